"""`whisperport bench`"""

from collections.abc import Sequence
from pathlib import Path

import click

from whisperport.bench.transcribing import (
    BenchOptions,
    BenchResult,
    Part,
    default_audio,
    run_bench,
)
from whisperport.bundle import Bundle
from whisperport.cli.console import (
    print_json,
    print_lines,
    print_next,
    print_table,
    shown_path,
    stages,
)
from whisperport.cli.options import (
    as_json,
    run_option,
    run_options_help,
    run_options_of,
    threads,
    trust,
)
from whisperport.errors import AudioError, UsageError
from whisperport.ranges import MAX_REPEAT
from whisperport.transcription import default_bundle
from whisperport.verification import TextErrors, Unit, machine, versions

MEASURED = ("whisperport", "onnxruntime", "executorch", "torch", "numpy", "av")
UNKNOWN = "not measured"
NORMALIZED = " (Whisper normalizer)"
LABEL_WIDTH = len(f"word error rate{NORMALIZED}")


@click.command(
    short_help="Split the time of transcribing into its parts, beside the accuracy.",
    epilog=run_options_help(),
)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[BUNDLE]... [AUDIO]")
@click.option(
    "--repeat",
    type=click.IntRange(1, MAX_REPEAT),
    default=3,
    show_default=True,
    help="Number of rounds; the result of the median round is shown",
)
@click.option("--words", is_flag=True, help="Times of words as well, by the `align` program")
@click.option(
    "--transcript",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="What is said in AUDIO  [default: known for shipped recordings]",
)
@click.option(
    "--errors-in",
    "unit",
    type=click.Choice(["words", "characters"]),
    help="What an error rate counts  [default: words; characters in languages without spaces]",
)
@threads
@run_option
@trust
@as_json
def bench(
    paths: tuple[Path, ...],
    repeat: int,
    words: bool,
    transcript: Path | None,
    unit: Unit | None,
    threads: int | None,
    run_options: tuple[str, ...],
    trust: bool,
    as_json: bool,
) -> None:
    """Split the time of transcribing AUDIO into load, mel, every program, and Python.

    A BUNDLE is a folder, AUDIO a file. Several bundles take turns and are compared. Without any, the
    model and a recording that come with whisperport are taken.

    \b
    Example:
      $ whisperport bench build/tiny-xnnpack build/tiny-onnxruntime talk.mp3
    """
    folders, recording = _sorted_out(paths)
    options = BenchOptions(
        repeat=repeat,
        word_timestamps=words,
        transcript=None if transcript is None else _text(transcript),
        unit=unit,
        run=run_options_of(threads, run_options, trust=trust),
    )
    with stages() as progress:
        progress("checking the bundles")
        bundles = [Bundle.open(folder) for folder in folders]
        results = run_bench(bundles, recording, options, progress=progress)
    if as_json:
        print_json(_as_json(results, threads))
    else:
        for result in results:
            _print_result(result)
        if len(results) > 1:
            _print_comparison(results)
        _print_where(threads, repeat)
    print_next("verify", results[0].bundle)


def _sorted_out(paths: Sequence[Path]) -> tuple[list[Path], Path]:
    """Bundles and the recording, or what stands for them."""
    folders = [path for path in paths if path.is_dir()]
    files = [path for path in paths if not path.is_dir()]
    for path in files:
        if not path.is_file():
            raise UsageError(
                f"there is nothing at {path}",
                why="a bundle is a folder, and a recording a file",
                hint="`whisperport export CHECKPOINT --out DIR` writes a bundle",
            )
    if len(files) > 1:
        raise click.UsageError(f"expected one recording, got {' and '.join(map(str, files))}")
    return folders or [default_bundle()], files[0] if files else default_audio()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AudioError(f"cannot read the transcript {path}", why=str(error)) from error


def _print_result(result: BenchResult) -> None:
    """Where the time of one bundle goes, and what came of it."""
    print_lines(f"{result.name}: {shown_path(result.bundle)}", "")
    whole = Part("whole", 0, result.total_ms, None)
    print_table(
        ("part", "calls", "ms a call", "ms", "share"),
        [_cells(part, result.total_ms) for part in (*result.parts, whole)],
    )
    if result.uncached is not None:
        print_lines(
            "",
            f"{result.uncached.name}, the decoder without KV cache, takes "
            f"{result.uncached.median_ms:.2f} ms per token; transcribing does not use it",
        )
    print_lines(
        "",
        *_rate_lines(result),
        f"{'real-time factor':<{LABEL_WIDTH}}  {result.real_time_factor:.4f}, of "
        f"{result.audio_s:.1f} s of sound ({result.audio}), loading aside",
        f"{'peak memory':<{LABEL_WIDTH}}  {_memory(result)}",
        "",
    )


