"""An HTML page of a measurement: where the time goes, and how far each program is from its limit."""

from collections.abc import Sequence
from html import escape

from whisperport.bench.limits import Limit, Rates
from whisperport.bench.transcribing import BenchResult, Part
from whisperport.system.page import html_page

LABELLED = 0.05  # of the time; a shorter part has no room for its name

_STYLE = """
.window { display: flex; height: 3.2rem; margin: .4rem 0 1.2rem } .window > div { overflow: hidden }
.part { background: var(--rest); border-right: 1px solid Canvas; position: relative }
.part > i { background: var(--bar); position: absolute; inset: 0 auto 0 0 }
.part > span { position: relative; padding: .2rem .4rem; font-size: 12px; white-space: nowrap }
.bar { background: var(--rest); height: .8rem; min-width: 12rem }
.bar > i { display: block; background: var(--bar); height: 100% }
"""


def bench_page(
    results: Sequence[BenchResult], rates: Rates, limits: Sequence[Sequence[Limit]], where: str
) -> str:
    """Return the page: complete, without scripts and without other files.

    Args:
        results: of the bundles.
        rates: of the machine.
        limits: of the programs of each bundle.
        where: the machine, versions and threads.
    """
    longest = max(result.total_ms for result in results)
    body = (
        "<p>The length of a bar is the time of loading and transcribing. The dark part of a program is its "
        "limit: the machine reads and multiplies as fast as it can. What has no dark part has no known "
        "limit.</p>\n"
        f"<p>This machine reads {rates.read_gb:.1f} GB/s, and multiplies matrices with "
        f"{rates.gflop:.0f} GFLOP/s in float32 and {rates.gop_8_bits:.0f} GOP/s in 8 bits.</p>\n"
    )
    for result, own in zip(results, limits, strict=True):
        body += f"<h2>{escape(result.name)}</h2>\n<p>{escape(str(result.bundle))}: "
        body += f"{result.total_ms:.0f} ms for {result.audio_s:.1f} s of audio</p>\n"
        body += _window(result, own, longest) + _table(own)
    return html_page("Where the time goes", f"{body}<p>{escape(where)}</p>\n", _STYLE)


def _window(result: BenchResult, limits: Sequence[Limit], longest_ms: float) -> str:
    share = {one.program: min(1.0, one.share) for one in limits}
    parts = "".join(
        _part(part, share.get(part.name, 0.0), result.total_ms) for part in result.parts
    )
    return f'<div class="window" style="width:{result.total_ms / longest_ms:.1%}">{parts}</div>\n'


def _part(part: Part, limit: float, total_ms: float) -> str:
    share, ms = part.total_ms / total_ms, f"{part.total_ms:.0f} ms"
    name = escape(part.name)
    label = f"<span>{name}<br>{ms}</span>" if share >= LABELLED else ""
    return (
        f'<div class="part" style="width:{share:.2%}" title="{name}: {ms}">'
        f'<i style="width:{limit:.1%}"></i>{label}</div>'
    )


def _table(limits: Sequence[Limit]) -> str:
    rows = "".join(
        f"<tr><td>{escape(one.program)}<td>{escape(one.precision)}"
        f'<td class="n">{1e3 * one.work.read_gb:.1f} MB'
        f'<td class="n">{one.work.gflop:.2f} G<td class="n">{one.work.gop_8_bits:.2f} G'
        f'<td class="n">{one.limit_ms:.2f} ms<td class="n">{one.ms:.2f} ms<td class="n">{one.share:.0%}'
        f'<td><div class="bar"><i style="width:{min(1.0, one.share):.1%}"></i></div></tr>\n'
        for one in limits
    )
    return (
        '<table><tr><th>program<th>precision<th class="n">reads<th class="n">in float32'
        '<th class="n">in 8 bits<th class="n">limit<th class="n">measured<th class="n">of the time<th>'
        "</tr>\n"
        f"{rows}</table>\n"
    )
