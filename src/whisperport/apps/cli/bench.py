"""`whisperport bench`"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Any, get_args

import click

from whisperport.apps.bench.acceptance import AcceptanceRow, How
from whisperport.apps.bench.roofline import Limit, Rates, limits_of, measure_rates
from whisperport.apps.bench.transcribing import (
    BenchOptions,
    BenchResult,
    Part,
    default_audio,
    run_bench,
)
from whisperport.apps.cli.audio_files import check_audio
from whisperport.apps.cli.bench_page import (
    NORMALIZED,
    UNKNOWN,
    acceptance_value,
    bench_page,
    memory,
    rate,
    rate_in_full,
    rate_name,
)
from whisperport.apps.cli.console import (
    command_line,
    print_json,
    print_lines,
    print_next,
    print_table,
    shown_path,
    stages,
)
from whisperport.apps.cli.fields import field_options, field_values
from whisperport.apps.cli.given import Given, InputPath
from whisperport.apps.cli.model_option import bundle_of_model, chosen_bundle, model_option
from whisperport.apps.cli.shared_options import (
    RUN_OPTIONS,
    adapter_option,
    as_json,
    html_option,
    run_option,
    run_options_of,
    short_windows,
    threads,
    trust,
)
from whisperport.apps.cli.verb import Verb, option
from whisperport.build.export.bundle_cache import open_bundle
from whisperport.errors import AudioError, UsageError
from whisperport.program.bundle import Bundle
from whisperport.system.machine import usable_cores
from whisperport.system.outputs import write_page
from whisperport.system.progress import begin_stage
from whisperport.system.regular_file import read_short_text
from whisperport.verification import machine, versions

MEASURED = ("whisperport", "onnxruntime", "executorch", "torch", "numpy", "av")
LABEL_WIDTH = len(f"word error rate{NORMALIZED}")


@click.command(
    cls=Verb,
    short_help="Measure time, CPU time, memory and error rate of transcribing with bundles.",
    target_options=RUN_OPTIONS,
)
@click.argument("paths", nargs=-1, type=Given("bundle", "audio"), metavar="[BUNDLE]... [AUDIO]")
@field_options(BenchOptions, "repeat", "word_timestamps", group="Measurement")
@option(
    "--transcript",
    group="Error rate",
    type=InputPath(dir_okay=False),
    metavar="FILE",
    show_default="known for audio files that come with whisperport",
    help="UTF-8 text file with the correct transcript of AUDIO. Without it, the error rate is shown only "
    "for audio files that come with whisperport",
)
@field_options(BenchOptions, "unit", group="Error rate")
@html_option("where the time of each bundle goes, its error rate, and each program's limit")
@model_option
@as_json
@threads
@run_option
@short_windows
@adapter_option
@trust
def bench(
    paths: tuple[Path, ...],
    model: str | None,
    transcript: Path | None,
    html: Path | None,
    threads: int | None,
    run_options: tuple[str, ...],
    short_windows: bool | None,
    adapter: Path | None,
    trust: bool,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Measure time, CPU time, memory and error rate of transcribing AUDIO with one or more bundles.

    The time is split into loading, mel spectrogram, each program, and the rest (Python code). CPU time is
    user and system time of all threads of the process. The acceptance table shows the latencies of the
    programs, and compares tokens and error rates with the bundle's reference; times of an emulation on
    the CPU are not in it. Each BUNDLE is a folder. Several bundles run in turn, round by round, and are
    compared. With --model, the bundle of that model is one of them. Without AUDIO, an audio file that comes
    with whisperport is used.

    The limit of a program is the time in which this machine can read its weights and compute its matrix
    multiplications, in the program's precision; both are measured here. A program near its limit is faster
    only in fewer bits.

    \b
    Examples:
      $ whisperport bench --model default
      $ whisperport bench build/tiny-xnnpack talk.mp3 --transcript talk.txt
      $ whisperport bench build/tiny-xnnpack build/tiny-onnxruntime talk.mp3 --repeat 5
    """
    folders, audio = _bundles_and_audio(paths)
    options = BenchOptions(
        transcript=None if transcript is None else _text(transcript),
        run=run_options_of(
            threads, run_options, trust=trust, short_windows=short_windows, adapter=adapter
        ),
        **field_values(BenchOptions, chosen),
    )
    check_audio(str(audio))
    if folders:
        model_bundles = [] if model is None else [bundle_of_model(model)]
    else:
        model_bundles = [open_bundle(chosen_bundle(None, model))]
    with stages():
        begin_stage("checking the bundles")
        bundles = [*(Bundle.open(folder) for folder in folders), *model_bundles]
        results = run_bench(bundles, audio, options)
        begin_stage("measuring what this machine reads and multiplies")
        rates = measure_rates(threads)
    limits = [
        limits_of(bundle.manifest, result.medians, result.how, rates)
        for bundle, result in zip(bundles, results, strict=True)
    ]
    if as_json:
        print_json(_as_json(results, threads, rates, limits))
    else:
        for result, own in zip(results, limits, strict=True):
            _print_result(result)
            _print_limits(rates, own)
        if len(results) > 1:
            _print_comparison(results)
        print_lines(*_machine_lines(threads, options.repeat))
    if html is not None:
        where = "; ".join(_machine_lines(threads, options.repeat))
        following = command_line("verify", results[0].bundle)
        write_page(html, bench_page(results, rates, limits, where, following))
    print_next("verify", results[0].bundle)


