"""Run one program on one execution provider in a child process, and compare its outputs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.limited import Limits, StoppedError, run_limited
from whisperport.probing.report import Attempt, NodeCount
from whisperport.progress import Progress
from whisperport.runner import Array
from whisperport.verification.compare import Comparison, Gate, compare_output

JOB = "whisperport.probing.session:run_session"
MESSAGES = 3  # last lines of the native libraries' messages that are kept
TAIL_BYTES = 8192  # of these messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all attempts of a probe share.

    Attributes:
        folder: of the bundle.
        work: folder for temporary files; `PROGRAM.inputs.npz` is in it for every program.
        repeat: number of measured runs.
        threads: CPU threads; None: ONNX Runtime chooses.
        limits: of every child process.
    """

    folder: Path
    work: Path
    repeat: int
    threads: int | None
    limits: Limits

    def write_inputs(self, program: str, inputs: Mapping[str, Array]) -> None:
        """Write the inputs of a program for its child processes."""
        np.savez(self._inputs(program), allow_pickle=False, **dict(inputs))

    def _inputs(self, program: str) -> Path:
        return self.work / f"{program}.inputs.npz"

    def attempt(
        self, program: str, provider: str, options: Mapping[str, str], progress: Progress
    ) -> tuple[Attempt, dict[str, Array]]:
        """Run a program on a provider.

        Returns:
            The attempt, without comparisons; and its outputs, empty if it did not run.

        Raises:
            LoweringError: the provider is not installed.
            BundleError: the program's file is damaged.
        """
        outputs, log = self.work / "outputs.npz", self.work / "messages"
        for file in (outputs, log):
            file.unlink(missing_ok=True)
        arguments: dict[str, Any] = {
            "folder": str(self.folder),
            "program": program,
            "provider": provider,
            "options": dict(options),
            "inputs": str(self._inputs(program)),
            "outputs": str(outputs),
            "log": str(log),
            "repeat": self.repeat,
            "threads": self.threads,
        }
        base = Attempt(program=program, provider=provider, options=dict(options), status="ran")
        try:
            found = run_limited(
                JOB, arguments, self.limits, lambda stage: progress(f"{program}: {stage}")
            )
        except StoppedError as error:
            messages = _last_messages(log)
            return replace(base, status="crashed", reason=str(error), messages=messages), {}
        if "failed" in found:
            reason = f"{found['stage']}: {found['failed']}"
            messages = _last_messages(log)
            return replace(base, status="failed", reason=reason, messages=messages), {}
        with np.load(outputs, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        nodes = tuple(NodeCount(**node) for node in found.pop("nodes"))
        del found["providers"]
        return replace(base, nodes=nodes, **found), arrays


def compared(
    attempt: Attempt, outputs: Mapping[str, Array], expected: Mapping[str, Array], gate: Gate
) -> Attempt:
    """Return the attempt with a comparison of each output; nothing is compared if it did not run."""
    if attempt.status != "ran":
        return attempt
    found: list[Comparison] = [
        compare_output(name, outputs.get(name), array, gate) for name, array in expected.items()
    ]
    return replace(attempt, comparisons=tuple(found))


def _last_messages(log: Path) -> tuple[str, ...]:
    try:
        text = log.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace")
    except OSError:
        return ()
    lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
    return tuple(lines[-MESSAGES:])
