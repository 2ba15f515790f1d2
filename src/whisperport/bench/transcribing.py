"""Where the time of transcribing goes: programs, spectrogram and Python, beside how much was right."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.bench.memory import peak_memory_mib
from whisperport.bench.timed import MEL, Clock, TimedMel
from whisperport.bundle import Bundle
from whisperport.checks import UNCACHED_DECODER
from whisperport.progress import Progress
from whisperport.ranges import MAX_REPEAT, check_range
from whisperport.runtime import Engine
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.verification import TextErrors, Unit, text_errors, unit_of
from whisperport.verification.clips import shipped_recordings

LOAD = "load"
PYTHON = "Python"
DEFAULT_RECORDING = "19-long.flac"  # three windows, and words enough for an error rate
UNCACHED_CALLS = 3  # timed of the decoder without KV cache, in every round
WARM_UP_S = 1.0  # of sound: every program but `align` runs once, and no more


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """How bundles are timed.

    Raises:
        UsageError: `repeat` is out of its range.
    """

    repeat: int = 3  # rounds; in each, every bundle is loaded and transcribes once
    words: bool = False  # word times as well, by the `align` program
    transcript: str | None = None  # what is said; None: known for shipped recordings only
    unit: Unit | None = None  # in which errors are counted; None: by the language first heard
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        check_range("repeat", self.repeat, 1, MAX_REPEAT)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the time of loading and transcribing."""

    name: str  # "load", "mel", a program's name, or "Python": the rest
    calls: int  # in one round; 0 where calls have no meaning
    total_ms: float  # in the round that took the median time
    median_ms: float | None  # of a call, over all rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """One bundle on one recording. The parts add up to `whole_ms`."""

    bundle: Path
    name: str  # the manifest's
    recording: str
    audio_s: float
    parts: tuple[Part, ...]
    whole_ms: float  # loading and transcribing, in the median round
    real_time_factor: float  # transcribing seconds, without loading, / audio seconds
    peak_memory_mib: float | None  # None: not measured on this system
    text: str
    errors: TextErrors | None  # None: nobody knows what is said
    rounds: int
    # The decoder without KV cache, where the bundle has it: each call decodes one token. It is not a part
    # of the whole, since no transcription uses it.
    uncached: Part | None = None

    def to_json(self) -> dict[str, Any]:
        rate = {self.errors.name.lower(): self.errors.rate} if self.errors else {"wer": None}
        return asdict(self) | {"bundle": str(self.bundle)} | rate


@dataclass(frozen=True, slots=True)
class _Round:
    """One bundle, loaded and run once."""

    calls: dict[str, list[float]]  # seconds
    whole_s: float
    audio_s: float
    text: str
    language: str  # code
    uncached: list[float] = field(default_factory=list)  # seconds of calls without KV cache


def run_bench(
    bundles: Sequence[Bundle],
    recording: Path,
    options: BenchOptions | None = None,
    *,
    progress: Progress = lambda _: None,
) -> list[BenchResult]:
    """Time bundles on one recording, their rounds interleaved: a busy moment falls on all alike.

    Raises:
        AudioError, BundleError, MissingPackageError, UsageError: see `Transcriber`.
    """
    options = options or BenchOptions()
    rounds: list[list[_Round]] = [[] for _ in bundles]
    for number in range(1, options.repeat + 1):
        for bundle, done in zip(bundles, rounds, strict=True):
            progress(f"round {number} of {options.repeat}: {bundle.folder}")
            done.append(_one_round(bundle, recording, options, Clock()))
    results = []
    unit = options.unit or unit_of(next((done[0].language for done in rounds), "en"))
    for bundle, done in zip(bundles, rounds, strict=True):
        progress(f"memory: {bundle.folder}")
        peak = peak_memory_mib(bundle.folder, recording, words=options.words, run=options.run)
        results.append(_result(bundle, recording, done, peak, options.transcript, unit))
    return results