def _bundles_and_audio(paths: Sequence[Path]) -> tuple[list[Path], Path]:
    """The bundles' folders, and the audio file; a shipped one if none is given.

    Raises:
        UsageError: a path does not exist.
        click.UsageError: more than one audio file is given.
    """
    folders = [path for path in paths if path.is_dir()]
    files = [path for path in paths if not path.is_dir()]
    for path in files:
        if not path.is_file():
            raise UsageError(
                f"{path} does not exist",
                why="expected the folder of a bundle, or an audio file",
                hint="`whisperport export CHECKPOINT --target NAME --out DIR` writes a bundle",
            )
    if len(files) > 1:
        raise click.UsageError(f"expected one audio file, got {' and '.join(map(str, files))}")
    return folders, files[0] if files else default_audio()


def _text(path: Path) -> str:
    try:
        return read_short_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise AudioError(f"cannot read the transcript {path}", why=str(error)) from error


def _print_result(result: BenchResult) -> None:
    """Print the times, the error rates, the real-time factor and the memory of one bundle."""
    print_lines(f"{result.name}: {shown_path(result.bundle)}", "")
    total_cpu_ms = sum(part.cpu_ms or 0.0 for part in result.parts)
    total = Part("total", 0, result.total_ms, None, total_cpu_ms)
    print_table(
        ("part", "calls", "ms per call", "ms", "share", "CPU ms"),
        [_cells(part, result.total_ms) for part in (*result.parts, total)],
    )
    for how in get_args(How):
        names = [name for name, known in result.how.items() if known == how]
        if names and how != "run here":
            print_lines(
                "",
                f"{how}, so that these times are not those of the device:",
                f"  {', '.join(names)}",
            )
    if result.uncached is not None:
        print_lines(
            "",
            f"{result.uncached.name}, the decoder without KV cache, takes "
            f"{result.uncached.median_ms:.2f} ms per token; no transcription uses it",
        )
    print_lines(
        "",
        *_rate_lines(result),
        f"{'real-time factor':<{LABEL_WIDTH}}  {result.real_time_factor:.4f}, for "
        f"{result.audio_s:.1f} s of audio ({result.audio}), without loading",
        f"{'CPU time':<{LABEL_WIDTH}}  {result.cpu_s_per_audio_s:.4f} s per second of audio, without "
        "loading",
        f"{'CPU time of the decoder':<{LABEL_WIDTH}}  {result.decoder_cpu_s_per_audio_s:.4f} s per "
        f"second of audio; of the encoder: {result.encoder_cpu_s_per_audio_s:.4f} s",
        f"{'peak memory':<{LABEL_WIDTH}}  {memory(result)}",
        "",
    )
    _print_acceptance(result.acceptance)


def _print_acceptance(rows: Sequence[AcceptanceRow]) -> None:
    """Print the acceptance table, then the limits and the reasons of failures."""
    print_table(
        ("acceptance", "value", "reference", "result", "evidence"),
        [
            (
                row.metric,
                acceptance_value(row.value, row.unit),
                "" if row.reference is None else acceptance_value(row.reference, row.unit),
                "" if row.passed is None else "pass" if row.passed else "FAIL",
                f"{row.evidence}: {', '.join(row.targets)}",
            )
            for row in rows
        ],
    )
    rules = dict.fromkeys(f"{row.metric}: {row.rule}" for row in rows if row.rule)
    print_lines("", *(line for rule in rules for line in wrap(rule, 100)))
    print_lines(*(f"FAIL: {row.metric}: {row.reason}" for row in rows if row.reason), "")


