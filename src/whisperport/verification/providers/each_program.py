"""Run each ONNX program of a bundle on an execution provider, with every set of options to try.

`record_inputs` records real inputs: those of one clip that the CPU transcribes.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from whisperport.errors import BundleError, UsageError
from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.execution_providers import CPU, POLICIES, Provider
from whisperport.program.runner import Array, Runner
from whisperport.runtime import (
    DecodeOptions,
    Decoder,
    decode_together,
    decode_window,
    load_engine,
    start_tokens,
)
from whisperport.system.child import Limits, StoppedError, run_limited
from whisperport.system.progress import begin_stage, prefixed
from whisperport.targets import TARGETS, RunOptions, get_target
from whisperport.targets.cpu.onnxruntime import ProviderOptions
from whisperport.targets.execution_provider import ExecutionProvider
from whisperport.targets.onnx.runner import ON_CPU
from whisperport.targets.preflight import available_memory
from whisperport.verification.array_comparison import compare_output
from whisperport.verification.providers.provider_report import ProviderReport, Trial
from whisperport.verification.reference import Reference, reference_mel
from whisperport.verification.tolerances import GATES

TARGET = "onnxruntime"  # whose programs are ONNX files for any provider
JOB = "whisperport.verification.providers.provider_session:run_session"
REPEAT = 10  # measured runs of a program, after one that is not measured
TIMEOUT_S = 1800.0  # for one program and set of options, compilation included
LEAST_MEMORY = 2**30  # bytes; Python and ONNX Runtime need 0.15 GB
UNKNOWN_MEMORY = 8 * 2**30  # bytes; the limit where the system does not tell what is available
MESSAGES = 3  # last lines of the native libraries' messages that are kept
TAIL_BYTES = 8192  # of these messages


def verify_each_program(bundle: Bundle | str | os.PathLike[str], run: RunOptions) -> ProviderReport:
    """Run each ONNX program of a bundle on an execution provider, and compare it with the CPU provider.

    Each session is created in a process of its own, with limits on memory and time, so that a crash is a
    result. The inputs are those of one clip of the bundle's reference. For a provider that a target's
    vendor documents, the documented options are tried; see `whisperport.targets.execution_provider`.

    Args:
        bundle: the bundle or its folder; it has programs for the target `onnxruntime`.
        run: the option `onnxruntime.provider` names the execution provider. Its options
            `onnxruntime.provider-options` replace those of every trial, and
            `onnxruntime.provider-programs` names the programs to try; default: all.

    Returns:
        The trials, and which programs to run on the provider; True if one of them can run there.

    Raises:
        LoweringError: the provider is not installed.
        UsageError: no provider is named, or the bundle has no such program.
        BundleError: the bundle is damaged, or the CPU provider cannot run one of its programs.
        MissingPackageError: a target's runtime is not installed.
    """
    provider_options = cast(ProviderOptions, run.of(get_target(TARGET)))
    provider = provider_options.chosen()
    if provider.name in (CPU, *POLICIES):
        raise UsageError(
            "no execution provider is named to try each program on",
            why=f"every program is compared with {CPU}, on one provider",
            hint="add `--run-option onnxruntime.provider=NAME`; `whisperport doctor` lists the names",
        )
    version = str(provider.require().__version__)
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    entries = _entries(opened, provider_options)
    facts = _facts(provider.name)
    begin_stage("collecting inputs on the CPU")
    clip, recorded = record_inputs(opened, RunOptions(threads=run.threads, trust=run.trust))
    used = [entry.spec.name for entry in entries if entry.spec.name in recorded]
    with tempfile.TemporaryDirectory(prefix="whisperport-") as work:
        sessions = _Sessions(opened.folder.absolute(), Path(work), run.threads)
        expected = {}
        for name in used:
            sessions.write_inputs(name, recorded[name].inputs)
            expected[name] = sessions.on_cpu(name)
        trials = []
        for options in facts.option_sets(provider.options):
            for name in used:
                ran = sessions.run(name, replace(provider, options=options))
                calls = recorded[name].calls
                trials.append(_trial(name, calls, options, ran, expected[name], facts))
    return ProviderReport(
        subject=opened.manifest.name,
        provider=provider.name,
        device=provider.device,
        library=provider.library,
        version=version,
        clip=clip,
        precision=facts.precision,
        trials=tuple(trials),
        remarks=(*_documented(opened, entries, facts, provider.options), *_not_tried(opened)),
    )


@dataclass(frozen=True, slots=True)
class _Ran:
    """What a child process returned: its outputs, and facts as JSON; or why it did not run."""

    outputs: Mapping[str, Array]
    facts: Mapping[str, Any]
    failure: str = ""
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Sessions:
    """Runs programs in child processes, with files in a folder for their inputs and outputs."""

    bundle: Path
    work: Path
    threads: int | None

    def write_inputs(self, program: str, inputs: Mapping[str, Array]) -> None:
        np.savez(self.work / f"{program}.inputs.npz", allow_pickle=False, **dict(inputs))

    def on_cpu(self, program: str) -> _Ran:
        """Run a program on the CPU provider, whose outputs are the reference."""
        ran = self.run(program, ON_CPU)
        if ran.failure:
            raise BundleError(
                f"ONNX Runtime's CPU provider cannot run `{program}`",
                why=ran.failure,
                hint="free memory; otherwise export the bundle again",
            )
        return ran

    def run(self, program: str, provider: Provider) -> _Ran:
        """Run a program on a provider."""
        outputs, log = self.work / "outputs.npz", self.work / "messages"
        for file in (outputs, log):
            file.unlink(missing_ok=True)
        arguments: dict[str, Any] = {
            "folder": str(self.bundle),
            "program": program,
            "provider": asdict(provider),
            "inputs": str(self.work / f"{program}.inputs.npz"),
            "outputs": str(outputs),
            "log": str(log),
            "repeat": REPEAT,
            "threads": self.threads,
        }

        try:
            with prefixed(f"{program} on {provider.name}"):
                result = run_limited(JOB, arguments, _limits())
        except StoppedError as error:
            return _Ran({}, {}, str(error), _last_messages(log))
        if "failed" in result:
            return _Ran({}, {}, f"{result['stage']}: {result['failed']}", _last_messages(log))
        with np.load(outputs, allow_pickle=False) as stored:
            return _Ran({name: stored[name] for name in stored.files}, result)


def _limits() -> Limits:
    available = available_memory()
    memory = UNKNOWN_MEMORY if available is None else max(available, LEAST_MEMORY)
    return Limits(memory, TIMEOUT_S)


def _last_messages(log: Path) -> tuple[str, ...]:
    try:
        text = log.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace")
    except OSError:
        return ()
    lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
    return tuple(lines[-MESSAGES:])


def _trial(
    program: str,
    calls: int,
    options: Mapping[str, str],
    ran: _Ran,
    expected: _Ran,
    facts: ExecutionProvider,
) -> Trial:
    """Compare the outputs of a program with those of the CPU provider."""
    trial = {"program": program, "calls": calls, "options": options, "cpu_ms": expected.facts["ms"]}
    if ran.failure:
        return Trial(**trial, failure=ran.failure, messages=ran.messages)
    nodes = ran.facts["nodes"]
    elsewhere: Counter[str] = Counter()
    for node in nodes:
        if node["provider"] != facts.name:
            elsewhere[node["operator"]] += node["count"]
    gate = GATES[facts.precision]
    return Trial(
        **trial,
        on_provider=sum(node["count"] for node in nodes if node["provider"] == facts.name),
        elsewhere=dict(elsewhere),
        comparisons=tuple(
            compare_output(name, ran.outputs.get(name), array, gate)
            for name, array in expected.outputs.items()
        ),
        **{name: ran.facts[name] for name in ("create_s", "ms", "deviation")},
    )


def _entries(bundle: Bundle, provider_options: ProviderOptions) -> list[ProgramEntry]:
    """Return the programs to try.

    Raises:
        UsageError: the bundle has no program for ONNX Runtime, or not the wanted one.
    """
    entries = [entry for entry in bundle.manifest.programs if entry.target == TARGET]
    if not entries:
        raise UsageError(
            f"the bundle has no program on the target `{TARGET}`",
            why=f"its targets are {', '.join(sorted({e.target for e in bundle.manifest.programs}))}",
            hint=f"export it with `whisperport export CHECKPOINT --target {TARGET} --out BUNDLE`",
        )
    provider_options.check_programs([entry.spec.name for entry in entries])
    return [entry for entry in entries if provider_options.on_provider(entry.spec.name)]


def _facts(provider: str) -> ExecutionProvider:
    """Return what is known about a provider; nothing but its name for an unknown one."""
    known = (target.execution_provider for target in TARGETS)
    by_name = {facts.name: facts for facts in known if facts is not None}
    return by_name.get(provider, ExecutionProvider(name=provider))


def _documented(
    bundle: Bundle,
    entries: list[ProgramEntry],
    facts: ExecutionProvider,
    options: Mapping[str, str],
) -> list[str]:
    """Return what the vendor's documentation says about the programs and the given options."""
    graphs = {entry.spec.name: OnnxGraph.of(bundle.folder, entry) for entry in entries}
    opsets = ", ".join(str(opset) for opset in sorted({graph.opset() for graph in graphs.values()}))
    rule = "whisperport knows no limit of the provider's documentation"
    if facts.min_opset:
        rule = f"the provider's documentation asks for {facts.min_opset} or newer"
    return [
        f"opset: {opsets}; {rule}",
        *(
            f"{name}: {objection}"
            for name, graph in graphs.items()
            for objection in facts.objections(graph.opset(), graph.operators())
        ),
        *(
            f"`{name}` is not a documented option of {facts.name}; ONNX Runtime may ignore it silently"
            for name in options
            if facts.options and name not in facts.options
        ),
    ]


