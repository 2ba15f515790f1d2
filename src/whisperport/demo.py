"""Show the whole way on the embedded model: export for two targets, verify, transcribe, measure."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from whisperport.audio import load_audio, log_mel
from whisperport.bench.measure import measure
from whisperport.bundle import Bundle
from whisperport.exporting import ExportOptions, export
from whisperport.progress import Progress
from whisperport.runtime import DecodeOptions, Engine
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.verification import Report, TextErrors, text_errors, whisper_text_errors
from whisperport.verification.clips import Recording, shipped_recordings

DEMO_TARGETS = ("onnxruntime", "xnnpack")
STEPS = 32  # tokens timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcribed:
    """One recording: what was said, what was understood."""

    recording: Recording
    text: str
    errors: TextErrors
    whisper_errors: TextErrors  # the same after Whisper's English normalizer


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """One target, exported, verified, run and timed."""

    target: str
    folder: Path
    programs: int
    delegated: int  # nodes of all programs that the target runs
    undelegated: int  # nodes that it does not
    sqnr_db: float  # the worst of all array checks
    tokens_equal: tuple[int, int]  # clips whose tokens equal the reference's, of how many
    encoder_ms: float  # median, one window
    token_ms: float  # median, one step
    transcribed: tuple[Transcribed, ...]
    real_time_factor: float  # processing seconds / audio seconds, over all recordings

    @property
    def errors(self) -> TextErrors:
        return sum((h.errors for h in self.transcribed), TextErrors())

    @property
    def whisper_errors(self) -> TextErrors:
        """The same after Whisper's English normalizer."""
        return sum((h.whisper_errors for h in self.transcribed), TextErrors())


def run_demo(
    checkpoint: str,
    folder: Path,
    targets: Sequence[str] = DEMO_TARGETS,
    *,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> list[DemoRow]:
    """Export `checkpoint` for each target into `folder`, verify it, and transcribe what is shipped.

    Raises:
        VerificationError, MissingPackageError: see `export`.
    """
    run = RunOptions(threads=threads)
    rows = []
    for target in targets:
        out = folder / target
        bundle = export(
            checkpoint,
            target,
            out,
            ExportOptions(run=run),
            progress=partial(_tell, progress, target),
        )
        rows.append(_row(bundle, target, out, run, progress))
    return rows


def _tell(progress: Progress, target: str, stage: str) -> None:
    progress(f"{target}: {stage}")


def _row(bundle: Bundle, target: str, out: Path, run: RunOptions, progress: Progress) -> DemoRow:
    report = Report.from_json(bundle.manifest.verification)
    transcriber = Transcriber(bundle, run)
    transcribed, processing, duration = [], 0.0, 0.0
    options = TranscribeOptions(decode=DecodeOptions(language="en"))
    for recording in shipped_recordings():
        progress(f"{target}: transcribing {recording.path.name}")
        started = time.perf_counter()
        transcript = transcriber.transcribe(recording.path, options)
        processing += time.perf_counter() - started
        duration += transcript.duration_s
        errors = text_errors(transcript.text, recording.text)
        transcribed.append(
            Transcribed(
                recording=recording,
                text=transcript.text,
                errors=errors,
                whisper_errors=whisper_text_errors(transcript.text, recording.text),
            )
        )
    progress(f"{target}: timing")
    encoder_ms, token_ms = _times(transcriber.engine, transcribed[0].recording)
    free = [c for c in report.checks if c.level == "tokens" and c.what.endswith("free")]
    delegation = [entry.delegation for entry in bundle.manifest.programs]
    return DemoRow(
        target=target,
        folder=out,
        programs=len(bundle.manifest.programs),
        delegated=sum(d["delegated"] for d in delegation),
        undelegated=sum(len(d["undelegated"]) for d in delegation),
        sqnr_db=min(c.value["sqnr_db"] for c in report.checks if c.level == "arrays"),
        tokens_equal=(sum(c.passed for c in free), len(free)),
        encoder_ms=encoder_ms,
        token_ms=token_ms,
        transcribed=tuple(transcribed),
        real_time_factor=processing / duration,
    )


def _times(engine: Engine, recording: Recording) -> tuple[float, float]:
    """Median milliseconds of one encoder run, and of one step."""
    dims = engine.dims
    mel = log_mel(load_audio(recording.path), dims.n_mels, n_frames=dims.n_frames)
    encoder = measure(lambda: engine.encode(mel))
    decoder = engine.decoder()
    decoder.start_window(engine.encode(mel))
    decoder.prefill([engine.generation.start_of_transcript])
    step = measure(lambda: decoder.step(engine.generation.end_of_text), n=STEPS)
    return encoder.median_ms, step.median_ms
