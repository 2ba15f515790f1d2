"""What tests of rewrites share: built-in and third-party programs, small steps, and how a program runs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from whisperport.model.rewrites import Outcome, run_rewrites
from whisperport.model.trace.program import Program, as_program, trace
from whisperport.model.trace.trial import eager_outputs, random_inputs

from ...extent import core_or_all
from .third_party import third_party_programs

EXACT = 1e-6  # see test_every_rewrite.py


def rewritten(name: str, module: nn.Module, *inputs: Any) -> tuple[Program, Program, Outcome]:
    """The program of a module, after the rewrite, and what it did."""
    program = trace("one", module, inputs)
    after, (outcome,) = run_rewrites(program, [name])
    return program, after, outcome


def reasons(outcome: Outcome) -> str:
    return "; ".join(rejection.reason for rejection in outcome.rejected)


def operators(program: Program) -> list[str]:
    nodes = program.exported.graph.nodes
    return [str(node.target) for node in nodes if node.op == "call_function"]


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="session")
def programs(
    request: pytest.FixtureRequest,
    random_hf_whisper: Callable[..., Any],
    random_openai_whisper: Callable[..., Any],
) -> dict[str, Program]:
    """Graphs of complete programs: five built-in ones and the third-party ones, two decomposed.

    The built-in ones have one layer in `make test`, as the third-party ones do.
    """
    from whisperport.model.network.whisper import build_model
    from whisperport.model.trace.variants import whisper_programs
    from whisperport.model.trace.whisper import Parts

    names = ("encoder", "cross_kv", "prefill_4", "step", "align")
    checkpoint = request.getfixturevalue(core_or_all("one_layer_checkpoint", "tiny_checkpoint"))
    parts = Parts(build_model(checkpoint), [(0, 0)])
    built_in = {p.name: p for p in whisper_programs(parts, names)}
    theirs = third_party_programs(random_hf_whisper, random_openai_whisper)
    return {
        **built_in,
        **theirs,
        "decomposed": decomposed(built_in["encoder"]),
        "decomposed decoder": decomposed(theirs["openai-whisper's decoder"]),
    }


def decomposed(program: Program) -> Program:
    """In core ATen operators, as other people's pipelines hand programs over."""
    outputs = [t.name for t in program.spec.outputs]
    return as_program(program.name, program.exported.run_decompositions(), outputs)


@pytest.fixture(scope="session")
def run() -> Callable[..., list[Tensor]]:
    """`run(program, seed=0)`: the outputs on random inputs, masks and all."""

    def run(program: Program, *, seed: int = 0) -> list[Tensor]:
        return eager_outputs(program, random_inputs(program, seed))

    return run


@pytest.fixture(scope="session")
def largest_error() -> Callable[[list[Tensor], list[Tensor]], float]:
    """max|actual - expected| / max|expected|, over all outputs."""

    def error(actual: list[Tensor], expected: list[Tensor]) -> float:
        assert len(actual) == len(expected) > 0
        errors = []
        for a, e in zip(actual, expected, strict=True):
            assert a.shape == e.shape
            assert a.dtype == e.dtype
            assert torch.isfinite(a).all()
            errors.append(float((a - e).abs().max() / e.abs().max()))
        return float(np.max(errors))

    return error
