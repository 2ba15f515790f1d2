"""Compare a rewritten or lowered program with the original, output by output, on every sample."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whisperport.runner import Array
from whisperport.verification.compare import Comparison, Gate, compare_output
from whisperport.verification.samples import Sample
from whisperport.verification.tolerances import gate_for

if TYPE_CHECKING:  # boards have no torch
    from torch import Tensor

    from whisperport.programs.program import Program


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """One output of a program on one sample, compared with the original's."""

    sample: str
    comparison: Comparison

    def to_json(self) -> dict[str, Any]:
        """Numbers that JSON does not have, such as the infinite SQNR of equal outputs, are null."""
        found = self.comparison
        return {
            "sample": self.sample,
            "output": found.output,
            "passed": bool(found),
            "rule": found.rule,
            "reason": found.reason,
            **{name: _finite(number) for name, number in found.numbers().items()},
        }


@dataclass(frozen=True, slots=True)
class Equality:
    """All comparisons of two programs. True if there are some, and all passed."""

    compared: tuple[OutputComparison, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.compared) and not self.failed

    @property
    def failed(self) -> tuple[OutputComparison, ...]:
        return tuple(one for one in self.compared if not one.comparison)

    @property
    def cosine(self) -> float:
        """The lowest; NaN if nothing could be measured of an output."""
        return self._worst("cosine", min)

    @property
    def sqnr_db(self) -> float:
        """The lowest; NaN if nothing could be measured of an output."""
        return self._worst("sqnr_db", min)

    @property
    def max_relative(self) -> float:
        """The highest max|Δ| / max|expected|; NaN if nothing could be measured of an output."""
        return self._worst("max_relative", max)

    @property
    def reason(self) -> str:
        """Why the programs are not equal, in words; empty if they are."""
        if not self.compared:
            return "nothing was compared: the program has no output"
        if not self.failed:
            return ""
        first = self.failed[0]
        more = f" ({len(self.failed)} of {len(self.compared)} comparisons failed)"
        return f"`{first.comparison.output}` on {first.sample}: {first.comparison.reason}{more}"

    def numbers(self) -> dict[str, float | None]:
        """The worst of each, for JSON."""
        return {
            "cosine": _finite(self.cosine),
            "sqnr_db": _finite(self.sqnr_db),
            "max_relative": _finite(self.max_relative),
        }

    def _worst(self, name: str, choose: Any) -> float:
        numbers = [getattr(one.comparison, name) for one in self.compared]
        if not numbers or any(math.isnan(number) for number in numbers):
            return math.nan
        return float(choose(numbers))


def compare_sample(
    sample: str, actual: Mapping[str, Array], expected: Mapping[str, Array], gate: Gate
) -> tuple[OutputComparison, ...]:
    """Every expected output, held against the actual one of the same name."""
    return tuple(
        OutputComparison(sample, compare_output(name, actual.get(name), reference, gate))
        for name, reference in expected.items()
    )


def failed_sample(sample: str, names: Sequence[str], reason: str) -> tuple[OutputComparison, ...]:
    """What to report of outputs that there are none of, such as those of a program that did not run."""
    return tuple(
        OutputComparison(sample, Comparison(output=name, rule="it runs", reason=reason))
        for name in names
    )


def eager_arrays(program: "Program", inputs: "Sequence[Tensor]") -> dict[str, Array]:
    """What torch makes of a program, by the names of its outputs; bfloat16 as float32."""
    from whisperport.programs.trial import eager_outputs

    names = (tensor.name for tensor in program.spec.outputs)
    outputs = eager_outputs(program, inputs)
    return {name: as_array(output) for name, output in zip(names, outputs, strict=True)}


def expected_outputs(program: "Program", samples: Sequence[Sample]) -> dict[str, dict[str, Array]]:
    """Sample -> output -> what torch makes of the original program."""
    return {sample.name: eager_arrays(program, sample.inputs) for sample in samples}


def gate_of(table: Mapping[str, Gate], program: "Program") -> Gate:
    """The gate for the coarsest dtype that the program computes in."""
    from whisperport.inspection.read_exported import read_exported

    graph = read_exported(program.name, program.exported)
    values = (value for node in graph.nodes for value in node.outputs)
    return gate_for(table, {value.dtype for value in (*values, *graph.inputs)})


def as_array(tensor: "Tensor") -> Array:
    """Numpy has no bfloat16."""
    import torch

    plain = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    array: Array = plain.detach().contiguous().numpy()
    return array


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
