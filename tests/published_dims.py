"""Sizes of published checkpoints that tests compute with."""

from whisperport.program.dims import Dims


def whisper_dims(width: int, layers: int, heads: int = 0) -> Dims:
    """The sizes of a multilingual checkpoint: of tiny with (384, 4), of base with (512, 6), and so on."""
    heads = heads or width // 64
    return Dims(
        n_mels=80,
        n_audio_ctx=1500,
        n_audio_state=width,
        n_audio_head=heads,
        n_audio_layer=layers,
        n_text_ctx=448,
        n_text_state=width,
        n_text_head=heads,
        n_text_layer=layers,
        n_vocab=51865,
        n_audio_ffn=4 * width,
        n_text_ffn=4 * width,
    )


TURBO = Dims(
    n_mels=128,
    n_audio_ctx=1500,
    n_audio_state=1280,
    n_audio_head=20,
    n_audio_layer=32,
    n_text_ctx=448,
    n_text_state=1280,
    n_text_head=20,
    n_text_layer=4,
    n_vocab=51866,
    n_audio_ffn=5120,
    n_text_ffn=5120,
)
