"""What was transcribed is kept when the rest of a recording fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from whisperport.errors import IncompleteError, Interrupted, WhisperportError
from whisperport.transcription.transcript import Transcript


@contextmanager
def incomplete_as_error(transcript: Callable[[], Transcript]) -> Iterator[None]:
    """Give whatever ends the block early the transcript until then.

    Any exception: hours of work are not lost to a defect in a driver. Where nothing was said yet it goes
    on as it was.

    Raises:
        IncompleteError: an exception, which is its cause.
        Interrupted: Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(transcript()) from error
    except Exception as error:
        done = transcript()
        if not done.segments:
            raise
        what = f"the recording is transcribed only to {done.segments[-1].end:.1f} s"
        if isinstance(error, WhisperportError):
            raise IncompleteError(what, done, why=error.what, hint=error.hint) from error
        raise IncompleteError(what, done, why=f"{type(error).__name__}: {error}") from error
