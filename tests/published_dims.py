"""Sizes of published checkpoints that tests compute with."""

from whisperport.program.dims import Dims

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
