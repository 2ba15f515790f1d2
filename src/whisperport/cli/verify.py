"""`whisperport verify`"""

import sys
from pathlib import Path

import click

from whisperport.bundle import Bundle
from whisperport.cli.checks_table import print_checks, print_failures
from whisperport.cli.console import (
    Argument,
    command_line,
    print_json,
    print_lines,
    print_next,
    print_note,
    print_warning,
    stages,
)
from whisperport.cli.device_output import (
    device_options,
    diagnose_options,
    next_of_diagnosis,
    outputs_of,
    print_device_inputs,
    print_diagnosis,
)
from whisperport.cli.evidence_words import verified_words
from whisperport.cli.given import Given
from whisperport.cli.options import (
    RUN_OPTIONS,
    as_json,
    html_option,
    run_option,
    run_option_arguments,
    run_options_of,
    threads,
    trust,
)
from whisperport.cli.provider_report import print_provider_report
from whisperport.cli.verb import Verb, option
from whisperport.cli.verify_page import layers_page, verify_page
from whisperport.diagnosis.device_inputs import write_device_inputs
from whisperport.diagnosis.diagnosing import diagnose
from whisperport.diagnosis.layers import compare_layers, layer_sentences
from whisperport.errors import UsageError
from whisperport.providers import verify_each_program
from whisperport.system.outputs import write_page
from whisperport.targets import RunOptions
from whisperport.verification.bundle_check import verify as run_verify
from whisperport.verification.record_evidence import verify_and_record
from whisperport.verification.reference import Reference


@click.command(
    cls=Verb,
    short_help="Run a bundle and compare its outputs with its reference.",
    target_options=RUN_OPTIONS,
)
@click.argument("bundle", type=Given("bundle"))
@option(
    "--record",
    group="Verification",
    is_flag=True,
    help="Add the result to the bundle's manifest, as evidence that its files ran on this machine",
)
@option(
    "--each-program",
    group="Verification",
    is_flag=True,
    help="Run each program alone on the execution provider of ONNX Runtime that the option "
    "onnxruntime.provider names, and compare it with the CPU provider",
)
@device_options
@html_option("the error of each program, and the words of each clip with its audio")
@as_json
@threads
@run_option
@trust
def verify(
    bundle: Path,
    threads: int | None,
    run_options: tuple[str, ...],
    trust: bool,
    record: bool,
    each_program: bool,
    html: Path | None,
    as_json: bool,
    device_inputs: Path | None,
    device_outputs: tuple[str, ...],
    program: str,
    clips: tuple[str, ...],
    quantization: Path | None,
    precision: str | None,
    simulated: str | None,
    device_layers: Path | None,
    reference_layers: Path | None,
) -> None:
    """Run a bundle's programs on this machine and compare them with its reference.

    The reference is what PyTorch computed for a few audio clips when the bundle was exported; it is stored
    in the bundle, with the clips.

    \b
    Four levels are compared:
      arrays     the outputs of each program
      tokens     the tokens decoded from each of these clips
      words      the transcripts of all clips, by their word error rate against the true text
      isolation  the result of a clip, with and without other clips before it

    PyTorch is needed only if a runtime of the bundle needs it. The exit status is 1 if a comparison
    fails.

    With --each-program, every session is created in a process of its own, so that a crash is a result.
    The command shows which programs the provider can run, where their nodes ran, how exact and how stable
    their outputs are, and the time per run. It then recommends which programs to run there, and with which
    options. The inputs are those of one clip. The exit status is 1 if no program can run there.

    With --device-output, a file that a device wrote is compared with the expected output of one program
    instead, and the causes of a difference are named: dtype, scale and zero point, layout, padding, window,
    spectrogram, stale buffer, quantization error and others.

    \b
    Examples:
      $ whisperport verify build/tiny-xnnpack
      $ whisperport verify build/tiny-xnnpack --record
      $ whisperport verify build/tiny --each-program --run-option onnxruntime.provider=NAME
      $ whisperport verify build/small --device-inputs inputs
      $ whisperport verify build/small --device-output output.bin
      $ whisperport verify build/small --program step --device-output outputs/
    """
    run = run_options_of(threads, run_options, trust=trust)
    options = (program, clips, quantization, precision, simulated, run)
    if device_layers or reference_layers:
        _compare_layers(device_layers, reference_layers, html, as_json=as_json)
        return
    if html and (device_inputs or device_outputs or each_program):
        raise click.UsageError("--html has no page about this: it shows a verification, or layers")
    if device_inputs:
        _write_inputs(bundle, device_inputs, options, as_json=as_json)
        return
    if device_outputs:
        _diagnose(bundle, device_outputs, options, as_json=as_json)
        return
    if each_program:
        if record:
            raise click.UsageError("--each-program and --record exclude each other")
        _on_provider(bundle, run, as_json=as_json)
        return
    opened = Bundle.open(bundle)
    with stages() as progress:
        verified = verify_and_record if record else run_verify
        report = verified(opened, run=run, clips=clips, progress=progress)
    same = run_option_arguments(run_options, trust=trust)
    following: tuple[Argument, ...] = ("transcribe", "talk.mp3", "--bundle", bundle, *same)
    if html is not None:
        reference = Reference.from_arrays(opened.reference())
        write_page(html, verify_page(report, reference, command_line(*following)))
    if as_json:
        print_json(report.to_json())
    else:
        print_checks(report.checks)
        print_failures(report.failures())
        how = f" ({', '.join(run_options)})" if run_options else ""
        print_lines("", f"{bundle}: {'verified' if report else 'NOT VERIFIED'}{how}")
    if record:
        print_note(f"recorded in {bundle}: {verified_words(Bundle.open(bundle).manifest)}")
    if opened.manifest.failed:
        print_warning(
            "this bundle failed its verification at export; it was written with --allow-unverified"
        )
    if not report:
        sys.exit(1)
    print_next(*following)


