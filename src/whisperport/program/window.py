"""Windows: the length of audio that the programs process at a time, if shorter than the checkpoint's.

`Window` is the only one of a bundle, and `ShortWindows` are those that it has besides the checkpoint's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, get_args

from whisperport.errors import UsageError
from whisperport.program.dims import LARGEST, SECONDS_PER_POSITION, Dims
from whisperport.program.strict_json import Field
from whisperport.system.option import Option

Padding = Literal["none", "features", "keys-and-values", "silence"]
PADDINGS: tuple[Padding, ...] = get_args(Padding)
DEFAULT_PADDING: Padding = "silence"  # chosen by benchmarks/words/short_windows.py
SHORTEST_S = 1.0  # a shorter window holds hardly a word
USUAL = 1500  # positions of the window of every checkpoint of OpenAI
LONGEST = LARGEST["n_audio_ctx"]


Positions = Annotated[int, partial(Field.integer, at_least=1, at_most=LONGEST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window shorter than the checkpoint's. All sizes are encoder positions of 20 ms.

        ├─ audio_positions ─┤ silence │
        ├───────── positions ─────────┤───── padding ─────┤
        ├─────────────── context_positions ───────────────┤

    The encoder processes `positions`. The first `audio_positions` of them hold audio, the rest is silence.
    The encoder's output is padded to `context_positions`, the audio context of the decoder's
    cross-attention.

    Attributes:
        positions: T, number of encoder positions.
        audio_positions: number of positions that hold audio; at most T.
        context_positions: T plus padding, the length of the cross-attention K/V.
        padding: what the padding consists of: "none", "features", "keys-and-values" or "silence".

    Raises:
        ValueError: the sizes are not in rising order, or the padding is unknown or contradicts them.
    """

    positions: Positions
    audio_positions: Positions
    context_positions: Positions
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
        """Number of positions that are padding."""
        return self.context_positions - self.positions


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortWindows:
    """Lengths of windows that the runtime may use in place of the checkpoint's where the audio ends.

        ├─────────── audio ───────────┤ at least 0.5 s ┤
        ├─────────────────── positions ────────────────┤──── silence, as the decoder knows it ────┤

    Attributes:
        positions: lengths in encoder positions of 20 ms, in rising order.
        min_logprob: mean log-probability of the tokens of a window, below which the checkpoint's window is
            used after all, unless the text is more probable than all others together.

    Raises:
        ValueError: there is no length, they are not in rising order, or the number is not 0 or less.
    """

    positions: tuple[Positions, ...]
    min_logprob: float

    def __post_init__(self) -> None:
        if not self.positions or list(self.positions) != sorted(set(self.positions)):
            raise ValueError(f"`positions` is {self.positions}; expected lengths in rising order")
        if not -math.inf < self.min_logprob <= 0:
            raise ValueError(f"`min_logprob` is {self.min_logprob}; expected 0 or a number below")

    def shortest(self, n_frames: int) -> int | None:
        """Return the positions of the shortest window that holds audio and MARGIN; None: none does.

        Args:
            n_frames: mel frames of audio, 10 ms each.
        """
        return next((count for count in self.positions if 2 * count >= n_frames + MARGIN), None)


