"""The expected signature of every program of a bundle, derived from the model's sizes; roles of inputs.

A manifest is checked against these signatures when a bundle is opened and before a bundle is written. A
program with another signature is therefore never part of a bundle. ARCHITECTURE.md defines the axis
letters.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from whisperport.program.dims import Dims
from whisperport.program.low_rank import (
    LORA_A,
    LORA_B,
    LowRank,
    adapter_inputs,
    without_adapter,
)
from whisperport.program.program_kind import (
    ALIGN,
    COARSE_PROJECTION,
    CROSS_KV,
    ENCODER,
    PREFILL,
    STEP,
    UNCACHED_DECODER,
    VOCAB_PROJECTION,
)
from whisperport.program.spec import ProgramSpec, TensorSpec, UncachedForm
from whisperport.program.window import Window

# R: `prefill` computes the logits of two tokens of a prompt: the last token, and the token that gives the
# no-speech probability.
PICKED_ROWS = 2
# Output of `step`, `step_B` and `prefill_P`: the natural logarithm of the sum of all exp(logit), which the
# host need not compute then. Bundles for some targets have it; `Lowering.sums_exponentials`.
LOGSUMEXP = "logsumexp"
MAX_TOKENS = 4096  # largest P, tokens per run; `prefill_64` and `align` have 64
MAX_BATCH = 64  # largest B, rows of a `step_B`; `export` writes up to 16
MAX_PIECES = 1024  # largest number of pieces of the logits; the default of `uncached_decoder` is 4

RANK4_KINDS = (CROSS_KV, STEP, PREFILL)  # of programs that have a `rank4` variant; not `step_B`

Role = Literal["input", "constant", "state"]
"""How long an input keeps its array; see `roles`."""

HOST_DTYPES = ("float32", "float16")  # of caches and masks: what the host can store

_LAYER = re.compile("_[0-9]+$")
_ROLES: Mapping[str, Role] = {  # input name without its layer number -> role; other names: `input`
    "features": "constant",
    "cross_k": "constant",
    "cross_v": "constant",
    "self_k": "state",
    "self_v": "state",
    LORA_A: "constant",
    LORA_B: "constant",
}
_RUN_ONCE = {
    "encoder",
    "cross_kv",
}  # run once per window, so binding their inputs would save nothing
_BATCH_ROLES: Mapping[str, Role] = {
    **dict.fromkeys(("self_k", "self_v", "cross_k", "cross_v"), "state"),
    **dict.fromkeys((LORA_A, LORA_B), "constant"),
}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Layout of cached keys or values. A row holds the H × D numbers of one token or audio position."""

    axis: int  # the axis that counts rows: 2 for (H, D, N), 1 for (H, N, D)
    dtype: str = "float32"  # or "float16"

    def shape(self, heads: int, width: int, length: int) -> tuple[int, int, int]:
        """Return the shape of `length` rows of `heads` heads, each `width` wide."""
        return (heads, width, length) if self.axis == 2 else (heads, length, width)


@dataclass(frozen=True, slots=True)
class CacheForm:
    """Layouts and dtypes of keys, values and masks. All decode programs of a bundle share one form."""

    self_k: KvLayout = KvLayout(axis=2)
    self_v: KvLayout = KvLayout(axis=1)
    cross_k: KvLayout = KvLayout(axis=2)
    cross_v: KvLayout = KvLayout(axis=1)
    mask: str = "float32"  # dtype of the mask: "float32" or "float16"


def roles(program: ProgramSpec) -> dict[str, Role]:
    """Return the role of every input of a program: input name -> role.

    input     a new array for every run
    constant  one array per window: the cross-attention K/V, the encoder's features, or an adapter
    state     the self-attention cache (KV cache), to which the host appends rows between runs; in a batch
              also the cross-attention K/V, because the rows of a batch begin their windows independently
    """
    known = {} if program.kind.name in _RUN_ONCE else _ROLES
    if program.kind.is_batch:
        known = _BATCH_ROLES
    return {
        tensor.name: known.get(_LAYER.sub("", tensor.name), "input") for tensor in program.inputs
    }


def standard_form(spec: ProgramSpec) -> ProgramSpec:
    """Return the signature of a program of the `rank4` variant as that of the default variant.

    In the `rank4` variant the mask, the logits and all K/V have one more axis, the first one, of size 1. A
    signature of another variant is returned as it is, and so is a tensor whose first axis is not of size 1.
    """
    if not _has_rank4_form(spec):
        return spec
    return ProgramSpec(
        spec.name,
        tuple(map(_without_leading_axis, spec.inputs)),
        tuple(map(_without_leading_axis, spec.outputs)),
    )


