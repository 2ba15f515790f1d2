"""Small steps that the tests of single rewrites share."""

from typing import Any

import torch
from torch import nn

from whisperport.model.rewrites import Outcome, run_rewrites
from whisperport.model.trace.program import Program, trace

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
