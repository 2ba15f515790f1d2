"""The length of audio that the programs process per window, where it is shorter than the checkpoint's."""

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

        ├─ audio_positions ─┤ silence │
        ├───────── positions ─────────┤───── padding ─────┤
        ├─────────────── context_positions ───────────────┤

    The encoder processes `positions`, of which the first `audio_positions` hold audio and the rest is
    silence. Its output is padded to `context_positions`, the audio context of the decoder's
    cross-attention.

    Raises:
        ValueError: sizes that do not follow one another, or an unknown padding.
    """

    positions: int  # T: encoder positions
    audio_positions: int  # at most T
    context_positions: int  # T and the padding: length of the cross-attention K/V
    padding: Padding

    def __post_init__(self) -> None:
        if not 1 <= self.audio_positions <= self.positions <= self.context_positions:
            raise ValueError(
                f"`audio_positions` is {self.audio_positions}, `positions` {self.positions}, "
                f"`context_positions` {self.context_positions}; "
                "expected 1 or more, in rising order"
            )
        if self.padding not in PADDINGS:
            raise ValueError(f"`padding` is {self.padding!r}; expected one of {PADDINGS}")
        if (self.padding == "none") != (self.context_positions == self.positions):
            raise ValueError(
                f"`padding` is {self.padding!r} from {self.positions} to {self.context_positions} positions"
            )

    @property
    def padded(self) -> int:
        """Positions that are padding."""
        return self.context_positions - self.positions

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions:
    """A window as it is asked for, in seconds; None: as the checkpoint was trained, or all of it."""

    seconds: float | None = None
    padding: Padding = DEFAULT_PADDING
    context_s: float | None = (
        None  # length of the audio context that the decoder attends to, with padding
    )
    audio_s: float | None = None  # length of audio put into each window; the rest is silence

    def of(self, dims: Dims) -> Window | None:
        """This window for a checkpoint of these sizes; None: the checkpoint's own, all of it.

        Raises:
            UsageError: not a multiple of 20 ms, longer than the checkpoint's, or too short.
        """
        trained = dims.n_audio_ctx
        positions = _positions("a window", self.seconds, trained)
        audio_positions = _positions("the audio of a window", self.audio_s, positions)
        if self.padding not in PADDINGS:
            raise UsageError(
                f"there is no padding `{self.padding}`", hint=f"one of {', '.join(PADDINGS)}"
            )
        context_positions = positions
        if self.padding != "none":
            context_positions = _positions(
                "the audio context of the decoder", self.context_s, trained
            )
        if context_positions < positions:
            raise UsageError(
                f"an audio context of {self.context_s:g} s is shorter than the window of "
                f"{self.seconds:g} s",
                hint="pad to the window's length or more, or use `none`",
            )
        if audio_positions == positions == trained:
            return None
        padding: Padding = "none" if context_positions == positions else self.padding
        return Window(
            positions=positions,
            audio_positions=audio_positions,
            context_positions=context_positions,
            padding=padding,
        )


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
            why="the encoder makes one position per 20 ms of audio",
            hint=f"{positions * SECONDS_PER_POSITION:g} s is the nearest",
        )
    return positions