def form_of(spec: ProgramSpec, dims: Dims, window: Window | None) -> dict[str, Any]:
    """Read the fields of `CacheForm` from a program's mask and its tensors of decoder layer 0.

    If the number of rows equals the width of a head, both layouts have the same shape. The default layout
    is assumed then.

    Args:
        spec: the program's signature.
        dims: sizes of the model.
        window: the bundle's window; None for the checkpoint's own window.

    Returns:
        Field of `CacheForm` -> value, for the tensors that the program has.
    """
    spec = standard_form(spec)
    cross = spec.kind.positions or _positions(dims, window)
    lengths = {"self": dims.n_text_ctx, "cross": cross}
    tensors = {tensor.name: tensor for tensor in (*spec.outputs, *spec.inputs)}
    heads = spec.kind.batch * dims.n_text_head
    form: dict[str, Any] = {}
    for cache, length in lengths.items():
        for name in (f"{cache}_k", f"{cache}_v"):
            if tensor := tensors.get(f"{name}_0"):
                usual = getattr(CacheForm(), name).axis
                form[name] = _layout_of(tensor, usual, (heads, dims.text_head_width), length)
    if mask := tensors.get("mask"):
        form["mask"] = _float(mask)
    return form


def expected_signature(
    spec: ProgramSpec,
    dims: Dims,
    window: Window | None,
    heads: int,
    low_rank: LowRank | None = None,
) -> ProgramSpec:
    """Return the signature that a program must have.

    Args:
        spec: the program's signature in the manifest. Its name tells which program it is. The model's
            sizes do not determine everything, so these facts are read from `spec`: the form of the
            encoder's input, the number of tokens, the number of vocabulary pieces, and the form of the
            caches and the mask.
        dims: sizes of the model.
        window: the bundle's window; None for the checkpoint's own window.
        heads: number of alignment heads.
        low_rank: the adapters that the programs take; None: none.

    Raises:
        ValueError: no program has this name, or the number of tokens, rows or pieces is out of range.
    """
    own = without_adapter(spec)
    expected = _expected_standard(standard_form(own), dims, window, heads)
    if _has_rank4_form(own):
        expected = _in_rank4(expected)
    inputs = (*expected.inputs, *adapter_inputs(spec.name, dims, low_rank))
    return replace(expected, inputs=inputs)


def _expected_standard(
    spec: ProgramSpec, dims: Dims, window: Window | None, heads: int
) -> ProgramSpec:
    """Return the signature that a program must have, from a signature in the usual form."""
    kind = spec.kind
    if kind.positions:
        positions = _in_range("positions", kind.positions, 1, dims.n_audio_ctx - 1)
        dims, window = replace(dims, n_audio_ctx=positions), None
    sizes = _Sizes(dims, _positions(dims, window), CacheForm(**form_of(spec, dims, window)))
    if kind.name == PREFILL:
        return _prefill(sizes, _in_range("tokens", kind.tokens, 1, MAX_TOKENS), spec)
    if kind.name == ENCODER:
        return _encoder(spec.name, dims, nchw=_rank(spec, 0) == 4)
    if kind.name == CROSS_KV:
        return ProgramSpec(spec.name, (_features(dims),), _cross_cache(sizes))
    if kind.name == STEP:
        rows = _in_range("rows", kind.batch, 1, MAX_BATCH)
        return _step(replace(sizes, batch=rows), spec)
    if kind.name == ALIGN:
        return _align(sizes, heads, _in_range("tokens", _size(spec, 0, 1), 1, MAX_TOKENS))
    if kind.name == VOCAB_PROJECTION:
        return _vocab_projection(
            dims, _in_range("pieces", len(spec.outputs), 1, min(MAX_PIECES, dims.n_vocab))
        )
    if kind.name == COARSE_PROJECTION:
        logits = (1, 1, dims.n_vocab)
        outputs = (TensorSpec("logits", logits), TensorSpec("bound", logits))
        return ProgramSpec(COARSE_PROJECTION, (_rows(dims, "hidden", 1),), outputs)
    if kind.name == UNCACHED_DECODER:
        return _uncached_decoder(dims, _uncached_form(spec, dims))
    raise ValueError(f"this version of whisperport has no program named {spec.name[:80]!r}")


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes that determine the signatures of the decode programs."""

    dims: Dims
    cross: int  # T: audio positions that the cross-attention reads
    form: CacheForm
    batch: int = 1  # B: rows that the program decodes


def _encoder(name: str, dims: Dims, *, nchw: bool) -> ProgramSpec:
    shape = (1, dims.n_mels, 1, dims.n_frames) if nchw else (1, dims.n_mels, dims.n_frames)
    return ProgramSpec(name, (TensorSpec("mel", shape),), (_features(dims),))


def _result(spec: ProgramSpec) -> str:
    """Return the name of a program's first output: "hidden", or "logits" for any other."""
    return "hidden" if spec.outputs and spec.outputs[0].name == "hidden" else "logits"


