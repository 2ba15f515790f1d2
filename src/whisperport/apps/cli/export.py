"""`whisperport export`"""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from whisperport.apps.cli.console import (
    Argument,
    command_line,
    print_json,
    print_lines,
    print_next,
    print_table,
    stages,
)
from whisperport.apps.cli.evidence_words import emulated_targets, manifest_json, verified_words
from whisperport.apps.cli.fields import field_options, field_values
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.shared_options import (
    STALL_MIN,
    as_json,
    html_option,
    no_preflight,
    output_option,
    pairs,
    stall_after,
    target_name,
    target_option,
    targets_by,
    threads,
)
from whisperport.apps.cli.verb import FloatRange, TargetOptions, Verb, option
from whisperport.apps.cli.verify_page import verify_page
from whisperport.apps.cli.watchdog import run_watched
from whisperport.build.export.bundle_cache import cache_folder
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.export.exported import Exported
from whisperport.build.search.search import export_best
from whisperport.program.bundle import Manifest, ProgramEntry
from whisperport.program.bundle.writing import check_writable
from whisperport.program.dims import published_dims
from whisperport.program.window import WindowOptions
from whisperport.system.outputs import write_page
from whisperport.targets import RunOptions, get_target
from whisperport.verification import Report
from whisperport.verification.reference import Reference


