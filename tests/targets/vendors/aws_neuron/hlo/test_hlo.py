"""The modules that are traced, as HLO made here: what a token moves, computes and keeps.

jax lowers what torch.export makes of the very module that `torch_neuronx.trace` gets. XLA runs the result,
which computes the same numbers. With the SDK, the tracer writes its own HLO: test_torch_2_9.py reads that
of PyTorch/XLA, which torch-neuronx is built on.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from whisperport.program.dims import Dims
from whisperport.targets.vendors.aws_neuron import neuron_modules

from .....extent import EVERYTHING, core_or_all
from .....published_dims import TURBO
from .. import micro_modules
from .hlo_of_torch import Lowered, lower
from .traced_hlo import CHECKS, Traced, build, failures, named, read

MICRO = replace(micro_modules.DIMS, n_text_layer=1)
CROSS = ("cross_k", "cross_v")
# Measured: at most 1.5e-6 between XLA and torch on the CPU, for outputs of up to 5.
TOLERANCE = 1e-5


def lowered(module: nn.Module, inputs: tuple[Tensor, ...], aliases: Mapping[str, int]) -> Lowered:
    with torch.no_grad():
        return lower(torch.export.export(module, inputs, strict=False), aliases)


def traced(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    aliases: Mapping[str, int],
    dims: Dims = TURBO,
) -> Traced:
    made = lowered(module, inputs, aliases)
    return read(made.module, made.inputs, made.resident, dims)


@pytest.fixture(scope="module")
def turbo_step() -> Traced:
    """The step of large-v3-turbo."""
    return traced(*build("step"))


class Projecting(nn.Module):
    """A step that gets the encoder's output and projects it for every token, as before the split."""

    def __init__(self, step: nn.Module, cross: nn.Module) -> None:
        super().__init__()
        self.step, self.cross = step, cross

    def forward(self, x: Tensor, mask: Tensor, position: Tensor, features: Tensor) -> Any:
        made = self.cross(features)
        layers = len(made) // 2
        state = {f"cross_k.{i}": made[i][None] for i in range(layers)}
        state |= {f"cross_v.{i}": made[layers + i][None] for i in range(layers)}
        return torch.func.functional_call(self.step, state, (x, mask, position))


def projecting(dims: Dims) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, int]]:
    step, inputs, aliases = build("step", dims)
    cross, features, _ = build("cross_kv", dims)
    below = {f"step.{name}": place for name, place in aliases.items()}
    return Projecting(step, cross), (*inputs, *features), below


@pytest.mark.parametrize("check", CHECKS)
def test_the_step_of_turbo_has_nothing_that_a_token_must_not_cost(
    turbo_step: Traced, check: str
) -> None:
    assert CHECKS[check](turbo_step) == []


def test_a_token_of_turbo_moves_at_most_64_kb_to_the_device(turbo_step: Traced) -> None:
    sizes = [one.n_bytes or 0 for one in turbo_step.per_token.values()]

    assert sizes == [1280 * 4, 449 * 4, 4]  # x, mask, position
    assert sum(sizes) <= 64 * 1024
    state = [one.n_bytes or 0 for name, one in turbo_step.inputs.items() if name[:7] in CROSS]
    assert sum(state) == 2 * 4 * 1500 * 1280 * 4  # 61 MB that stay on the device


def test_a_token_of_turbo_costs_39_gflop_less_than_with_projections(turbo_step: Traced) -> None:
    unfixed = traced(*projecting(TURBO))

    saved = unfixed.flops - turbo_step.flops

    assert saved >= 39e9
    assert saved == pytest.approx(
        8 * 2 * 1500 * 1280 * 1280, rel=1e-3
    )  # and the bias of the values
    assert failures(unfixed) == {"audio_per_token", "audio_projections", "repeated_work"}
    assert len(CHECKS["audio_projections"](unfixed)) == 8
    assert sum("39.3 GFLOP" in reason for reason in CHECKS["repeated_work"](unfixed)) == 8


@pytest.mark.parametrize(
    "program", core_or_all(["prefill_4"], ["step_8", "step_4", "prefill_4", "align"])
)
def test_the_other_decode_programs_have_nothing_of_it_either(program: str) -> None:
    dims = TURBO if EVERYTHING else MICRO

    assert failures(traced(*build(program, dims), dims)) == set()


@pytest.mark.parametrize("program", core_or_all(["step_4"], list(micro_modules.PROGRAMS)))
def test_the_hlo_computes_what_the_module_computes(program: str) -> None:
    described, weights = micro_modules.description(), micro_modules.weights()
    module, inputs, aliases = named(*neuron_modules.build(described, weights, program))
    generator = torch.Generator().manual_seed(0)
    for name, state in module.named_parameters():
        if neuron_modules.is_state(name):
            state.data = torch.randn(state.shape, generator=generator)
    given = [
        torch.randn(one.shape, generator=generator) if one.is_floating_point() else one
        for one in inputs
    ]
    made = lowered(module, inputs, aliases)
    with torch.no_grad():
        expected = module(*given)

    parameters = dict(module.named_parameters())
    passed = iter(given)
    arrays = [parameters[n] if n in made.resident else next(passed) for n in made.inputs]
    outputs = made.run(*(one.detach().numpy() for one in arrays))

    assert len(outputs) == len(expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=TOLERANCE, rtol=0)
        assert np.abs(ours).max() > 0.1
