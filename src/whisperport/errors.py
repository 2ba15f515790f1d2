"""Every exception that this package raises on purpose.

WhisperportError             base class: catch it to catch all of them
├── AudioError               audio is missing, unreadable, empty, or contains NaN
│   └── LongAudioError       audio is longer than a server allows
├── CheckpointError          a checkpoint is missing, unknown, damaged, or has other tensor shapes
├── TokenizerError           a tokenizer file is missing, or is not a Whisper tokenizer
├── LoweringError            a program cannot be built for the target
│   └── MissingPackageError  an optional package (an extra, a vendor's SDK) is not installed
├── ProgramError             a program's file is missing, damaged, or in an unknown format
├── VerificationError        a bundle's outputs differ from its reference, so it is not written
├── BundleError              a bundle on disk is damaged, incomplete, or has another format version
├── NumericalError           a program returned a NaN or an infinity
├── ForkError                a loaded program is used in a fork of the process that loaded it
├── QueueFullError           a server has as much work as it may have, or is shutting down
├── IncompleteError          reading audio failed in the middle; has the transcript until then
├── OutOfMemoryError         there is too little memory, or the process may not use more of it
└── UsageError               an argument has an unknown name or a value out of range

Interrupted                  a KeyboardInterrupt; has the transcript until then
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class WhisperportError(Exception):
    """The base class of all errors of this package.

    The command line prints the three parts on separate lines.

    Args:
        what: what happened.
        why: the reason; empty if it is not known.
        hint: what to do next; may be empty.
        code: short name of the cause that never changes, to group errors; empty: it has none.
    """

    def __init__(self, what: str, *, why: str = "", hint: str = "", code: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint
        self.code = code

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


class AudioError(WhisperportError):
    """Audio is missing, unreadable, empty, or contains NaN."""


class LongAudioError(AudioError):
    """Audio is longer than the limit.

    Args:
        limit_s: the limit in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__(
            f"the audio is longer than {limit_s:,.0f} s",
            why="this is the limit for one audio file",
            hint="cut it into parts, or raise the limit",
        )
        self.args = (limit_s,)  # for unpickling


class CheckpointError(WhisperportError):
    """A checkpoint is missing, unknown, damaged, or has other tensor shapes than expected."""


class TokenizerError(WhisperportError):
    """A tokenizer file is missing, or is not a Whisper tokenizer."""


class LoweringError(WhisperportError):
    """A program cannot be built for the target."""


class MissingPackageError(LoweringError):
    """An optional package (an extra, a vendor's SDK) is not installed."""


class OutOfMemoryError(WhisperportError):
    """There is too little memory, or the process may not use more of it."""


# Messages of Linux's dynamic linker, NumPy, torch and ONNX Runtime; each raises another kind of exception.
_LACKS_MEMORY = re.compile(
    r"failed to map segment|can(not|'t) allocate|unable to allocate|failed to allocate|not enough memory"
    r"|bad[ _]alloc(ation)?\b",
    re.IGNORECASE,
)


def out_of_memory(error: BaseException) -> OutOfMemoryError | None:
    """Return the error to raise if an exception, or one that led to it, is a lack of memory; else None.

    Without this, a library that could not be loaded counts as not installed, and a file as damaged.
    """
    seen: BaseException | None = error
    while seen is not None:
        code = seen.errno if isinstance(seen, OSError) else None
        if isinstance(seen, MemoryError) or code == errno.ENOMEM or _LACKS_MEMORY.search(str(seen)):
            return OutOfMemoryError(
                "there is not enough memory",
                why=str(seen).strip().split("\n")[0][:300] or "an allocation failed",
                hint="free memory, raise the limit of this process (`ulimit -v`) or of its container, or "
                "use a machine that has more",
            )
        seen = seen.__cause__ or seen.__context__
    return None


@contextmanager
def needs(what: str, *, extra: str = "", hint: str = "") -> Iterator[None]:
    """Raise MissingPackageError if a package that the block imports is not installed.

    Args:
        what: what cannot be done, and what is not installed.
        extra: pip extra that installs it.
        hint: what to do; empty: install the extra.
    """
    try:
        yield
    except ImportError as error:
        if lack := out_of_memory(error):
            raise lack from error
        install = f'pip install "whisperport[{extra}]"'
        raise MissingPackageError(what, why=str(error), hint=hint or install) from error


class ProgramError(WhisperportError):
    """A program's file is missing, damaged, or in an unknown format."""


class VerificationError(WhisperportError):
    """A bundle's outputs differ from its reference, so it is not written.

    Attributes:
        programs: the programs whose own outputs differ; empty if only tokens or words do.
    """

    programs: tuple[str, ...] = ()


class BundleError(WhisperportError):
    """A bundle on disk is damaged, incomplete, or has another format version."""


class NumericalError(WhisperportError):
    """A program returned a NaN or an infinity.

    Args:
        program: name of the program, or of the bundle's table, that the first such value came from.
    """

    def __init__(self, what: str, program: str, *, why: str = "", hint: str = "") -> None:
        super().__init__(what, why=why, hint=hint)
        self.args = what, program  # for unpickling, when another process raised the error
        self.program = program


class ForkError(WhisperportError):
    """A loaded program is used in a fork of the process that loaded it."""


class QueueFullError(WhisperportError):
    """A server has as much work as it may have, or is shutting down.

    Args:
        retry_after_s: when there will be room, in whole seconds (an estimate).
        closing: whether the server is shutting down.
    """

    def __init__(self, retry_after_s: int, *, closing: bool = False) -> None:
        super().__init__(
            "the server is shutting down" if closing else "the queue is full",
            hint=f"try again in {retry_after_s} s",
        )
        self.args = (retry_after_s,)  # for unpickling
        self.retry_after_s, self.closing = retry_after_s, closing


class IncompleteError(WhisperportError):
    """Reading or transcribing audio failed in the middle.

    The exception that ended it is the cause (`__cause__`).

    Args:
        transcript: `Transcript` of the windows before the failure.
    """

    def __init__(self, what: str, transcript: Any, *, why: str = "", hint: str = "") -> None:
        super().__init__(what, why=why, hint=hint)
        self.args = what, transcript  # for unpickling, when another process raised the error
        self.transcript = transcript


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or another signal interrupted a transcription.

    Args:
        transcript: `Transcript` of the windows before the interrupt.
    """

    def __init__(self, transcript: Any) -> None:
        super().__init__()
        self.transcript = transcript


class UsageError(WhisperportError):
    """An argument has an unknown name, a value out of range, or contradicts another argument."""
