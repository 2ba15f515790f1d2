"""`whisperport compile`"""

from pathlib import Path
from typing import Any

import click

from whisperport.apps.cli.checks_table import print_checks
from whisperport.apps.cli.console import (
    print_json,
    print_lines,
    print_next,
    print_note,
    print_table,
    print_warning,
    stages,
)
from whisperport.apps.cli.evidence_words import how_to_record
from whisperport.apps.cli.fields import field_options, field_values
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.shared_options import (
    as_json,
    pairs,
    stall_after,
    target_option,
    threads_for_calibration,
    trust,
)
from whisperport.apps.cli.verb import TargetOptions, Verb
from whisperport.apps.cli.watchdog import run_watched
from whisperport.build.compile.compile import compile as run_compile
from whisperport.build.compile.compile_options import CompileOptions
from whisperport.program.json_records import members

STALL_MIN = 24 * 60  # fine-tuning without a GPU takes hours, and reports no progress meanwhile


# What the vendor's tool ran for the comparison, in words.
HOW_IT_RAN = {
    "simulated": "compiled, run by the vendor's simulator",
    "emulated": "quantized, run by the vendor's emulator",
}


@click.command(
    "compile",
    cls=Verb,
    short_help="Compile a bundle's programs, or one program, with the vendor's compiler.",
    target_options=TargetOptions(
        "--option", lambda target: target.compiler.options if target.compiler else None
    ),
)
@click.argument("path", metavar="BUNDLE|FILE", type=Given("bundle", "program"))
@field_options(CompileOptions, "calibration", "inputs", "force", group="Calibration")
@field_options(CompileOptions, "target", "precision", group="Target")
@target_option
@field_options(CompileOptions, "toolchains", group="Target")
@field_options(CompileOptions, "out", "work", group="Output")
@field_options(CompileOptions, "allow_unverified", group="Verification")
@as_json
@threads_for_calibration
@stall_after(STALL_MIN)
@trust
def compile_verb(
    path: Path,
    target_options: tuple[str, ...],
    stall_after: float,
    threads: int | None,
    trust: bool,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Compile a bundle's programs, or one program in a FILE, with the vendor's compiler.

    The result is written into the bundle, or to --out. A FILE is what `whisperport lower` wrote, or any
    program of the format that the target's compiler reads.

    The compiler runs in the Python interpreter in which it is installed, or as a program. The results of
    finished stages are kept in --work and used again. If the compiler is not installed on this machine,
    the command prepares --work and tells what to do: copy that folder to a machine that has the compiler,
    run the script compile.py in it there, copy the folder back, and run this command again.

    \b
    Examples:
      $ whisperport compile build/tiny-npu --calibration calibration_audio
      $ whisperport compile build/tiny-npu --calibration noisy_audio --force
      $ whisperport compile decoder.onnx --target rk3588 --inputs calls
    """
    options = CompileOptions(
        options=pairs("--option", target_options),
        threads=threads,
        trust=trust,
        **field_values(CompileOptions, chosen),
    )
    out = options.out or path
    # `resolve` gives a bundle such as `.` its name.
    log = out.absolute().parent / f"{out.resolve().name}.compile"
    with stages():
        job = (run_compile, path, options)
        compiled = run_watched(*job, out=log, writes=out, stall_s=60 * stall_after)
    if as_json:
        print_json([members(program) for program in compiled.programs])
    else:
        print_table(
            ("program", "target", "MB", "compiler", "calibration"),
            [
                (
                    *(p.name, p.target, f"{p.bytes / 1e6:.1f}", p.compiler),
                    f"{p.samples} samples" if p.samples else "not needed",
                )
                for p in compiled.programs
            ],
        )
        for program in filter(lambda p: p.emulation, compiled.programs):
            print_lines("", f"{program.name}, {HOW_IT_RAN[program.ran]}:")
            print_checks(program.emulation)
        print_lines("", f"{compiled.folder}: compiled")
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
    if compiled.bundle is not None:
        print_note(how_to_record(compiled.folder, compiled.bundle.manifest))
        print_next("transcribe", "talk.mp3", "--bundle", compiled.folder)
