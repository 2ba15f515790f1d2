"""The signatures of a bundle's programs, as they follow from the model's sizes, and their inputs' roles.

A manifest is checked against them when a bundle is opened and before one is written, so a program that
was exported with another signature never becomes a bundle. Letters are the project's axis words (see
ARCHITECTURE.md).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

from whisperport.dims import Dims
from whisperport.spec import ProgramSpec, TensorSpec, UncachedForm
from whisperport.window import Window

PICKED_ROWS = 2  # R: of a prompt's last token, and of the one that tells whether there is speech
LARGEST_ROWS = 4096  # P; `prefill_64` and `align` have 64
LARGEST_PIECES = 1024  # of the vocabulary, in `uncached_decoder`; 4 unless a target asks for others

Role = Literal["input", "constant", "state"]
"""How long an input keeps its array; see `roles`."""

# Added to the scores of hidden tokens, by the mask's dtype. Both dtypes hold it; its `exp` is 0 in both.
MASKED: Mapping[str, float] = MappingProxyType({"float32": -30_000.0, "float16": -30_000.0})

_PREFILL = re.compile("prefill_([1-9][0-9]{0,8})")
_LAYER = re.compile("_[0-9]+$")
_ROLES: Mapping[str, Role] = {  # by an input's name without its layer; any other is an `input`
    "features": "constant",
    "cross_k": "constant",
    "cross_v": "constant",
    "self_k": "state",
    "self_v": "state",
}
_RUN_ONCE = {"encoder", "cross_kv"}  # per window, so that binding their inputs would save nothing


@dataclass(frozen=True, slots=True)
class Rows:
    """How keys or values are stored. A row holds a token's, or an audio position's, H × D numbers."""

    axis: int  # of the rows: 2 in (H, D, N), 1 in (H, N, D)
    dtype: str = "float32"  # or "float16"

    def shape(self, heads: int, width: int, length: int) -> tuple[int, int, int]:
        """The shape of `length` rows of H heads, each D wide."""
        return (heads, width, length) if self.axis == 2 else (heads, length, width)


@dataclass(frozen=True, slots=True)
class CacheForm:
    """The layouts and dtypes of keys, values and masks: one form for all decode programs of a bundle."""

    self_k: Rows = Rows(axis=2)
    self_v: Rows = Rows(axis=1)
    cross_k: Rows = Rows(axis=2)
    cross_v: Rows = Rows(axis=1)
    mask: str = "float32"  # the mask's dtype, or "float16"


def roles(program: ProgramSpec) -> dict[str, Role]:
    """The role of every input of a program, by the input's name.

    input     a new array for every run
    constant  one array for a window: the keys and values of its audio, or its features
    state     the self-attention cache, to which the host adds rows between runs
    """
    known = {} if program.name in _RUN_ONCE else _ROLES
    return {
        tensor.name: known.get(_LAYER.sub("", tensor.name), "input") for tensor in program.inputs
    }


def form_of(found: ProgramSpec, dims: Dims, window: Window | None) -> dict[str, Any]:
    """The fields of `CacheForm` that a program has, read from its tensors of layer 0 and its mask.

    Where a cache has as many rows as a head is wide, both layouts have one shape: the usual one counts.
    """
    lengths = {"self": dims.n_text_ctx, "cross": _positions(dims, window)}
    tensors = {tensor.name: tensor for tensor in (*found.outputs, *found.inputs)}
    form: dict[str, Any] = {}
    for cache, length in lengths.items():
        for name in (f"{cache}_k", f"{cache}_v"):
            if tensor := tensors.get(f"{name}_0"):
                form[name] = _rows_of(tensor, getattr(CacheForm(), name).axis, dims, length)
    if mask := tensors.get("mask"):
        form["mask"] = _float(mask)
    return form


def expected_signature(
    found: ProgramSpec, dims: Dims, window: Window | None, heads: int
) -> ProgramSpec:
    """The signature that a program must have.

    Args:
        found: the program as it is listed. Its name says which program it is. What the sizes of the
            model leave open is read from it: the form of the encoder's input, the number of rows, the
            number of pieces of the vocabulary, and the form of the caches and the mask.
        window: where it is not the one the checkpoint was trained on.
        heads: number of alignment heads.

    Raises:
        ValueError: no program has this name, or it has an impossible number of rows or pieces.
    """
    sizes = _Sizes(dims, _positions(dims, window), CacheForm(**form_of(found, dims, window)))
    prefill = _PREFILL.fullmatch(found.name)
    if prefill:
        return _prefill(sizes, _in_range("rows", int(prefill[1]), 1, LARGEST_ROWS))
    if found.name == "encoder":
        return _encoder(dims, nchw=_rank(found, 0) == 4)
    if found.name == "cross_kv":
        return ProgramSpec("cross_kv", (_features(dims),), _cross_cache(sizes))
    if found.name == "step":
        return _step(sizes)
    if found.name == "align":
        return _align(sizes, heads, _in_range("rows", _size(found, 0, 1), 1, LARGEST_ROWS))
    if found.name == "uncached_decoder":
        return _uncached_decoder(dims, _uncached_form(found, dims))
    raise ValueError(f"{found.name[:80]!r} is not the name of a program that this version knows")


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the signatures of the decode programs follow from."""

    dims: Dims
    cross: int  # T: audio positions of the cross-attention
    form: CacheForm


def _encoder(dims: Dims, *, nchw: bool) -> ProgramSpec:
    shape = (1, dims.n_mels, 1, dims.n_frames) if nchw else (1, dims.n_mels, dims.n_frames)
    return ProgramSpec("encoder", (TensorSpec("mel", shape),), (_features(dims),))


