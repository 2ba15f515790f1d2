"""The programs of a Whisper model: `encoder`, `cross_kv`, `prefill_P` for a few P, `step`, `align`."""

from collections.abc import Iterator, Sequence

import torch

from whisperport.dims import Dims
from whisperport.model.decoder import Align, CrossKV, Decode, Prefill
from whisperport.model.short_window import PaddedCrossKV
from whisperport.model.whisper import Whisper
from whisperport.programs.for_images import image_encoder
from whisperport.programs.program import Program, trace
from whisperport.signatures import PICKED_ROWS

PREFILL_ROWS = (4, 64)  # the start tokens (at most 4), and a text prompt in pieces of 64
ALIGN_ROWS = 64  # a window's text, in pieces


def program_names(prefill_rows: tuple[int, ...] = PREFILL_ROWS) -> tuple[str, ...]:
    """The names of all programs, in the order in which they are made."""
    prefills = (f"prefill_{rows}" for rows in prefill_rows)
    return ("encoder", "cross_kv", *prefills, "step", "align")


def whisper_programs(
    model: Whisper,
    alignment_heads: Sequence[tuple[int, int]],
    prefill_rows: tuple[int, ...] = PREFILL_ROWS,
    *,
    image: bool = False,
) -> Iterator[Program]:
    """Trace each program of `model` in turn; they share its weights.

    Args:
        alignment_heads: (decoder layer, head) pairs that follow the sound; at least one.
        image: the encoder takes its spectrogram as an image, (1, n_mels, 1, 2T).
    """
    dims, decoder, padding = model.dims, model.decoder, model.padding
    heard = model.window.heard if model.window else dims.n_audio_ctx
    yield image_encoder(model) if image else _encoder(model)

    features = torch.zeros(1, dims.n_audio_ctx, dims.n_audio_state)
    cross_kv = CrossKV(decoder) if padding is None else PaddedCrossKV(decoder, padding)
    yield trace("cross_kv", cross_kv, (features,), _layers(dims, "cross_k", "cross_v"))

    decoded = ["logits", *_layers(dims, "new_k", "new_v")]
    for rows in prefill_rows:
        pick = torch.zeros(1, PICKED_ROWS, rows)
        inputs = (*_rows(dims, rows), pick, *_caches(dims, heard))
        yield trace(f"prefill_{rows}", Prefill(decoder), inputs, decoded)
    yield trace("step", Decode(decoder), (*_rows(dims, 1), *_caches(dims, heard)), decoded)

    heads = sorted(alignment_heads)  # by layer: the order of the program's scores
    inputs = (*_rows(dims, ALIGN_ROWS), *_caches(dims, heard))
    yield trace("align", Align(decoder, heads), inputs, ["rows", "scores", *decoded[1:]])


def _encoder(model: Whisper) -> Program:
    mel = torch.zeros(1, model.dims.n_mels, model.dims.n_frames)
    return trace("encoder", model.encoder, (mel,), ["features"])


def _layers(dims: Dims, *names: str) -> list[str]:
    return [f"{name}_{layer}" for name in names for layer in range(dims.n_text_layer)]


def _rows(dims: Dims, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros(1, rows, dims.n_text_state)
    return x, torch.zeros(1, rows, dims.n_text_ctx + rows)


def _caches(dims: Dims, heard: int) -> tuple[list[torch.Tensor], ...]:
    heads, width = dims.n_text_head, dims.text_head_width
    cached = dims.n_text_ctx
    shapes = (
        (heads, width, cached),
        (heads, cached, width),
        (heads, width, heard),
        (heads, heard, width),
    )
    return tuple([torch.zeros(shape) for _ in range(dims.n_text_layer)] for shape in shapes)