@click.command(
    cls=Verb,
    short_help="Lower a checkpoint to a target, verify it, and write a bundle.",
    target_options=TargetOptions("--option", lambda target: target.lower_options),
)
@click.argument("checkpoint", type=Given("checkpoint", as_text=True))
@target_name(
    "Target that runs the programs",
    "auto measures every installed target that runs on this machine, in float32 and in fewer bits, and "
    "exports the fastest verified mix of targets and precisions; with --precision fp32, the fastest target "
    "in float32",
)
@field_options(ExportOptions, "placement", group="Target")
@option(
    "--precision",
    "precisions",
    group="Target",
    multiple=True,
    metavar="[PROGRAM=]NAME",
    show_default="the target's",
    help="Precision of all programs on --target, or of one program, such as fp16, w8 or encoder=w8a16; may "
    "be repeated. encoder=auto searches for the one with the fewest bits whose words are as good as "
    "float32's. A target's page lists its precisions, and so does the error for an unknown one",
)
@option(
    "--max-wer-increase",
    group="Target",
    type=FloatRange(0.01, 100),
    default=0.5,
    show_default="0.5",
    metavar="POINTS",
    help="With --precision encoder=auto: limit of the increase of the word error rate over float32's, in "
    "percentage points; the verification must show it with 95% confidence",
)
@option(
    "--batch",
    group="Target",
    type=click.Choice(["1", "2", "4", "8", "16"]),
    show_default="the target's: " + targets_by(lambda spec: str(spec.lowering.batch), unlisted="1"),
    help="Number of texts that the program step_B decodes together, such as speech chunks or beams; 1 "
    "exports no such program",
)
@field_options(ExportOptions, "uncached_decoder", group="Target")
@field_options(ExportOptions, "adapter", "adapters_as_inputs", group="Adapters")
@target_option
@field_options(ExportOptions, "calibration", group="Target")
@field_options(WindowOptions, group="Audio")
@field_options(ExportOptions, "windows", group="Audio")
@output_option(
    "DIR",
    "bundle",
    "Folder to write the bundle to; an existing bundle there is replaced",
    default="with --target auto, the user's cache, where --model CHECKPOINT finds it on CPUs of this kind; "
    "for other targets, --out is required",
)
@html_option(
    "the error of each program, and the words of each clip of the verification with its audio"
)
@as_json
@field_options(ExportOptions, "allow_unverified", "verify_with", "language", group="Verification")
@threads
@no_preflight
@stall_after(STALL_MIN)
def export(
    checkpoint: str,
    target: str,
    out: Path | None,
    max_wer_increase: float,
    stall_after: float,
    html: Path | None,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Lower a checkpoint to one target, verify it, and write a bundle.

    CHECKPOINT is a Hugging Face hub id or folder, a .pt file of openai-whisper, a folder of CTranslate2,
    a ggml file of whisper.cpp, a name such as tiny.en or turbo, or `default`: the small model that comes
    with whisperport. The programs of a bundle are encoder, cross_kv (cross-attention keys and values),
    prefill_4, prefill_64, step (one token with a KV cache) and align (word timestamps).

    \b
    Examples:
      $ whisperport export default --target onnxruntime --out build/default
      $ whisperport export openai/whisper-tiny --target xnnpack --out build/tiny-xnnpack
      $ whisperport export tiny.en --target onnxruntime --window 10 --out build/tiny-10s
      $ whisperport export tiny --target litert --precision w8 --out build/tiny-int8
      $ whisperport export tiny --target litert --out build/mine --verify-with talks
      $ whisperport export tiny -t litert --precision encoder=auto --verify-with talks --out build/a
      $ whisperport export tiny.en --target auto
    """
    options = _options(chosen)
    options.window.check(published_dims(checkpoint))  # here too: the child imports torch first
    if out is not None:
        check_writable(out)
    with stages():
        bundle: Exported = run_watched(
            partial(export_best, max_increase=max_wer_increase / 100),
            *(checkpoint, target, out, options),
            out=out or cache_folder() / "export",
            stall_s=60 * stall_after,
        )
    manifest = bundle.manifest
    following = _next_command(checkpoint, out, manifest)
    if as_json:
        timed = {"timed": _timed_json(bundle)} if bundle.timed else {}
        print_json({**manifest_json(manifest), **timed})
    else:
        if bundle.timed:
            _print_timed(bundle)
        print_table(
            ("program", "target", "delegated nodes", "not delegated", "status"),
            [
                (
                    entry.spec.name,
                    entry.target,
                    "" if entry.facts.delegated is None else str(entry.facts.delegated),
                    ", ".join(entry.facts.undelegated or ()) or "0",
                    manifest.status(entry.spec.name),
                )
                for entry in manifest.programs
            ],
        )
        for entry in manifest.programs:
            if entry.facts.notes:
                print_lines("", *(f"{entry.spec.name}: {note}" for note in entry.facts.notes))
        print_lines("", f"{bundle.folder if out is None else out}: {verified_words(manifest)}")
    if html is not None:
        report, reference = (
            Report.from_json(manifest.verification),
            Reference.from_arrays(bundle.reference()),
        )
        write_page(html, verify_page(report, reference, command_line(*following)))
    print_next(*following)


def _options(chosen: Mapping[str, Any]) -> ExportOptions:
    """The options of an export, from the values that click parsed."""
    precisions: tuple[str, ...] = chosen["precisions"]
    return ExportOptions(
        window=WindowOptions(**field_values(WindowOptions, chosen)),
        precision=_common_precision(precisions),
        precisions=pairs("--precision", tuple(p for p in precisions if "=" in p)),
        options=pairs("--option", chosen["target_options"]),
        batch=None if chosen["batch"] is None else int(chosen["batch"]),
        preflight=not chosen["no_preflight"],
        run=RunOptions(threads=chosen["threads"]),
        **field_values(ExportOptions, chosen),
    )


def _common_precision(precisions: tuple[str, ...]) -> str:
    """The precision that is given without a program; empty if there is none.

    Raises:
        click.BadParameter: more than one is given.
    """
    common_precisions = [precision for precision in precisions if "=" not in precision]
    if len(common_precisions) > 1:
        raise click.BadParameter("`--precision` is given twice without a program")
    return common_precisions[0] if common_precisions else ""


def _next_command(checkpoint: str, out: Path | None, manifest: Manifest) -> tuple[Argument, ...]:
    if out is None:
        return "transcribe", "talk.mp3", "--model", checkpoint
    emulated = [get_target(name) for name in emulated_targets(manifest)]
    if all(target.compiler is None for target in emulated):
        options = RunOptions().with_emulation(emulated).options
        chosen = [text for pair in options.items() for text in ("--run-option", "=".join(pair))]
        return "transcribe", "talk.mp3", "--bundle", out, *chosen
    if any(_is_calibrated(entry, manifest) for entry in manifest.programs):
        return "compile", out, "--calibration", "AUDIO_DIR"
    return "compile", out


def _is_calibrated(entry: ProgramEntry, manifest: Manifest) -> bool:
    """Whether the compiler of a program's target needs a calibration set for it."""
    compiler = get_target(entry.target).compiler
    if compiler is None:
        return False
    return compiler.calibration(entry.spec, manifest.dims, compiler.options()) is not None


def _print_timed(bundle: Exported) -> None:
    """Print a row per candidate with the times of its programs, and what is not used, with the reason."""
    programs = list(dict.fromkeys(timing.program for timing in bundle.timed))
    ms = {(timing.candidate, timing.program): f"{timing.ms:.2f} ms" for timing in bundle.timed}
    print_table(
        ("target", "precision", *programs, "chosen for"),
        [
            (
                candidate.target,
                candidate.precision,
                *(ms.get((candidate, program), "") for program in programs),
                ", ".join(group for group, chosen in bundle.choice.items() if chosen == candidate),
            )
            for candidate in dict.fromkeys(timing.candidate for timing in bundle.timed)
        ],
    )
    print_lines("", *(f"not used: {name}: {why}" for name, why in _rejected(bundle).items()))


def _timed_json(bundle: Exported) -> dict[str, Any]:
    """Return the times, and what is not used, as a JSON object."""
    return {
        "programs": [
            {"program": timing.program, **asdict(timing.candidate), "ms": timing.ms}
            for timing in bundle.timed
        ],
        "not_used": _rejected(bundle),
    }


def _rejected(bundle: Exported) -> dict[str, str]:
    """Return candidates and mixes that are not used -> the reason."""
    return {attempt.name: attempt.rejected for attempt in bundle.attempts if attempt.rejected}
