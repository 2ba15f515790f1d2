"""The HLO of the modules that AWS Neuron's tracer compiles, and what a token may not cost there."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from whisperport.model.inspection.cost import contracted, cost_of
from whisperport.model.inspection.graph import Graph, Node, Value
from whisperport.model.inspection.rules import RULES
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.dims import Dims
from whisperport.program.spec import Limit
from whisperport.targets.vendors.aws_neuron import lowering, neuron_modules

from .....micro import TURBO
from .. import micro_modules
from .read_hlo import Hlo, read_hlo

# What is wrong with an HLO module: caches that every call copies, and which of its inputs are weights.


# Operators whose result has the elements of their first input, in another order or dtype.
LAYOUT_OPS = frozenset({"clone", "expand", "reshape", "squeeze", "to", "transpose", "unsqueeze"})


# Operators that write a part of a tensor, or select from two -> which of their inputs is the old tensor.
WRITES = {"slice_scatter": (0,), "scatter": (0,), "where": (1, 2)}
MOVES = LAYOUT_OPS | {"gather"}  # their first input; a gather reorders the rows of beams


def broken(graph: Graph, rule: str, value: object = None) -> list[str]:
    """Return what a rule of `whisperport check` finds in a graph."""
    limit = Limit(rule=rule, value=value, source="a test")
    return [finding.reason for finding in RULES[rule].check(graph, limit)]


def projected_again(module: Hlo) -> list[str]:
    """Return what rule WP601 finds. A module does not state which of its inputs are weights."""
    weights = weight_inputs(module)
    inputs = tuple(value for value in module.graph.inputs if value.name not in weights)
    return broken(replace(module.graph, inputs=inputs), "WP601")


def copied_caches(module: Hlo) -> list[str]:
    """Return the inputs that are an output, unchanged or with a part written over, without an alias.

    Without one, the device keeps two caches, and every call copies the complete cache to write one row.
    """
    graph, inputs = module.graph, {value.name: value for value in module.graph.inputs}
    return [
        state
        for place, output in enumerate(graph.outputs)
        if (state := _state_of(graph, output, inputs)) and module.aliases.get(place) != state
    ]


def _state_of(graph: Graph, output: Value, inputs: Mapping[str, Value]) -> str:
    """Return the input of which an output is a new version; empty if there is none."""
    if output.name in inputs:
        return output.name
    seen: set[tuple[str, bool]] = set()
    waiting = [(output, False)]  # a tensor, and whether a part of it was written over
    while waiting:
        value, written = waiting.pop()
        if (value.name, written) in seen:
            continue
        seen.add((value.name, written))
        same = inputs.get(value.name)
        if same and written and (same.shape, same.dtype) == (output.shape, output.dtype):
            return same.name
        node = graph.producer(value)
        if node is None or not node.tensors:
            continue
        writes = node.op in WRITES
        places = WRITES.get(node.op, (0,) if node.op in MOVES else ())
        old = (node.tensors[place] for place in places if place < len(node.tensors))
        waiting += [(tensor, written or writes) for tensor in old]
    return ""


def weight_inputs(module: Hlo) -> frozenset[str]:
    """Return the names of the inputs that are used as weights.

    An input is a weight if it is multiplied by a computed tensor in a matmul without batch axes or in a
    convolution. Cached keys and values are multiplied with the heads as batch axes. If two inputs are
    multiplied by each other, such as the encoder's output and the weight of its keys, the weight is the one
    that is a weight elsewhere, or else the one that is multiplied by fewer inputs, or else the second. A
    floating-point input of rank 1 is a weight too, such as a bias. An input whose memory is reused for an
    output is not: it is state.
    """
    graph = module.graph
    vectors = (v for v in graph.inputs if len(v.shape or ()) == 1 and "float" in v.dtype)
    names = {value.name for value in vectors}
    pairs = list(_operands(graph))
    names.update(left or right for left, right in pairs if not left or not right)
    partners: dict[str, set[str]] = defaultdict(set)
    both = [(left, right) for left, right in pairs if left and right]
    for left, right in both:
        partners[left].add(right)
        partners[right].add(left)
    for left, right in both:
        if left not in names and right not in names:
            names.add(left if len(partners[left]) < len(partners[right]) else right)
    return frozenset(names - {"", *module.aliases.values()})


def _operands(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield the operands of each matmul and convolution: the name of the input that one is, or ""."""
    sources = {value.name: value.name for value in graph.inputs}
    for node in graph.nodes:
        read = [sources.get(value.name, "") for value in node.tensors]
        if node.op in LAYOUT_OPS and read and read[0]:
            sources[node.output.name] = read[0]
        if len(read) > 1 and _has_weight(node):
            yield read[0], read[1]


