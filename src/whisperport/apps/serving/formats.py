"""Transcripts in the formats of OpenAI's API."""

import math
from collections.abc import Iterable
from typing import Any

from starlette.responses import JSONResponse, Response

from whisperport.apps.serving.request import TranscriptionRequest
from whisperport.speech.text import LANGUAGES, Segment, Tokenizer, write_srt, write_vtt
from whisperport.speech.text.writers import segment_fields
from whisperport.transcription import Transcript

MEDIA_TYPES = {
    "text": "text/plain",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt",
}


def response_of(
    transcript: Transcript,
    request: TranscriptionRequest,
    tokenizer: Tokenizer,
    about: dict[str, str],
) -> Response:
    """Return the answer of a request.

    Args:
        transcript: the result.
        request: the format and what it contains.
        tokenizer: of the bundle.
        about: the bundle, for `x_whisperport`.
    """
    if request.form == "json":
        return JSONResponse(json_document(transcript, request, tokenizer))
    if request.form == "verbose_json":
        return JSONResponse(verbose_document(transcript, request, about))
    return Response(_text(transcript, request.form), media_type=MEDIA_TYPES[request.form])


def json_document(
    transcript: Transcript, request: TranscriptionRequest, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return the members of the format json."""
    document: dict[str, Any] = {"text": transcript.text}
    if request.logprobs:
        document["logprobs"] = logprobs_of(transcript.segments, tokenizer)
    seconds = math.ceil(transcript.duration_s)
    return {**document, "usage": {"type": "duration", "seconds": seconds}}


def verbose_document(
    transcript: Transcript, request: TranscriptionRequest, about: dict[str, str]
) -> dict[str, Any]:
    """Return the members of the format verbose_json.

    Beyond OpenAI's: `probability` of words, `truncated` of the segments of a window that reached the token
    limit, and `x_whisperport`.
    """
    translated = request.options.decode.task == "translate"
    code = "en" if translated else transcript.language
    document: dict[str, Any] = {
        "task": request.options.decode.task,
        "language": LANGUAGES.get(code, code),
        "duration": transcript.duration_s,
        "text": transcript.text,
    }
    if "segment" in request.granularities:
        segments = enumerate(transcript.segments)
        document["segments"] = [
            _segment(n, segment, transcript.truncated) for n, segment in segments
        ]
    if "word" in request.granularities:
        document["words"] = [
            {
                "word": word.word.strip(),
                "start": word.start,
                "end": word.end,
                "probability": word.probability,
            }
            for segment in transcript.segments
            for word in segment.words or ()
        ]
    usage = {"type": "duration", "seconds": math.ceil(transcript.duration_s)}
    return {**document, "usage": usage, "x_whisperport": about}


def logprobs_of(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return token, log-probability and bytes of every text token."""
    end = tokenizer.generation.end_of_text
    return [
        {
            "token": (data := tokenizer.bytes_at(token)).decode("utf-8", "replace"),
            "logprob": min(logprob, 0.0),  # rounding errors of sums
            "bytes": list(data),
        }
        for segment in segments
        for token, logprob in zip(segment.tokens, segment.logprobs, strict=True)
        if token < end
    ]


def n_tokens(segments: Iterable[Segment]) -> int:
    """Return the number of tokens, timestamps included."""
    return sum(len(segment.tokens) for segment in segments)


def _segment(number: int, segment: Segment, truncated: tuple[float, ...]) -> dict[str, Any]:
    return segment_fields(number, segment) | {"truncated": segment.seek / 100 in truncated}


def _text(transcript: Transcript, form: str) -> str:
    if form == "srt":
        return write_srt(transcript.segments)
    if form == "vtt":
        return write_vtt(transcript.segments)
    return f"{transcript.text}\n"
