"""Options of `whisperport verify` for the inputs and outputs of a device, and the text of a diagnosis."""

from collections.abc import Mapping
from pathlib import Path

import click

from whisperport.bundle import Bundle
from whisperport.cli.console import Argument, print_lines, print_next, print_note
from whisperport.cli.fields import field_options
from whisperport.cli.given import InputPath
from whisperport.cli.options import run_option_arguments
from whisperport.cli.paths import OutputPath
from whisperport.cli.verb import option, together
from whisperport.diagnosis.causes import CauseCode
from whisperport.diagnosis.device_inputs import DeviceInputs
from whisperport.diagnosis.diagnosing import DiagnoseOptions
from whisperport.diagnosis.raw_files import read_quantization
from whisperport.diagnosis.result import Diagnosis, OutputDiagnosis
from whisperport.program.program_kind import ENCODER
from whisperport.targets import RunOptions, get_target
from whisperport.verification.compare import Comparison

DEVICE = "Output of a device"
device_options = together(
    option(
        "--device-inputs",
        group=DEVICE,
        type=OutputPath("folder"),
        metavar="DIR",
        help="Write the inputs of one program as headerless files for a device, with a manifest and the "
        "expected outputs, to a new folder. Nothing is verified",
    ),
    option(
        "--device-output",
        "device_outputs",
        group=DEVICE,
        multiple=True,
        metavar="[NAME=]PATH",
        help="Diagnose a file that a device wrote for these inputs, headerless or .npy; or a folder with a "
        "file NAME.bin for each output of the program; may be repeated with the names of outputs",
    ),
    field_options(DiagnoseOptions, "program", group=DEVICE),
    option(
        "--clip",
        "clips",
        group=DEVICE,
        multiple=True,
        metavar="NAME",
        show_default="all clips; for a device the first",
        help="Clip of the bundle's reference to verify with, or that the device is given; may be repeated, "
        "but not for --device-output",
    ),
    option(
        "--quantization",
        group=DEVICE,
        type=InputPath(),
        metavar="FILE",
        show_default="float32 values",
        help="JSON file that says how the device stores tensors: "
        '{"NAME": {"dtype": "int8", "scale": 0.05, "zero_point": 3}}',
    ),
    field_options(DiagnoseOptions, "precision", group=DEVICE),
    option(
        "--simulated",
        group=DEVICE,
        metavar="PATH",
        help="Output of the simulated quantization, as a file or folder like that of the device. It shows "
        "whether the quantization or the device is wrong",
    ),
    option(
        "--device-layers",
        group=DEVICE,
        type=InputPath(),
        metavar="DIR",
        help="Folder with the layers that the device dumped, NAME.npy or NAME.bin; requires "
        "--reference-layers",
    ),
    option(
        "--reference-layers",
        group=DEVICE,
        type=InputPath(),
        metavar="DIR",
        help="Folder with the same layers in float32, NAME.npy, that those of the device are "
        "compared with",
    ),
)


def diagnose_options(
    program: str,
    clips: tuple[str, ...],
    quantization: Path | None,
    precision: str | None,
    simulated: str | None,
    run: RunOptions,
) -> DiagnoseOptions:
    """Return the options of a diagnosis.

    Raises:
        UsageError: the file of the quantization cannot be read.
    """
    return DiagnoseOptions(
        program=program,
        clip=clips[0] if clips else "",
        quantization=read_quantization(quantization) if quantization else {},
        simulated=simulated,
        precision=precision,
        run=run,
    )


def outputs_of(values: tuple[str, ...]) -> str | Mapping[str, str]:
    """Return the values of `--device-output`: one path, or paths by the name of the output.

    Raises:
        click.BadParameter: several paths are given without names, or a name is given twice.
    """
    if len(values) == 1 and ("=" not in values[0] or Path(values[0]).exists()):
        return values[0]
    found: dict[str, str] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not equals or not name or not path or name in found:
            raise click.BadParameter(
                f"expected NAME=PATH with a new name, got {value!r}", param_hint="--device-output"
            )
        found[name] = path
    return found