def _prefill(sizes: _Sizes, tokens: int, spec: ProgramSpec) -> ProgramSpec:
    pick = TensorSpec("pick", (1, PICKED_ROWS, tokens))
    return ProgramSpec(
        f"prefill_{tokens}",
        (*_token_inputs(sizes, tokens), pick, *_caches(sizes)),
        (*_results(sizes.dims, PICKED_ROWS, spec), *_new_rows(sizes, tokens)),
    )


def _step(sizes: _Sizes, spec: ProgramSpec) -> ProgramSpec:
    """Return the signature of `step`, or of `step_B` if there are several rows."""
    inputs = (*_token_inputs(sizes, 1), *_caches(sizes))
    results = _results(sizes.dims, sizes.batch, spec)
    return ProgramSpec(spec.name, inputs, (*results, *_new_rows(sizes, 1)))


def _results(dims: Dims, rows: int, spec: ProgramSpec) -> tuple[TensorSpec, ...]:
    """Return the outputs before the new keys and values, for so many tokens whose logits are computed."""
    if _result(spec) == "logits" and any(output.name == LOGSUMEXP for output in spec.outputs):
        return (_rows(dims, "logits", rows), TensorSpec(LOGSUMEXP, (rows, 1)))
    return (_rows(dims, _result(spec), rows),)


def _rows(dims: Dims, result: str, rows: int) -> TensorSpec:
    """Return the output of the logits, or of the hidden states that `vocab_projection` reads."""
    if result == "hidden":
        return TensorSpec(result, (1, rows, dims.n_text_state))
    return TensorSpec(result, (rows, dims.n_vocab))


def _vocab_projection(dims: Dims, pieces: int) -> ProgramSpec:
    whole = (TensorSpec("logits", (1, 1, dims.n_vocab)),)
    logits = _pieces(dims, pieces, 1, 1) if pieces > 1 else whole
    return ProgramSpec(VOCAB_PROJECTION, (_rows(dims, "hidden", 1),), logits)


