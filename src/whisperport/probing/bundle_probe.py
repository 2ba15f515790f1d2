"""Try every program of a bundle on an execution provider, with every set of options to try."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from whisperport.bundle import Bundle, ProgramEntry
from whisperport.bundle.onnx_graph import OnnxGraph
from whisperport.errors import BundleError, UsageError
from whisperport.limited import Limits
from whisperport.preflight import available_memory
from whisperport.probing.attempts import Setup, compared
from whisperport.probing.choice import choose
from whisperport.probing.inputs import record_inputs
from whisperport.probing.report import Attempt, Probed
from whisperport.progress import Progress
from whisperport.ranges import MAX_REPEAT, MAX_THREADS, check_range
from whisperport.runner import Array
from whisperport.targets import TARGETS, RunOptions
from whisperport.targets.execution_provider import ExecutionProvider
from whisperport.targets.onnx_runner import CPU, require_provider
from whisperport.verification.tolerances import GATES

TARGET = "onnxruntime"  # whose programs are ONNX files for any provider
MAX_TIMEOUT_S = 24 * 3600.0
MAX_DEVIATION = 1e-2  # largest deviation between two runs, as a part of the largest value
LEAST_MEMORY = 2**30  # bytes; Python and ONNX Runtime need 0.15 GB
UNKNOWN_MEMORY = 8 * 2**30  # bytes; the limit where the system does not tell what is available


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """Options of `probe`.

    Args:
        provider_options: options of the provider, name -> value; each replaces that of every trial.
            Default: none.
        programs: names of the programs to try. Default: (), all programs of the target `onnxruntime`.
        repeat: number of measured runs of each program, 1 to 10,000; one run before them is not measured.
            Default: 10.
        timeout_s: time limit in seconds for each program and set of options, above 0, at most 24 h.
            Default: 600.
        threads: CPU threads, 1 to 1024. Default: None, ONNX Runtime chooses.
        trust: record the inputs without a trial run of the bundle. Default: False.

    Raises:
        UsageError: a number is out of its range.
    """

    provider_options: Mapping[str, str] = field(default_factory=dict)
    programs: tuple[str, ...] = ()
    repeat: int = 10
    timeout_s: float = 600.0
    threads: int | None = None
    trust: bool = False

    def __post_init__(self) -> None:
        check_range("repeat", self.repeat, 1, MAX_REPEAT)
        check_range("threads", self.threads, 1, MAX_THREADS)
        check_range("timeout_s", self.timeout_s, 0.001, MAX_TIMEOUT_S)


def probe(
    bundle: Bundle | str | os.PathLike[str],
    provider: str,
    options: ProbeOptions | None = None,
    *,
    progress: Progress = lambda _: None,
) -> Probed:
    """Run each ONNX program of a bundle on an execution provider, and compare it with the CPU provider.

    The inputs are those of one clip of the bundle's reference. For a provider that a target's vendor
    documents, the documented options are tried; see `whisperport.targets.execution_provider`.

    Args:
        bundle: the bundle or its folder; it has programs for the target `onnxruntime`.
        provider: name of the execution provider in ONNX Runtime.
        options: see `ProbeOptions`. Default: None, all defaults.
        progress: called with a line for each stage.

    Returns:
        The attempts, and which programs to run on the provider; True if one of them can run there.

    Raises:
        LoweringError: the provider is not installed.
        UsageError: the bundle has no such program.
        BundleError: the bundle is damaged, or the CPU provider cannot run one of its programs.
        MissingPackageError: a target's runtime is not installed.
    """
    chosen = options or ProbeOptions()
    version = str(require_provider(provider).__version__)
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    entries = _entries(opened, chosen.programs)
    facts = _facts(provider)
    progress("collecting inputs on the CPU")
    run = RunOptions(threads=chosen.threads, trust=chosen.trust)
    clip, recorded = record_inputs(opened, run)
    used = [entry.spec.name for entry in entries if entry.spec.name in recorded]
    gate = GATES[facts.precision]
    with tempfile.TemporaryDirectory(prefix="whisperport-") as work:
        setup = Setup(
            folder=opened.folder.absolute(),
            work=Path(work),
            repeat=chosen.repeat,
            threads=chosen.threads,
            limits=_limits(chosen.timeout_s),
        )
        for name in used:
            setup.write_inputs(name, recorded[name].inputs)
        expected = {name: _on_cpu(setup, name, progress) for name in used}
        attempts = []
        for number, one in enumerate(facts.option_sets(chosen.provider_options)):
            say = _labelled(progress, f"options {number + 1}, " if number else "")
            for name in used:
                attempt, outputs = setup.attempt(name, provider, one, say)
                attempts.append(compared(attempt, outputs, expected[name][1], gate))
    on_cpu = {name: attempt for name, (attempt, _) in expected.items()}
    calls = {name: recorded[name].calls for name in used}
    graphs = {
        name: _described(opened, entry) for entry in entries if (name := entry.spec.name) in used
    }
    objections = {
        name: found for name, graph in graphs.items() if (found := facts.objections(*graph))
    }
    return Probed(
        bundle=opened.manifest.name,
        provider=provider,
        version=version,
        clip=clip,
        calls=calls,
        opsets={name: opset for name, (opset, _) in graphs.items()},
        min_opset=facts.min_opset,
        objections=objections,
        precision=facts.precision,
        max_deviation=MAX_DEVIATION,
        on_cpu=on_cpu,
        attempts=tuple(attempts),
        skipped=_skipped(opened),
        notes=_notes(facts, chosen.provider_options),
        choice=choose(attempts, on_cpu, calls, MAX_DEVIATION),
    )


def _on_cpu(setup: Setup, name: str, progress: Progress) -> tuple[Attempt, dict[str, Array]]:
    """Run a program on the CPU provider, whose outputs are the reference."""
    attempt, outputs = setup.attempt(name, CPU, {}, _labelled(progress, "CPU, "))
    if attempt.status != "ran":
        raise BundleError(
            f"ONNX Runtime's CPU provider cannot run `{name}`",
            why=attempt.reason,
            hint="free memory, or raise the time limit; otherwise export the bundle again",
        )
    return attempt, outputs


def _labelled(progress: Progress, label: str) -> Progress:
    return lambda stage: progress(f"{label}{stage}")


def _entries(bundle: Bundle, wanted: Sequence[str]) -> list[ProgramEntry]:
    """Return the programs to try.

    Raises:
        UsageError: the bundle has no program for ONNX Runtime, or not the wanted one.
    """
    found = [entry for entry in bundle.manifest.programs if entry.target == TARGET]
    names = [entry.spec.name for entry in found]
    unknown = [name for name in wanted if name not in names]
    if unknown or not found:
        raise UsageError(
            f"the bundle has no program `{unknown[0][:80]}` on the target `{TARGET}`"
            if unknown
            else f"the bundle has no program on the target `{TARGET}`",
            why=f"its programs there are {', '.join(names) or 'none'}",
            hint=f"export it with `whisperport export CHECKPOINT --target {TARGET} --out BUNDLE`",
        )
    return [entry for entry in found if not wanted or entry.spec.name in wanted]


def _facts(provider: str) -> ExecutionProvider:
    """Return what is known about a provider; nothing but its name for an unknown one."""
    known = (target.execution_provider for target in TARGETS)
    by_name = {one.name: one for one in known if one is not None}
    return by_name.get(provider, ExecutionProvider(name=provider))


def _limits(timeout_s: float) -> Limits:
    available = available_memory()
    memory = UNKNOWN_MEMORY if available is None else max(available, LEAST_MEMORY)
    return Limits(memory, timeout_s)


def _described(bundle: Bundle, entry: ProgramEntry) -> tuple[int, dict[str, int]]:
    """Return the opset of a program, and its operators with their numbers of nodes."""
    graph = OnnxGraph.of(bundle.folder, entry)
    return graph.opset(), graph.operators()


def _skipped(bundle: Bundle) -> tuple[str, ...]:
    return tuple(
        f"{entry.spec.name} ({entry.target})"
        for entry in bundle.manifest.programs
        if entry.target != TARGET
    )


def _notes(facts: ExecutionProvider, given: Mapping[str, str]) -> tuple[str, ...]:
    if not facts.options:
        return ()
    return tuple(
        f"`{name}` is not a documented option of {facts.name}; ONNX Runtime may ignore it silently"
        for name in given
        if name not in facts.options
    )
