"""The words and the HTML page of a measurement: speed, errors, where the time goes, and its limits."""

from collections.abc import Sequence

from whisperport.apps.bench.roofline import Limit, Rates
from whisperport.apps.bench.transcribing import BenchResult
from whisperport.system.page import Part, bar, facts, html_page, prose, strip, table, text, verdict
from whisperport.verification import TextErrors

UNKNOWN = "not measured"
NORMALIZED = " (Whisper normalizer)"


def acceptance_value(value: float | None, unit: str) -> str:
    """Return a value of the acceptance table with its unit."""
    if value is None:
        return UNKNOWN
    return {"ms": f"{value:.2f} ms", "clips": f"{value:.0f}", "share": f"{value:.2%}"}[unit]


def rate_name(result: BenchResult) -> str:
    """Name of the error rate; bundles that are compared share it, since they share the audio."""
    unit = "words" if result.errors is None else result.errors.unit
    return f"{unit.removesuffix('s')} error rate"


def rate(errors: TextErrors | None) -> str:
    """Return an error rate."""
    return UNKNOWN if errors is None else f"{errors.rate:.1%}"


def rate_in_full(errors: TextErrors | None) -> str:
    """Return an error rate with what was counted."""
    if errors is None:
        return f"{UNKNOWN}: the correct transcript is not known; give it with --transcript"
    return f"{rate(errors)} ({errors.errors} errors in {errors.length} {errors.unit})"


def memory(result: BenchResult) -> str:
    """Return the peak memory."""
    if result.peak_memory_mib is None:
        return UNKNOWN
    return f"{result.peak_memory_mib:.0f} MiB, in a separate process that only transcribes"


_LOADED = "the machine was loaded with other work while the limit was measured"
_CACHED = "or the CPU's caches hold what is read"


def bench_page(
    results: Sequence[BenchResult],
    rates: Rates,
    limits: Sequence[Sequence[Limit]],
    where: str,
    command: str = "",
) -> str:
    """Return the page: complete, without scripts and without other files.

    Args:
        results: of the bundles.
        rates: of the machine.
        limits: of the programs of each bundle.
        where: the machine, versions and threads.
        command: the suggested next command. Default: none.
    """
    longest = max(result.total_ms for result in results)
    several = len(results) > 1
    body = _overview(results, limits, command) if several else ""
    for result, own in zip(results, limits, strict=True):
        title = f"{result.name}: {result.bundle}"
        body += f"<h2>{text(title)}</h2>\n" if several else ""
        body += _verdict(result, own, "" if several else command, longest)
        body += _parts(result) + _limits(own, rates) + _acceptance(result)
    body += (
        f'<p class="dim">This machine reads {rates.read_gb:.1f} GB/s, and multiplies matrices with '
        f"{rates.gflop:.0f} GFLOP/s in float32 and {rates.gop_8_bits:.0f} GOP/s in 8 bits.</p>\n"
        f'<p class="dim">{text(where)}</p>\n'
    )
    names = ", ".join(dict.fromkeys(result.name for result in results))
    return html_page(f"Speed of {names}", body)


def _seconds(ms: float) -> str:
    return f"{ms / 1e3:.1f} s" if ms >= 1e3 else f"{ms:.0f} ms"


def _overview(
    results: Sequence[BenchResult], limits: Sequence[Sequence[Limit]], command: str
) -> str:
    first, fastest = results[0], min(results, key=lambda result: result.real_time_factor)
    factor = first.real_time_factor / fastest.real_time_factor if fastest.real_time_factor else 1.0
    ahead = "" if fastest is first else f", {factor:.2f} times as fast as {first.bundle.name}"
    longest = max(result.total_ms for result in results)
    rows = [
        (
            f"{text(result.bundle)}<br><span class=dim>{text(result.name)}</span>",
            f"{result.total_ms:,.0f} ms",
            bar(result.total_ms / longest),
            f"{result.real_time_factor:.4f}",
            UNKNOWN if result.errors is None else f"{result.errors.rate:.1%}",
            UNKNOWN if result.peak_memory_mib is None else f"{result.peak_memory_mib:.0f} MiB",
        )
        for result in results
    ]
    headings = ("bundle", ">time", "", ">real-time factor", f">{rate_name(first)}", ">peak memory")
    is_loaded = any(_is_impossible(limit) for own in limits for limit in own)
    return verdict(
        f"Of {len(results)} bundles, {fastest.bundle.name} is the fastest: real-time factor "
        f"{fastest.real_time_factor:.3f}{ahead}.",
        "bad" if any(map(_failures, results)) else "mark" if is_loaded else "good",
        table(headings, rows) + facts({"Next": f"<code>{text(command)}</code>" if command else ""}),
    )