def _cells(part: Part, total_ms: float) -> tuple[str, ...]:
    return (
        part.name,
        str(part.calls) if part.calls else "",
        "" if part.median_ms is None else f"{part.median_ms:.2f}",
        f"{part.total_ms:.1f}",
        f"{part.total_ms / total_ms:.1%}",
        UNKNOWN if part.cpu_ms is None else f"{part.cpu_ms:.1f}",
    )


def _print_comparison(results: Sequence[BenchResult]) -> None:
    """Print the bundles side by side in ms, with the ratio of each to the first."""
    first = results[0]
    names = dict.fromkeys(part.name for result in results for part in result.parts)
    labels = [chr(ord("A") + number) for number in range(len(results))]
    ratios = [f"{label} / A" for label in labels[1:]]
    rows = [_compared(name, [_total(result, name) for result in results]) for name in names]
    rows.append(_compared("total", [result.total_ms for result in results]))
    rates = [result.real_time_factor for result in results]
    rows.append(_compared("real-time factor", rates, digits=4))
    used = [result.cpu_s_per_audio_s for result in results]
    rows.append(_compared("CPU s per audio s", used, digits=4))
    decoding = [result.decoder_cpu_s_per_audio_s for result in results]
    rows.append(_compared("of the decoder", decoding, digits=4))
    peaks = [result.peak_memory_mib for result in results]
    rows.append(_compared("peak memory, MiB", peaks))
    for name, errors in (
        (rate_name(first), [result.errors for result in results]),
        (f"{rate_name(first)}{NORMALIZED}", [result.whisper_errors for result in results]),
    ):
        rows.append((name, *map(rate, errors), *[""] * len(ratios)))
    for label, result in zip(labels, results, strict=True):
        print_lines(f"{label}: {shown_path(result.bundle)}")
    print_lines("")
    print_table(("ms", *labels, *ratios), rows)
    if len({result.text for result in results}) > 1:
        print_lines("", f"The bundles' transcripts of {first.audio} differ.")
    print_lines("")


def _compared(name: str, numbers: Sequence[float | None], digits: int = 1) -> tuple[str, ...]:
    base = numbers[0]
    shown = [UNKNOWN if n is None else f"{n:.{digits}f}" for n in numbers]
    ratios = [f"{n / base:.2f}" if n is not None and base else "" for n in numbers[1:]]
    return (name, *shown, *ratios)


def _total(result: BenchResult, name: str) -> float | None:
    return next((part.total_ms for part in result.parts if part.name == name), None)


def _print_limits(rates: Rates, limits: Sequence[Limit]) -> None:
    """Print how far each program is from what this machine can do."""
    if not limits:
        return
    print_table(
        ("program", "precision", "reads", "operations", "limit", "measured", "limit / measured"),
        [
            (
                limit.program,
                limit.precision,
                f"{1e3 * limit.work.read_gb:.1f} MB",
                f"{limit.work.gflop + limit.work.gop_8_bits:.2f} G",
                f"{limit.limit_ms:.2f} ms",
                f"{limit.ms:.2f} ms",
                f"{limit.share:.0%}",
            )
            for limit in limits
        ],
    )
    print_lines(
        "",
        f"this machine: reads {rates.read_gb:.1f} GB/s; multiplies {rates.gflop:.0f} GFLOP/s in float32, "
        f"{rates.gop_8_bits:.0f} GOP/s in 8 bits",
        "",
    )


def _machine_lines(threads: int | None, repeat: int) -> tuple[str, ...]:
    here = machine()
    installed = (f"{name} {version}" for name, version in versions(MEASURED).items())
    return (
        f"{here['cpu']}, {here['cores']} cores, {here['os']}, {here['python']}",
        ", ".join(installed),
        f"threads: {threads or usable_cores()}; median of {repeat} rounds by total time",
    )


def _as_json(
    results: Sequence[BenchResult],
    threads: int | None,
    rates: Rates,
    limits: Sequence[Sequence[Limit]],
) -> dict[str, object]:
    return {
        "results": [
            result.to_json() | {"limits": [asdict(limit) | {"share": limit.share} for limit in own]}
            for result, own in zip(results, limits, strict=True)
        ],
        "rates": asdict(rates),
        "threads": threads,
        "machine": machine(),
        "versions": versions(MEASURED),
    }


def _rate_lines(result: BenchResult) -> list[str]:
    """The plain error rate, and the one after Whisper's normalizer."""
    name = rate_name(result)
    rates = ((name, result.errors), (f"{name}{NORMALIZED}", result.whisper_errors))
    return [f"{label:<{LABEL_WIDTH}}  {rate_in_full(errors)}" for label, errors in rates]
