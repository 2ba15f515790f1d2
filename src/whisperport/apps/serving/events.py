"""Server-sent events of a transcription."""

import json
from typing import Any

from whisperport.apps.serving.api_error import ApiError
from whisperport.apps.serving.formats import logprobs_of, n_tokens, verbose_document
from whisperport.apps.serving.request import TranscriptionRequest
from whisperport.speech.text import Segment, Tokenizer
from whisperport.transcription import Transcript

KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip
UNFINISHED = "\ufffd"  # of a character whose last bytes the next window may bring
POSITIONS_PER_S = 50  # of the encoder's output, which OpenAI's usage counts as input tokens


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
