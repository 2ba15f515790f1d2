"""`whisperport diagnose`"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from whisperport.apps.cli.console import (
    Argument,
    print_json,
    print_lines,
    print_next,
    print_note,
    stages,
)
from whisperport.apps.cli.fields import field_options, field_values
from whisperport.apps.cli.given import Given, InputPath
from whisperport.apps.cli.paths import OutputPath
from whisperport.apps.cli.shared_options import (
    RUN_OPTIONS,
    as_json,
    html_option,
    run_option,
    run_option_arguments,
    run_options_of,
    threads,
    trust,
)
from whisperport.apps.cli.verb import Verb, option
from whisperport.apps.cli.verify_page import layers_page
from whisperport.program.bundle import MANIFEST, Bundle
from whisperport.program.json_records import to_json
from whisperport.program.program_kind import ENCODER
from whisperport.system.outputs import write_page
from whisperport.targets import RunOptions, get_target
from whisperport.verification.array_comparison import Comparison
from whisperport.verification.diagnosis.causes import CauseCode
from whisperport.verification.diagnosis.device_inputs import DeviceInputs, write_device_inputs
from whisperport.verification.diagnosis.diagnosing import DiagnoseOptions
from whisperport.verification.diagnosis.diagnosing import diagnose as run_diagnose
from whisperport.verification.diagnosis.layers import compare_layers, layer_sentences
from whisperport.verification.diagnosis.raw_files import read_quantization
from whisperport.verification.diagnosis.result import Diagnosis, OutputDiagnosis

DEVICE = "Device"


@click.command(
    cls=Verb,
    short_help="Name the causes for which a device's output differs from the expected one.",
    target_options=RUN_OPTIONS,
)
@click.argument("expected", metavar="BUNDLE|LAYERS", type=Given("bundle"))
@click.argument("outputs", nargs=-1, metavar="[[NAME=]OUTPUT]...")
@option(
    "--write-inputs",
    group=DEVICE,
    type=OutputPath("folder"),
    metavar="DIR",
    help="In place of OUTPUT, write the inputs of the program as headerless files for the device, with a "
    "manifest and the expected outputs, to a new folder",
)
@field_options(DiagnoseOptions, "program", group=DEVICE)
@option(
    "--clip",
    "clips",
    group=DEVICE,
    multiple=True,
    metavar="NAME",
    show_default="the first",
    help="Clip of the bundle's reference that the device is given; may be repeated with --write-inputs",
)
@option(
    "--quantization",
    group=DEVICE,
    type=InputPath(),
    metavar="FILE",
    show_default="float32 values",
    help="JSON file that says how the device stores tensors: "
    '{"NAME": {"dtype": "int8", "scale": 0.05, "zero_point": 3}}',
)
@field_options(DiagnoseOptions, "precision", group=DEVICE)
@option(
    "--simulated",
    group=DEVICE,
    metavar="PATH",
    help="Output of the simulated quantization, as a file or folder like that of the device. It shows "
    "whether the quantization or the device is wrong",
)
@html_option("the error of each dumped layer. Only for LAYERS")
@as_json
@threads
@run_option
@trust
def diagnose(
    expected: Path,
    outputs: tuple[str, ...],
    write_inputs: Path | None,
    html: Path | None,
    as_json: bool,
    threads: int | None,
    run_options: tuple[str, ...],
    trust: bool,
    **chosen: Any,
) -> None:
    """Compare the output of a device with the expected one, and name the causes of a difference.

    The device runs one program of the BUNDLE on the inputs that --write-inputs writes. OUTPUT is the file
    that it wrote, headerless or .npy, or a folder with a file NAME.bin for each output of the program.
    Causes are dtype, scale and zero point, layout, padding, window, spectrogram, stale buffer, quantization
    error and others. The exit status is 1 if an output is not as expected.

    If layers were dumped, LAYERS is a folder with the layers in float32, NAME.npy, and OUTPUT the folder
    of the device's layers, NAME.npy or NAME.bin: the layer where the error begins is named.

    \b
    Examples:
      $ whisperport diagnose build/small --write-inputs inputs
      $ whisperport diagnose build/small output.bin
      $ whisperport diagnose build/small outputs/ --program step
      $ whisperport diagnose layers-float32/ layers-device/
    """
    if bool(outputs) == bool(write_inputs):
        raise click.UsageError("give either OUTPUT, to diagnose it, or --write-inputs")
    if _is_layers(expected) and len(outputs) == 1:
        _diagnose_layers(expected, Path(outputs[0]), html, as_json=as_json)
        return
    if html is not None:
        raise click.UsageError("--html shows LAYERS only")
    options = _options(chosen, run_options_of(threads, run_options, trust=trust))
    if write_inputs is not None:
        with stages():
            written = write_device_inputs(expected, write_inputs, options, clips=chosen["clips"])
        if as_json:
            print_json(written.to_json())
        else:
            print_device_inputs(written, expected)
        return
    bundle = Bundle.open(expected)
    with stages():
        diagnosis = run_diagnose(bundle, _outputs(outputs), options)
    if as_json:
        print_json(diagnosis.to_json())
    else:
        print_diagnosis(diagnosis)
    if following := next_of_diagnosis(diagnosis, bundle, outputs, options):
        print_next(*following)
    if not diagnosis:
        sys.exit(1)


def _options(chosen: dict[str, Any], run: RunOptions) -> DiagnoseOptions:
    """The options object made of the chosen values, by parameter name, as click parsed them.

    Raises:
        UsageError: the file of the quantization cannot be read.
    """
    clips, quantization = chosen["clips"], chosen["quantization"]
    return DiagnoseOptions(
        clip=clips[0] if clips else "",
        quantization=read_quantization(quantization) if quantization else {},
        simulated=chosen["simulated"],
        run=run,
        **field_values(DiagnoseOptions, chosen),
    )


def _outputs(values: tuple[str, ...]) -> str | Mapping[str, str]:
    """Return one path, or paths by the name of the output.

    Raises:
        click.BadParameter: several paths are given without names, or a name is given twice.
    """
    if len(values) == 1 and ("=" not in values[0] or Path(values[0]).exists()):
        return values[0]
    paths: dict[str, str] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not equals or not name or not path or name in paths:
            raise click.BadParameter(
                f"expected NAME=PATH with a new name, got {value!r}", param_hint="OUTPUT"
            )
        paths[name] = path
    return paths


def _is_layers(folder: Path) -> bool:
    """Return whether a folder holds arrays of layers, and is no bundle."""
    return not (folder / MANIFEST).is_file() and any(folder.glob("*.npy"))


def _diagnose_layers(reference: Path, device: Path, html: Path | None, *, as_json: bool) -> None:
    """Compare the layers that a device dumped with those in float32."""
    with stages():
        layers = compare_layers(device, reference)
    if as_json:
        print_json(to_json(layers))
    else:
        print_lines(*layer_sentences(layers))
    if html is not None:
        write_page(html, layers_page(layers))


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
    print_next("diagnose", bundle, "OUTPUT.bin", *program)


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
    diagnosis: Diagnosis, bundle: Bundle, files: tuple[str, ...], options: DiagnoseOptions
) -> tuple[Argument, ...]:
    """Return the command that uses the output, or that finds out more about what is wrong with it."""
    program = () if diagnosis.program == ENCODER else ("--program", diagnosis.program)
    clip = ("--clip", options.clip) if options.clip else ()
    if all(output.passed or (output.fix and output.after) for output in diagnosis.outputs):
        if program or len(files) > 1:
            return ()
        path = files[0].removeprefix(f"{diagnosis.outputs[0].output}=")
        like = () if diagnosis.passed else ("--features-like", path)
        of_clip = ("--features-clip", options.clip) if options.clip and like else ()
        run = options.run.with_emulation(get_target(e.target) for e in bundle.manifest.programs)
        chosen = run_option_arguments(tuple(f"{k}={v}" for k, v in run.options.items()))
        features = ("--features", path, *like, *of_clip)
        return "transcribe", "--bundle", bundle.folder, *chosen, *features
    if diagnosis.causes and set(diagnosis.causes) <= {CauseCode.QUANTIZATION_ERROR}:
        if options.simulated is not None:
            return "sensitivity", "CHECKPOINT"
        return "diagnose", bundle.folder, *files, *program, *clip, "--simulated", "SIMULATED.npy"
    return "diagnose", bundle.folder, *program, *clip, "--write-inputs", "NEW_DIR"


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
