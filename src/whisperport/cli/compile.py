"""`whisperport compile`"""

from dataclasses import asdict
from pathlib import Path
from typing import Literal, cast, get_args

import click

from whisperport.cli.console import (
    print_json,
    print_lines,
    print_next,
    print_note,
    print_table,
    stages,
)
from whisperport.cli.options import as_json, threads, trust
from whisperport.compiling import CompileOptions, compile_bundle
from whisperport.targets.hailo.model_script import ScriptOptions, SixteenBit
from whisperport.watchdog import MAX_STALL_S, run_watched

STALL_MIN = 24 * 60  # fine-tuning without a GPU takes hours, and says nothing meanwhile
LEVELS = ("0", "1", "2", "max")


@click.command("compile", short_help="Compile a bundle's programs by the vendor's own compiler.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="A folder of recordings as the device will hear them, or spectrograms as .npy  "
    "[default: as before, else the few that come with whisperport]",
)
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where finished stages are kept  [default: BUNDLE.compile]",
)
@click.option("--force", is_flag=True, help="Compile with too few or with silent recordings")
@click.option(
    "--optimization-level",
    type=click.IntRange(0, 4),
    default=ScriptOptions().optimization_level,
    show_default=True,
    help="What the compiler does against the loss of precision",
)
@click.option(
    "--finetune/--no-finetune",
    default=True,
    show_default=True,
    help="Train the quantized weights; takes a GPU, or hours",
)
@click.option(
    "--epochs",
    type=click.IntRange(1, 10_000),
    help="Number of fine-tuning epochs  [default: the number in Hailo's published recipe]",
)
@click.option(
    "--sixteen-bit",
    type=click.Choice(get_args(SixteenBit)),
    default="adds",
    show_default=True,
    help="What is computed in 16 bits; the list of layers fits Hailo's own graphs only",
)
@click.option(
    "--compiler-optimization-level",
    type=click.Choice(LEVELS),
    help="How long it searches for a faster placement  [default: the compiler's own]",
)
@click.option(
    "--stall-after",
    type=click.FloatRange(0, MAX_STALL_S / 60, min_open=True),
    default=STALL_MIN,
    show_default=True,
    metavar="MINUTES",
    help="Stop if one stage takes longer than this",
)
@threads
@trust
@as_json
def compile_verb(
    bundle: Path,
    calibration: Path | None,
    work: Path | None,
    force: bool,
    optimization_level: int,
    finetune: bool,
    epochs: int | None,
    sixteen_bit: SixteenBit,
    compiler_optimization_level: str | None,
    stall_after: float,
    threads: int | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Compile a bundle for a Hailo chip, in stages that are kept, and put the result into it.

    Hailo's Dataflow Compiler does it, where it is installed; where it is not, a folder and a script are
    left for a machine that has it.

    \b
    Example:
      $ whisperport compile build/tiny-hailo8l --calibration recordings
    """
    script = ScriptOptions(
        optimization_level=optimization_level,
        finetune=finetune,
        epochs=epochs,
        sixteen_bit=sixteen_bit,
        compiler_optimization_level=_level(compiler_optimization_level),
    )
    options = CompileOptions(
        calibration=calibration,
        work=work,
        force=force,
        script=script,
        threads=threads,
        trust=trust,
    )
    log = (
        bundle.absolute().parent / f"{bundle.resolve().name}.compile"
    )  # of `.` too, which has no name
    with stages() as say:
        job = (compile_bundle, bundle, options)
        compiled = run_watched(*job, out=log, writes=bundle, say=say, stall_s=60 * stall_after)
    if as_json:
        print_json([asdict(program) for program in compiled.programs])
    else:
        print_table(
            ("program", "target", "MB", "compiler", "calibrated with"),
            [
                (p.name, p.target, f"{p.bytes / 1e6:.1f}", p.compiler, f"{p.samples} windows")
                for p in compiled.programs
            ],
        )
        print_lines("", f"{bundle}: compiled")
    print_note("it was not run here: copy it to the board, and verify and transcribe there")
    print_next("transcribe", "talk.mp3", "--bundle", bundle)


def _level(asked: str | None) -> Literal[0, 1, 2, "max"] | None:
    if asked is None or asked == "max":
        return cast("Literal['max'] | None", asked)
    return cast(Literal[0, 1, 2], int(asked))
