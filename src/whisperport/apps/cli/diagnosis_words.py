"""What `whisperport diagnose` prints: the files for a device, a diagnosis, what to do next."""

from pathlib import Path

from whisperport.apps.cli.console import Argument, print_lines, print_next, print_note
from whisperport.apps.cli.shared_options import run_option_arguments
from whisperport.program.bundle import Bundle
from whisperport.program.program_kind import ENCODER
from whisperport.targets import get_target
from whisperport.verification.array_comparison import Comparison
from whisperport.verification.diagnosis.causes import CauseCode
from whisperport.verification.diagnosis.device_inputs import DeviceInputs
from whisperport.verification.diagnosis.diagnosing import DiagnoseOptions
from whisperport.verification.diagnosis.result import Diagnosis, OutputDiagnosis


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
