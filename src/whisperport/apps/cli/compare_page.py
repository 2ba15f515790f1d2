"""An HTML page of `compare`: the error from layer to layer, and the first layer that diverges."""

import math
from collections.abc import Sequence

from whisperport.apps.cli.compare_words import decibels, divergence_sentences, error_text, operators
from whisperport.apps.cli.log_plot import PLOT_STYLE, Line, Tag, log_plot
from whisperport.system.page import bar, facts, html_page, table, text, verdict
from whisperport.verification.compare import min_sqnr_of
from whisperport.verification.diagnosis.divergence import ComparedPrograms, ComparedValue

SHOWN_BEFORE, SHOWN_AFTER = 5, 25  # layers around the first that diverges
MAX_ROWS = 3000  # of the table of all values
LOWEST = 1e-8  # error of an empty bar, below the rounding of float32; a full bar is an error of 1
DECIBELS = 20.0

_HEADINGS = ("", ">error", ">SQNR", "operator")
_STYLE = f"""{PLOT_STYLE}
.legend span {{ margin-right: 1.2rem; font-size: 13px }}
.legend b {{ display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem;
  vertical-align: -.1em; border-radius: .2rem }}
"""


def compare_page(found: ComparedPrograms, command: str = "") -> str:
    """Return the page: complete, without scripts and without other files.

    Args:
        found: the compared programs.
        command: the suggested next command. Default: none.
    """
    layers = found.layers
    body = _verdict(found, command) + _picture(found, layers) + _near(found, layers)
    more = len(found.values) - MAX_ROWS
    body += (
        f"<details><summary><b>All {len(found.values)} matched values</b></summary>\n"
        + table(
            ("value", *_HEADINGS, _line_heading(found)),
            (_row(found, one, one.name) for one in found.values[:MAX_ROWS]),
        )
        + (f"<p>{more} more are listed with <code>--all</code>.</p>\n" if more > 0 else "")
        + "</details>\n"
    )
    return html_page(f"{found.a} compared with {found.b}", body, _STYLE)


def _verdict(found: ComparedPrograms, command: str) -> str:
    sentence, *others = divergence_sentences(found)
    passed = sum(map(bool, found.outputs))
    failed = [f"{one.output}: {one.reason} ({one.rule})" for one in found.outputs if not one]
    outputs = f"{passed} of {len(found.outputs)} outputs are within the limits"
    kind = "bad" if not found else "good"
    how_much = ""
    if found.first is not None:
        first = found.values[found.first]
        place = f" ({first.line})" if first.line else ""
        passing = "; all outputs are within the limits" if found else ""
        sentence = f"The programs diverge first at {first.fault}{place}{passing}."
        how_much = (
            f"the error of {first.name} is {error_text(first)}, that of what it is computed from at most "
            f"{first.before:.1e}; at the last matched value, {found.values[-1].name}, it is "
            f"{error_text(found.values[-1])}"
        )
        kind = "mark" if found else "bad"
    elif not found:
        sentence = (
            f"No layer diverges, but {outputs.replace(str(passed), 'only ' + str(passed), 1)}."
        )
    *more, advice = others or [""]
    kept = f"{len(found.values)} values, of {found.kept[0]} in {found.a} and {found.kept[1]} in {found.b}"
    shown = {
        "How much": text(how_much),
        "Also": "<br>".join(map(text, more)),
        "Outputs": "<br>".join(map(text, (f"{outputs}{':' if failed else ''}", *failed))),
        "Matched": text(kept),
        "Notes": "<br>".join(map(text, found.notes)),
        "What to do": text(advice.replace("this layer", _fault(found))),
        "Next": f"<code>{text(command)}</code>" if command else "",
    }
    return verdict(sentence, kind, facts(shown))


def _fault(found: ComparedPrograms) -> str:
    return "" if found.first is None else found.values[found.first].fault


def _picture(found: ComparedPrograms, layers: Sequence[ComparedValue]) -> str:
    """Return a bar of the error of each layer, in the order in which they are computed."""
    errors = [one.error for one in layers]
    tags = [
        Tag(layers.index(one), _tag_of(one) if kind == "bad" else "", kind)
        for kind, one in (("mark", _worst(found)), ("bad", _first(found)))
        if one is not None and one in layers
    ]
    limits = [limit for one in found.outputs if (limit := min_sqnr_of(one.rule)) is not None]
    lines = []
    if limits and any(errors):
        lines = [Line(10 ** (-limits[0] / DECIBELS), f"limit of the outputs: {limits[0]:g} dB")]
    ends = (layers[0].layer, layers[-1].layer)
    about = f"error of {len(layers)} layers; {divergence_sentences(found)[0]}"
    plot = log_plot(errors, about, ends, tags, lines)
    if not plot:
        return ""
    colors = [("bad", "the first layer that diverges")] * (_first(found) is not None)
    if _worst(found) is not None and _worst(found) is not _first(found):
        colors.append(("mark", "where the error grows most"))
    legend = "".join(f'<span><b class="{kind} fill"></b>{text(one)}</span>' for kind, one in colors)
    return (
        "<h2>The error from layer to layer</h2>\n<p>A bar is the largest error of a layer, in the order in "
        "which the layers are computed: the size of the difference divided by that of the value of "
        f'{text(found.a)}.</p>\n<p class="legend">{legend}</p>\n{plot}'
    )


def _tag_of(first: ComparedValue) -> str:
    return f"{first.fault}: {error_text(first)}"


def _first(found: ComparedPrograms) -> ComparedValue | None:
    return None if found.first is None else found.values[found.first]


def _worst(found: ComparedPrograms) -> ComparedValue | None:
    return None if found.worst is None else found.values[found.worst]


def _near(found: ComparedPrograms, layers: Sequence[ComparedValue]) -> str:
    """Return the layers around the first that diverges; without one, the first layers."""
    first = _first(found)
    at = 0 if first is None else layers.index(first)
    rows = layers[max(0, at - SHOWN_BEFORE) : at + SHOWN_AFTER]
    more = len(layers) - len(rows)
    title = "Layers" if first is None else "Layers around the first that diverges"
    return (
        f"<h2>{title}</h2>\n"
        + table(
            ("layer", *_HEADINGS, _line_heading(found)),
            (_row(found, one, one.layer) for one in rows),
        )
        + (f"<p>{more} further layers are in the table below.</p>\n" if more else "")
    )


def _line_heading(found: ComparedPrograms) -> str:
    return "Python line" if any(one.line for one in found.values) else ""


def _row(found: ComparedPrograms, one: ComparedValue, name: str) -> tuple[str, ...]:
    first, worst = one is _first(found), one is _worst(found)
    kind = "bad" if first else "mark" if worst else ""
    shown = text(name)
    if kind:
        why = "the first that diverges" if first else "its error grows most"
        shown = f'<b class="{kind}">✕ {shown}</b><br><span class="dim">{why}</span>'
    return (
        shown,
        bar(_share(one.error), kind),
        "0" if one.error == 0 else f"{one.error:.1e}" if math.isfinite(one.error) else "NaN",
        decibels(one.sqnr_db),
        text(operators(one)),
        text(one.line),
    )


def _share(error: float) -> float:
    """Return the part of a bar that an error fills, on a logarithmic scale."""
    if not error > LOWEST:
        return 0.0 if error == error else 1.0
    return 1 - math.log10(min(error, 1.0)) / math.log10(LOWEST)
