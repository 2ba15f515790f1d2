"""Measure how time and CPU time of transcribing split into programs and other parts, and the error rate."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from whisperport.apps.bench.acceptance import (
    AcceptanceRow,
    How,
    acceptance,
    check_accuracy,
    how_programs_run,
)
from whisperport.apps.bench.memory import peak_memory_mib
from whisperport.apps.bench.timed import MEL, Clock, TimedMel
from whisperport.program.bundle import Bundle
from whisperport.program.checks import Check
from whisperport.program.program_kind import ENCODER, UNCACHED_DECODER, kind_of
from whisperport.runtime import Engine
from whisperport.system.option import MAX_REPEAT, Option, check_ranges
from whisperport.system.progress import Counted, begin_stage
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.verification import (
    TextErrors,
    Unit,
    text_errors,
    unit_of,
    whisper_text_errors,
)
from whisperport.verification.clips import shipped_audio

LOAD = "load"
PYTHON = "Python"
DEFAULT_AUDIO = "19-long.flac"  # it has three windows, and enough words for an error rate
UNCACHED_CALLS = 3  # measured calls of the decoder without KV cache, per round
WARM_UP_S = 1.0  # seconds of audio: every program but `align` runs at least once


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of `run_bench`.

    Raises:
        UsageError: `repeat` is out of its range.
    """

    repeat: Annotated[
        int,
        Option(
            "Number of rounds. In each, every bundle is loaded and transcribes AUDIO once; for "
            "each bundle, its round with the median time is shown",
            1,
            MAX_REPEAT,
        ),
    ] = 3
    word_timestamps: Annotated[
        bool, Option("Also compute word timestamps, with the program `align`, and measure them")
    ] = False
    transcript: str | None = None  # correct text; None: that of a shipped audio file, if it is one
    unit: Annotated[
        Unit | None,
        Option(
            "Unit in which errors are counted: words (word error rate, WER) or characters (CER)",
            default="words, or characters for languages written without spaces",
            flag="--errors-in",
        ),
    ] = None
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the time of loading and transcribing."""

    name: str  # "load", "mel", a program's name, or "Python" for all other time
    calls: int  # number of calls in one round; 0 where calls are not counted
    total_ms: float  # time of all calls in the round with the median total time
    median_ms: float | None  # median time of one call, over all rounds
    # CPU time of all calls in the same round: user and system time of all threads of the process.
    cpu_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """The result of one bundle on one audio file. The times of the parts add up to `total_ms`."""

    bundle: Path
    name: str  # name of the bundle in its manifest
    audio: str  # name of the audio file
    audio_s: float
    parts: tuple[Part, ...]
    total_ms: float  # loading and transcribing, in the round with the median total time
    real_time_factor: float  # seconds of transcribing, without loading, / seconds of audio
    # Seconds of CPU time / seconds of audio, in the same round: of transcribing, without loading; of the
    # encoder; and of all programs of the decoder.
    cpu_s_per_audio_s: float
    encoder_cpu_s_per_audio_s: float
    decoder_cpu_s_per_audio_s: float
    peak_memory_mib: float | None  # None: not measured on this system
    text: str
    errors: TextErrors | None  # None: the correct transcript is not known
    whisper_errors: TextErrors | None  # the same after Whisper's normalizer for the language
    rounds: int
    acceptance: tuple[AcceptanceRow, ...]
    how: Mapping[str, How]  # name of a program -> how it ran
    # The decoder without KV cache, if the bundle has it; each call decodes one token. It is not included
    # in `total_ms`, since no transcription uses it.
    uncached: Part | None = None

    @property
    def medians(self) -> dict[str, float]:
        """Name of a part -> median time of one call, in milliseconds."""
        return {part.name: part.median_ms for part in self.parts if part.median_ms is not None}

    def to_json(self) -> dict[str, Any]:
        name = self.errors.name.lower() if self.errors else "wer"
        rates = {
            name: self.errors and self.errors.rate,
            f"{name}_whisper_normalizer": self.whisper_errors and self.whisper_errors.rate,
        }
        return asdict(self) | {"bundle": str(self.bundle)} | rates


@dataclass(frozen=True, slots=True)
class _Round:
    """The measurements of loading one bundle and transcribing once."""

    calls: dict[str, list[float]]  # name of the part -> seconds of each call
    total_s: float
    audio_s: float
    text: str
    language: str  # language code
    # Seconds of each call of the decoder without KV cache.
    uncached: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=dict)  # as `calls`, of CPU time
    cpu_s: float = 0.0  # as `total_s`, of CPU time
    checks: tuple[Check, ...] = ()  # of the accuracy; in the last round only

    def cpu_of(self, *names: str) -> float:
        """Return the CPU time of all calls of some parts, in seconds."""
        return sum(sum(self.cpu.get(name, ())) for name in names)


def run_bench(
    bundles: Sequence[Bundle],
    audio: Path,
    options: BenchOptions | None = None,
) -> list[BenchResult]:
    """Measure bundles on one audio file.

    The bundles take turns in every round, so that other load on the machine affects all of them alike.

    Raises:
        AudioError, BundleError, MissingPackageError, UsageError: see `Transcriber`.
    """
    options = options or BenchOptions()
    rounds: list[list[_Round]] = [[] for _ in bundles]
    for number in range(1, options.repeat + 1):
        for position, (bundle, results_of_bundle) in enumerate(zip(bundles, rounds, strict=True)):
            stage = f"round {number} of {options.repeat}: {bundle.folder}"
            finished = (number - 1) * len(bundles) + position
            begin_stage(Counted(stage, finished, options.repeat * len(bundles)))
            last = number == options.repeat
            results_of_bundle.append(_one_round(bundle, audio, options, Clock(), last))
    results = []
    language = next((results_of_bundle[0].language for results_of_bundle in rounds), "en")
    unit = options.unit or unit_of(language)
    for bundle, results_of_bundle in zip(bundles, rounds, strict=True):
        begin_stage(f"measuring peak memory: {bundle.folder}")
        peak = peak_memory_mib(
            bundle.folder, audio, word_timestamps=options.word_timestamps, run=options.run
        )
        results.append(_result(bundle, audio, results_of_bundle, peak, options, language, unit))
    return results


def default_audio() -> Path:
    """The shipped audio file that is used if none is given."""
    return next(r.path for r in shipped_audio() if r.path.name == DEFAULT_AUDIO)


def _one_round(
    bundle: Bundle, audio: Path, options: BenchOptions, clock: Clock, check: bool
) -> _Round:
    transcribe = TranscribeOptions(word_timestamps=options.word_timestamps)
    with clock.timing(LOAD):
        transcriber = Transcriber(
            Bundle.open(bundle.folder), options.run, wrap_runner=clock.wrap_runner
        )
    load, load_cpu = clock.calls[LOAD], clock.cpu[LOAD]
    transcriber.transcribe(audio, TranscribeOptions(clip_timestamps=(0.0, WARM_UP_S)))
    clock.reset()
    started, used = clock.now(), clock.cpu_now()
    mel = TimedMel(audio, transcriber.engine.dims, clock)
    try:
        transcript = transcriber.transcribe_mel(mel, transcribe)
    finally:
        mel.close()
    cpu_s = clock.cpu_now() - used
    transcribing_s = clock.now() - started
    calls, cpu = {LOAD: load, **clock.calls}, {LOAD: load_cpu, **clock.cpu}
    clock.reset()  # what runs from here on is not part of the round
    duration, text, language = transcript.duration_s, transcript.text, transcript.language
    uncached = time_uncached(transcriber.engine, clock)
    checks = check_accuracy(bundle, transcriber.engine, options.run) if check else ()
    return _Round(
        calls,
        transcribing_s + load[0],
        duration,
        text,
        language,
        uncached,
        cpu,
        cpu_s + load_cpu[0],
        checks,
    )


def time_uncached(engine: Engine, clock: Clock) -> list[float]:
    """Measure single calls of the decoder without KV cache, in seconds; empty if the bundle has none.

    Its shapes are static and every call computes all positions, so its time does not depend on the audio
    or the tokens.
    """
    decoder = engine.uncached_decoder()
    if decoder is None:
        return []
    decoder.start_window(np.zeros((engine.dims.n_audio_ctx, engine.dims.n_audio_state), np.float32))
    decoder.prefill([engine.generation.start_of_transcript])  # warms up
    clock.reset()
    for _ in range(UNCACHED_CALLS):
        decoder.step(engine.generation.start_of_transcript)
    return clock.calls[UNCACHED_DECODER]


def _result(
    bundle: Bundle,
    audio: Path,
    rounds: Sequence[_Round],
    peak_memory_mib: float | None,
    options: BenchOptions,
    language: str,
    unit: Unit,
) -> BenchResult:
    typical = sorted(rounds, key=lambda r: r.total_s)[(len(rounds) - 1) // 2]
    loading = sum(typical.calls[LOAD])
    programs = [entry.spec.name for entry in bundle.manifest.programs]
    encoders = [name for name in programs if kind_of(name).name == ENCODER]
    parts = _parts(typical, rounds, programs)
    latencies = {part.name: part.median_ms for part in parts if part.median_ms is not None}
    transcript = options.transcript
    if transcript is None:
        transcript = _known_transcript(audio)
    errors = whisper_errors = None
    if transcript is not None:
        errors = text_errors(typical.text, transcript, unit)
        whisper_errors = whisper_text_errors(typical.text, transcript, language, unit)
    return BenchResult(
        bundle=bundle.folder,
        name=bundle.manifest.name,
        audio=audio.name,
        audio_s=typical.audio_s,
        parts=parts,
        total_ms=1e3 * typical.total_s,
        real_time_factor=(typical.total_s - loading) / typical.audio_s,
        cpu_s_per_audio_s=(typical.cpu_s - typical.cpu_of(LOAD)) / typical.audio_s,
        encoder_cpu_s_per_audio_s=typical.cpu_of(*encoders) / typical.audio_s,
        decoder_cpu_s_per_audio_s=typical.cpu_of(
            *(name for name in programs if name not in encoders)
        )
        / typical.audio_s,
        peak_memory_mib=peak_memory_mib,
        text=typical.text,
        errors=errors,
        whisper_errors=whisper_errors,
        rounds=len(rounds),
        acceptance=acceptance(bundle.manifest, latencies, rounds[-1].checks, options.run.options),
        how=how_programs_run(bundle.manifest, options.run.options),
        uncached=_uncached([second for round_ in rounds for second in round_.uncached]),
    )


def _uncached(seconds: Sequence[float]) -> Part | None:
    if not seconds:
        return None
    return Part(
        UNCACHED_DECODER, len(seconds), 1e3 * sum(seconds), 1e3 * statistics.median(seconds)
    )


def _parts(typical: _Round, rounds: Sequence[_Round], programs: Sequence[str]) -> tuple[Part, ...]:
    """The parts in the order of their first call; all time outside of measured calls is `Python`."""
    parts = []
    for name in (LOAD, MEL, *programs):
        if calls := typical.calls.get(name):
            everywhere = [second for r in rounds for second in r.calls.get(name, ())]
            median = 1e3 * statistics.median(everywhere)
            parts.append(
                Part(name, len(calls), 1e3 * sum(calls), median, 1e3 * typical.cpu_of(name))
            )
    rest = 1e3 * typical.total_s - sum(part.total_ms for part in parts)
    cpu_rest = 1e3 * typical.cpu_s - sum(part.cpu_ms or 0.0 for part in parts)
    return (*parts, Part(PYTHON, 0, rest, None, cpu_rest))


def _known_transcript(audio: Path) -> str | None:
    """The correct text of an audio file that comes with the package; None for other files."""
    same = (r.text for r in shipped_audio() if r.path.resolve() == audio.resolve())
    return next(same, None)