def _has_weight(node: Node) -> bool:
    return node.op == "conv" or (node.op == "matmul" and not node.attributes.get("has_batch"))


# The HLO of the modules that AWS Neuron's tracer compiles, and what a token may not cost there.


@dataclass(frozen=True)
class Traced:
    """A module as HLO."""

    hlo: Hlo
    names: tuple[str, ...]  # of torch's inputs and parameters, in the order of the HLO parameters
    resident: frozenset[str]  # the names that are parameters: they stay on the device
    audio: int  # T, positions of the encoder
    width: int  # d

    @cached_property
    def inputs(self) -> dict[str, Value]:
        """Torch's name -> parameter of the HLO module."""
        return dict(zip(self.names, self.hlo.graph.inputs, strict=True))

    @property
    def per_token(self) -> dict[str, Value]:
        """The inputs that the host passes at every call."""
        return {name: one for name, one in self.inputs.items() if name not in self.resident}

    @property
    def flops(self) -> int:
        return cost_of(self.hlo.graph).flops


def read(module: bytes, names: Any, resident: Any, dims: Dims) -> Traced:
    return Traced(
        read_hlo(module), tuple(names), frozenset(resident), dims.n_audio_ctx, dims.n_text_state
    )


def build(program: str, dims: Dims = TURBO) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, int]]:
    """Build a module of any size; weights are one zero, expanded. Aliases are by the parameter's name."""
    with torch.device("meta"):
        model = Whisper(dims).eval().requires_grad_(False)
    zero = torch.zeros(1)
    model.load_state_dict(
        {name: zero.expand(one.shape) for name, one in model.state_dict().items()}, assign=True
    )
    traced = tuple(whisper_programs(Parts(model, micro_modules.HEADS), (program,)))
    return named(*neuron_modules.build(*lowering.describe(traced, "float32"), program))


def named(
    module: nn.Module, inputs: tuple[Tensor, ...], aliases: Mapping[Tensor, int]
) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, int]]:
    """Replace the state parameters in the aliases by their names."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return module, inputs, {names[id(state)]: place for state, place in aliases.items()}


# What the HLO of a decode program must not have -------------------------------------------------------


def audio_per_token(traced: Traced) -> list[str]:
    """Inputs of audio length that the host passes at every call."""
    return [name for name, one in traced.per_token.items() if traced.audio in (one.shape or ())]


def audio_projections(traced: Traced) -> list[str]:
    """Matmuls of shape (T, d, d): T rows of d columns by a weight (d, d)."""
    width = traced.width

    def is_one(node: Node) -> bool:
        if node.op != "matmul" or width**2 not in [one.size for one in node.tensors]:
            return False
        return (contracted(node), node.output.size) == (width, traced.audio * width)

    return [node.name for node in traced.hlo.graph.nodes if is_one(node)]


def caches_without_alias(traced: Traced) -> list[str]:
    """Self-attention caches that no output is written to, and those that are copied."""
    aliased = set(traced.hlo.aliases.values())
    caches = {name: one for name, one in traced.inputs.items() if "self_" in name}
    missing = [name for name, one in caches.items() if one.name not in aliased]
    return [*missing, *copied_caches(traced.hlo), *([] if caches else ["there are no caches"])]


def int64(traced: Traced) -> list[str]:
    """Inputs and results of 64 bits; a constant that is converted to 32 bits is none."""
    values = [value for node in traced.hlo.graph.nodes for value in node.outputs]
    wide = ("int64", "uint64", "float64")
    return [one.name for one in (*values, *traced.hlo.graph.inputs) if one.dtype in wide]


def dynamic_shapes(traced: Traced) -> list[str]:
    """Shapes that are not static."""
    return broken(traced.hlo.graph, "WP204")


def repeated_work(traced: Traced) -> list[str]:
    """What rules WP601 and WP602 find."""
    return [*projected_again(traced.hlo), *broken(traced.hlo.graph, "WP602")]


CHECKS: dict[str, Callable[[Traced], list[str]]] = {
    check.__name__: check
    for check in (
        audio_per_token,
        audio_projections,
        caches_without_alias,
        int64,
        dynamic_shapes,
        repeated_work,
    )
}


def failures(traced: Traced) -> set[str]:
    """Return the names of the checks that find something."""
    return {name for name, check in CHECKS.items() if check(traced)}