def _not_tried(bundle: Bundle) -> list[str]:
    untried = [
        f"{entry.spec.name} ({entry.target})"
        for entry in bundle.manifest.programs
        if entry.target != TARGET
    ]
    return [f"not tried, since they have no ONNX file: {', '.join(untried)}"] if untried else []


@dataclass(frozen=True, slots=True)
class Recorded:
    """The inputs of the last call of a program.

    Attributes:
        inputs: name -> array.
        calls: number of calls that transcribing one window needed, without a prompt and without word
            timestamps.
    """

    inputs: Mapping[str, Array]
    calls: int


class _Recorder(Runner):
    """A runner that wraps another one, counts its calls and keeps the inputs of the last one."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.spec)
        self._runner = runner
        self.calls = 0
        self.inputs: dict[str, Array] = {}

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        self.calls += 1
        names = [tensor.name for tensor in self.spec.inputs]
        # The engine reuses its arrays.
        self.inputs = {name: array.copy() for name, array in zip(names, inputs, strict=True)}
        return list(self._runner.run(self.inputs).values())


def record_inputs(bundle: Bundle, run: RunOptions) -> tuple[str, dict[str, Recorded]]:
    """Transcribe the first clip of the bundle's reference, and record the inputs of every program.

    Args:
        bundle: the bundle; a program that cannot run here is emulated where its target has an emulation.
        run: threads and trust.

    Returns:
        Name of the clip; and name of a program -> its inputs.
    """
    recorders: dict[str, _Recorder] = {}

    def wrap(runner: Runner) -> Runner:
        recorders[runner.spec.name] = _Recorder(runner)
        return recorders[runner.spec.name]

    targets = [get_target(entry.target) for entry in bundle.manifest.programs]
    engine = load_engine(bundle, run.with_emulation(targets), wrap)
    reference = Reference.from_arrays(bundle.reference())
    clip = max(reference.clips, key=lambda clip: len(clip.tokens))  # so that the caches are filled
    decoder, generation = Decoder(engine), engine.generation
    features = engine.encode(reference_mel(engine.dims, clip))
    decoded = decode_window(decoder, features, DecodeOptions())
    calls = {name: recorder.calls for name, recorder in recorders.items()}
    if engine.batch_step is not None:
        rows = engine.batch_size
        decode_together(engine, [features] * rows, [DecodeOptions(max_tokens=2)] * rows)
    text = tuple(token for token in decoded.tokens if token < generation.end_of_text)
    decode_window(decoder, features, DecodeOptions(prompt=text or (0,), max_tokens=1))
    start = start_tokens(generation, decoded.language, "transcribe")
    decoder.align([*start, *text, generation.end_of_text])
    if uncached := engine.uncached_decoder():
        uncached.start_window(features)
        uncached.prefill(start)
    return clip.name, {
        name: Recorded(recorder.inputs, calls[name])
        for name, recorder in recorders.items()
        if recorder.calls
    }
