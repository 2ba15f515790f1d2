"""Compare every output of a rewritten or lowered program with the original's, on every sample."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whisperport.program.runner import Array
from whisperport.verification.array_comparison import Comparison, Gate, compare_output
from whisperport.verification.samples import Sample
from whisperport.verification.tolerances import gate_for

if TYPE_CHECKING:  # boards have no torch
    from torch import Tensor

    from whisperport.model.trace.program import Program


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """The comparison of one output on one sample."""

    sample: str  # name of the sample
    comparison: Comparison

    def to_json(self) -> dict[str, Any]:
        """Return JSON data. NaN and infinity, such as the SQNR of equal outputs, become null."""
        comparison = self.comparison
        return {
            "sample": self.sample,
            "output": comparison.output,
            "passed": bool(comparison),
            "rule": comparison.rule,
            "reason": comparison.reason,
            **{name: _finite(number) for name, number in comparison.numbers().items()},
        }


@dataclass(frozen=True, slots=True)
class Equality:
    """All comparisons of two programs. True if there is at least one and all passed."""

    compared: tuple[OutputComparison, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.compared) and not self.failed

    @property
    def failed(self) -> tuple[OutputComparison, ...]:
        """The comparisons that failed."""
        return tuple(output for output in self.compared if not output.comparison)

    @property
    def cosine(self) -> float:
        """Lowest cosine of all outputs; NaN if it could not be computed for one of them."""
        return self._worst("cosine", min)

    @property
    def sqnr_db(self) -> float:
        """Lowest SQNR of all outputs; NaN if it could not be computed for one of them."""
        return self._worst("sqnr_db", min)

    @property
    def max_relative(self) -> float:
        """Highest max|Δ| / max|expected|; NaN if it could not be computed for one output."""
        return self._worst("max_relative", max)

    @property
    def reason(self) -> str:
        """Why the programs are not equal; empty if they are."""
        if not self.compared:
            return "nothing was compared: the program has no outputs"
        if not self.failed:
            return ""
        first = self.failed[0]
        tally = f" ({len(self.failed)} of {len(self.compared)} comparisons failed)"
        return f"`{first.comparison.output}` on {first.sample}: {first.comparison.reason}{tally}"

    def numbers(self) -> dict[str, float | None]:
        """Return the worst value of each number, for JSON."""
        return {
            "cosine": _finite(self.cosine),
            "sqnr_db": _finite(self.sqnr_db),
            "max_relative": _finite(self.max_relative),
        }

    def _worst(self, name: str, choose: Any) -> float:
        numbers = [getattr(output.comparison, name) for output in self.compared]
        if not numbers or any(math.isnan(number) for number in numbers):
            return math.nan
        return float(choose(numbers))


def compare_sample(
    sample: str, actual: Mapping[str, Array], expected: Mapping[str, Array], gate: Gate
) -> tuple[OutputComparison, ...]:
    """Compare each expected output with the actual output of the same name."""
    return tuple(
        OutputComparison(sample, compare_output(name, actual.get(name), reference, gate))
        for name, reference in expected.items()
    )


def failed_sample(sample: str, names: Sequence[str], reason: str) -> tuple[OutputComparison, ...]:
    """Return failed comparisons for outputs that do not exist because the program did not run.

    Args:
        sample: name of the sample.
        names: names of the outputs.
        reason: why the program did not run.
    """
    return tuple(
        OutputComparison(sample, Comparison(output=name, rule="the program runs", reason=reason))
        for name in names
    )


def eager_arrays(program: "Program", inputs: "Sequence[Tensor]") -> dict[str, Array]:
    """Run a program in torch, and return its outputs by name; bfloat16 becomes float32."""
    from whisperport.model.trace.trial import eager_outputs

    names = (tensor.name for tensor in program.spec.outputs)
    outputs = eager_outputs(program, inputs)
    return {name: as_array(output) for name, output in zip(names, outputs, strict=True)}


def expected_outputs(program: "Program", samples: Sequence[Sample]) -> dict[str, dict[str, Array]]:
    """Run the original program in torch on every sample: name of the sample -> output -> array."""
    return {sample.name: eager_arrays(program, sample.inputs) for sample in samples}


def gate_of(table: Mapping[str, Gate], program: "Program") -> Gate:
    """Return the gate of the least precise dtype that occurs in the program."""
    from whisperport.model.inspection.read_exported import read_exported

    graph = read_exported(program.name, program.exported)
    values = (value for node in graph.nodes for value in node.outputs)
    return gate_for(table, {value.dtype for value in (*values, *graph.inputs)})


def as_array(tensor: "Tensor") -> Array:
    """Convert a tensor to a numpy array. bfloat16, which numpy does not have, becomes float32."""
    import torch

    plain = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    array: Array = plain.detach().contiguous().numpy()
    return array


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
