"""An HTML page of a measurement: where the time goes, and how far each program is from its limit."""

from collections.abc import Sequence

from whisperport.bench.limits import Limit, Rates
from whisperport.bench.transcribing import BenchResult
from whisperport.system.page import Part, bar, html_page, strip, table, text

_HEADINGS = ("program", "precision", ">reads", ">in float32", ">in 8 bits", ">limit", ">measured")


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
        body += f"<h2>{text(result.name)}</h2>\n<p>{text(str(result.bundle))}: "
        body += f"{result.total_ms:.0f} ms for {result.audio_s:.1f} s of audio</p>\n"
        body += _window(result, own, longest) + _table(own)
    return html_page("Where the time goes", f"{body}<p>{text(where)}</p>\n")


def _window(result: BenchResult, limits: Sequence[Limit], longest_ms: float) -> str:
    share = {one.program: min(1.0, one.share) for one in limits}
    parts = [
        Part(
            part.total_ms / result.total_ms,
            f"{part.name}\n{part.total_ms:.0f} ms",
            "part",
            share.get(part.name, 0.0),
        )
        for part in result.parts
    ]
    return strip(parts, f"{result.total_ms:.0f} ms by program", result.total_ms / longest_ms)


def _table(limits: Sequence[Limit]) -> str:
    rows = (
        (
            text(one.program),
            text(one.precision),
            f"{1e3 * one.work.read_gb:.1f} MB",
            f"{one.work.gflop:.2f} G",
            f"{one.work.gop_8_bits:.2f} G",
            f"{one.limit_ms:.2f} ms",
            f"{one.ms:.2f} ms",
            f"{one.share:.0%}",
            bar(one.share),
        )
        for one in limits
    )
    return table((*_HEADINGS, ">of the time", ""), rows)
