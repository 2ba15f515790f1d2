"""Demonstrate all steps on one model: export, verify, transcribe, measure."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.apps.bench.acceptance import equal_clips
from whisperport.apps.bench.timed import measure
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.errors import CheckpointError, MissingPackageError
from whisperport.program.bundle import Bundle
from whisperport.program.checks import Check
from whisperport.runtime import DecodeOptions, Decoder, Engine
from whisperport.speech.audio import load_audio, log_mel
from whisperport.speech.data import embedded_model
from whisperport.system.progress import begin_stage, prefixed
from whisperport.targets import RunOptions
from whisperport.targets.preflight import requires_torch
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.verification import Report, TextErrors, text_errors, whisper_text_errors
from whisperport.verification.clips import ShippedAudio, shipped_audio

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from whisperport.model.checkpoint import Checkpoint

DEMO_TARGETS = ("onnxruntime",)
OFFICIAL = "tiny.en"
STEPS = 32  # number of measured decoding steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcribed:
    """The transcript of one audio clip.

    Attributes:
        clip: the clip, with the spoken text.
        text: the transcript.
        errors: differences between the transcript and the spoken text.
        whisper_errors: the same differences, after Whisper's English normalizer.
    """

    clip: ShippedAudio
    text: str
    errors: TextErrors
    whisper_errors: TextErrors


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """The results of one target.

    Attributes:
        target: name of the target.
        folder: folder of the bundle.
        programs: number of programs.
        delegated: number of nodes, of all programs, that the target runs.
        undelegated: number of nodes, of all programs, that the target does not run.
        sqnr_db: the lowest SQNR of all comparisons of arrays, in dB.
        tokens_equal: number of clips whose tokens equal the reference's, and number of all clips.
        encoder_ms: median time of the encoder for one window, in milliseconds.
        token_ms: median time of one step of the decoder, in milliseconds.
        transcribed: the transcripts of all clips.
        real_time_factor: processing time / length of the audio, over all clips.
        embedded: the model is the embedded one, which was trained on speech such as that of the clips.
            The synthetic clips show nothing about the error rate of another model.
    """

    target: str
    folder: Path
    programs: int
    delegated: int
    undelegated: int
    sqnr_db: float
    tokens_equal: tuple[int, int]
    encoder_ms: float
    token_ms: float
    transcribed: tuple[Transcribed, ...]
    real_time_factor: float
    embedded: bool = True

    @property
    def errors(self) -> TextErrors:
        """Sum of the differences of all clips."""
        return sum((clip.errors for clip in self.transcribed), TextErrors())

    @property
    def whisper_errors(self) -> TextErrors:
        """Sum of the differences of all clips, after Whisper's English normalizer."""
        return sum((clip.whisper_errors for clip in self.transcribed), TextErrors())


def choose_checkpoint() -> "tuple[Checkpoint | str, str]":
    """Return OpenAI's tiny.en if a cache or the network has it, or else the name of the embedded model.

    Returns:
        The checkpoint, and one line that says which it is and why.

    Raises:
        MissingPackageError: torch is not installed.
    """
    with requires_torch("run the demo"):
        from whisperport.model.checkpoint import load_checkpoint

    begin_stage(f"looking for {OFFICIAL}")
    try:
        return load_checkpoint(OFFICIAL), f"model: OpenAI's {OFFICIAL}, which was found"
    except (CheckpointError, MissingPackageError) as error:
        why = f"{error.what}: {error.why}" if error.why else error.what
        return embedded_model.NAME, f"model: the embedded one, for synthetic speech, because {why}"


def run_demo(
    checkpoint: "Checkpoint | str",
    folder: Path,
    targets: Sequence[str] = DEMO_TARGETS,
    *,
    threads: int | None = None,
) -> list[DemoRow]:
    """Export a checkpoint for each target, verify the bundles, and transcribe the package's clips.

    The clips are synthetic speech. A model other than "default" transcribes only the first.

    Args:
        checkpoint: a loaded checkpoint, or anything that `load_checkpoint` accepts.
        folder: folder of the bundles; each bundle has the name of its target.
        targets: names of the targets.
        threads: CPU threads per runtime, 1 to 1024. Default: None, one per core.

    Raises:
        VerificationError, MissingPackageError: see `export`.
    """
    run = RunOptions(threads=threads)
    rows = []
    for target in targets:
        out = folder / target
        with prefixed(target):
            bundle = export(checkpoint, target, out, ExportOptions(run=run))
            rows.append(_row(bundle, target, out, run, checkpoint == embedded_model.NAME))
    return rows


def _row(bundle: Bundle, target: str, out: Path, run: RunOptions, embedded: bool) -> DemoRow:
    report = Report.from_json(bundle.manifest.verification)
    transcriber = Transcriber(bundle, run)
    transcribed, processing, duration = [], 0.0, 0.0
    options = TranscribeOptions(decode=DecodeOptions(language="en"))
    for clip in shipped_audio() if embedded else shipped_audio()[:1]:
        begin_stage(f"transcribing {clip.path.name}")
        started = time.perf_counter()
        transcript = transcriber.transcribe(clip.path, options)
        processing += time.perf_counter() - started
        duration += transcript.duration_s
        errors = text_errors(transcript.text, clip.text)
        transcribed.append(
            Transcribed(
                clip=clip,
                text=transcript.text,
                errors=errors,
                whisper_errors=whisper_text_errors(transcript.text, clip.text),
            )
        )
    begin_stage("measuring the encoder and the decoder")
    encoder_ms, token_ms = _median_times(transcriber.engine, transcribed[0].clip)
    facts = [entry.facts for entry in bundle.manifest.programs]
    return DemoRow(
        target=target,
        folder=out,
        programs=len(bundle.manifest.programs),
        delegated=sum(program_facts.delegated or 0 for program_facts in facts),
        undelegated=sum(len(program_facts.undelegated or ()) for program_facts in facts),
        sqnr_db=lowest_sqnr_db(report.checks),
        tokens_equal=equal_clips(report.checks),
        encoder_ms=encoder_ms,
        token_ms=token_ms,
        transcribed=tuple(transcribed),
        real_time_factor=processing / duration,
        embedded=embedded,
    )


def _median_times(engine: Engine, clip: ShippedAudio) -> tuple[float, float]:
    """Return the median milliseconds of one run of the encoder, and of one step of the decoder."""
    dims = engine.dims
    mel = log_mel(load_audio(clip.path), dims.n_mels, n_frames=dims.n_frames)
    encoder = measure(lambda: engine.encode(mel))
    decoder = Decoder(engine)
    decoder.start_window(engine.encode(mel))
    decoder.prefill([engine.generation.start_of_transcript])
    step = measure(lambda: decoder.step(engine.generation.end_of_text), n=STEPS)
    return encoder.median_ms, step.median_ms


def lowest_sqnr_db(checks: Sequence[Check]) -> float:
    """Return the lowest SQNR in dB of all comparisons of arrays; a sum of exponentials has none."""
    of_arrays = (check.value for check in checks if check.level == "arrays")
    return min(value["sqnr_db"] for value in of_arrays if "sqnr_db" in value)
