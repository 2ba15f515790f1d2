"""What tests of rewrites share: built-in, third-party and drawn programs, and how a program runs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
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


# Programs that write in place, through views and not, in any order: drawn by hypothesis.

Step = tuple[str, int, int]  # what, of which tensor, and a number
Function = Callable[[Tensor, Tensor], Any]


class Calls(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


def drawn_writes() -> st.SearchStrategy[list[Step]]:
    kinds = st.sampled_from(("slice", "select", "transpose", "view", "write", "use", "copy"))
    return st.lists(st.tuples(kinds, st.integers(0, 5), st.integers(0, 6)), min_size=3, max_size=9)


def function_of(drawn: list[Step], *, constant: bool = False) -> Function:
    """A function of two tensors (1, 8, 8) that does these steps with the first, or also with a constant."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        tensors = [torch.relu(x), *([torch.ones(8, 8) + 1.0] if constant else [])]
        for kind, place, number in drawn:
            one = tensors[place % len(tensors)]
            if kind == "slice" and one.dim() and one.shape[0] > 1:
                tensors.append(one[: max(1, number % one.shape[0])])
            elif kind == "select" and one.dim() > 1:
                tensors.append(one[number % one.shape[0]])
            elif kind == "transpose" and one.dim() > 1:
                tensors.append(one.transpose(0, 1))
            elif kind == "view" and one.is_contiguous():
                tensors.append(one.view(-1))
            elif kind == "write":
                one.mul_(2.0 if number % 2 else torch.sigmoid(y.flatten()[number]))
            elif kind == "copy":
                one.copy_(torch.sigmoid(one))
            elif kind == "use":
                tensors.append(one + 1.0)
        kept = tensors if constant else tensors[::2]
        return sum((one.sum() for one in kept), torch.zeros(()))

    return run
