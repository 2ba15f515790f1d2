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
    pairs,
    stall_after,
    target_option,
    threads_for_calibration,
    trust,
)
from whisperport.cli.verb import Verb, option
from whisperport.commands.watchdog import run_watched
from whisperport.compilation.compile import Compiled, CompiledProgram, CompileOptions
from whisperport.compilation.compile import compile as run_compile
from whisperport.targets import TARGETS
from whisperport.toolchain.interpreter import variable

TOOLCHAINS = list(dict.fromkeys(t.compiler.toolchain for t in TARGETS if t.compiler))
VARIABLES = ", ".join(variable(toolchain) for toolchain in TOOLCHAINS)
COMMANDS = {
    t.compiler.toolchain: t.compiler.sdk for t in TARGETS if t.compiler and t.compiler.is_command
}
STALL_MIN = 24 * 60  # fine-tuning without a GPU takes hours, and reports no progress meanwhile


def _commands() -> str:
    named = ", ".join(f"{toolchain}=sdk ({command})" for toolchain, command in COMMANDS.items())
    return f", for example {named}" if named else ""


@click.command(
    "compile",
    cls=Verb,
    short_help="Compile a bundle's programs with the vendor's compiler.",
    target_options=("--option", {t.spec.name: t.compiler.options for t in TARGETS if t.compiler}),
)
@click.argument("bundle", type=click.Path(path_type=Path))
@option(
    "--calibration",
    group="Calibration",
    type=click.Path(path_type=Path),
    metavar="PATH",
    show_default="those of the previous run, else the few that come with whisperport",
    help="Folder of audio files that resemble what the device will record, or an .npy file of log-mel "
    "spectrograms (clips, mel bins, frames of one window). The compiler derives quantization ranges "
    "from them",
)
@option(
    "--force",
    group="Calibration",
    is_flag=True,
    help="Compile even if the calibration audio is too short, silent or narrow-band, or the model is "
    "larger than the target's limit",
)
@target_option
@option(
    "--toolchain",
    "toolchains",
    group="Target",
    multiple=True,
    metavar="NAME=PATH",
    show_default=f"the environment variables {VARIABLES}, else this interpreter and PATH",
    help="Where a vendor's SDK is: the Python interpreter in which it is installed, for example "
    f"{TOOLCHAINS[0]}=sdk/bin/python, or the folder of an SDK that is a program"
    f"{_commands()}. NAME is one of: {', '.join(TOOLCHAINS)}. May be repeated",
)
@option(
    "--work",
    group="Output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    show_default="BUNDLE.compile",
    help="Folder for the results of finished stages. The next run uses them again; a stage runs again "
    "if its inputs changed, such as the calibration audio or an option",
)
@option(
    "--allow-unverified",
    group="Verification",
    is_flag=True,
    help="Write the compiled programs even if their outputs in the vendor's simulator disagree with the "
    "reference. Their evidence keeps the failed comparisons",
)
@as_json
@threads_for_calibration
@stall_after(STALL_MIN)
@trust
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
    allow_unverified: bool,
    as_json: bool,
) -> None:
    """Compile a bundle's programs with the vendor's compiler, and write the result into the bundle.

    The compiler runs in the Python interpreter in which it is installed, or as a program. The results of
    finished stages are kept in --work and used again. If the compiler is not installed on this machine,
    the command prepares --work and tells what to do: copy that folder to a machine that has the compiler,
    run the script compile.py in it there, copy the folder back, and run this command again.

    \b
    Examples:
      $ whisperport compile build/tiny-npu --calibration calibration_audio
      $ whisperport compile build/tiny-npu --calibration noisy_audio --force
    """
    options = CompileOptions(
        calibration=calibration,
        work=work,
        force=force,
        allow_unverified=allow_unverified,
        options=pairs("--option", target_options),
        toolchains=pairs("--toolchain", toolchains),
        threads=threads,
        trust=trust,
    )
    # `resolve` gives a bundle such as `.` its name.
    log = bundle.absolute().parent / f"{bundle.resolve().name}.compile"
    with stages() as progress:
        job = (run_compile, bundle, options)
        compiled = run_watched(
            *job, out=log, writes=bundle, progress=progress, stall_s=60 * stall_after
        )
    if as_json:
        print_json([_to_json(program) for program in compiled.programs])
    else:
        print_table(
            ("program", "target", "MB", "compiler", "calibration"),
            [
                (p.name, p.target, f"{p.bytes / 1e6:.1f}", p.compiler, _samples(p.samples))
                for p in compiled.programs
            ],
        )
        for program in filter(lambda one: one.emulation, compiled.programs):
            print_lines("", f"{program.name}, {_how_it_ran(program, compiled)}:")
            print_checks(program.emulation)
        print_lines("", f"{bundle}: compiled")
    for program in compiled.programs:
        failed = [check for check in program.emulation if not check.passed]
        if failed:
            print_warning(
                f"{program.name}: {len(failed)} of {len(program.emulation)} comparisons of the program "
                f"with its reference failed; {failed[0].what}: {failed[0].reason}"
            )
        for note in program.notes:
            print_warning(f"{program.name}: {note}")
        for layer, decibels in program.snr_db.items():
            print_note(
                f"{program.name}: the compiler measured {decibels:g} dB SNR at layer {layer}"
            )
    print_note(how_to_record(bundle, compiled.bundle.manifest))
    print_next("transcribe", "talk.mp3", "--bundle", bundle)


def _how_it_ran(program: CompiledProgram, compiled: Compiled) -> str:
    """Return, in words, what the vendor's tool ran: the compiled file, or the quantized program."""
    kinds = {one.kind for one in compiled.bundle.manifest.evidence(program.name)}
    if "simulated" in kinds:
        return "compiled, run by the vendor's simulator"
    return "quantized, run by the vendor's emulator"


def _samples(samples: int) -> str:
    return f"{samples} samples" if samples else "not needed"


def _to_json(program: CompiledProgram) -> dict[str, object]:
    emulation = [check_to_json(check) for check in program.emulation]
    return {**asdict(program), "snr_db": dict(program.snr_db), "emulation": emulation}