def _cells(part: Part, total_ms: float) -> tuple[str, ...]:
    return (
        part.name,
        str(part.calls) if part.calls else "",
        "" if part.median_ms is None else f"{part.median_ms:.2f}",
        f"{part.total_ms:.1f}",
        f"{part.total_ms / total_ms:.1%}",
    )


def _print_comparison(results: Sequence[BenchResult]) -> None:
    """Milliseconds side by side, and for all but the first how many times the first's."""
    first = results[0]
    names = dict.fromkeys(part.name for result in results for part in result.parts)
    labels = [chr(ord("A") + number) for number in range(len(results))]
    ratios = [f"{label} / A" for label in labels[1:]]
    rows = [_compared(name, [_total(result, name) for result in results]) for name in names]
    rows.append(_compared("whole", [result.total_ms for result in results]))
    rates = [result.real_time_factor for result in results]
    rows.append(_compared("real-time factor", rates, digits=4))
    peaks = [result.peak_memory_mib for result in results]
    rows.append(_compared("peak memory, MiB", peaks))
    for name, errors in (
        (_rate_name(first), [result.errors for result in results]),
        (f"{_rate_name(first)}{NORMALIZED}", [result.whisper_errors for result in results]),
    ):
        rows.append((name, *map(_rate, errors), *[""] * len(ratios)))
    for label, result in zip(labels, results, strict=True):
        print_lines(f"{label}: {shown_path(result.bundle)}")
    print_lines("")
    print_table(("ms", *labels, *ratios), rows)
    if len({result.text for result in results}) > 1:
        print_lines("", f"The bundles did not understand the same in {first.audio}.")
    print_lines("")


def _compared(name: str, numbers: Sequence[float | None], digits: int = 1) -> tuple[str, ...]:
    base = numbers[0]
    shown = [UNKNOWN if n is None else f"{n:.{digits}f}" for n in numbers]
    ratios = [f"{n / base:.2f}" if n is not None and base else "" for n in numbers[1:]]
    return (name, *shown, *ratios)


def _total(result: BenchResult, name: str) -> float | None:
    return next((part.total_ms for part in result.parts if part.name == name), None)


def _print_where(threads: int | None, repeat: int) -> None:
    here = machine()
    installed = (f"{name} {version}" for name, version in versions(MEASURED).items())
    print_lines(
        f"{here['cpu']}, {here['cores']} cores, {here['os']}, {here['python']}",
        ", ".join(installed),
        f"threads: {threads or 'as the runtime chooses'}; median of {repeat} rounds by time",
    )


def _as_json(results: Sequence[BenchResult], threads: int | None) -> dict[str, object]:
    return {
        "results": [result.to_json() for result in results],
        "threads": threads,
        "machine": machine(),
        "versions": versions(MEASURED),
    }


def _rate_name(result: BenchResult) -> str:
    """Of bundles that are compared, all have the same."""
    unit = "words" if result.errors is None else result.errors.unit
    return f"{unit.removesuffix('s')} error rate"


def _rate_lines(result: BenchResult) -> list[str]:
    """The plain error rate, and the one after Whisper's normalizer."""
    name = _rate_name(result)
    rates = ((name, result.errors), (f"{name}{NORMALIZED}", result.whisper_errors))
    return [f"{label:<{LABEL_WIDTH}}  {_rate_in_full(errors)}" for label, errors in rates]


def _rate_in_full(errors: TextErrors | None) -> str:
    if errors is None:
        return f"{UNKNOWN}: what is said is not known; give it with --transcript"
    return f"{_rate(errors)} ({errors.errors} errors in {errors.length} {errors.unit})"


def _rate(errors: TextErrors | None) -> str:
    return UNKNOWN if errors is None else f"{errors.rate:.1%}"


def _memory(result: BenchResult) -> str:
    if result.peak_memory_mib is None:
        return UNKNOWN
    return f"{result.peak_memory_mib:.0f} MiB, of a process that does nothing else"
