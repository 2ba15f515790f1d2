"""Transcripts in the formats of OpenAI's API: complete, or as server-sent events."""

import json
import math
from collections.abc import Iterable
from typing import Any

from starlette.responses import JSONResponse, Response

from whisperport.apps.serving.api_error import ApiError
from whisperport.apps.serving.request import TranscriptionRequest
from whisperport.speech.text import LANGUAGES, Segment, Tokenizer, write_srt, write_vtt
from whisperport.speech.text.writers import segment_fields
from whisperport.transcription import Transcript

MEDIA_TYPES = {
    "text": "text/plain",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt",
}
KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip
UNFINISHED = "\ufffd"  # of a character whose last bytes the next window may bring
POSITIONS_PER_S = 50  # of the encoder's output, which OpenAI's usage counts as input tokens


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


class Events:
    """The events of one transcription.

    Args:
        request: what it asks for.
        tokenizer: of the bundle.
        about: the bundle, for `x_whisperport`.
    """

    def __init__(
        self, request: TranscriptionRequest, tokenizer: Tokenizer, about: dict[str, str]
    ) -> None:
        self._request, self._tokenizer, self._about = request, tokenizer, about
        self._deltas = Deltas()

    def window(self, transcript: Transcript, *, final: bool = False) -> bytes:
        """Return the event of the text since the last one; nothing, if there is none."""
        delta, segments = self._deltas.of(transcript, final=final)
        if not delta:
            return b""
        event: dict[str, Any] = {"type": "transcript.text.delta", "delta": delta}
        if self._request.logprobs:
            event["logprobs"] = logprobs_of(segments, self._tokenizer)
        if self._request.form == "verbose_json":
            event["end"] = transcript.segments[-1].end  # seconds: how much of the audio is done
        return encoded(event)

    def done(self, transcript: Transcript) -> bytes:
        """Return the last events: the rest of the text, and the complete transcript."""
        rest = self.window(transcript, final=True)
        heard, written = (
            round(transcript.duration_s * POSITIONS_PER_S),
            n_tokens(transcript.segments),
        )
        event: dict[str, Any] = {"type": "transcript.text.done", "text": transcript.text}
        if self._request.logprobs:
            event["logprobs"] = logprobs_of(transcript.segments, self._tokenizer)
        if self._request.form == "verbose_json":
            event = verbose_document(transcript, self._request, self._about) | event
        counts = {"input_tokens": heard, "output_tokens": written, "total_tokens": heard + written}
        return rest + encoded({**event, "usage": {"type": "tokens", **counts}})


class Deltas:
    """Turns transcripts so far into deltas. Joined, they are the text of the last one."""

    def __init__(self) -> None:
        self._sent, self._n_segments = "", 0

    def of(self, transcript: Transcript, *, final: bool = False) -> tuple[str, tuple[Segment, ...]]:
        """Return the text and the segments since the last call.

        Args:
            transcript: the transcript so far.
            final: it is complete, so that nothing is held back.
        """
        text = transcript.text if final else transcript.text.rstrip(f"{UNFINISHED} \n\t")
        if not text.startswith(self._sent):
            assert not final, "the text of a transcript only grows"
            return "", ()
        delta, self._sent = text[len(self._sent) :], text
        new = transcript.segments[self._n_segments :]
        self._n_segments = len(transcript.segments)
        return delta, new


def failed(error: ApiError) -> bytes:
    """Return the event of an error after the answer has begun."""
    return encoded(error.document())


def encoded(event: dict[str, Any]) -> bytes:
    """Return one event."""
    return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
