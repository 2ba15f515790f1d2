"""The result of a diagnosis: which causes explain the device's output, with numbers before and after."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whisperport.program.json_records import to_json
from whisperport.program.runner import Array
from whisperport.verification.array_comparison import Comparison
from whisperport.verification.diagnosis.candidates import Candidate
from whisperport.verification.diagnosis.causes import CauseCode, Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDiagnosis:
    """The diagnosis of one output of the program.

    Attributes:
        output: name of the output that was expected.
        source: the file, or "array".
        passed: whether the file holds the expected output as it is, without a correction.
        findings: the causes, in the order in which their corrections are applied; empty if none is known.
        before: the comparison without a correction; failed if the file has another size or shape.
        after: the comparison with all corrections applied; the same as `before` if there are none.
        limit: what the output must reach, for which precision, and the source of this limit.
        fix: a short numpy program that reads the file and applies all corrections; empty if no correction
            changes a value: the file stores the values as it should, and the values themselves are wrong.
        excluded: what was tried and does not explain the file, one sentence each.
        corrected: the values with all corrections, float32 in the output's shape, NaN where the file holds
            none; as they are if nothing explains the file, and None if it has another size then. If the
            input or the output was another one, these are the values of that one.
        storage: how the file stores them; None if nothing explains it.
    """

    output: str
    source: str
    passed: bool
    findings: tuple[Finding, ...]
    before: Comparison
    after: Comparison
    limit: str = ""
    fix: str = ""
    excluded: tuple[str, ...] = ()
    corrected: Array | None = field(default=None, repr=False, compare=False)
    storage: Candidate | None = field(default=None, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, without the corrected values."""
        return {
            "output": self.output,
            "source": self.source,
            "passed": self.passed,
            "limit": self.limit,
            "causes": to_json(self.findings),
            "before": _numbers(self.before),
            "after": _numbers(self.after),
            "fix": self.fix,
            "excluded": list(self.excluded),
        }

    @property
    def explained(self) -> bool:
        """Whether the output passed, or at least one cause was found."""
        return self.passed or bool(self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The diagnosis of a device's outputs. True if every output passed.

    Attributes:
        program: name of the program.
        clip: name of the reference clip whose input the device was given.
        outputs: one diagnosis for every output that was given.
        expected_from: where the expected outputs come from.
        verdict: device, simulated quantization and float32 compared, in one sentence; empty if no
            simulated output is known.
        numbers: numbers of the verdict by name.
        missing: outputs of the program for which there is no file.
    """

    program: str
    clip: str
    outputs: tuple[OutputDiagnosis, ...]
    expected_from: str = ""
    verdict: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.passed

    @property
    def passed(self) -> bool:
        """Whether at least one output was given and every one is as expected, without any correction."""
        return bool(self.outputs) and all(output.passed for output in self.outputs)

    @property
    def causes(self) -> tuple[CauseCode, ...]:
        """All causes that were found, each once, in the order of `CauseCode`; empty if there are none."""
        causes = {finding.cause for output in self.outputs for finding in output.findings}
        return tuple(cause for cause in CauseCode if cause in causes)

    @property
    def unexplained(self) -> tuple[str, ...]:
        """Names of the outputs that are wrong for a reason that was not found."""
        return tuple(output.output for output in self.outputs if not output.explained)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; numbers that are not finite are strings."""
        return {
            "program": self.program,
            "clip": self.clip,
            "passed": self.passed,
            "causes": to_json(self.causes),
            "outputs": to_json(self.outputs),
            "missing": list(self.missing),
            "expected_from": self.expected_from,
            "verdict": self.verdict,
            "numbers": to_json(self.numbers),
        }


def _numbers(comparison: Comparison) -> dict[str, Any]:
    numbers: dict[str, Any] = to_json(comparison.numbers())
    return {"passed": bool(comparison), "reason": comparison.reason, **numbers}
