"""An HTML page of a program's sensitivity: a table, and pictures of the activations that 8 bits ruin."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from whisperport.system.page import html_page

WIDTH, HEIGHT = 720, 140  # of a picture, in pixels
LINES = 400  # at most, in a picture; each is the largest of the values that it stands for
MARGIN = 64  # left of it, for the numbers
DECADES = 4  # of the vertical axis, below the largest value
LARGEST_DB = 60.0  # of a bar

_STYLE = """
.bar { display: inline-block; height: .7rem; background: var(--bar) }
.ruined .bar { background: var(--bad) }
figure { margin: 1.5rem 0 } figcaption { margin-bottom: .3rem }
svg { background: #8881; max-width: 100% } svg text { fill: currentColor }
"""


def sensitivity_page(program: str, rows: Sequence[Mapping[str, Any]], min_db: float) -> str:
    """Return the page: complete, without scripts and without other files.

    Args:
        program: its name, for the title.
        rows: as `sensitivity` returns them.
        min_db: SQNR of typical values below which one 8-bit scale ruins an activation.
    """
    ruined = [row for row in rows if row["ruined"]]
    return html_page(
        f"8-bit activations of {program}",
        f"<p>One 8-bit scale ruins {len(ruined)} of {len(rows)} activations: the values of the median "
        f"frame or channel keep less than {min_db:g} dB. These need 16 bits or a float type, or 8 bits of "
        "the weights alone.</p>\n"
        + "".join(_figure(row) for row in ruined)
        + "<h2>All activations, the worst first</h2>\n<table><tr><th>activation<th>operator"
        "<th>typical values<th><th>output, if it is alone in 8 bits</tr>\n"
        + "".join(_row(row) for row in rows)
        + "</table>\n",
        _STYLE,
    )


def _row(row: Mapping[str, Any]) -> str:
    decibels = row["typical_db"]
    bar = round(160 * max(0.0, min(decibels, LARGEST_DB)) / LARGEST_DB)
    alone = "" if row["alone_db"] is None else f"{row['alone_db']:.0f} dB"
    kind = "ruined" if row["ruined"] else "kept"
    return (
        f"<tr class={kind}><td>{escape(row['activation'])}"
        f"<td>{escape(row['operator'])}<td>{decibels:.0f} dB"
        f'<td><span class="bar" style="width:{bar}px"></span><td>{alone}</tr>\n'
    )


def _figure(row: Mapping[str, Any]) -> str:
    pictures = [
        f"<div>largest value in each {axis}</div>{_picture(row[f'{axis}s'])}"
        for axis in ("channel", "frame")
        if row[f"{axis}s"]
    ]
    return f"<figure><figcaption>{escape(row['text'])}</figcaption>{''.join(pictures)}</figure>\n"


def _picture(values: Sequence[float]) -> str:
    """Return a picture of absolute values, a vertical line for each or for some, on a logarithmic axis."""
    together = -(-len(values) // LINES)
    values = [max(values[first : first + together]) for first in range(0, len(values), together)]
    largest = max(values)
    if not largest:
        return ""

    def height(value: float) -> float:
        below = math.log10(largest / value) if value else DECADES
        return HEIGHT * max(0.0, 1 - below / DECADES)

    step = (WIDTH - MARGIN) / len(values)
    lines = "".join(
        f"M{MARGIN + step * (index + 0.5):.1f},{HEIGHT}v{-height(value):.1f}"
        for index, value in enumerate(values)
    )
    labels = "".join(
        f'<text x="{MARGIN - 4}" y="{HEIGHT * n / DECADES + 11:.0f}" text-anchor="end" font-size="11">'
        f"{largest / 10**n:.2g}</text>"
        for n in range(DECADES)
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">{labels}'
        f'<path d="{lines}" stroke="var(--bad)" stroke-width="{max(0.6, min(step, 3)):.1f}"/></svg>'
    )