def _on_provider(bundle: Path, run: RunOptions, *, as_json: bool) -> None:
    """Run each program on an execution provider; exit with status 1 if none can run there."""
    with stages() as progress:
        report = verify_each_program(bundle, run, progress=progress)
    if as_json:
        print_json(report.to_json())
    else:
        print_provider_report(report)
    if not report:
        sys.exit(1)
    recommended = tuple(f"{name}={value}" for name, value in report.run_options().items())
    same = run_option_arguments(recommended, trust=run.trust)
    print_next("transcribe", "talk.mp3", "--bundle", bundle, *same)


_Options = tuple[str, tuple[str, ...], Path | None, str | None, str | None, RunOptions]


def _write_inputs(bundle: Path, folder: Path, options: _Options, *, as_json: bool) -> None:
    """Write the inputs of a program for a device."""
    with stages() as progress:
        written = write_device_inputs(
            bundle, folder, diagnose_options(*options), clips=options[1], progress=progress
        )
    if as_json:
        print_json(written.to_json())
    else:
        print_device_inputs(written, bundle)


def _diagnose(bundle: Path, outputs: tuple[str, ...], options: _Options, *, as_json: bool) -> None:
    """Diagnose the outputs of a device; exit with status 1 if they are wrong."""
    chosen, opened = diagnose_options(*options), Bundle.open(bundle)
    with stages() as progress:
        found = diagnose(opened, outputs_of(outputs), chosen, progress=progress)
    if as_json:
        print_json(found.to_json())
    else:
        print_diagnosis(found)
    if following := next_of_diagnosis(found, opened, outputs, chosen):
        print_next(*following)
    if not found:
        sys.exit(1)


def _compare_layers(
    device: Path | None, reference: Path | None, html: Path | None, *, as_json: bool
) -> None:
    """Compare the layers that a device dumped with those in float32."""
    if device is None or reference is None:
        raise UsageError(
            "--device-layers and --reference-layers belong together",
            hint="give the folder of the device's layers and that of the same layers in float32",
        )
    with stages() as progress:
        layers = compare_layers(device, reference, progress=progress)
    if html is not None:
        write_page(html, layers_page(layers))
    if as_json:
        print_json([layer.to_json() for layer in layers])
    else:
        print_lines(*layer_sentences(layers))
