"""The result of a transcription.

`incomplete_as_error` keeps the transcript so far if the transcription of the rest fails.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from whisperport.errors import IncompleteError, Interrupted, WhisperportError
from whisperport.speech.text import Segment


@dataclass(frozen=True, slots=True)
class Transcript:
    """The transcript of an audio file.

    Attributes:
        text: all text, without spaces at both ends.
        segments: in order of time.
        language: language code, as given or detected.
        duration_s: duration of the audio in seconds.
        truncated: starts of the windows that reached the token limit, in seconds.
        language_probability: of the detected language among all, 0 to 1; None: it was not detected.
    """

    text: str
    segments: tuple[Segment, ...]
    language: str
    duration_s: float
    truncated: tuple[float, ...]
    language_probability: float | None = None


@contextmanager
def incomplete_as_error(transcript: Callable[[], Transcript]) -> Iterator[None]:
    """Add the transcript so far to any exception of the block.

    This includes unexpected exceptions, so that a defect in a driver does not lose hours of work. If no
    text was transcribed yet, the original exception is raised.

    Args:
        transcript: returns the transcript so far.

    Raises:
        IncompleteError: the block raised an exception, which is its cause.
        Interrupted: Ctrl-C was pressed.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(transcript()) from error
    except Exception as error:
        so_far = transcript()
        if not so_far.segments:
            raise
        what = f"the transcription stopped at {so_far.segments[-1].end:.1f} s"
        if isinstance(error, WhisperportError):
            raise IncompleteError(what, so_far, why=error.what, hint=error.hint) from error
        raise IncompleteError(what, so_far, why=f"{type(error).__name__}: {error}") from error
