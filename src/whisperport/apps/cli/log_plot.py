"""A picture of positive numbers in HTML: one bar each, on a logarithmic axis, with lines across them."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from whisperport.system.page import text

MAX_BARS = 375  # each of more values' bars is the largest of the values that it stands for
MAX_DECADES = 8  # of the axis, below the largest value
ROOM = 1.6  # above the largest and below the smallest number, as a factor

PLOT_STYLE = """
.plot { position: relative; height: 11rem; margin: .6rem 0 .3rem 3.6rem; border-left: 1px solid var(--dim);
  border-bottom: 1px solid var(--dim); font-size: 13px }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; fill: var(--bar) }
.plot svg .bad { fill: var(--bad) } .plot svg .mark { fill: var(--mark) }
.plot > span { position: absolute; right: calc(100% + .4rem); transform: translateY(50%);
  white-space: nowrap; color: var(--dim); font-variant-numeric: tabular-nums }
.plot > i { position: absolute; left: 0; right: 0 }
.plot > b { position: absolute; padding: 0 .35rem; background: var(--paper); color: var(--bad);
  border-radius: .25rem; line-height: 1.35; max-width: 55%; overflow-wrap: anywhere }
.plot > b.mark { color: var(--mark) }
.plot > i, .key i { border-top: 2px solid var(--ink) }
.plot > i.thin, .key i.thin { border-top-style: dashed }
.key { display: flex; flex-wrap: wrap; gap: 0 1.2rem; font-size: 13px; margin: .2rem 0 0 3.6rem }
.key i { display: inline-block; width: 1.6rem; vertical-align: .25em; margin-right: .4rem }
.axis { display: flex; justify-content: space-between; margin: 0 0 .8rem 3.6rem; font-size: 13px;
  color: var(--dim) }
"""


@dataclass(frozen=True, slots=True)
class Line:
    """A line across a plot."""

    value: float
    label: str
    thin: bool = False  # dashed


@dataclass(frozen=True, slots=True)
class Tag:
    """A bar of another color, with a label beside its top."""

    place: int  # of the value
    label: str  # empty: none
    kind: str = "bad"  # class of the style sheet, "bad" or "mark"


def log_plot(
    values: Sequence[float],
    about: str,
    ends: tuple[str, str],
    tags: Collection[Tag] = (),
    lines: Sequence[Line] = (),
) -> str:
    """Return the plot; empty if no value is above 0.

    What the lines are is above it, so that no label is on another.

    Args:
        values: at least 0; one that is not finite has the height of the plot.
        about: what it shows, for readers who do not see it.
        ends: text below its left and its right end.
        tags: the bars that are marked. Default: none.
        lines: across the plot. Default: none.
    """
    numbers = [
        number for number in (*values, *(line.value for line in lines)) if 0 < number < math.inf
    ]
    if not numbers:
        return ""
    top = ROOM * max(numbers)
    low = max(min(numbers) / ROOM, top / 10**MAX_DECADES)

    def height(value: float) -> float:
        """Return a share of the plot's height."""
        if math.isnan(value) or value >= top:
            return 1.0
        return math.log(value / low) / math.log(top / low) if value > low else 0.0

    together = -(-len(values) // MAX_BARS)
    paths = {"": "", "bad": "", "mark": ""}
    kinds = {tag.place // together: tag.kind for tag in tags}
    for place, first in enumerate(range(0, len(values), together)):
        tall = 100 * max(map(height, values[first : first + together]))
        paths[kinds.get(place, "")] += f"M{place + 0.08:g},100v-{tall:.1f}h.84v{tall:.1f}z"
    count = -(-len(values) // together)
    # A marked bar is at least a hundredth of the plot wide, so that it is seen among hundreds of others.
    wide = "".join(
        f'<path class="{tag.kind}" d="M{tag.place // together + 0.5 - count / 200:g},100'
        f"v-{100 * height(values[tag.place]):.1f}h{count / 100:g}"
        f'v{100 * height(values[tag.place]):.1f}z"/>'
        for tag in tags
        if count > 100
    )
    drawn = "".join(f'<path class="{kind}" d="{path}"/>' for kind, path in paths.items() if path)
    heights = [height(value) for value in values]
    marks = "".join(_tag(tag, heights) for tag in tags if tag.label)
    return (
        f'{_key(lines)}<div class="plot" role="img" aria-label="{text(about)}">'
        f'<svg viewBox="0 0 {count} 100" preserveAspectRatio="none">{drawn}{wide}</svg>'
        + "".join(_tick(10.0**n, height(10.0**n)) for n in _decades(low, top))
        + "".join(_line(line, f' style="bottom:{height(line.value):.1%}"') for line in lines)
        + f"{marks}</div>"
        f'<div class="axis"><span>{text(ends[0])}</span><span>{text(ends[1])}</span></div>\n'
    )


def short_number(value: float) -> str:
    """Return a number with three digits, and without an exponent if it has at most seven."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _decades(low: float, top: float) -> range:
    return range(math.ceil(math.log10(low)), math.floor(math.log10(top)) + 1)


def _tick(value: float, height: float) -> str:
    return f'<span style="bottom:{height:.1%}">{short_number(value)}</span>'


def _line(line: Line, place: str = "") -> str:
    kind = ' class="thin"' if line.thin else ""
    return f"<i{kind}{place}></i>"


def _key(lines: Sequence[Line]) -> str:
    shown = (f"<span>{_line(line)}{text(line.label)}</span>" for line in lines)
    return f'<div class="key">{"".join(shown)}</div>\n' if lines else ""


def _tag(tag: Tag, heights: Sequence[float]) -> str:
    """Return a label beside the top of a bar, on the side with room where the bars are lower."""
    count = len(heights)
    at, near = (tag.place + 0.5) / count, max(1, count // 4)
    before, behind = heights[max(0, tag.place - near) : tag.place], heights[tag.place + 1 :][:near]
    is_right = at < 0.4 or (at < 0.6 and sum(behind) <= sum(before))
    side = f"left:calc({at:.1%} + .5rem)" if is_right else f"right:calc({1 - at:.1%} + .5rem)"
    top = min(0.8, 1 - heights[tag.place])
    return f'<b class="{tag.kind}" style="{side};top:{top:.1%}">{text(tag.label)}</b>'