def _pieces(dims: Dims, pieces: int, *leading: int) -> tuple[TensorSpec, ...]:
    """Return the outputs of logits in pieces, whose sizes differ by at most 1."""
    ends = [dims.n_vocab * i // pieces for i in range(pieces + 1)]
    return tuple(
        TensorSpec(f"logits_{i}", (*leading, end - start))
        for i, (start, end) in enumerate(pairwise(ends))
    )


def _align(sizes: _Sizes, heads: int, tokens: int) -> ProgramSpec:
    hidden = TensorSpec("rows", (1, tokens, sizes.dims.n_text_state))
    scores = TensorSpec("scores", (heads, tokens, sizes.cross))
    return ProgramSpec(
        "align",
        (*_token_inputs(sizes, tokens), *_caches(sizes)),
        (hidden, scores, *_new_rows(sizes, tokens)),
    )


def _uncached_decoder(dims: Dims, form: UncachedForm) -> ProgramSpec:
    embeddings = TensorSpec("embeddings", (1, dims.n_text_state, *form.layout))
    logits = _pieces(dims, form.pieces, 1, form.sequence_length)
    return ProgramSpec(UNCACHED_DECODER, (_features(dims), embeddings), logits)


def _uncached_form(spec: ProgramSpec, dims: Dims) -> UncachedForm:
    """Read the form from a program's signature.

    The shape of the embeddings tells where positions are added: (1, d, S, 1) by the host, (1, d, 1, S) by
    the program.
    """
    pieces = _in_range("pieces", len(spec.outputs), 1, min(MAX_PIECES, dims.n_vocab))
    if _size(spec, 1, 3) == 1:
        return UncachedForm(
            _in_range("tokens", _size(spec, 1, 2), 8, dims.n_text_ctx), "host", pieces
        )
    return UncachedForm(_in_range("tokens", _size(spec, 1, 3), 8, dims.n_text_ctx), "graph", pieces)


def _features(dims: Dims) -> TensorSpec:
    return TensorSpec("features", (1, dims.n_audio_ctx, dims.n_audio_state))


def _token_inputs(sizes: _Sizes, tokens: int) -> tuple[TensorSpec, TensorSpec]:
    x = TensorSpec("x", (sizes.batch, tokens, sizes.dims.n_text_state))
    mask = (sizes.batch, tokens, sizes.dims.n_text_ctx + tokens)
    return x, TensorSpec("mask", mask, sizes.form.mask)


def _caches(sizes: _Sizes) -> tuple[TensorSpec, ...]:
    own, length = sizes.form, sizes.dims.n_text_ctx
    return (
        *_layers(sizes, "self_k", own.self_k, length),
        *_layers(sizes, "self_v", own.self_v, length),
        *_cross_cache(sizes),
    )


def _cross_cache(sizes: _Sizes) -> tuple[TensorSpec, ...]:
    return (
        *_layers(sizes, "cross_k", sizes.form.cross_k, sizes.cross),
        *_layers(sizes, "cross_v", sizes.form.cross_v, sizes.cross),
    )


def _new_rows(sizes: _Sizes, tokens: int) -> tuple[TensorSpec, ...]:
    return (
        *_layers(sizes, "new_k", sizes.form.self_k, tokens),
        *_layers(sizes, "new_v", sizes.form.self_v, tokens),
    )


def _layers(sizes: _Sizes, name: str, layout: KvLayout, length: int) -> Iterator[TensorSpec]:
    """Yield the tensor of keys, or of values, of every decoder layer."""
    dims = sizes.dims
    shape = layout.shape(sizes.batch * dims.n_text_head, dims.text_head_width, length)
    return (TensorSpec(f"{name}_{i}", shape, layout.dtype) for i in range(dims.n_text_layer))


def _positions(dims: Dims, window: Window | None) -> int:
    """Return T: the number of audio positions that the cross-attention reads."""
    return window.context_positions if window else dims.n_audio_ctx


def _layout_of(tensor: TensorSpec, usual: int, heads: tuple[int, int], length: int) -> KvLayout:
    """Return the layout of a tensor of `length` rows.

    Args:
        tensor: keys or values.
        usual: the row axis of the default layout.
        heads: number of heads, and the width of each.
        length: number of rows.
    """
    width, dtype = heads[1], _float(tensor)
    alternative = KvLayout(3 - usual, dtype)
    if tensor.shape == alternative.shape(*heads, length) and length != width:
        return alternative
    return KvLayout(usual, dtype)


def _float(tensor: TensorSpec) -> str:
    """Return the tensor's dtype, or float32 if the host cannot store that dtype."""
    return tensor.dtype if tensor.dtype in HOST_DTYPES else "float32"


def _has_rank4_form(spec: ProgramSpec) -> bool:
    """Whether a program is of the `rank4` variant: the mask, or the cross-attention K/V, have four axes."""
    if spec.kind.is_batch or spec.kind.name not in RANK4_KINDS:
        return False
    tensors = (*spec.inputs, *spec.outputs)
    return any(len(t.shape) == 4 for t in tensors if t.name in ("mask", "cross_k_0"))


def _without_leading_axis(tensor: TensorSpec) -> TensorSpec:
    if _has_leading_axis(tensor) and tensor.shape[:1] == (1,):
        return replace(tensor, shape=tensor.shape[1:])
    return tensor


def _in_rank4(program: ProgramSpec) -> ProgramSpec:
    """Return the signature of the `rank4` variant from that of the default variant."""

    def lengthened(tensor: TensorSpec) -> TensorSpec:
        return replace(tensor, shape=(1, *tensor.shape)) if _has_leading_axis(tensor) else tensor

    inputs, outputs = (tuple(map(lengthened, side)) for side in (program.inputs, program.outputs))
    return ProgramSpec(program.name, inputs, outputs)


def _has_leading_axis(tensor: TensorSpec) -> bool:
    """Whether a tensor has one axis more in the `rank4` variant: mask, logits, their sum, K/V of layers."""
    return tensor.name in ("mask", "logits", LOGSUMEXP) or _LAYER.search(tensor.name) is not None


def _rank(spec: ProgramSpec, tensor: int) -> int:
    return len(spec.inputs[tensor].shape) if tensor < len(spec.inputs) else 0


def _size(spec: ProgramSpec, tensor: int, axis: int) -> int:
    """Return the size of one axis of an input; 0 if there is no such axis."""
    return spec.inputs[tensor].shape[axis] if axis < _rank(spec, tensor) else 0


def _in_range(what: str, number: int, lowest: int, highest: int) -> int:
    if not lowest <= number <= highest:
        raise ValueError(f"it has {number} {what}; expected {lowest} to {highest}")
    return number
