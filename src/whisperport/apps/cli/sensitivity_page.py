"""An HTML page of a program's sensitivity: the activations that 8 bits ruin, and why, as pictures."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from whisperport.apps.cli.log_plot import PLOT_STYLE, Line, Tag, log_plot, short_number
from whisperport.system.page import bar, facts, html_page, table, text, verdict

LARGEST_DB = 60.0  # of a bar
MAX_FIGURES = 50  # activations with a picture
WHAT_TO_DO = "Give these activations 16 bits or a float type, or quantize only the weights."
_STYLE = f"""{PLOT_STYLE}
figure {{ margin: 1.4rem 0; break-inside: avoid }}
td:first-child {{ min-width: min(12rem, 36vw) }}
"""
_NO_CHANNEL = "no single channel"


def sensitivity_page(
    program: str, rows: Sequence[Mapping[str, Any]], min_db: float, command: str = ""
) -> str:
    """Return the page: complete, without scripts and without other files.

    Args:
        program: its name, for the title.
        rows: as `sensitivity` returns them, the worst first.
        min_db: SQNR of typical values below which one 8-bit scale ruins an activation.
        command: the suggested next command. Default: none.
    """
    ruined = [row for row in rows if row["ruined"]]
    body = _verdict(rows, ruined, min_db, command)
    if ruined:
        body += _table(ruined) + _figures(ruined)
    body += (
        f"<details{'' if ruined else ' open'}><summary><b>All {len(rows)} activations, the worst first</b>"
        f"</summary>\n<p>The line in a bar is the limit of {min_db:g} dB.</p>\n"
        + table(
            ("activation", "operator", ">typical values", "", ">output, if it is alone in 8 bits"),
            (_row(row, min_db) for row in rows),
        )
        + "</details>\n"
    )
    return html_page(f"8-bit activations of {program}", body, _STYLE)


def _verdict(
    rows: Sequence[Mapping[str, Any]],
    ruined: Sequence[Mapping[str, Any]],
    min_db: float,
    command: str,
) -> str:
    following = {"Next": f"<code>{text(command)}</code>" if command else ""}
    worst = (ruined or rows)[0]
    decibels = _decibels(worst["typical_db"])
    if not ruined:
        sentence = f"One 8-bit scale ruins none of {len(rows)} activations."
        least = f"{worst['activation']}: typical values keep {decibels}; the limit is {min_db:g} dB"
        return verdict(sentence, "good", facts({"The worst": text(least), **following}))
    step, typical = short_number(worst["step"]), short_number(worst["typical"])
    shown = {
        "The worst": f"<code>{text(worst['activation'])}</code> {text(_fault(worst))}",
        "Why": text(
            f"one 8-bit step is {step}, and a typical value {typical}: typical values keep {decibels}; "
            f"below {min_db:g} dB the scale ruins them"
        ),
        "What to do": text(WHAT_TO_DO),
    }
    sentence = f"One 8-bit scale ruins {len(ruined)} of {len(rows)} activations."
    return verdict(sentence, "bad", facts(shown | following))


def _table(ruined: Sequence[Mapping[str, Any]]) -> str:
    headings = (
        "activation",
        "channel at fault",
        ">largest |value|",
        ">typical value (rms)",
        ">8-bit step",
        ">typical values keep",
        ">output, if alone in 8 bits",
        ">shape",
    )
    rows = (
        (
            f"{text(row['activation'])}<br><span class=dim>{text(row['operator'])}</span>",
            text(_NO_CHANNEL if row["channel"] is None else f"channel {row['channel']}"),
            short_number(_largest(row)),
            short_number(row["typical"]),
            short_number(row["step"]),
            _decibels(row["typical_db"]),
            "" if row["alone_db"] is None else _decibels(row["alone_db"]),
            text(" × ".join(map(str, row["shape"]))),
        )
        for row in ruined
    )
    return (
        "<h2>Activations that one 8-bit scale ruins</h2>\n<p>Values have no unit: they are those of the "
        "float32 program. The step is the distance of two neighbours among 256 values from the smallest "
        "to the largest. dB: ratio of signal to quantization noise (SQNR).</p>\n"
        + table(headings, rows)
    )


def _figures(ruined: Sequence[Mapping[str, Any]]) -> str:
    remainder = len(ruined) - MAX_FIGURES
    return (
        "<h2>Their channels</h2>\n<p>A bar is the largest absolute value of a channel, over all frames and "
        "samples. What is below the 8-bit step is rounded to 0 or to one step.</p>\n"
        + "".join(map(_figure, ruined[:MAX_FIGURES]))
        + (f"<p>{remainder} more are in the table only.</p>\n" if remainder > 0 else "")
    )


def _figure(row: Mapping[str, Any]) -> str:
    channels, worst = row["channels"], row["channel"]
    tags = () if worst is None else (Tag(worst, f"channel {worst}: {_peak(row, worst)}"),)
    lines = (
        Line(row["step"], f"8-bit step: {short_number(row['step'])}"),
        Line(row["typical"], f"typical: {short_number(row['typical'])}", thin=True),
    )
    about = f"largest value of each of {len(channels)} channels; {row['text']}"
    ends = ("channel 0", f"channel {len(channels) - 1}")
    return (
        f"<figure><h3>{text(row['activation'])}</h3><figcaption class=dim>{text(_fault(row))}"
        f"</figcaption>{log_plot(channels, about, ends, tags, lines)}</figure>\n"
    )


def _fault(row: Mapping[str, Any]) -> str:
    """Say which channel is at fault, if it is one."""
    worst, typical = row["channel"], row["typical"]
    if worst is None:
        ratio = f", {_times(_largest(row) / typical)} a typical value" if typical else ""
        return f"{_NO_CHANNEL}: values reach {short_number(_largest(row))}{ratio}"
    median = statistics.median(row["channels"])
    ratio = f", {_times(row['channels'][worst] / median)} the median channel's" if median else ""
    return f"channel {worst} reaches {_peak(row, worst)}{ratio}"


def _peak(row: Mapping[str, Any], channel: int) -> str:
    return short_number(row["channels"][channel])


def _largest(row: Mapping[str, Any]) -> float:
    return float(max(abs(row["smallest"]), abs(row["largest"])))


def _times(ratio: float) -> str:
    return f"{short_number(ratio)} times" if ratio < 1e6 else "more than a million times"


def _row(row: Mapping[str, Any], min_db: float) -> tuple[str, ...]:
    decibels = row["typical_db"]
    kind = "bad" if row["ruined"] else ""
    return (
        text(row["activation"]),
        text(row["operator"]),
        _decibels(decibels),
        bar(decibels / LARGEST_DB, kind, min_db / LARGEST_DB),
        "" if row["alone_db"] is None else _decibels(row["alone_db"]),
    )


def _decibels(number: float) -> str:
    return f"{number:.0f} dB" if math.isfinite(number) else "exact"
