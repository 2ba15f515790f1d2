"""Lower a torch program to HLO with jax: the protocol buffer that XLA-based compilers read.

Every operator of torch's core set that Whisper's programs need is written here with `jax.lax`. Each result
has the dtype that torch states, so an int64 in the torch program is an int64 in the module. Shapes are
enough: no weight is needed, and models of any size are lowered in seconds.

jax is installed with litert-torch, a part of the extra `dev`.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

import numpy as np
import pytest
import torch
from torch.export.graph_signature import InputKind

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax: Any = pytest.importorskip("jax", reason="HLO modules are made with jax: pip install jax")
jnp, lax = jax.numpy, jax.lax


@dataclass(frozen=True)
class Lowered:
    """A torch program as HLO."""

    module: bytes  # HloModuleProto
    inputs: tuple[str, ...]  # of torch, in the order of the module's parameters
    resident: frozenset[str]  # those inputs that are parameters and buffers of the torch module
    run: Callable[..., list[Any]]  # arrays in, arrays out, with XLA on the CPU


def lower(
    exported: Any, aliases: Mapping[str, int] | None = None, *, keep_unused: bool = True
) -> Lowered:
    """Lower an exported program.

    Args:
        exported: a `torch.export.ExportedProgram`.
        aliases: name of a parameter or input -> index of the output that is written to its memory.
        keep_unused: keep inputs that nothing reads; PyTorch/XLA removes them. Parameters of the torch
            module that nothing reads are removed in any case.
    """
    core = exported.run_decompositions()
    nodes = [node for node in core.graph.nodes if node.op == "placeholder"]
    every, resident = _inputs(core)
    kept = [
        bool(n.users) or (keep_unused and s not in resident)
        for n, s in zip(nodes, every, strict=True)
    ]
    nodes = [node for node, keep in zip(nodes, kept, strict=True) if keep]
    names = tuple(name for name, keep in zip(every, kept, strict=True) if keep)
    shapes = [jax.ShapeDtypeStruct(tuple(n.meta["val"].shape), _dtype(n)) for n in nodes]
    donated = tuple(place for place, name in enumerate(names) if name in (aliases or {}))

    def function(*arrays: Any) -> Any:
        return _interpret(core, dict(zip(nodes, arrays, strict=True)))

    kind = Parameter.POSITIONAL_ONLY  # jax calls the module's parameters as the function's
    arguments = [Parameter(re.sub(r"\W", "_", name), kind) for name in names]
    function.__signature__ = Signature(arguments)  # type: ignore[attr-defined]
    with jax.enable_x64(True):
        jitted = jax.jit(function, donate_argnums=donated, keep_unused=True)
        module = jitted.lower(*shapes).compiler_ir("hlo").as_serialized_hlo_module_proto()

    def run(*arrays: Any) -> list[Any]:
        with jax.enable_x64(True):
            return [np.asarray(one) for one in jax.jit(function)(*arrays)]

    return Lowered(module, names, resident & set(names), run)


def _inputs(core: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    specs = core.graph_signature.input_specs
    user = InputKind.USER_INPUT
    names = tuple(s.arg.name if s.kind == user else str(s.target) for s in specs)
    return names, frozenset(n for n, s in zip(names, specs, strict=True) if s.kind != user)


def _interpret(core: Any, values: dict[Any, Any]) -> tuple[Any, ...]:
    """Compute the outputs; `values` has those of the placeholders."""

    def value(argument: Any) -> Any:
        return torch.fx.node.map_arg(argument, lambda node: values[node])

    for node in core.graph.nodes:
        if node.op == "output":
            return tuple(value(node.args[0]))
        if node.op != "placeholder":
            name = str(node.target).removeprefix("aten.").split(".")[0]
            if name not in OPERATORS:
                raise NotImplementedError(f"{node.target} has no lowering to HLO here")
            values[node] = OPERATORS[name](node, *value(node.args), **value(node.kwargs))
    raise AssertionError("the graph has no output")


def _dtype(node: Any) -> Any:
    return jnp.dtype(str(_meta(node).dtype).removeprefix("torch."))


def _meta(node: Any) -> Any:
    meta = node.meta["val"]
    return meta[0] if isinstance(meta, tuple | list) else meta


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(_meta(node).shape)


def _elementwise(function: Callable[..., Any], *, compares: bool = False) -> Callable[..., Any]:
    """Compute in the dtype that torch promotes the operands to."""

    def run(node: Any, *operands: Any, **options: Any) -> Any:
        dtype = _dtype(node)
        if compares:
            given = [_meta(a) if isinstance(a, torch.fx.Node) else a for a in node.args[:2]]
            dtype = jnp.dtype(str(torch.result_type(*given)).removeprefix("torch."))
        shape = _shape(node)
        full = [jnp.broadcast_to(jnp.asarray(one, dtype), shape) for one in operands]
        return function(*full)

    return run


def _expand(node: Any, x: Any, sizes: Any, **_: Any) -> Any:
    return jnp.broadcast_to(x, _shape(node))


def _reshape(node: Any, x: Any, *_: Any, **__: Any) -> Any:
    return lax.reshape(x, _shape(node))


def _cast(node: Any, x: Any, *_: Any, **__: Any) -> Any:
    return lax.convert_element_type(x, _dtype(node))


def _permute(node: Any, x: Any, axes: Sequence[int]) -> Any:
    return lax.transpose(x, [axis % x.ndim for axis in axes])


def _slice(
    node: Any, x: Any, axis: int = 0, start: int | None = 0, end: int | None = None, step: int = 1
) -> Any:
    start, end, _ = slice(start, end).indices(x.shape[axis])
    return lax.slice_in_dim(x, start, end, step, axis % x.ndim)


def _select(node: Any, x: Any, axis: int, place: int) -> Any:
    return lax.index_in_dim(x, place, axis % x.ndim, keepdims=False)


def _split(node: Any, x: Any, sizes: Sequence[int], axis: int = 0) -> list[Any]:
    ends = np.cumsum(sizes)
    pairs = zip(ends - np.array(sizes), ends, strict=True)
    return [lax.slice_in_dim(x, int(a), int(b), 1, axis % x.ndim) for a, b in pairs]


def _dot(node: Any, a: Any, b: Any) -> Any:
    batch = tuple(range(a.ndim - 2))
    numbers = (((a.ndim - 1,), (b.ndim - 2,)), (batch, batch))
    return lax.dot_general(a, b, numbers, precision="highest")


def _addmm(node: Any, bias: Any, a: Any, b: Any) -> Any:
    return _dot(node, a, b) + jnp.broadcast_to(bias, _shape(node))


def _reduce(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(node: Any, x: Any, axes: Any = None, keepdim: bool = False, **_: Any) -> Any:
        axes = [axes] if isinstance(axes, int) else axes or range(x.ndim)
        x = lax.convert_element_type(x, _dtype(node))
        found = function(x, tuple(axis % x.ndim for axis in axes))
        return lax.reshape(found, _shape(node))

    return run


def _sum(x: Any, axes: Any) -> Any:
    return lax.reduce(x, jnp.zeros((), x.dtype), lax.add, axes)


def _amax(x: Any, axes: Any) -> Any:
    lowest = jnp.asarray(-jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else 0, x.dtype)
    return lax.reduce(x, lowest, lax.max, axes)


def _any(x: Any, axes: Any) -> Any:
    return lax.reduce(x, jnp.asarray(False), lax.bitwise_or, axes)


def _keep(x: Any, axes: Any, like: Any) -> Any:
    kept = [1 if axis in axes else size for axis, size in enumerate(like.shape)]
    return jnp.broadcast_to(lax.reshape(x, kept), like.shape)


def _softmax(node: Any, x: Any, axis: int, _: bool = False) -> Any:
    axes = (axis % x.ndim,)
    powers = lax.exp(x - _keep(_amax(x, axes), axes, x))
    return powers / _keep(_sum(powers, axes), axes, x)


def _layer_norm(node: Any, x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> list[Any]:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    count = jnp.asarray(np.prod(shape), x.dtype)
    centered = x - _keep(_sum(x, axes) / count, axes, x)
    variance = _sum(centered * centered, axes) / count
    scale = _keep(lax.rsqrt(variance + jnp.asarray(eps, x.dtype)), axes, x)
    found = centered * scale
    found = found if weight is None else found * jnp.broadcast_to(weight, x.shape)
    return [found if bias is None else found + jnp.broadcast_to(bias, x.shape)]


def _gelu(node: Any, x: Any, **_: Any) -> Any:
    half, root = jnp.asarray(0.5, x.dtype), jnp.asarray(2**-0.5, x.dtype)
    return half * x * (lax.erf(x * root) + jnp.asarray(1, x.dtype))


def _gather(axis: int, x: Any, places: Any) -> Any:
    """Return the slices of `x` along an axis at `places`, whose axes replace that axis."""
    offsets = tuple(range(axis)) + tuple(range(axis + places.ndim, x.ndim - 1 + places.ndim))
    numbers = lax.GatherDimensionNumbers(offsets, (axis,), (axis,))
    sizes = [1 if one == axis else size for one, size in enumerate(x.shape)]
    found = lax.reshape(places, (*places.shape, 1))
    return lax.gather(x, found, numbers, sizes, mode="promise_in_bounds")


def _conv(
    node: Any, x: Any, weight: Any, bias: Any, stride: Any, pad: Any, *_: Any, **__: Any
) -> Any:
    pairs = [(one, one) for one in pad]
    found = lax.conv_general_dilated(x, weight, stride, pairs, precision="highest")
    return found if bias is None else found + jnp.broadcast_to(bias[:, None], found.shape)


def _select_scatter(node: Any, x: Any, new: Any, axis: int, place: int) -> Any:
    start = [0] * x.ndim
    start[axis] = place
    return lax.dynamic_update_slice(x, jnp.expand_dims(new, axis), [np.int32(s) for s in start])


OPERATORS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("view", "unsqueeze", "squeeze", "_unsafe_view", "reshape"), _reshape),
    **dict.fromkeys(("clone", "alias", "detach"), lambda node, x, **_: x),
    "_assert_tensor_metadata": lambda node, *_, **__: None,  # a check, of what is static here
    "_to_copy": _cast,
    "expand": _expand,
    "index": lambda node, x, places: x[tuple(slice(None) if p is None else p for p in places)],
    "permute": _permute,
    "repeat": lambda node, x, counts: jnp.tile(x, counts),
    "t": lambda node, x: lax.transpose(x, (1, 0)),
    "transpose": lambda node, x, a, b: jnp.swapaxes(x, a, b),
    "slice": _slice,
    "select": _select,
    "split_with_sizes": _split,
    "cat": lambda node, parts, axis=0: lax.concatenate(parts, axis % parts[0].ndim),
    "cumsum": lambda node, x, axis, **_: lax.cumsum(x.astype(_dtype(node)), axis % x.ndim),
    "mm": _dot,
    "bmm": _dot,
    "addmm": _addmm,
    "convolution": _conv,
    "sum": _reduce(_sum),
    "amax": _reduce(_amax),
    "any": _reduce(_any),
    "_softmax": _softmax,
    "native_layer_norm": _layer_norm,
    "gelu": _gelu,
    "index_select": lambda node, x, axis, places: _gather(axis % x.ndim, x, places),
    "embedding": lambda node, table, ids, *_: _gather(0, table, ids),
    "select_scatter": _select_scatter,
    "<built-in function getitem>": lambda node, values, place: values[place],
    "full": lambda node, *_, **__: jnp.full(_shape(node), node.args[1], _dtype(node)),
    "full_like": lambda node, *_, **__: jnp.full(_shape(node), node.args[1], _dtype(node)),
    "scalar_tensor": lambda node, value, **_: jnp.asarray(value, _dtype(node)),
    "add": _elementwise(lax.add),
    "sub": _elementwise(lax.sub),
    "mul": _elementwise(lax.mul),
    "div": _elementwise(lax.div),
    "pow": _elementwise(lax.pow),
    "neg": _elementwise(lax.neg),
    "eq": _elementwise(lax.eq, compares=True),
    "ne": _elementwise(lax.ne, compares=True),
    "gt": _elementwise(lax.gt, compares=True),
    "ge": _elementwise(lax.ge, compares=True),
    "lt": _elementwise(lax.lt, compares=True),
    "le": _elementwise(lax.le, compares=True),
    "logical_not": _elementwise(lax.bitwise_not),
    "logical_and": _elementwise(lax.bitwise_and),
    "bitwise_and": _elementwise(lax.bitwise_and),
    "where": lambda node, chosen, a, b: lax.select(
        *(
            jnp.broadcast_to(jnp.asarray(one, kind), _shape(node))
            for one, kind in ((chosen, bool), (a, _dtype(node)), (b, _dtype(node)))
        )
    ),
}


def _arange(node: Any, start: Any, end: Any, step: Any = 1, **_: Any) -> Any:
    counted = lax.iota(_dtype(node), _shape(node)[0])
    return counted * jnp.asarray(step, _dtype(node)) + jnp.asarray(start, _dtype(node))


OPERATORS["arange"] = _arange
