"""Fused operators in the graphs of `neuron_modules`: one matmul for Q, K and V, and AWS's own kernels.

This file stands alone: it needs torch (2.9 or later) and the standard library. The kernels are functions of
AWS's packages, which are imported when a program is compiled. Where a package is missing, or a kernel does
not support the shapes, the plain operators stay, and `Used` says so. On a CPU, the plain operators run.

    option     replaces, found by its form      by
    qkv        three linear layers with the     one matmul with the joined weights; the bias of K is 0
               same input: Q, K and V
    attention  bmm(softmax(bmm(Q, K)), V) of    `scaled_dot_product_attention_kernel`, NxD Inference
               a graph without state
    conv       conv1d of width 3, and GELU      `conv1d`, NKI library

Sources of the calls: aws-neuron/neuronx-distributed-inference@4bcdc54, experimental/functional/attention/
causal_attention_functions.py; aws-neuron/nki-library@d2ad3a5, nkilib/experimental/conv/conv1d.py. The same
kernels: jimburtoft/neuronx-distributed-inference@6c49162. No kernel was run by this project.

**Tensor parallel.** R devices compute H / R heads each. A linear layer is split into R contiguous parts of
its rows. If the joined weight is [Q; K; V], the first of two devices gets all of Q and half of K, and the
result is wrong (as in 6c49162, for R > 1). `joined_rows` therefore joins the rows device by device, as in
[Q0; K0; V0; Q1; K1; V1]. A `ColumnParallelLinear` with `stride=3` makes the same of [Q; K; V]
(aws-neuron/neuronx-distributed@fbac349, parallel_layers/layers.py, `create_local_weight`).
"""

from __future__ import annotations

import importlib
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

OPTIONS = ("qkv", "attention", "conv")
ATTENTION = (
    "neuronx_distributed_inference.experimental.functional.attention.causal_attention_functions"
)
CONV, CONV_TYPES = "nkilib.experimental.conv.conv1d", "nkilib.core.utils.common_types"
HOST = "cpu"  # type of torch device on which no kernel runs
CPU_ONLY = "plain: the program ran on the CPU only"

Run = Callable[..., Tensor]


class Used:
    """Which operators each option used, in words. It is filled while a program is traced."""

    def __init__(self, options: Sequence[str]) -> None:
        self._notes: dict[str, list[str]] = {option: [] for option in options}

    def add(self, option: str, what: str) -> None:
        """Note what an option used."""
        if what not in self._notes[option]:
            self._notes[option].append(what)

    def words(self) -> dict[str, str]:
        """Return option -> what it used."""
        return {option: "; ".join(notes) or CPU_ONLY for option, notes in self._notes.items()}


def fuse(module: nn.Module, options: Sequence[str]) -> Used:
    """Replace operators of a module that `neuron_modules.build` made, in place.

    Args:
        module: the module. If it has no operators of an option, such as `step` of "conv", nothing changes.
        options: names in `OPTIONS`.

    Returns:
        What was used; complete after the module was traced.

    Raises:
        ValueError: an option is unknown.
    """
    if unknown := [option for option in options if option not in OPTIONS]:
        raise ValueError(f"the option {unknown[0]!r} is not one of {OPTIONS}")
    graph: Any = getattr(module, "program", module)
    attentions = _attentions(graph) if module is graph and "attention" in options else []
    convolutions = _convolutions(graph) if "conv" in options else []
    replaced = {"qkv": True, "attention": attentions, "conv": convolutions}
    used = Used([option for option in options if replaced[option]])
    if attentions:
        _call_kernel(graph, attentions, FlashAttention(used))
    if convolutions:
        _call_kernel(graph, convolutions, FusedConv(used))
    if "qkv" in options:
        used.add("qkv", f"one matmul in {_join_projections(graph)} layers")
    return used


# Patterns in a graph -----------------------------------------------------------------------------


def _attentions(graph: Any) -> list[Sequence[Any]]:
    """Return the nodes of each bmm(softmax(bmm(Q, K)), V)."""
    chains = _chains(graph, "aten.bmm.default", "aten.softmax.int", "aten.bmm.default")
    return [chain for chain in chains if chain[1].args[1] in (-1, 2)]


def _convolutions(graph: Any) -> list[Sequence[Any]]:
    """Return the nodes of each convolution of width 3, padded by 1, with an exact GELU."""
    tensors = _tensors(graph)

    def fits(conv: Any, gelu: Any) -> bool:
        if len(conv.args) != 5 or conv.args[4] != [1] or conv.kwargs or gelu.kwargs:
            return False
        weight = tensors.get(_name(conv.args[1]))
        return weight is not None and weight.shape[2] == 3 and conv.args[2] is not None

    chains = _chains(graph, "aten.conv1d.default", "aten.gelu.default")
    return [chain for chain in chains if fits(*chain)]