def _verdict(result: BenchResult, limits: Sequence[Limit], command: str, longest_ms: float) -> str:
    transcribing = result.real_time_factor * result.audio_s * 1e3
    words = "" if result.errors is None else f", {rate_name(result)} {result.errors.rate:.1%}"
    sentence = (
        f"{result.audio_s:.1f} s of audio in {_seconds(transcribing)}: real-time factor "
        f"{result.real_time_factor:.3f}{words}."
    )
    slowest = max(result.parts, key=lambda part: part.total_ms)
    impossible = [limit.program for limit in limits if _is_impossible(limit)]
    failed = _failures(result)
    shown = {
        "Slowest": text(
            f"{slowest.name}: {slowest.total_ms:,.0f} ms, {slowest.total_ms / result.total_ms:.1%} of "
            f"loading and transcribing"
        ),
        rate_name(result).capitalize(): text(rate_in_full(result.errors)),
        f"The same{NORMALIZED}": text(rate_in_full(result.whisper_errors))
        if result.whisper_errors
        else "",
        "CPU time": text(f"{result.cpu_s_per_audio_s:.4f} s per second of audio, without loading"),
        "Peak memory": text(memory(result)),
        "Limits": text(
            f"{_LOADED}: that of {', '.join(impossible)} is above the measured time. Measure again on an "
            "idle machine"
        )
        if impossible
        else "",
        "Failed": "<br>".join(map(prose, failed)),
        "Bundle": text(result.bundle),
        "Next": f"<code>{text(command)}</code>" if command else "",
    }
    kind = "bad" if failed else "mark" if impossible else "good"
    note = (
        '<p class="dim">Loading and transcribing from left to right; the length of a part is its time. Its '
        "dark part is its limit: as fast as this machine reads and multiplies.</p>"
    )
    strip_ = _strip(result, limits, result.total_ms / longest_ms)
    return verdict(sentence, kind, strip_ + note + facts(shown))


def _failures(result: BenchResult) -> list[str]:
    return [f"{row.metric}: {row.reason}" for row in result.acceptance if row.passed is False]


def _is_impossible(limit: Limit) -> bool:
    """Whether a program was faster than its limit."""
    return limit.share > 1


def _strip(result: BenchResult, limits: Sequence[Limit], width: float) -> str:
    known = {program_limit.program: program_limit for program_limit in limits}
    parts = []
    for part in result.parts:
        limit = known.get(part.name)
        wrong = limit is not None and _is_impossible(limit)
        parts.append(
            Part(
                part.total_ms / result.total_ms,
                f"{part.name}\n{part.total_ms:,.0f} ms",
                "mark fill" if wrong else "part",
                0.0 if limit is None or wrong else limit.share,
            )
        )
    return strip(parts, f"{result.total_ms:.0f} ms by program", width)


def _parts(result: BenchResult) -> str:
    rows = [
        (
            text(part.name),
            f"{part.calls:,}" if part.calls else "",
            "" if part.median_ms is None else f"{part.median_ms:.2f} ms",
            f"{part.total_ms:,.1f} ms",
            bar(part.total_ms / result.total_ms),
            f"{part.total_ms / result.total_ms:.1%}",
            UNKNOWN if part.cpu_ms is None else f"{part.cpu_ms:,.1f} ms",
            text(result.how.get(part.name, "")),
        )
        for part in result.parts
    ]
    headings = (
        *("part", ">calls", ">per call", ">in all", "", ">share", ">CPU time"),
        "how it ran" if any(result.how.values()) else "",
    )
    return f"<h2>Where the time goes</h2>\n{table(headings, rows)}"


def _limits(limits: Sequence[Limit], rates: Rates) -> str:
    if not limits:
        return ""
    headings = (
        *("program", "", ">measured", ">limit", ">limit / measured", "precision"),
        *(">reads", ">in float32", ">in 8 bits"),
    )
    return (
        "<h2>Distance to the limit</h2>\n<p>The limit is the time in which this machine reads the weights "
        "of a program and computes its matrix multiplications. A bar is the measured time of one run, and "
        "the line across it the limit.</p>\n"
        + table(headings, map(_limit, limits))
        + "".join(_impossible(limit, rates) for limit in limits if _is_impossible(limit))
    )


def _limit(limit: Limit) -> tuple[str, ...]:
    longer = max(limit.ms, limit.limit_ms)
    share, wrong = f"{limit.share:.0%}", _is_impossible(limit)
    return (
        text(limit.program),
        bar(limit.ms / longer, "mark" if wrong else "", limit.limit_ms / longer),
        f"{limit.ms:.2f} ms",
        f"{limit.limit_ms:.2f} ms",
        f'<b class="mark">{share}</b>' if wrong else share,
        text(limit.precision),
        f"{1e3 * limit.work.read_gb:.1f} MB",
        f"{limit.work.gflop:.2f} GFLOP",
        f"{limit.work.gop_8_bits:.2f} GOP",
    )


def _impossible(limit: Limit, rates: Rates) -> str:
    """Say why a limit is above what was measured."""
    is_read = 1e3 * limit.work.read_gb / rates.read_gb >= limit.limit_ms
    why = f"{_LOADED}, {_CACHED}" if is_read else _LOADED
    return f"<p>The limit of {text(limit.program)} is above its measured time: {why}.</p>\n"


def _acceptance(result: BenchResult) -> str:
    if not result.acceptance:
        return ""
    rows = [
        (
            text(row.metric),
            acceptance_value(row.value, row.unit),
            "" if row.reference is None else acceptance_value(row.reference, row.unit),
            "" if row.passed is None else "pass" if row.passed else '<b class="bad">FAIL</b>',
            text(row.rule),
            text(f"{row.evidence}: {', '.join(row.targets)}"),
        )
        for row in result.acceptance
    ]
    headings = ("acceptance", ">value", ">reference", "result", "limit", "evidence")
    return f"<h2>Acceptance</h2>\n{table(headings, rows)}"
