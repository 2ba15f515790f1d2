"""What an export wrote, and what a search tried for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from whisperport.program.bundle import Bundle

POINTS = 100  # in 1.0 of a rate


@dataclass(frozen=True, slots=True)
class Candidate:
    """A target, and the precision of programs on it."""

    target: str
    precision: str

    def __str__(self) -> str:
        return f"{self.target} {self.precision}"


@dataclass(frozen=True, slots=True)
class Timed:
    """One program of one candidate.

    Attributes:
        program: name of the program.
        candidate: where it ran.
        ms: median time of a run, in milliseconds.
    """

    program: str
    candidate: Candidate
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One candidate, or a mix of several.

    Attributes:
        name: of the target and precision of each program, or of the encoder's precision.
        rejected: why it was not chosen; empty: it was.
        bound: upper bound of the increase in WER over float32's, with 95%; None: not computed.
        size: bytes of all program files; 0: not counted.
        encoder_ms: median time of a run of the encoder, in milliseconds; 0: not measured.
    """

    name: str
    rejected: str = ""
    bound: float | None = None
    size: int = 0
    encoder_ms: float = 0.0

    def __str__(self) -> str:
        if self.rejected:
            return f"{self.name}: " + self.rejected.split("\n")[0]
        bound = "" if self.bound is None else f"WER at most {POINTS * self.bound:+.2f} points; "
        return (
            f"{self.name}: chosen; {bound}{self.size / 1e6:.1f} MB, "
            f"encoder {self.encoder_ms:.0f} ms"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported(Bundle):
    """The bundle that an export wrote, and what a search tried for it.

    Attributes:
        attempts: what was tried, in order; without a search nothing.
        timed: every program of every candidate that was measured, with the target "auto".
        choice: encoder, cross_kv and step -> the candidate that runs it, with the target "auto".
    """

    attempts: tuple[Attempt, ...] = ()
    timed: tuple[Timed, ...] = ()
    choice: Mapping[str, Candidate] = field(default_factory=dict)

    @classmethod
    def of(cls, bundle: Bundle, attempts: tuple[Attempt, ...] = ()) -> "Exported":
        """Return a bundle that was written, with what was tried for it."""
        return cls(
            folder=bundle.folder,
            manifest=bundle.manifest,
            raw=bundle.raw,
            hashed=bundle.hashed,
            attempts=attempts,
        )
