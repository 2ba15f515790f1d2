"""Which nodes of a lowered ExecuTorch program run in a delegate, read off the .pte file itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any

from whisperport.errors import BundleError

HEADER_BYTES = 64  # of a .pte, enough for its extended header: executorch/schema/extended_header.h


@dataclass(frozen=True, slots=True)
class Delegation:
    """One method of a program: how much of it an accelerator runs."""

    method: str
    subgraphs: int  # calls into a delegate
    undelegated: tuple[str, ...]  # operators that run outside any delegate, one entry per call

    def to_json(self) -> dict[str, Any]:
        return {"subgraphs": self.subgraphs, "undelegated": list(self.undelegated)}


def read_delegation(pte: bytes | mmap) -> dict[str, Delegation]:
    """Every method of a .pte, by name. Weights, which lie behind the program in the file, are not read.

    Raises:
        BundleError: `pte` is not an ExecuTorch program.

    Source: the instructions of `ExecutionPlan.chains`, executorch/schema/program.fbs.
    """
    from executorch.exir._serialize._program import _flatbuffer_to_program, _get_extended_header

    try:
        header = _get_extended_header(pte[:HEADER_BYTES])
        program = _flatbuffer_to_program(pte[: header.program_size] if header else pte[:])
        return {plan.name: _of_plan(plan) for plan in program.execution_plan if plan.chains}
    except Exception as error:  # struct.error, IndexError, TypeError where a table is missing, ...
        raise BundleError(
            "this is not an ExecuTorch program", why=f"{type(error).__name__}: {error}"
        ) from error


def _of_plan(plan: Any) -> Delegation:
    subgraphs, undelegated = 0, []
    for instruction in _instructions(plan.chains):
        kind = type(instruction.instr_args).__name__
        if kind == "DelegateCall":
            subgraphs += 1
        elif kind == "KernelCall":
            operator = plan.operators[instruction.instr_args.op_index]
            undelegated.append(f"{operator.name}.{operator.overload}".rstrip("."))
    return Delegation(plan.name, subgraphs, tuple(undelegated))


def _instructions(chains: Sequence[Any]) -> list[Any]:
    return [instruction for chain in chains for instruction in chain.instructions]
