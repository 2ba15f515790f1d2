"""The words and the HTML page of `compare`: errors from layer to layer, the first layer that diverges."""

import math
from collections.abc import Sequence

from whisperport.apps.cli.log_plot import PLOT_STYLE, Line, Tag, log_plot
from whisperport.system.page import bar, facts, html_page, table, text, verdict
from whisperport.verification.array_comparison import min_sqnr_of
from whisperport.verification.diagnosis.divergence import ComparedPrograms, ComparedValue


def divergence_sentences(comparison: ComparedPrograms) -> list[str]:
    """Say where the programs diverge, and what to do next."""
    last = comparison.values[-1]
    if comparison.first is None:
        largest = max(value.error for value in comparison.values)
        if largest == 0:
            return ["The programs are equal: every matched value is identical."]
        grown = f"The largest error of a value is {largest:.1e}"
        return [f"No layer diverges: the errors are those of rounding. {grown}."]
    first = comparison.values[comparison.first]
    place = f" ({first.line})" if first.line else ""
    texts = [
        f"The programs diverge first at {first.fault}{place}: the error of `{first.name}` is "
        f"{error_text(first)}, that of what it is computed from at most {first.before:.1e}. "
        f"At the last matched value, `{last.name}`, it is {error_text(last)}."
    ]
    if joined_modules := [module for module in first.modules if module != first.fault]:
        texts.append(
            f"One of the programs joins it with {', '.join(joined_modules)}, where the fault may be too."
        )
    if first.between:
        extra = ", ".join(f"{operator} in {side}" for side, operator, _ in first.between[:6])
        texts.append(f"Before it, only one of the programs computes: {extra}.")
    if comparison.worst is not None and comparison.worst != comparison.first:
        worst = comparison.values[comparison.worst]
        texts.append(
            f"The error grows most at {worst.fault}: from {worst.before:.1e} to {error_text(worst)}."
        )
    operators = dict.fromkeys(filter(None, (first.operator, first.other_operator)))
    texts.append(
        f"Compare the weights and the arguments of this layer ({', '.join(operators)}) in both programs. "
        "If it is quantized, give it more bits, or leave it in float."
    )
    return texts


def error_text(value: ComparedValue) -> str:
    """Return the error of a value, also in dB."""
    return f"{value.error:.1e} ({decibels(value.sqnr_db)})"


def decibels(number: float) -> str:
    """Return an SQNR in words."""
    if number == math.inf:
        return "equal"
    return f"{number:.0f} dB" if math.isfinite(number) else "NaN"


def operators(value: ComparedValue) -> str:
    """Return the operators that compute a value, of both programs if they differ."""
    if value.other_operator in ("", value.operator):
        return value.operator
    return f"{value.operator}/{value.other_operator}"


SHOWN_BEFORE, SHOWN_AFTER = 5, 25  # layers around the first that diverges
MAX_ROWS = 3000  # of the table of all values
LOWEST = 1e-8  # error of an empty bar, below the rounding of float32; a full bar is an error of 1
DECIBELS = 20.0

_HEADINGS = ("", ">error", ">SQNR", "operator")
COMPARE_STYLE = f"""{PLOT_STYLE}
.legend span {{ margin-right: 1.2rem; font-size: 13px }}
.legend b {{ display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem;
  vertical-align: -.1em; border-radius: .2rem }}
"""


def compare_page(comparison: ComparedPrograms, command: str = "") -> str:
    """Return the page: complete, without scripts and without other files.

    Args:
        comparison: the compared programs.
        command: the suggested next command. Default: none.
    """
    body = _verdict(comparison, command) + compared_layers(comparison)
    remainder = len(comparison.values) - MAX_ROWS
    body += (
        f"<details><summary><b>All {len(comparison.values)} matched values</b></summary>\n"
        + table(
            ("value", *_HEADINGS, _line_heading(comparison)),
            (_row(comparison, value, value.name) for value in comparison.values[:MAX_ROWS]),
        )
        + (
            f"<p>{remainder} more are listed with <code>--all</code>.</p>\n"
            if remainder > 0
            else ""
        )
        + "</details>\n"
    )
    return html_page(f"{comparison.a} compared with {comparison.b}", body, COMPARE_STYLE)


def compared_layers(comparison: ComparedPrograms) -> str:
    """Return a picture of the errors, and the layers around the first that diverges."""
    layers = comparison.layers
    return _picture(comparison, layers) + _near(comparison, layers)


