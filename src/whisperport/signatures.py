"""The signatures of a bundle's programs, as they follow from the sizes of the model.

A manifest is checked against them when a bundle is opened and before one is written, so a program that
was exported with another signature never becomes a bundle. Letters are the project's axis words (see
ARCHITECTURE.md).
"""

import re
from itertools import pairwise

from whisperport.dims import Dims
from whisperport.spec import FullForm, ProgramSpec, TensorSpec
from whisperport.window import Window

PICKED_ROWS = 2  # R: of a prompt's last token, and of the one that tells whether there is speech
LARGEST_ROWS = 4096  # P; `prefill_64` and `align` have 64
LARGEST_PIECES = 1024  # of the vocabulary, in `decode_full`; 4 unless a target asks for others

_PREFILL = re.compile("prefill_([1-9][0-9]{0,8})")


def expected_signature(
    found: ProgramSpec, dims: Dims, window: Window | None, heads: int
) -> ProgramSpec:
    """The signature that a program must have.

    Args:
        found: the program as it is listed. Its name says which program it is. What the sizes of the
            model leave open is read from it: the form of the encoder's input, the number of rows, and
            the number of pieces of the vocabulary.
        window: where it is not the one the checkpoint was trained on.
        heads: number of alignment heads.

    Raises:
        ValueError: no program has this name, or it has an impossible number of rows or pieces.
    """
    cross = window.heard if window else dims.n_audio_ctx
    prefill = _PREFILL.fullmatch(found.name)
    if prefill:
        return _prefill(dims, cross, _in_range("rows", int(prefill[1]), 1, LARGEST_ROWS))
    if found.name == "encoder":
        return _encoder(dims, nchw=_rank(found, 0) == 4)
    if found.name == "cross_kv":
        return _cross_kv(dims, cross)
    if found.name == "step":
        return _step(dims, cross)
    if found.name == "align":
        return _align(dims, cross, heads, _in_range("rows", _size(found, 0, 1), 1, LARGEST_ROWS))
    if found.name == "decode_full":
        return _decode_full(dims, _full_form(found, dims))
    raise ValueError(f"{found.name[:80]!r} is not the name of a program that this version knows")


def _encoder(dims: Dims, *, nchw: bool) -> ProgramSpec:
    shape = (1, dims.n_mels, 1, dims.n_frames) if nchw else (1, dims.n_mels, dims.n_frames)
    return ProgramSpec("encoder", (TensorSpec("mel", shape),), (_features(dims),))


def _cross_kv(dims: Dims, cross: int) -> ProgramSpec:
    return ProgramSpec("cross_kv", (_features(dims),), _cross_cache(dims, cross))


def _prefill(dims: Dims, cross: int, rows: int) -> ProgramSpec:
    pick = TensorSpec("pick", (1, PICKED_ROWS, rows))
    logits = TensorSpec("logits", (PICKED_ROWS, dims.n_vocab))
    return ProgramSpec(
        f"prefill_{rows}",
        (*_tokens(dims, rows), pick, *_caches(dims, cross)),
        (logits, *_new_rows(dims, rows)),
    )


def _step(dims: Dims, cross: int) -> ProgramSpec:
    logits = TensorSpec("logits", (1, dims.n_vocab))
    return ProgramSpec(
        "step", (*_tokens(dims, 1), *_caches(dims, cross)), (logits, *_new_rows(dims, 1))
    )


def _align(dims: Dims, cross: int, heads: int, rows: int) -> ProgramSpec:
    hidden = TensorSpec("rows", (1, rows, dims.n_text_state))
    scores = TensorSpec("scores", (heads, rows, cross))
    return ProgramSpec(
        "align",
        (*_tokens(dims, rows), *_caches(dims, cross)),
        (hidden, scores, *_new_rows(dims, rows)),
    )


def _decode_full(dims: Dims, form: FullForm) -> ProgramSpec:
    embeddings = TensorSpec("embeddings", (1, dims.n_text_state, *form.layout))
    ends = [dims.n_vocab * i // form.pieces for i in range(form.pieces + 1)]
    logits = (
        TensorSpec(f"logits_{i}", (1, form.rows, end - start))
        for i, (start, end) in enumerate(pairwise(ends))
    )
    return ProgramSpec("decode_full", (_features(dims), embeddings), tuple(logits))


def _full_form(found: ProgramSpec, dims: Dims) -> FullForm:
    """Positions are added by the host to (1, d, S, 1), and by the program to (1, d, 1, S)."""
    pieces = _in_range("pieces", len(found.outputs), 1, min(LARGEST_PIECES, dims.n_vocab))
    if _size(found, 1, 3) == 1:
        return FullForm(_in_range("rows", _size(found, 1, 2), 8, dims.n_text_ctx), "host", pieces)
    return FullForm(_in_range("rows", _size(found, 1, 3), 8, dims.n_text_ctx), "graph", pieces)


def _features(dims: Dims) -> TensorSpec:
    return TensorSpec("features", (1, dims.n_audio_ctx, dims.n_audio_state))


def _tokens(dims: Dims, rows: int) -> tuple[TensorSpec, TensorSpec]:
    x = TensorSpec("x", (1, rows, dims.n_text_state))
    return x, TensorSpec("mask", (1, rows, dims.n_text_ctx + rows))


def _caches(dims: Dims, cross: int) -> tuple[TensorSpec, ...]:
    own = _keys_and_values(dims, "self_k", "self_v", dims.n_text_ctx)
    return (*own, *_cross_cache(dims, cross))


def _cross_cache(dims: Dims, cross: int) -> tuple[TensorSpec, ...]:
    return _keys_and_values(dims, "cross_k", "cross_v", cross)


def _new_rows(dims: Dims, rows: int) -> tuple[TensorSpec, ...]:
    return _keys_and_values(dims, "new_k", "new_v", rows)


def _keys_and_values(dims: Dims, keys: str, values: str, length: int) -> tuple[TensorSpec, ...]:
    """Keys (H, D, length) of every layer, then values (H, length, D) of every layer."""
    heads, width, layers = dims.n_text_head, dims.text_head_width, range(dims.n_text_layer)
    return (
        *(TensorSpec(f"{keys}_{layer}", (heads, width, length)) for layer in layers),
        *(TensorSpec(f"{values}_{layer}", (heads, length, width)) for layer in layers),
    )


def _rank(found: ProgramSpec, tensor: int) -> int:
    return len(found.inputs[tensor].shape) if tensor < len(found.inputs) else 0


def _size(found: ProgramSpec, tensor: int, axis: int) -> int:
    """A size of one of the inputs; 0 where there is no such axis."""
    return found.inputs[tensor].shape[axis] if axis < _rank(found, tensor) else 0


def _in_range(what: str, number: int, lowest: int, highest: int) -> int:
    if not lowest <= number <= highest:
        raise ValueError(f"it has {number} {what}; expected {lowest} to {highest}")
    return number
