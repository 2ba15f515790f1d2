"""Sizes of a Whisper model. Every size is read from the checkpoint."""

from dataclasses import asdict, dataclass
from typing import Annotated

from whisperport.program.strict_json import Field

SAMPLES_PER_POSITION = 320  # samples at 16 kHz: hop 160, and the second convolution has stride 2
SECONDS_PER_POSITION = SAMPLES_PER_POSITION / 16_000  # 0.02

# The largest sizes that are accepted from a file: a damaged file is rejected before memory is allocated.
# Each is about ten times the size in OpenAI's largest model (large-v3: 128 mel bins, width 1280, 20 heads,
# 32 layers, vocabulary 51866). The positions allow windows of 21 minutes.
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

# Sizes of Whisper's vocabularies: English only; multilingual; with Cantonese (large-v3, turbo).
KNOWN_VOCABULARIES = (51864, 51865, 51866)


def _size(field: Field) -> int:
    return field.integer(1, LARGEST[field.path.rpartition(".")[2]])


Size = Annotated[int, _size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """Sizes of a Whisper model; the names are openai-whisper's. ARCHITECTURE.md defines the axis letters.

    Attributes:
        n_mels: number of mel bins: 80, or 128 for large-v3 and turbo.
        n_audio_ctx: T, number of encoder positions of 20 ms: 1500 for a window of 30 s.
        n_audio_state: d, width of the encoder.
        n_audio_head: H, number of attention heads of the encoder.
        n_audio_layer: number of encoder layers.
        n_text_ctx: N, number of rows of the KV cache; the checkpoint's `max_target_positions`, 448 in every
            OpenAI model.
        n_text_state: d, width of the decoder; equal to `n_audio_state`.
        n_text_head: H, number of attention heads of the decoder.
        n_text_layer: L, number of decoder layers.
        n_vocab: V, size of the vocabulary: 51864 (.en), 51865, or 51866 (large-v3, turbo).
        n_audio_ffn: width inside the encoder's feed-forward block; 4 d in every OpenAI model.
        n_text_ffn: width inside the decoder's feed-forward block; 4 d in every OpenAI model.

    Raises:
        ValueError: a size is not a positive integer, the widths differ, or a width is not a multiple of
            its number of heads.
    """

    n_mels: Size
    n_audio_ctx: Size
    n_audio_state: Size
    n_audio_head: Size
    n_audio_layer: Size
    n_text_ctx: Size
    n_text_state: Size
    n_text_head: Size
    n_text_layer: Size
    n_vocab: Size
    n_audio_ffn: Size
    n_text_ffn: Size

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` is {value!r}; expected a positive integer")
        if self.n_audio_state != self.n_text_state:
            raise ValueError(
                f"encoder width {self.n_audio_state} differs from decoder width {self.n_text_state}; "
                "cross-attention needs equal widths"
            )
        for width, heads, side in (
            (self.n_audio_state, self.n_audio_head, "encoder"),
            (self.n_text_state, self.n_text_head, "decoder"),
        ):
            if width % heads:
                raise ValueError(f"{side} width {width} is not a multiple of its {heads} heads")

    @property
    def n_frames(self) -> int:
        """Number of mel frames of 10 ms in one window: 2 T."""
        return 2 * self.n_audio_ctx

    @property
    def window_s(self) -> float:
        """Length of one window in seconds."""
        return self.n_audio_ctx * SECONDS_PER_POSITION

    @property
    def text_head_width(self) -> int:
        """D, width of one attention head of the decoder."""
        return self.n_text_state // self.n_text_head

    @property
    def encoder_weights(self) -> int:
        """Number of the encoder's weights, without the table of positional embeddings."""
        d, wide = self.n_audio_state, self.n_audio_ffn
        stem = 3 * self.n_mels * d + d + 3 * d * d + d
        attention, feed_forward = 4 * d * d + 3 * d, 2 * d * wide + d + wide
        norm = 2 * d
        return stem + self.n_audio_layer * (attention + feed_forward + 2 * norm) + norm


# Name -> width d, heads, encoder layers, decoder layers. Source: openai-whisper, README.md and the
# checkpoints' own `dims`.
_SIZES = {
    "tiny": (384, 6, 4, 4),
    "base": (512, 8, 6, 6),
    "small": (768, 12, 12, 12),
    "medium": (1024, 16, 24, 24),
    "large-v1": (1280, 20, 32, 32),
    "large-v2": (1280, 20, 32, 32),
    "large-v3": (1280, 20, 32, 32),
    "large": (1280, 20, 32, 32),  # large-v3
    "large-v3-turbo": (1280, 20, 32, 4),
    "turbo": (1280, 20, 32, 4),
}
_V3 = ("large-v3", "large", "large-v3-turbo", "turbo")
_ENGLISH = ("tiny", "base", "small", "medium")


PUBLISHED = (*_SIZES, *(f"{family}.en" for family in _ENGLISH))  # names with published sizes


def published_dims(name: str) -> Dims | None:
    """Return the sizes of OpenAI's model of this name, such as "tiny.en"; None: there is none."""
    family = name.removesuffix(".en")
    if family not in _SIZES or (family != name and family not in _ENGLISH):
        return None
    width, heads, encoder_layers, decoder_layers = _SIZES[family]
    return Dims(
        n_mels=128 if family in _V3 else 80,
        n_audio_ctx=1500,
        n_audio_state=width,
        n_audio_head=heads,
        n_audio_layer=encoder_layers,
        n_text_ctx=448,
        n_text_state=width,
        n_text_head=heads,
        n_text_layer=decoder_layers,
        n_vocab=51864 if family != name else 51866 if family in _V3 else 51865,
        n_audio_ffn=4 * width,
        n_text_ffn=4 * width,
    )
