"""The HLO of the modules that AWS Neuron's tracer compiles, and what a token may not cost there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from whisperport.model.inspection.cost import contracted, cost_of
from whisperport.model.inspection.graph import Node, Value
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.dims import Dims
from whisperport.targets.vendors.aws_neuron import lowering, neuron_modules

from .....published_dims import TURBO
from .. import micro_modules
from .hlo_checks import broken, copied_caches, projected_again
from .read_hlo import Hlo, read_hlo


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