def _prefill(sizes: _Sizes, rows: int) -> ProgramSpec:
    pick = TensorSpec("pick", (1, PICKED_ROWS, rows))
    logits = TensorSpec("logits", (PICKED_ROWS, sizes.dims.n_vocab))
    return ProgramSpec(
        f"prefill_{rows}",
        (*_tokens(sizes, rows), pick, *_caches(sizes)),
        (logits, *_new_rows(sizes, rows)),
    )


def _step(sizes: _Sizes) -> ProgramSpec:
    logits = TensorSpec("logits", (1, sizes.dims.n_vocab))
    return ProgramSpec(
        "step", (*_tokens(sizes, 1), *_caches(sizes)), (logits, *_new_rows(sizes, 1))
    )


def _align(sizes: _Sizes, heads: int, rows: int) -> ProgramSpec:
    hidden = TensorSpec("rows", (1, rows, sizes.dims.n_text_state))
    scores = TensorSpec("scores", (heads, rows, sizes.cross))
    return ProgramSpec(
        "align",
        (*_tokens(sizes, rows), *_caches(sizes)),
        (hidden, scores, *_new_rows(sizes, rows)),
    )


def _uncached_decoder(dims: Dims, form: UncachedForm) -> ProgramSpec:
    embeddings = TensorSpec("embeddings", (1, dims.n_text_state, *form.layout))
    ends = [dims.n_vocab * i // form.pieces for i in range(form.pieces + 1)]
    logits = (
        TensorSpec(f"logits_{i}", (1, form.sequence_length, end - start))
        for i, (start, end) in enumerate(pairwise(ends))
    )
    return ProgramSpec("uncached_decoder", (_features(dims), embeddings), tuple(logits))


def _uncached_form(found: ProgramSpec, dims: Dims) -> UncachedForm:
    """Positions are added by the host to (1, d, S, 1), and by the program to (1, d, 1, S)."""
    pieces = _in_range("pieces", len(found.outputs), 1, min(LARGEST_PIECES, dims.n_vocab))
    if _size(found, 1, 3) == 1:
        return UncachedForm(
            _in_range("rows", _size(found, 1, 2), 8, dims.n_text_ctx), "host", pieces
        )
    return UncachedForm(_in_range("rows", _size(found, 1, 3), 8, dims.n_text_ctx), "graph", pieces)


def _features(dims: Dims) -> TensorSpec:
    return TensorSpec("features", (1, dims.n_audio_ctx, dims.n_audio_state))


def _tokens(sizes: _Sizes, rows: int) -> tuple[TensorSpec, TensorSpec]:
    x = TensorSpec("x", (1, rows, sizes.dims.n_text_state))
    return x, TensorSpec("mask", (1, rows, sizes.dims.n_text_ctx + rows), sizes.form.mask)


def _caches(sizes: _Sizes) -> tuple[TensorSpec, ...]:
    own, length = sizes.form, sizes.dims.n_text_ctx
    return (
        *_layers(sizes.dims, "self_k", own.self_k, length),
        *_layers(sizes.dims, "self_v", own.self_v, length),
        *_cross_cache(sizes),
    )


def _cross_cache(sizes: _Sizes) -> tuple[TensorSpec, ...]:
    return (
        *_layers(sizes.dims, "cross_k", sizes.form.cross_k, sizes.cross),
        *_layers(sizes.dims, "cross_v", sizes.form.cross_v, sizes.cross),
    )


def _new_rows(sizes: _Sizes, rows: int) -> tuple[TensorSpec, ...]:
    return (
        *_layers(sizes.dims, "new_k", sizes.form.self_k, rows),
        *_layers(sizes.dims, "new_v", sizes.form.self_v, rows),
    )


def _layers(dims: Dims, name: str, rows: Rows, length: int) -> Iterator[TensorSpec]:
    """The keys, or the values, of every decoder layer."""
    shape = rows.shape(dims.n_text_head, dims.text_head_width, length)
    return (TensorSpec(f"{name}_{i}", shape, rows.dtype) for i in range(dims.n_text_layer))


def _positions(dims: Dims, window: Window | None) -> int:
    """T: audio positions that the cross-attention reads."""
    return window.context_positions if window else dims.n_audio_ctx


def _rows_of(tensor: TensorSpec, usual: int, dims: Dims, length: int) -> Rows:
    """How a tensor of `length` rows stores them: along the axis `usual`, or the other of 1 and 2."""
    heads, width, dtype = dims.n_text_head, dims.text_head_width, _float(tensor)
    other = Rows(3 - usual, dtype)
    if tensor.shape == other.shape(heads, width, length) and length != width:
        return other
    return Rows(usual, dtype)


def _float(tensor: TensorSpec) -> str:
    """Its dtype, or float32 where it has none that the host can store."""
    return tensor.dtype if tensor.dtype in MASKED else "float32"


def _rank(found: ProgramSpec, tensor: int) -> int:
    return len(found.inputs[tensor].shape) if tensor < len(found.inputs) else 0


def _size(found: ProgramSpec, tensor: int, axis: int) -> int:
    """A size of one of the inputs; 0 where there is no such axis."""
    return found.inputs[tensor].shape[axis] if axis < _rank(found, tensor) else 0


def _in_range(what: str, number: int, lowest: int, highest: int) -> int:
    if not lowest <= number <= highest:
        raise ValueError(f"it has {number} {what}; expected {lowest} to {highest}")
    return number