def _chains(graph: Any, *ops: str) -> list[Sequence[Any]]:
    """Return the nodes of each chain of operators, whose inner results nothing else reads."""
    nodes = {node.name: node for node in graph.nodes}
    readers = Counter([*graph.results, *(name for node in graph.nodes for name in node.reads())])
    chains: list[Sequence[Any]] = []
    claimed: set[str] = set()
    for last in graph.nodes:
        chain = [last]
        while len(chain) < len(ops) and chain[0].args and _name(chain[0].args[0]) in nodes:
            chain.insert(0, nodes[_name(chain[0].args[0])])
        names = [node.name for node in chain]
        is_read_once = all(readers[name] == 1 for name in names[:-1])
        if [node.op for node in chain] == [*ops] and is_read_once and claimed.isdisjoint(names):
            chains.append(chain)
            claimed.update(names)
    return chains


def _name(argument: Any) -> str:
    """Return the name of the node whose result an argument is; "" if it is none."""
    return argument["node"] if isinstance(argument, dict) else ""


def _tensors(graph: Any) -> dict[str, Tensor]:
    """Return the weights of a graph: name of a node -> tensor."""
    return dict(zip(graph.weights, graph.tensors, strict=True))


def _rewrite(graph: Any, new: Mapping[str, list[Any]], tensors: Mapping[str, Tensor]) -> None:
    """Replace nodes, by name, each by any number of nodes."""
    graph.use(
        [replacement for node in graph.nodes for replacement in new.get(node.name, [node])], tensors
    )


def _call_kernel(graph: Any, chains: Sequence[Sequence[Any]], kernel: Any) -> None:
    """Replace each chain by one node that calls a kernel."""
    new: dict[str, list[Any]] = {node.name: [] for chain in chains for node in chain}
    for chain in chains:
        args, run = kernel.node(*chain)
        new[chain[-1].name] = [chain[-1]._replace(op="kernel", function=run, args=args, kwargs={})]
    _rewrite(graph, new, _tensors(graph))


# Q, K and V --------------------------------------------------------------------------------------


def _join_projections(graph: Any) -> int:
    """Join each three linear layers with the same input; return how many layers have them."""
    tensors = _tensors(graph)
    by_input: dict[str, list[Any]] = {}
    for node in graph.nodes:
        weights = [_name(argument) for argument in node.args[1:]]
        if node.op == "aten.linear.default" and not node.kwargs and tensors.keys() >= {*weights}:
            by_input.setdefault(_name(node.args[0]), []).append(node)
    groups = [group for group in by_input.values() if len(group) == 3]
    new: dict[str, list[Any]] = {}
    for group in groups:
        new |= _joined(group, tensors)
    _rewrite(graph, new, tensors)
    return len(groups)


