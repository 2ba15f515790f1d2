"""Read from a .pte file which operators of an ExecuTorch program run in a delegate."""

from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any

from whisperport.errors import BundleError

HEADER_BYTES = 64  # contain the extended header of a .pte: executorch/schema/extended_header.h


@dataclass(frozen=True, slots=True)
class Delegation:
    """How much of one method of a program runs in a delegate."""

    method: str
    subgraphs: int  # calls into a delegate
    undelegated: tuple[str, ...]  # operators that run in no delegate, one entry per call

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON, without the method's name."""
        return {"subgraphs": self.subgraphs, "undelegated": list(self.undelegated)}


def read_delegation(pte: bytes | mmap) -> dict[str, Delegation]:
    """Read the delegation of every method of a .pte, by the method's name; weights are not read.

    Raises:
        BundleError: `pte` is not an ExecuTorch program, or is damaged.

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