def _verdict(comparison: ComparedPrograms, command: str) -> str:
    sentence, *further_sentences = divergence_sentences(comparison)
    passed = sum(map(bool, comparison.outputs))
    failed = [
        f"{output.output}: {output.reason} ({output.rule})"
        for output in comparison.outputs
        if not output
    ]
    outputs = f"{passed} of {len(comparison.outputs)} outputs are within the limits"
    kind = "bad" if not comparison else "good"
    how_much = ""
    if comparison.first is not None:
        first = comparison.values[comparison.first]
        place = f" ({first.line})" if first.line else ""
        passing = "; all outputs are within the limits" if comparison else ""
        sentence = f"The programs diverge first at {first.fault}{place}{passing}."
        how_much = (
            f"the error of {first.name} is {error_text(first)}, that of what it is computed from at most "
            f"{first.before:.1e}; at the last matched value, {comparison.values[-1].name}, it is "
            f"{error_text(comparison.values[-1])}"
        )
        kind = "mark" if comparison else "bad"
    elif not comparison:
        sentence = (
            f"No layer diverges, but {outputs.replace(str(passed), 'only ' + str(passed), 1)}."
        )
    *details, advice = further_sentences or [""]
    kept = (
        f"{len(comparison.values)} values, of {comparison.kept[0]} in {comparison.a} and "
        f"{comparison.kept[1]} in {comparison.b}"
    )
    shown = {
        "How much": text(how_much),
        "Also": "<br>".join(map(text, details)),
        "Outputs": "<br>".join(map(text, (f"{outputs}{':' if failed else ''}", *failed))),
        "Matched": text(kept),
        "Notes": "<br>".join(map(text, comparison.notes)),
        "What to do": text(advice.replace("this layer", _fault(comparison))),
        "Next": f"<code>{text(command)}</code>" if command else "",
    }
    return verdict(sentence, kind, facts(shown))


def _fault(comparison: ComparedPrograms) -> str:
    return "" if comparison.first is None else comparison.values[comparison.first].fault


def _picture(comparison: ComparedPrograms, layers: Sequence[ComparedValue]) -> str:
    """Return a bar of the error of each layer, in the order in which they are computed."""
    errors = [layer.error for layer in layers]
    tags = [
        Tag(
            layers.index(layer),
            f"{layer.fault}: {error_text(layer)}" if kind == "bad" else "",
            kind,
        )
        for kind, layer in (("mark", _worst(comparison)), ("bad", _first(comparison)))
        if layer is not None and layer in layers
    ]
    limits = [
        limit for output in comparison.outputs if (limit := min_sqnr_of(output.rule)) is not None
    ]
    lines = []
    if limits and any(errors):
        lines = [Line(10 ** (-limits[0] / DECIBELS), f"limit of the outputs: {limits[0]:g} dB")]
    ends = (layers[0].layer, layers[-1].layer)
    about = f"error of {len(layers)} layers; {divergence_sentences(comparison)[0]}"
    plot = log_plot(errors, about, ends, tags, lines)
    if not plot:
        return ""
    colors = [("bad", "the first layer that diverges")] * (_first(comparison) is not None)
    if _worst(comparison) is not None and _worst(comparison) is not _first(comparison):
        colors.append(("mark", "where the error grows most"))
    legend = "".join(
        f'<span><b class="{kind} fill"></b>{text(meaning)}</span>' for kind, meaning in colors
    )
    return (
        "<h2>The error from layer to layer</h2>\n<p>A bar is the largest error of a layer, in the order in "
        "which the layers are computed: the size of the difference divided by that of the value of "
        f'{text(comparison.a)}.</p>\n<p class="legend">{legend}</p>\n{plot}'
    )


def _first(comparison: ComparedPrograms) -> ComparedValue | None:
    return None if comparison.first is None else comparison.values[comparison.first]


def _worst(comparison: ComparedPrograms) -> ComparedValue | None:
    return None if comparison.worst is None else comparison.values[comparison.worst]


def _near(comparison: ComparedPrograms, layers: Sequence[ComparedValue]) -> str:
    """Return the layers around the first that diverges; without one, the first layers."""
    first = _first(comparison)
    at = 0 if first is None else layers.index(first)
    rows = layers[max(0, at - SHOWN_BEFORE) : at + SHOWN_AFTER]
    remainder = len(layers) - len(rows)
    title = "Layers" if first is None else "Layers around the first that diverges"
    return (
        f"<h2>{title}</h2>\n"
        + table(
            ("layer", *_HEADINGS, _line_heading(comparison)),
            (_row(comparison, layer, layer.layer) for layer in rows),
        )
        + (f"<p>{remainder} further layers are in the table below.</p>\n" if remainder else "")
    )


def _line_heading(comparison: ComparedPrograms) -> str:
    return "Python line" if any(value.line for value in comparison.values) else ""


def _row(comparison: ComparedPrograms, value: ComparedValue, name: str) -> tuple[str, ...]:
    first, worst = value is _first(comparison), value is _worst(comparison)
    kind = "bad" if first else "mark" if worst else ""
    shown = text(name)
    if kind:
        why = "the first that diverges" if first else "its error grows most"
        shown = f'<b class="{kind}">✕ {shown}</b><br><span class="dim">{why}</span>'
    return (
        shown,
        bar(_share(value.error), kind),
        "0" if value.error == 0 else f"{value.error:.1e}" if math.isfinite(value.error) else "NaN",
        decibels(value.sqnr_db),
        text(operators(value)),
        text(value.line),
    )


def _share(error: float) -> float:
    """Return the part of a bar that an error fills, on a logarithmic scale."""
    if not error > LOWEST:
        return 0.0 if error == error else 1.0
    return 1 - math.log10(min(error, 1.0)) / math.log10(LOWEST)