def print_device_inputs(written: DeviceInputs, bundle: Path) -> None:
    """Print which files were written."""
    for clip in written.manifest["clips"]:
        for entry in clip["inputs"]:
            shape = " x ".join(map(str, entry["shape"]))
            print_lines(
                f"{written.folder / entry['file']}: {entry['dtype']}, {shape}, {entry['bytes']:,} bytes"
            )
    print_note(f"{written.folder / 'manifest.json'} lists the files and the expected outputs")
    program = () if written.program == "encoder" else ("--program", written.program)
    print_next("verify", bundle, *program, "--device-output", "OUTPUT.bin")


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the diagnosis of every output, and whether all of them passed."""
    print_lines(
        f"program {diagnosis.program}, clip {diagnosis.clip}",
        f"expected outputs: {diagnosis.expected_from or 'given'}",
    )
    for output in diagnosis.outputs:
        _print_output(output)
    if diagnosis.missing:
        print_lines("", f"no file was given for {', '.join(diagnosis.missing)}")
    if diagnosis.verdict:
        print_lines("", f"verdict: {diagnosis.verdict}")
    failed = ", ".join(output.output for output in diagnosis.outputs if not output.passed)
    result = f"FAIL: {failed}" if failed else "pass"
    print_lines("", f"{diagnosis.program}, clip {diagnosis.clip}: {result}")


def next_of_diagnosis(
    diagnosis: Diagnosis, bundle: Bundle, given: tuple[str, ...], options: DiagnoseOptions
) -> tuple[Argument, ...]:
    """Return the command that uses the output, or that finds out more about what is wrong with it."""
    program = () if diagnosis.program == ENCODER else ("--program", diagnosis.program)
    clip = ("--clip", options.clip) if options.clip else ()
    if all(output.passed or (output.fix and output.after) for output in diagnosis.outputs):
        if program or len(given) > 1:
            return ()
        path = given[0].removeprefix(f"{diagnosis.outputs[0].output}=")
        like = () if diagnosis.passed else ("--features-like", path)
        of_clip = ("--features-clip", options.clip) if options.clip and like else ()
        run = options.run.with_emulation(get_target(e.target) for e in bundle.manifest.programs)
        chosen = run_option_arguments(tuple(f"{k}={v}" for k, v in run.options.items()))
        files = ("--features", path, *like, *of_clip)
        return "transcribe", "--bundle", bundle.folder, *chosen, *files
    if diagnosis.causes and set(diagnosis.causes) <= {CauseCode.QUANTIZATION_ERROR}:
        if options.simulated is not None:
            return "sensitivity", "CHECKPOINT"
        outputs = [word for path in given for word in ("--device-output", path)]
        return "verify", bundle.folder, *program, *clip, *outputs, "--simulated", "SIMULATED.npy"
    return "verify", bundle.folder, *program, *clip, "--device-inputs", "NEW_DIR"


def _print_output(output: OutputDiagnosis) -> None:
    before, after = _measured(output.before), _measured(output.after)
    reason = output.before.reason
    result = "pass" if output.passed else "FAIL" if reason == before else f"FAIL: {reason}"
    print_lines("", f"{output.output}: {output.source}", f"  as it is: {before}")
    print_lines(f"  limit: {output.limit}", f"  {result}")
    if output.passed:
        return
    for finding in output.findings:
        print_lines("", f"  {finding.cause}", f"    {finding.sentence}")
        if finding.advice:
            print_lines(f"    {finding.advice}")
    if not output.findings:
        print_lines("", "  no cause explains this file; excluded:")
        print_lines(*(f"    {sentence}" for sentence in output.excluded))
    elif output.fix:
        still = "" if output.after else f"; it still fails: {output.after.reason}"
        what = "the file" if output.after else "how the file is stored"
        print_lines("", f"  corrected: {after}{still}")
        print_lines("", f"  these lines correct {what}:", "")
        print_lines(*(f"    {line}" for line in output.fix.split("\n")))
    else:
        if after != before:
            print_lines("", f"  apart from that: {after}")
        print_lines(
            "", "  nothing corrects this file: its values are wrong, not how they are stored"
        )


def _measured(comparison: Comparison) -> str:
    numbers = comparison.numbers()
    if numbers["sqnr_db"] != numbers["sqnr_db"]:
        return comparison.reason
    largest = numbers["max_relative"]
    return (
        f"SQNR {numbers['sqnr_db']:.1f} dB, cosine {numbers['cosine']:.5f}, largest error {largest:.1e} of "
        "the largest value"
    )