def default_recording() -> Path:
    """The shipped recording that is timed where none is given."""
    return next(r.path for r in shipped_recordings() if r.path.name == DEFAULT_RECORDING)


def _one_round(bundle: Bundle, recording: Path, options: BenchOptions, clock: Clock) -> _Round:
    transcribe = TranscribeOptions(word_timestamps=options.words)
    with clock.timing(LOAD):
        transcriber = Transcriber(
            Bundle.open(bundle.folder), options.run, wrap_runner=clock.wrap_runner
        )
    load = clock.calls[LOAD]
    transcriber.transcribe(recording, TranscribeOptions(clips=(0.0, WARM_UP_S)))
    clock.reset()
    started = clock.now()
    mel = TimedMel(recording, transcriber.engine.dims, clock)
    try:
        transcript = transcriber.transcribe_mel(mel, transcribe)
    finally:
        mel.close()
    whole = clock.now() - started
    calls = {LOAD: load, **clock.calls}
    duration, text, language = transcript.duration_s, transcript.text, transcript.language
    uncached = time_uncached(transcriber.engine, clock)
    return _Round(calls, whole + load[0], duration, text, language, uncached)


def time_uncached(engine: Engine, clock: Clock) -> list[float]:
    """Seconds of single calls of the decoder without KV cache; none where the bundle has none.

    Its shapes are static and every call computes all rows, so neither audio nor tokens change its time.
    """
    decoder = engine.without_cache()
    if decoder is None:
        return []
    decoder.listen(np.zeros((engine.dims.n_audio_ctx, engine.dims.n_audio_state), np.float32))
    decoder.prefill([engine.generation.start_of_transcript])  # warms up
    clock.reset()
    for _ in range(UNCACHED_CALLS):
        decoder.step(engine.generation.start_of_transcript)
    return clock.calls[UNCACHED_DECODER]


def _result(
    bundle: Bundle,
    recording: Path,
    rounds: Sequence[_Round],
    peak_memory_mib: float | None,
    transcript: str | None,
    unit: Unit,
) -> BenchResult:
    typical = sorted(rounds, key=lambda r: r.whole_s)[(len(rounds) - 1) // 2]
    loading = sum(typical.calls[LOAD])
    if transcript is None:
        transcript = _known_transcript(recording)
    return BenchResult(
        bundle=bundle.folder,
        name=bundle.manifest.name,
        recording=recording.name,
        audio_s=typical.audio_s,
        parts=_parts(typical, rounds, [e.spec.name for e in bundle.manifest.programs]),
        whole_ms=1e3 * typical.whole_s,
        real_time_factor=(typical.whole_s - loading) / typical.audio_s,
        peak_memory_mib=peak_memory_mib,
        text=typical.text,
        errors=None if transcript is None else text_errors(typical.text, transcript, unit),
        rounds=len(rounds),
        uncached=_uncached([second for one in rounds for second in one.uncached]),
    )


def _uncached(seconds: Sequence[float]) -> Part | None:
    if not seconds:
        return None
    return Part(
        UNCACHED_DECODER, len(seconds), 1e3 * sum(seconds), 1e3 * statistics.median(seconds)
    )


def _parts(typical: _Round, rounds: Sequence[_Round], programs: Sequence[str]) -> tuple[Part, ...]:
    """In the order in which they first run; what no clock saw is Python."""
    parts = []
    for name in (LOAD, MEL, *programs):
        if calls := typical.calls.get(name):
            everywhere = [second for r in rounds for second in r.calls.get(name, ())]
            median = 1e3 * statistics.median(everywhere)
            parts.append(Part(name, len(calls), 1e3 * sum(calls), median))
    rest = 1e3 * typical.whole_s - sum(part.total_ms for part in parts)
    return (*parts, Part(PYTHON, 0, rest, None))


def _known_transcript(recording: Path) -> str | None:
    """What is said, where the recording is one of the package's."""
    same = (r.text for r in shipped_recordings() if r.path.resolve() == recording.resolve())
    return next(same, None)
