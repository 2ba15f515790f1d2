"""What an execution provider did with each program of a bundle, and which programs to run on it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whisperport.program.json_records import members, to_json
from whisperport.verification.array_comparison import Comparison

# A program is faster if it takes this part less time. Medians of repeated runs on an idle machine differ by
# a few per cent; this is the project's choice.
MIN_GAIN = 0.05
MAX_DEVIATION = 1e-2  # largest deviation between two runs, as a part of the largest value


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One program in a session on the execution provider with one set of options.

    Attributes:
        program: name of the program.
        options: of the provider, name -> value.
        calls: number of calls per window of the clip.
        cpu_ms: milliseconds per run on the CPU provider, median.
        failure: why it did not run, with the stage: an exception was raised, or the process crashed, took
            too long or needed too much memory; empty: it ran.
        messages: the last messages of the native libraries, if it did not run.
        on_provider: number of executed nodes on the provider, after ONNX Runtime's fusions. A provider that
            compiles subgraphs has one node for each.
        elsewhere: operator -> number of nodes that ran on another provider, such as the CPU.
        create_s: seconds to create the session, compilation included; NaN: it was not created.
        ms: milliseconds per run, median; NaN: it did not run.
        comparisons: every output, compared with that of the CPU provider for the same inputs.
        deviation: largest difference between two runs on the same inputs, divided by the output's largest
            value.
    """

    program: str
    options: Mapping[str, str] = field(default_factory=dict)
    calls: int = 0
    cpu_ms: float = math.nan
    failure: str = ""
    messages: tuple[str, ...] = ()
    on_provider: int = 0
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    create_s: float = math.nan
    ms: float = math.nan
    comparisons: tuple[Comparison, ...] = ()
    deviation: float = math.nan

    def __bool__(self) -> bool:
        return not self.fault()

    @property
    def sqnr_db(self) -> float:
        """The lowest SQNR of an output against the CPU provider; NaN if an output was not compared."""
        ratios = [comparison.sqnr_db for comparison in self.comparisons]
        return math.nan if not ratios or any(map(math.isnan, ratios)) else min(ratios)

    @property
    def saved_ms(self) -> float:
        """Milliseconds saved per window. A program that one window does not need counts once."""
        return max(1, self.calls) * (self.cpu_ms - self.ms)

    def fault(self) -> str:
        """Return why the program cannot run on the provider with these options; empty if it can."""
        if self.failure:
            return self.failure
        if not self.on_provider:
            return "the provider declined all nodes, so that the CPU ran them"
        if not self.comparisons:
            return "it has no outputs"
        for comparison in self.comparisons:
            if not comparison:
                return f"output `{comparison.output}`: {comparison.reason}"
        if not self.deviation <= MAX_DEVIATION:
            return (
                f"its outputs differ between runs on the same inputs, by {self.deviation:.1e} of the "
                "largest value"
            )
        return ""

    def why_on_cpu(self) -> str:
        """Return why the program should run on the CPU; empty if the provider is correct and faster."""
        if fault := self.fault():
            return fault
        if not self.ms <= (1 - MIN_GAIN) * self.cpu_ms:
            return f"it is not faster: {self.ms:.3g} ms, and {self.cpu_ms:.3g} ms on the CPU"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderReport:
    """All trials on an execution provider. It is True if a program can run on the provider.

    Attributes:
        subject: name of the bundle.
        provider: name of the execution provider.
        version: of ONNX Runtime.
        clip: the clip whose inputs were used.
        precision: precision of the provider, which chooses the limits of the comparisons.
        trials: in the order in which they ran: each set of options, with every program.
        remarks: what the documentation of the provider says, and what was not tried.
        device: of the provider, as the user named it; "": its first.
        library: path of the provider's library, as the user named it; "": that of an installed package.
    """

    subject: str
    provider: str
    version: str
    clip: str
    precision: str
    trials: tuple[Trial, ...]
    remarks: tuple[str, ...] = ()
    device: str = ""
    library: str = ""

    def __bool__(self) -> bool:
        return any(self.trials)

    def by_options(self) -> list[list[Trial]]:
        """Return the trials with the same options, for every set of options."""
        groups: list[list[Trial]] = []
        for trial in self.trials:
            if not groups or groups[-1][0].options != trial.options:
                groups.append([])
            groups[-1].append(trial)
        return groups

    def recommended(self) -> list[Trial]:
        """Return the trials with the options that save the most time per window.

        All programs on the provider have the same options. Those with a `why_on_cpu` should not run there.
        """
        return max(
            self.by_options(),
            key=lambda trials: sum(trial.saved_ms for trial in trials if not trial.why_on_cpu()),
        )

    def run_options(self) -> dict[str, str]:
        """Return the options with which to run the bundle as recommended; empty: on the CPU."""
        trials = self.recommended()
        chosen = [trial.program for trial in trials if not trial.why_on_cpu()]
        if not chosen:
            return {}
        named = {"provider": self.provider, "device": self.device, "library": self.library}
        options = {f"onnxruntime.{name}": value for name, value in named.items() if value}
        if trials[0].options:
            text = ";".join(f"{name}={value}" for name, value in trials[0].options.items())
            options["onnxruntime.provider-options"] = text
        if len(chosen) < len(trials):
            options["onnxruntime.provider-programs"] = ",".join(chosen)
        return options

    def to_json(self) -> dict[str, Any]:
        """Return JSON data; NaN and infinity are strings."""
        data: dict[str, Any] = members(self)
        for trial, trial_data in zip(self.trials, data["trials"], strict=True):
            trial_data |= to_json({"sqnr_db": trial.sqnr_db, "fault": trial.fault()})
        return {**data, "usable": bool(self), "run_options": self.run_options()}
