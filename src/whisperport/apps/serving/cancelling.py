"""Decodings that end at their next step once they are cancelled."""

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from whisperport.runtime import Decoder, Steps

T = TypeVar("T")


def cancellable(
    start: Callable[[Decoder], Steps[T]], is_cancelled: Callable[[], bool], decoder: Decoder
) -> Steps[T]:
    """Run a decoding as `start(decoder)` does, to its next step after it is cancelled.

    Raises:
        CancelledError: it was cancelled. The decoding is closed, so that what it uses is free.
    """
    if is_cancelled():
        raise CancelledError
    decoding = start(decoder)
    try:
        requested = next(decoding)
        while True:
            if is_cancelled():
                raise CancelledError
            try:
                scored = yield requested
            except BaseException as error:
                requested = decoding.throw(error)
            else:
                requested = decoding.send(scored)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        decoding.close()


def settle(future: Future[T], result: T | None, error: BaseException | None) -> None:
    """Set the outcome of a future that counts as waiting until now; nothing, if it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)  # type: ignore[arg-type]  # a result, since there is no error
