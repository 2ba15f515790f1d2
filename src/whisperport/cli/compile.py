"""`whisperport compile`"""

from dataclasses import asdict
from pathlib import Path

import click

from whisperport.bundle.evidence_json import check_to_json
from whisperport.cli.checks_table import print_checks
from whisperport.cli.console import (
    print_json,
    print_lines,
    print_next,
    print_note,
    print_table,
    print_warning,
    stages,
)
from whisperport.cli.evidence_words import how_to_record
from whisperport.cli.options import (
    as_json,
    options_help,
    pairs,
    target_option,
    threads,
    trust,
)
from whisperport.compiling import CompiledProgram, CompileOptions
from whisperport.compiling import compile as run_compile
from whisperport.targets import TARGETS
from whisperport.watchdog import MAX_STALL_S, run_watched

STALL_MIN = 24 * 60  # fine-tuning without a GPU takes hours, and says nothing meanwhile


@click.command(
    "compile",
    short_help="Compile a bundle's programs by the vendor's own compiler.",
    epilog=options_help({t.spec.name: t.compiler.options for t in TARGETS if t.compiler}),
)
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
@target_option
@click.option(
    "--toolchain",
    "toolchains",
    multiple=True,
    metavar="NAME=PYTHON",
    help="The Python interpreter that has a vendor's SDK; may be repeated  [default: "
    "WHISPERPORT_TOOLCHAIN_NAME, else this interpreter]",
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
    target_options: tuple[str, ...],
    toolchains: tuple[str, ...],
    stall_after: float,
    threads: int | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Compile a bundle's programs by the vendor's own compiler, and write the result into the bundle.

    The compiler runs in the Python interpreter that has it, in stages that are kept. Where it is not
    installed, a folder and a script are left for a machine that has it.

    \b
    Example:
      $ whisperport compile build/tiny-npu --calibration recordings
    """
    options = CompileOptions(
        calibration=calibration,
        work=work,
        force=force,
        options=pairs("--option", target_options),
        toolchains=pairs("--toolchain", toolchains),
        threads=threads,
        trust=trust,
    )
    log = (
        bundle.absolute().parent / f"{bundle.resolve().name}.compile"
    )  # of `.` too, which has no name
    with stages() as progress:
        job = (run_compile, bundle, options)
        compiled = run_watched(
            *job, out=log, writes=bundle, progress=progress, stall_s=60 * stall_after
        )
    if as_json:
        print_json([_to_json(program) for program in compiled.programs])
    else:
        print_table(
            ("program", "target", "MB", "compiler", "calibrated with"),
            [
                (p.name, p.target, f"{p.bytes / 1e6:.1f}", p.compiler, f"{p.samples} samples")
                for p in compiled.programs
            ],
        )
        for program in filter(lambda one: one.emulation, compiled.programs):
            print_lines("", f"{program.name}, quantized, in the vendor's emulator:")
            print_checks(program.emulation)
        print_lines("", f"{bundle}: compiled")
    for program in compiled.programs:
        failed = [check for check in program.emulation if not check.passed]
        if failed:
            print_warning(
                f"{program.name}: {len(failed)} of {len(program.emulation)} comparisons of the quantized "
                f"program failed; {failed[0].what}: {failed[0].reason}"
            )
        for layer, decibels in program.snr_db.items():
            print_note(f"{program.name}: the compiler measured {decibels:g} dB SNR at {layer}")
    print_note(how_to_record(bundle, compiled.bundle.manifest))
    print_next("transcribe", "talk.mp3", "--bundle", bundle)


def _to_json(program: CompiledProgram) -> dict[str, object]:
    emulation = [check_to_json(check) for check in program.emulation]
    return {**asdict(program), "snr_db": dict(program.snr_db), "emulation": emulation}
