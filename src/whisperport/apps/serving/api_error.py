"""Errors as OpenAI's API answers them: a status, and an object with four members."""

from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import JSONResponse

from whisperport.errors import (
    AudioError,
    IncompleteError,
    LongAudioError,
    QueueFullError,
    UsageError,
    WhisperportError,
)

INVALID, RATE_LIMIT, SERVER = "invalid_request_error", "rate_limit_error", "server_error"
FORMATS = "flac, mp3, mp4, mpeg, mpga, m4a, ogg, wav, webm"


class ApiError(Exception):
    """An error that is answered to the client.

    Args:
        status: HTTP status.
        message: what happened, for people.
        code: what happened, for programs; None: no code.
        param: the field of the request that is wrong; None: no field.
        kind: OpenAI's type of the error.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str = INVALID,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.kind, self.headers = kind, dict(headers or {})

    def document(self) -> dict[str, Any]:
        """Return the error as OpenAI's JSON object."""
        members = {"message": self.message, "type": self.kind, "param": self.param}
        return {"error": {**members, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the answer."""
        return JSONResponse(self.document(), self.status, self.headers)


def api_error(error: BaseException) -> ApiError:
    """Return the answer to an exception. An unexpected one is a 500, which clients should not repeat."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, IncompleteError) and error.__cause__ is not None:
        return api_error(error.__cause__)
    if isinstance(error, QueueFullError):
        return _queue_full(error)
    if isinstance(error, LongAudioError):
        return ApiError(413, one_line(error), param="file")
    if isinstance(error, AudioError):
        message = f"Unrecognized file format. Supported formats: [{FORMATS}]. {one_line(error)}"
        return ApiError(400, message, code="invalid_value", param="file")
    if isinstance(error, UsageError):
        return ApiError(400, one_line(error), code="unsupported_value")
    message = "The server failed. Its log has the reason beside the request's id."
    return ApiError(500, message, kind=SERVER, code="internal", headers={"x-should-retry": "false"})


def _queue_full(error: QueueFullError) -> ApiError:
    again = {"retry-after": str(error.retry_after_s)}
    if error.closing:
        message = "The server is shutting down"
        return ApiError(503, message, kind=SERVER, code="shutting_down", headers=again)
    message = f"The queue is full. Try again in {error.retry_after_s} s"
    return ApiError(429, message, kind=RATE_LIMIT, code="queue_full", headers=again)


def one_line(error: WhisperportError) -> str:
    """Return an error as one line."""
    why = f": {error.why}" if error.why else ""
    return f"{error.what}{why}"


def unknown_model(name: str, served: Iterable[str]) -> str:
    """Return the message about a model that is not served."""
    return (
        f"The model {name[:100]!r} does not exist; served: {', '.join(served)}. "
        "`whisperport serve --alias NAME` accepts a further name"
    )
