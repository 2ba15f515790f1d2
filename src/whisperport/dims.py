"""The sizes of one Whisper model, read from its checkpoint and never assumed."""

from dataclasses import asdict, dataclass
from typing import Any

SAMPLES_PER_POSITION = 320  # 16 kHz, hop 160, and the second convolution has stride 2
SECONDS_PER_POSITION = SAMPLES_PER_POSITION / 16_000  # 0.02

# The largest sizes that are read from a file, so that a damaged one is rejected before anything is
# allocated. Each is about ten times the largest of OpenAI's models (large-v3: 128 mel bins, width 1280,
# 20 heads, 32 layers, vocabulary 51866), and the positions allow windows of 21 minutes.
LARGEST = {
    "n_mels": 1024,
    "n_audio_ctx": 65_536,
    "n_audio_state": 16_384,
    "n_audio_head": 1024,
    "n_audio_layer": 512,
    "n_text_ctx": 65_536,
    "n_text_state": 16_384,
    "n_text_head": 1024,
    "n_text_layer": 512,
    "n_vocab": 1_000_000,
    "n_audio_ffn": 131_072,
    "n_text_ffn": 131_072,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """Sizes of a Whisper model. Letters are the project's axis words (see ARCHITECTURE.md)."""

    n_mels: int  # mel bins: 80, or 128 for large-v3 and turbo
    n_audio_ctx: int  # T: encoder positions of 20 ms; 1500 for 30 s
    n_audio_state: int  # d: width of the encoder
    n_audio_head: int  # H of the encoder
    n_audio_layer: int  # encoder layers
    n_text_ctx: int  # N: cache rows, the checkpoint's `max_target_positions`; 448
    n_text_state: int  # d: width of the decoder, equal to the encoder's
    n_text_head: int  # H of the decoder
    n_text_layer: int  # L: decoder layers
    n_vocab: int  # V: 51864 (.en), 51865, or 51866 (large-v3, turbo)
    n_audio_ffn: int  # width inside the encoder's feed-forward block; 4 d in every OpenAI model
    n_text_ffn: int  # width inside the decoder's feed-forward block

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` is {value!r}; expected a positive integer")
        if self.n_audio_state != self.n_text_state:
            raise ValueError(
                f"encoder width {self.n_audio_state} differs from decoder width {self.n_text_state}; "
                "cross-attention needs them equal"
            )
        for width, heads, side in (
            (self.n_audio_state, self.n_audio_head, "encoder"),
            (self.n_text_state, self.n_text_head, "decoder"),
        ):
            if width % heads:
                raise ValueError(f"{side} width {width} is not a multiple of its {heads} heads")

    @property
    def n_frames(self) -> int:
        """Mel frames of 10 ms in one window: 2 T."""
        return 2 * self.n_audio_ctx

    @property
    def window_s(self) -> float:
        """Seconds of audio in one window."""
        return self.n_audio_ctx * SECONDS_PER_POSITION

    @property
    def text_head_width(self) -> int:
        """D of the decoder."""
        return self.n_text_state // self.n_text_head

    @property
    def encoder_weights(self) -> int:
        """Numbers that the encoder is made of, without its table of positions."""
        d, wide = self.n_audio_state, self.n_audio_ffn
        stem = 3 * self.n_mels * d + d + 3 * d * d + d
        attention, feed_forward = 4 * d * d + 3 * d, 2 * d * wide + d + wide
        norm = 2 * d
        return stem + self.n_audio_layer * (attention + feed_forward + 2 * norm) + norm

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Dims":
        """Raises TypeError for a missing or unknown name, ValueError for an impossible size."""
        return cls(**data)
