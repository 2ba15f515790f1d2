"""A row of the output: what is known about one file after its transcription, or why it failed."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from whisperport.apps.archive.identity import Identity
from whisperport.apps.archive.job import Job, stored
from whisperport.errors import (
    AudioError,
    IncompleteError,
    NumericalError,
    UsageError,
    WhisperportError,
)
from whisperport.runtime import Thresholds
from whisperport.speech.text import Segment
from whisperport.transcription import Transcript

Row = dict[str, Any]
"""A row by column name; `store.py` has the types. A worker returns values that JSON can hold."""


def row_of(
    job: Job,
    *,
    transcript: Transcript | None = None,
    error: BaseException | None = None,
    warnings: Sequence[str] = (),
    thresholds: Thresholds | None = None,
    seconds: float = 0.0,
    audio_sha256: str | None = None,
) -> Row:
    """Return the row of a file.

    Args:
        job: the file.
        transcript: what was transcribed; None: nothing.
        error: why the file failed; an `IncompleteError` has the transcript so far.
        warnings: about the audio, such as damaged parts that were skipped.
        thresholds: of the transcription, for the marks; None: defaults.
        seconds: time between opening the file and its result.
        audio_sha256: hash of the file's bytes; None: the file could not be read.
    """
    if isinstance(error, IncompleteError):
        transcript = error.transcript
    segments = transcript.segments if transcript else ()
    logprob = _mean_logprob(segments)
    return {
        "id": job.id,
        "path": stored(job.path),
        "size": job.size,
        "modified_ns": job.modified_ns,
        "duration": transcript.duration_s if transcript else None,
        "text": transcript.text if transcript else None,
        "segments": [_segment(segment) for segment in segments],
        "language": transcript.language or None if transcript else None,
        "language_probability": transcript.language_probability if transcript else None,
        "avg_logprob": logprob,
        "confidence": None if logprob is None else math.exp(min(0.0, logprob)),
        "marks": marks(transcript, warnings, thresholds or Thresholds()) if transcript else [],
        "warnings": [stored(text) for text in warnings],
        "seconds": seconds,
        "error": _error(error, job.path) if error else None,
        "audio_sha256": audio_sha256,
    }


def _segment(segment: Segment) -> dict[str, Any]:
    """Return the members of a segment that a row has."""
    members = asdict(segment)
    del members["window_s"], members["match"]
    return members


def marks(transcript: Transcript, warnings: Sequence[str], thresholds: Thresholds) -> list[str]:
    """Return what is doubtful about a transcript: some of the names in `MARKS`."""
    ratio, logprob = thresholds.compression_ratio_threshold, thresholds.logprob_threshold
    is_refused = any(each.match and not each.match.matched for each in transcript.segments)
    is_marked = {
        "no speech": not transcript.text and not is_refused,
        "low log-probability": logprob is not None
        and any(segment.avg_logprob < logprob for segment in transcript.segments),
        "repeated text": ratio is not None
        and any(segment.compression_ratio > ratio for segment in transcript.segments),
        "no match": is_refused,
        "truncated": bool(transcript.truncated),
        "damaged audio": bool(warnings),
    }
    return [name for name, is_set in is_marked.items() if is_set]


MARKS = {
    "no speech": "The transcript is empty: silence, or no speech that the model understands",
    "low log-probability": "A segment's average log-probability is below the threshold",
    "repeated text": "A segment's compression ratio is above the threshold: text may repeat",
    "no match": "Speech is no sentence of the grammar, and has no text",
    "truncated": "A window reached the limit of tokens: text is missing",
    "damaged audio": "FFmpeg skipped or clipped part of the audio; the column `warnings` says what",
}


def _mean_logprob(segments: Sequence[Segment]) -> float | None:
    """Return the mean of the segments' log-probabilities, each weighted by its number of tokens."""
    count = sum(len(segment.tokens) for segment in segments)
    if not count:
        return None
    return sum(segment.avg_logprob * len(segment.tokens) for segment in segments) / count


CODES = {
    "missing": "There is no such file",
    "unreadable": "The file cannot be opened or read",
    "not-a-file": "The path is a folder, a pipe or a device",
    "empty": "The file has no samples",
    "not-audio": "The file has no audio that FFmpeg can read",
    "damaged": "Nothing in the file can be decoded",
    "unsupported": "The audio has a sample rate or channels that cannot be used",
    "not-finite": "The samples have a NaN or an infinity",
    "too-short": "The audio is shorter than 10 ms",
    "audio": "The audio cannot be used for another reason",
    "options": "The language, the prompt or another option cannot be used with this model",
    "model": "A program of the model returned a NaN or an infinity",
    "incomplete": "The transcription stopped in the middle; the row has the text until then",
    "memory": "Memory ran out in the process that transcribed the file",
    "process-ended": "The process that transcribed the file ended twice, then with no other file",
    "unexpected": "An error that nobody expected: a defect of whisperport or of a library",
}
"""Code of an error -> what it means. Codes never change, so that rows of all versions can be grouped."""


def _code(error: BaseException) -> str:
    match error:
        case IncompleteError():
            return "incomplete"
        case WhisperportError(code=str(code)) if code:
            return code
        case NumericalError():
            return "model"
        case AudioError():
            return "audio"
        case UsageError():
            return "options"
        case MemoryError():
            return "memory"
        case OSError():
            return "unreadable"
    return "unexpected"


def _error(error: BaseException, path: str) -> dict[str, str]:
    """Return code, message, cause and hint; the path, which is another column, is left out of the texts."""
    if isinstance(error, WhisperportError):
        parts = {"what": error.what, "why": error.why, "hint": error.hint}
    else:
        parts = {"what": f"{type(error).__name__} was raised", "why": str(error), "hint": ""}
    texts = {name: stored(_without(path, text)) for name, text in parts.items()}
    return {"code": _code(error), **texts}


def _without(path: str, text: str) -> str:
    return text.replace(f"`{path}`", "the file").replace(path, "the file")


def with_identity(row: Row, identity: Identity, own_options_sha256: str) -> Row:
    """Return a row with the columns that say when and with what it was made."""
    return {
        **row,
        "transcribed_at": datetime.now(UTC),
        "model": identity.model,
        "bundle_sha256": identity.bundle_sha256,
        "options_sha256": own_options_sha256,
        "versions": identity.versions,
    }