def _joined(group: Sequence[Any], tensors: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Return one matmul in place of three, and its parts; add its weights to `tensors`."""
    first, name = group[0], group[0].name
    weights = [tensors[_name(node.args[1])] for node in group]
    biases = [
        tensors[_name(node.args[2])] if len(node.args) > 2 else weight.new_zeros(len(weight))
        for node, weight in zip(group, weights, strict=True)
    ]
    tensors[f"{name}/weight"], tensors[f"{name}/bias"] = joined_rows(weights), joined_rows(biases)
    args = [first.args[0], {"node": f"{name}/weight"}, {"node": f"{name}/bias"}]
    matmul = first._replace(name=f"{name}/joined", args=args)
    sizes = [len(weight) for weight in weights]
    split = first._replace(
        name=f"{name}/parts",
        op="split",
        function=torch.split,
        args=[{"node": matmul.name}, sizes, -1],
    )
    parts = {
        node.name: [
            node._replace(
                op="getitem", function=operator.getitem, args=[{"node": split.name}, index]
            )
        ]
        for index, node in enumerate(group)
    }
    return {**parts, name: [matmul, split, *parts[name]]}


def joined_rows(rows: Sequence[Tensor], heads: int = 1, degree: int = 1) -> Tensor:
    """Join the weights (d, …) or the biases (d,) of Q, K and V, device by device.

    Args:
        rows: of Q, of K, and of V.
        heads: H, number of heads.
        degree: R, number of devices. If it does not divide H, heads of zeros are added. They add nothing to
            the result: the output projection has zeros for them too.

    Returns:
        (3·H'·D, …), of which device r gets the r-th of R equal parts; H' is a multiple of R.
    """
    padded = [padded_rows(projection, heads, degree) for projection in rows]
    parts = [projection.reshape(degree, -1, *projection.shape[1:]) for projection in padded]
    return torch.cat(parts, dim=1).flatten(0, 1)


def padded_rows(rows: Tensor, heads: int, degree: int) -> Tensor:
    """Add heads of zeros to (H·D, …) until the number of heads is a multiple of `degree`."""
    missing = -heads % degree * (rows.shape[0] // heads)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def fused_state_dict(
    weights: Mapping[str, Tensor], heads: int, degree: int = 1
) -> dict[str, Tensor]:
    """Convert the weights of a Whisper model, with openai-whisper's names, for `degree` devices.

    `attn.query`, `attn.key` and `attn.value` become `attn.qkv`. Cross-attention is not joined, since its
    queries and its keys have different inputs; its heads are padded.
    """
    converted = dict(weights)
    for name in [name for name in weights if name.endswith("attn.query.weight")]:
        layer = name.removesuffix("query.weight")
        out = converted[f"{layer}out.weight"]
        converted[f"{layer}out.weight"] = padded_rows(out.T, heads, degree).T
        if layer.endswith(".cross_attn."):
            for part in ("query.weight", "query.bias", "key.weight", "value.weight", "value.bias"):
                converted[layer + part] = padded_rows(weights[layer + part], heads, degree)
            continue
        q, k, v = (converted.pop(f"{layer}{part}.weight") for part in ("query", "key", "value"))
        q_bias, v_bias = (converted.pop(f"{layer}{part}.bias") for part in ("query", "value"))
        converted[f"{layer}qkv.weight"] = joined_rows((q, k, v), heads, degree)
        zeros = torch.zeros_like(q_bias)
        converted[f"{layer}qkv.bias"] = joined_rows((q_bias, zeros, v_bias), heads, degree)
    return converted


_BY_ROWS = ("attn.qkv", "attn.query", "attn.key", "attn.value", "mlp.0")  # column-parallel layers
_BY_COLUMNS = ("attn.out.weight", "mlp.2.weight")  # row-parallel layers; their bias is added once


def shard(weights: Mapping[str, Tensor], degree: int, rank: int) -> dict[str, Tensor]:
    """Return the weights of one of `degree` devices. Every device has all weights that are not split.

    Args:
        weights: as `fused_state_dict` returns them for `degree`.

    Raises:
        ValueError: a weight cannot be split into equal parts.
    """

    def part(name: str, weight: Tensor) -> Tensor:
        by_rows = any(f"{layer}." in name for layer in _BY_ROWS)
        if not by_rows and not name.endswith(_BY_COLUMNS):
            return weight
        axis = 0 if by_rows else 1
        if weight.shape[axis] % degree:
            raise ValueError(f"{name} {tuple(weight.shape)} cannot be split into {degree} parts")
        return weight.chunk(degree, dim=axis)[rank]

    return {name: part(name, weight) for name, weight in weights.items()}


# Kernels -----------------------------------------------------------------------------------------


class FlashAttention:
    """Attention over all positions by AWS's kernel, which does not write the scores to memory."""

    def __init__(self, used: Used) -> None:
        self._used = used
        self._kernel, self._missing = _kernel(ATTENTION, "scaled_dot_product_attention_kernel")

    def node(self, scores: Any, softmax: Any, attended: Any) -> tuple[list[Any], Run]:
        """Return arguments and function of the node that replaces three nodes.

        It attends from scaled queries (H, T, D) to keys (H, D, T) and values (H, T, D): (H, T, D).
        """

        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            weights = softmax.function(scores.function(q, k), *softmax.args[1:], **softmax.kwargs)
            return cast(Tensor, attended.function(weights, v))

        def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # A scale of 1: the queries are scaled already. The kernel wants all three as (B, H, T, D).
            q, k, v = q[None], k.permute(0, 2, 1)[None], v[None]
            return cast(Tensor, self._kernel(q, k, v, is_causal=False, scale=1.0))[0]

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            result = _attempt(fused, (q, k, v), "attention", ATTENTION, self._missing, self._used)
            return plain(q, k, v) if result is None else result

        return [*scores.args, attended.args[1]], run


class FusedConv:
    """A convolution with GELU by AWS's kernel."""

    def __init__(self, used: Used) -> None:
        self._used = used
        self._kernel, self._missing = _kernel(CONV, "conv1d")
        types, missing = _kernel(CONV_TYPES, "ActFnType")
        self._missing = self._missing or missing
        self._gelu = None if self._missing else types.GELU

    def node(self, conv: Any, gelu: Any) -> tuple[list[Any], Run]:
        """Return arguments and function of the node that replaces two nodes: (B, C, T) to (B, d, T')."""
        stride, padding = conv.args[3:]

        def fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            filters = weight.permute(2, 1, 0)  # (3, C, d)
            further = {"padding": (1, 1), "activation_fn": self._gelu}
            return cast(Tensor, self._kernel(x, filters, bias, stride=stride[0], **further))

        def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            result = _attempt(fused, (x, weight, bias), "conv", CONV, self._missing, self._used)
            if result is not None:
                return result
            return cast(Tensor, gelu.function(conv.function(x, weight, bias, stride, padding)))

        return conv.args[:3], run


def _kernel(module: str, name: str) -> tuple[Any, str]:
    """Import a function of AWS's packages: the function, or None and why it is missing."""
    try:
        return getattr(importlib.import_module(module), name), ""
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return None, f"plain: {module} cannot be imported: {str(error)[:200]}"


def _attempt(
    fused: Run, inputs: Sequence[Tensor], option: str, module: str, missing: str, used: Used
) -> Tensor | None:
    """Run a kernel on a device's tensors; None if it is missing, or rejects them with an assertion."""
    if inputs[0].device.type == HOST:
        return None
    if not missing:
        try:
            result = fused(*inputs)
        except AssertionError as error:
            why = (str(error).splitlines() or ["it gives no reason"])[0][:200]
            missing = f"plain: {module} does not support the program: {why}"
        else:
            used.add(option, f"kernel: {module}")
            return result
    used.add(option, missing)
    return None
