"""How much sound the programs take at once, where that is less than the checkpoint was trained on."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from whisperport.dims import SECONDS_PER_POSITION, Dims
from whisperport.errors import UsageError

Padding = Literal["none", "features", "keys-and-values", "silence"]
PADDINGS: tuple[Padding, ...] = get_args(Padding)
DEFAULT_PADDING: Padding = "silence"  # chosen by benchmarks/short_windows.py
SHORTEST_S = 1.0  # shorter ones hold no word


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window shorter than the checkpoint's; all sizes in encoder positions of 20 ms.

        ├──── sound ────┤ quiet │           heard            │
        ├────── positions ──────┤────────── padding ─────────┤

    The encoder takes `positions`, of which the first `sound` are filled with sound. What it returns is
    padded for the decoder's cross-attention to `heard`.

    Raises:
        ValueError: sizes that do not follow one another, or an unknown padding.
    """

    positions: int  # T
    sound: int  # at most T
    heard: int  # T and what is padded: the length of the cross-attention's keys and values
    padding: Padding

    def __post_init__(self) -> None:
        if not 1 <= self.sound <= self.positions <= self.heard:
            raise ValueError(
                f"`sound` is {self.sound}, `positions` {self.positions}, `heard` {self.heard}; "
                "expected 1 or more, in rising order"
            )
        if self.padding not in PADDINGS:
            raise ValueError(f"`padding` is {self.padding!r}; expected one of {PADDINGS}")
        if (self.padding == "none") != (self.heard == self.positions):
            raise ValueError(
                f"`padding` is {self.padding!r} from {self.positions} to {self.heard} positions"
            )

    @property
    def padded(self) -> int:
        """Positions that are padding."""
        return self.heard - self.positions

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions:
    """A window as it is asked for, in seconds; None: as the checkpoint was trained, or all of it."""

    seconds: float | None = None
    padding: Padding = DEFAULT_PADDING
    heard_s: float | None = None  # the decoder hears as much, the padding included
    sound_s: float | None = None  # sound put into a window; what is left of it stays quiet

    def of(self, dims: Dims) -> Window | None:
        """This window for a checkpoint of these sizes; None: the checkpoint's own, all of it.

        Raises:
            UsageError: not a multiple of 20 ms, longer than the checkpoint's, or too short.
        """
        trained = dims.n_audio_ctx
        positions = _positions("a window", self.seconds, trained)
        sound = _positions("the sound of a window", self.sound_s, positions)
        if self.padding not in PADDINGS:
            raise UsageError(
                f"there is no padding `{self.padding}`", hint=f"one of {', '.join(PADDINGS)}"
            )
        heard = positions
        if self.padding != "none":
            heard = _positions("what the decoder hears", self.heard_s, trained)
        if heard < positions:
            raise UsageError(
                f"the decoder cannot hear {self.heard_s:g} s of a window of {self.seconds:g} s",
                hint="pad to the window's length or more, or use `none`",
            )
        if sound == positions == trained:
            return None
        padding: Padding = "none" if heard == positions else self.padding
        return Window(positions=positions, sound=sound, heard=heard, padding=padding)


def _positions(what: str, seconds: float | None, longest: int) -> int:
    """Seconds as encoder positions, at most `longest`; None and the longest itself are always allowed."""
    limit_s = longest * SECONDS_PER_POSITION
    if seconds is None or seconds == limit_s:
        return longest
    if not SHORTEST_S <= seconds <= limit_s:  # false for NaN too
        raise UsageError(
            f"{what} cannot be {seconds:g} s",
            why=f"expected {SHORTEST_S:g} to {limit_s:g} s",
            hint="give a number between them",
        )
    positions = round(seconds / SECONDS_PER_POSITION)
    if abs(positions * SECONDS_PER_POSITION - seconds) > 1e-6:
        raise UsageError(
            f"{what} cannot be {seconds:g} s",
            why="the encoder makes one position of 20 ms of sound",
            hint=f"{positions * SECONDS_PER_POSITION:g} s is the nearest",
        )
    return positions
