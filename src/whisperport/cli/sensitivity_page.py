"""An HTML page of a program's sensitivity: a table, and pictures of the activations that 8 bits ruin."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from whisperport.system.page import bar, html_page, table, text

WIDTH, HEIGHT = 720, 140  # of a picture, in pixels
LINES = 400  # at most, in a picture; each is the largest of the values that it stands for
MARGIN = 64  # left of it, for the numbers
DECADES = 4  # of the vertical axis, below the largest value
LARGEST_DB = 60.0  # of a bar

_HEADINGS = ("activation", "operator", ">typical values", "", ">output, if it is alone in 8 bits")

_STYLE = """
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
        + "<h2>All activations, the worst first</h2>\n"
        + table(_HEADINGS, map(_row, rows)),
        _STYLE,
    )


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    decibels = row["typical_db"]
    return (
        text(row["activation"]),
        text(row["operator"]),
        f"{decibels:.0f} dB",
        bar(decibels / LARGEST_DB, "bad" if row["ruined"] else ""),
        "" if row["alone_db"] is None else f"{row['alone_db']:.0f} dB",
    )


def _figure(row: Mapping[str, Any]) -> str:
    pictures = [
        f"<div>largest value in each {axis}</div>{_picture(row[f'{axis}s'])}"
        for axis in ("channel", "frame")
        if row[f"{axis}s"]
    ]
    return f"<figure><figcaption>{text(row['text'])}</figcaption>{''.join(pictures)}</figure>\n"


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