MARGIN = 50  # mel frames of silence after the audio: the decoder finds its end there
# 2.5, 3.5, 4.5, 7.5, 10, 15 and 20 s: trained checkpoints kept their words. Without the margin, one text
# in ten had no end. The number finds the texts that differ from those of 30 s, and with them one in 24 of
# the others.
UNVERIFIED = ShortWindows(positions=(125, 175, 225, 375, 500, 750, 1000), min_logprob=-0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions:
    """Length of the window and its padding, as a user asks for it.

    All lengths are in seconds, multiples of 0.02 s, and at least 1 s.

    The padding is what follows the window in the decoder's audio context. Where a longest window is known
    to compile for a target, `export` uses that one as the default of `seconds`.
    """

    seconds: Annotated[
        float | None,
        Option(
            "Length of audio that the encoder processes in one call: a multiple of 0.02, from 1 to the "
            "checkpoint's length",
            metavar="SECONDS",
            default="the longest known to compile for the target, else the checkpoint's, 30",
            flag="--window",
        ),
    ] = None
    audio_s: Annotated[
        float | None,
        Option(
            "Length of audio put into each window: a multiple of 0.02, from 1 to --window; silence fills "
            "the rest",
            metavar="SECONDS",
            default="the length of --window",
            flag="--audio",
        ),
    ] = None
    padding: Annotated[
        Padding,
        Option(
            "How a window shorter than `context_s` is padded: not at all (none; `context_s` then has no "
            "effect), with zeros after the encoder's output (features), with zeros after the "
            "cross-attention keys and values, or with the encoder's output for silence"
        ),
    ] = DEFAULT_PADDING
    context_s: Annotated[
        float | None,
        Option(
            "Length of the audio context that the decoder attends to, padding included: a multiple of "
            "0.02, from --window to the checkpoint's length",
            metavar="SECONDS",
            default="the checkpoint's, 30",
            flag="--pad-to",
        ),
    ] = None

    def check(self, dims: Dims | None) -> None:
        """Check, before a checkpoint is read, that it can have this window.

        Args:
            dims: sizes of the checkpoint, if its name tells them.

        Raises:
            UsageError: see `of`; without sizes, no checkpoint can have this window.
        """
        try:
            self._of(dims.n_audio_ctx if dims else USUAL)
        except UsageError as error:
            if dims:
                raise
            try:
                self._of(LONGEST)
            except UsageError:
                raise error from None

    def of(self, dims: Dims) -> Window | None:
        """Return the window for a checkpoint of these sizes; None for the checkpoint's own window.

        Raises:
            UsageError: the padding is unknown, or a length is out of range or not a multiple of 20 ms.
        """
        return self._of(dims.n_audio_ctx)

    def _of(self, trained: int) -> Window | None:
        positions = _positions("a window", self.seconds, trained)
        audio_positions = _positions("the audio of a window", self.audio_s, positions)
        if self.padding not in PADDINGS:
            raise UsageError(
                f"there is no padding `{self.padding}`", hint=f"choose one of {', '.join(PADDINGS)}"
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
                hint="give an audio context at least as long as the window, or the padding `none`",
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


def shorter_lengths(seconds: Sequence[float]) -> tuple[int, ...]:
    """Return lengths of window as encoder positions, in rising order, without the usual one of 30 s.

    Raises:
        UsageError: a length is out of range or not a multiple of 20 ms.
    """
    return tuple(sorted({_positions("a window", each, USUAL) for each in seconds} - {USUAL}))


def _positions(what: str, seconds: float | None, longest: int) -> int:
    """Convert seconds to encoder positions of 20 ms.

    Args:
        what: subject of an error message.
        seconds: a length, or None for the longest.
        longest: the largest number of positions; it is allowed even if it is shorter than `SHORTEST_S`.

    Raises:
        UsageError: the length is out of range, or not a multiple of 20 ms.
    """
    limit_s = longest * SECONDS_PER_POSITION
    if seconds is None or seconds == limit_s:
        return longest
    if not SHORTEST_S <= seconds <= limit_s:  # false for NaN too
        raise UsageError(
            f"{what} cannot be {seconds:g} s",
            why=f"expected {SHORTEST_S:g} to {limit_s:g} s",
            hint="give a length in this range",
        )
    positions = round(seconds / SECONDS_PER_POSITION)
    if abs(positions * SECONDS_PER_POSITION - seconds) > 1e-6:
        raise UsageError(
            f"{what} cannot be {seconds:g} s",
            why="the encoder makes one position per 20 ms of audio",
            hint=f"the nearest possible length is {positions * SECONDS_PER_POSITION:g} s",
        )
    return positions
