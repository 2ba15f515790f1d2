"""Every exception this package raises on purpose.

WhisperportError             catch this one to catch them all
├── AudioError               the sound is missing, unreadable, empty, or not numbers
├── CheckpointError          the weights are missing, unknown, damaged, or of another shape
├── TokenizerError           the tokenizer's file is missing or is not Whisper's
├── LoweringError            a program cannot be built for the target
│   └── MissingPackageError  an optional package (an extra, a vendor's SDK) is not installed
├── ProgramError             a program's file is missing, damaged, or of a format nobody here reads
├── VerificationError        a bundle disagrees with its reference, so it is not written
├── BundleError              a bundle on disk is damaged, incomplete, or of another version
├── NumericalError           a program returned a NaN or an infinity
├── ForkError                a loaded program is used in a fork of the process that loaded it
├── IncompleteError          a recording failed in the middle; carries what was transcribed before
└── UsageError               an argument names something that does not exist

Interrupted                  a KeyboardInterrupt that carries what was transcribed before it
"""

from typing import Any


class WhisperportError(Exception):
    """What happened, why, and what to do next; the command line prints the three on their own lines."""

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


class AudioError(WhisperportError):
    """The sound is missing, unreadable, empty, or not numbers."""


class CheckpointError(WhisperportError):
    """The weights are missing, unknown, damaged, or of another shape."""


class TokenizerError(WhisperportError):
    """The tokenizer's file is missing or is not Whisper's."""


class LoweringError(WhisperportError):
    """A program cannot be built for the target."""


class MissingPackageError(LoweringError):
    """An optional package (an extra, a vendor's SDK) is not installed."""


class ProgramError(WhisperportError):
    """A program's file is missing, damaged, or of a format that is not read."""


class VerificationError(WhisperportError):
    """A bundle disagrees with its reference, so it is not written."""


class BundleError(WhisperportError):
    """A bundle on disk is damaged, incomplete, or of another version."""


class NumericalError(WhisperportError):
    """A program returned a NaN or an infinity.

    `program` is the name of the program, or of the bundle's table, that the first such value came from.
    """

    def __init__(self, what: str, program: str, *, why: str = "", hint: str = "") -> None:
        super().__init__(what, why=why, hint=hint)
        self.args = what, program  # with which it is unpickled, as after another process raised it
        self.program = program


class ForkError(WhisperportError):
    """A loaded program is used in a fork of the process that loaded it."""


class IncompleteError(WhisperportError):
    """A recording failed in the middle; what was transcribed before is not lost.

    `transcript` is a `Transcript` of the windows before, and the cause is the exception that ended it.
    """

    def __init__(self, what: str, transcript: Any, *, why: str = "", hint: str = "") -> None:
        super().__init__(what, why=why, hint=hint)
        self.args = (
            what,
            transcript,
        )  # with which it is unpickled, as after another process raised it
        self.transcript = transcript


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while a recording was transcribed; `transcript` is a `Transcript` of the windows before."""

    def __init__(self, transcript: Any) -> None:
        super().__init__()
        self.transcript = transcript


class UsageError(WhisperportError):
    """An argument names something that does not exist."""
