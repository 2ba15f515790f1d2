"""Diagnose the outputs of a device: say why they differ from the expected outputs."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import UsageError
from whisperport.program.bundle import Bundle
from whisperport.program.runner import Array
from whisperport.system.option import Option
from whisperport.system.progress import begin_stage
from whisperport.targets import RunOptions
from whisperport.verification.array_comparison import Comparison, Gate, compare
from whisperport.verification.diagnosis.causes import CauseCode, Finding
from whisperport.verification.diagnosis.coarse import (
    coarse_output,
    is_noise,
    known_output,
    quantization_error,
)
from whisperport.verification.diagnosis.expected import Expected, ExpectedTensor, Quantization
from whisperport.verification.diagnosis.expected_outputs import expected_outputs
from whisperport.verification.diagnosis.explaining import Explanation
from whisperport.verification.diagnosis.explanation_search import Search, search
from whisperport.verification.diagnosis.layouts import explain_size
from whisperport.verification.diagnosis.raw_files import RawOutput, files_of, raw_of
from whisperport.verification.diagnosis.result import Diagnosis, OutputDiagnosis
from whisperport.verification.diagnosis.verdict import Verdict, verdict_of
from whisperport.verification.tolerances import GATES

RESEMBLING = 0.3  # correlation of outputs that are in the same order

DeviceOutput = str | os.PathLike[str] | Array
"""A file of a device, headerless little-endian or `.npy`, or an array in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseOptions:
    """Options of `diagnose`.

    Args:
        clip: name of the reference clip that the device was given. Default: "", the first clip of the
            reference.
        quantization: output name -> dtype, scale and zero point that the device stores it with. Default:
            none, so that every output is expected in float32.
        simulated: the output of the simulated quantization, in the forms of the device's output; it is
            compared with the device and with float32. Default: None, not known.
        run: how the bundle's programs are run here, for expected outputs and for wrong inputs.
    """

    program: Annotated[
        str,
        Option(
            "Program that the device runs, such as encoder, cross_kv, prefill_4 or step",
            metavar="NAME",
        ),
    ] = "encoder"
    clip: str = ""
    quantization: Mapping[str, Quantization] = field(default_factory=dict)
    simulated: DeviceOutput | Mapping[str, DeviceOutput] | None = None
    precision: Annotated[
        str | None,
        Option(
            "Precision whose limit decides whether the output of the device passes",
            default="the program's precision; for a program in fp32, fp16, or w8a8 with --simulated",
            flag="--device-precision",
            choices=tuple(GATES),
        ),
    ] = None
    run: RunOptions = field(default_factory=RunOptions)


def diagnose(
    bundle: Bundle | Expected | str | os.PathLike[str],
    output: DeviceOutput | Mapping[str, DeviceOutput],
    options: DiagnoseOptions | None = None,
) -> Diagnosis:
    """Compare the output of a device with the expected output, and name the causes of a difference.

    Args:
        bundle: the bundle or its folder; or its expected outputs, which `expected_outputs` returns. Give
            these to diagnose many files with one computation of the expected outputs.
        output: a file or array, if the program has one output; a folder with one file per output, named
            after it (`features.bin`, `logits.npy`, ...); or output name -> file or array.
        options: program, clip and how to run; None: the defaults. Not used with expected outputs.

    Raises:
        UsageError: the program, the clip or an output does not exist, or a file cannot be read.
        BundleError: the bundle is damaged.
        MissingPackageError: a target's runtime is not installed.
    """
    options = options or DiagnoseOptions()
    expected = bundle if isinstance(bundle, Expected) else _expected(bundle, options)
    simulated = {}
    if options.simulated is not None:
        begin_stage("reading the simulated quantization")
        simulated = _simulated_values(options.simulated, expected)
        expected = replace(expected, known=simulated)
    diagnoses = _diagnosed_all(output, expected)
    verdict = None
    if options.simulated is not None:
        verdict = _verdict(_values_of(diagnoses), simulated, expected)
    return Diagnosis(
        program=expected.program,
        clip=expected.clip,
        outputs=tuple(diagnoses.values()),
        expected_from=expected.source,
        verdict=verdict.sentence if verdict else "",
        numbers=verdict.numbers if verdict else {},
        missing=tuple(t.name for t in expected.tensors if t.name not in diagnoses),
    )


def _diagnosed_all(
    output: DeviceOutput | Mapping[str, DeviceOutput], expected: Expected
) -> dict[str, OutputDiagnosis]:
    """Return the diagnosis of each output that was given, by its name."""
    raws = {
        name: raw_of(device_output, 4 * expected.tensor(name).array.size)
        for name, device_output in _outputs(output, expected).items()
    }
    diagnoses = {}
    for name, raw in raws.items():
        begin_stage(f"diagnosing the output {name}")
        diagnoses[name] = _diagnosed(raw, expected.tensor(name), expected)
    return diagnoses


def _simulated_values(
    output: DeviceOutput | Mapping[str, DeviceOutput], expected: Expected
) -> dict[str, Array]:
    """Return the outputs of the simulated quantization, corrected where they can be.

    Those that resemble the expected outputs as they are need no diagnosis.
    """
    values = {}
    for name, device_output in _outputs(output, expected).items():
        tensor = expected.tensor(name)
        array = _as_it_is(raw_of(device_output, 4 * tensor.array.size), tensor)
        if array is not None and _correlation(array, tensor.array) >= RESEMBLING:
            values[name] = array
        else:
            values |= _values_of(_diagnosed_all({name: device_output}, expected))
    return values


def _correlation(x: Array, r: Array) -> float:
    with np.errstate(all="ignore"):
        return float(np.corrcoef(x.reshape(-1), r.reshape(-1))[0, 1])


def _values_of(diagnoses: Mapping[str, OutputDiagnosis]) -> dict[str, Array]:
    """Return the outputs whose values are known, corrected where they can be."""
    return {
        name: diagnosis.corrected
        for name, diagnosis in diagnoses.items()
        if diagnosis.corrected is not None
    }


def _verdict(
    device: Mapping[str, Array], simulated: Mapping[str, Array], expected: Expected
) -> Verdict:
    """Compare the outputs of the device with the simulated quantization."""
    names = [name for name in device if name in simulated]
    if not names:
        return Verdict(
            sentence="No output is known of both the device and the simulation.", numbers={}
        )
    return verdict_of(
        [device[name] for name in names],
        [simulated[name] for name in names],
        [expected.tensor(name).array for name in names],
        expected.limit(names[0]),
    )


def _expected(bundle: Bundle | str | os.PathLike[str], options: DiagnoseOptions) -> Expected:
    return expected_outputs(
        bundle,
        options.program,
        options.clip,
        quantization=options.quantization,
        precision=options.precision or "",
        of_float32="fp16" if options.simulated is None else "w8a8",
        run=options.run,
    )


def _outputs(
    output: DeviceOutput | Mapping[str, DeviceOutput], expected: Expected
) -> dict[str, DeviceOutput]:
    """Return the given files or arrays by the name of the output."""
    names = tuple(tensor.name for tensor in expected.tensors)
    if isinstance(output, Mapping):
        if not output:
            raise UsageError("no output of a device was given", hint="give at least one file")
        for name in output:
            expected.tensor(name)
        return dict(output)
    if not isinstance(output, np.ndarray) and os.path.isdir(output):
        return dict(files_of(Path(output), names))
    if len(names) > 1:
        raise UsageError(
            f"the program `{expected.program}` has {len(names)} outputs",
            why="it is not known which of them the file holds",
            hint=f"give NAME=FILE with one of {', '.join(names[:6])}, or a folder of files",
        )
    return {names[0]: output}


def _diagnosed(raw: RawOutput, tensor: ExpectedTensor, expected: Expected) -> OutputDiagnosis:
    gate = expected.limit(tensor.name)
    before = _before(raw, tensor, expected)
    as_it_is = OutputDiagnosis(
        output=tensor.name,
        source=raw.source,
        passed=bool(before),
        findings=(),
        before=before,
        after=before,
        limit=f"{gate.rule} for {expected.precision}: {gate.because}",
        corrected=_as_it_is(raw, tensor),
    )
    if before:
        return as_it_is
    if constant := _constant(raw):
        return replace(as_it_is, findings=(constant,))
    best = known_output(raw, tensor, expected)
    if best is None:
        result = search(raw, tensor, expected)
        best = _explained(result, tensor, expected, gate)
        if best is None:
            return replace(as_it_is, excluded=_excluded(raw, tensor, before, result))
    corrected = best.corrected.astype(np.float32).reshape(tensor.array.shape)
    is_changed = as_it_is.corrected is None or _is_changed(corrected, as_it_is.corrected)
    return replace(
        as_it_is,
        findings=best.findings,
        after=_after(best, tensor, gate),
        fix=_fix_program(best, raw, tensor) if is_changed else "",
        corrected=corrected,
        storage=best.candidate,
    )


def _is_changed(corrected: Array, as_it_is: Array) -> bool:
    """Return whether a correction changes a value; those that it leaves out are not corrected."""
    kept = np.isfinite(corrected)
    return not np.allclose(corrected[kept], as_it_is[kept], rtol=1e-6, atol=0)


def _explained(
    result: Search, tensor: ExpectedTensor, expected: Expected, gate: Gate
) -> Explanation | None:
    """Return the explanation with quantization as its last cause, if that is the rest of the error."""
    best = result.best
    if best is not None:
        if best.findings and (best.is_complete or _after(best, tensor, gate)):
            return best
        if is_noise(best, tensor, expected):
            if best.reference.is_window:  # the rest is the distance of two windows
                return best
            return replace(best, findings=(*best.findings, quantization_error(best)))
    return coarse_output(result.candidates, tensor, expected)


def _before(raw: RawOutput, tensor: ExpectedTensor, expected: Expected) -> Comparison:
    """Compare the file as it is read without a diagnosis: in the expected dtype and order."""
    actual = _as_it_is(raw, tensor)
    if actual is None:
        form = tensor.quantization.dtype if tensor.quantization else "<f4"
        size = tensor.array.size * np.dtype(form).itemsize
        reason = f"the file has {raw.data.size:,} bytes; expected {size:,}"
        rule = expected.limit(tensor.name).rule
        return Comparison(output=tensor.name, rule=rule, reason=reason)
    return expected.compared(tensor, actual)


def _as_it_is(raw: RawOutput, tensor: ExpectedTensor) -> Array | None:
    """Return the file's values in the expected dtype and order; None if it has another size."""
    form = tensor.quantization.dtype if tensor.quantization else "<f4"
    if raw.data.size != tensor.array.size * np.dtype(form).itemsize:
        return None
    values = np.frombuffer(raw.data, form)
    if declared := tensor.quantization:
        values = (values.astype(np.float32) - declared.zero_point) * np.float32(declared.scale)
    return values.reshape(tensor.array.shape)


def _after(best: Explanation, tensor: ExpectedTensor, gate: Gate) -> Comparison:
    """Compare the corrected values with the output that the file holds, where values exist."""
    reference = best.reference
    known = np.isfinite(best.corrected)
    actual, expected = best.corrected, reference.array
    if known.all():
        return compare(reference.name, actual, expected, gate, frame_axis=reference.frame_axis)
    return compare(reference.name, actual[known], expected[known], gate)


def _constant(raw: RawOutput) -> Finding | None:
    """Return the finding if all values of a file are equal, whatever their dtype."""
    data: NDArray[Any] = raw.data
    for itemsize in (1, 2, 4, 8):
        if data.size % itemsize == 0 and data.size > itemsize:
            items = data.reshape(-1, itemsize)
            if (items == items[0]).all() or (itemsize == 4 and _are_zeros(data)):
                break
    else:
        return None
    shown, is_finite = f"the bytes {items[0].tobytes().hex(' ')}" if data.any() else "0", True
    if itemsize == 4:
        value = float(np.frombuffer(items[0].tobytes(), "<f4")[0])
        shown, is_finite = f"{value:.6g}", math.isfinite(value)
    return Finding(
        cause=CauseCode.CONSTANT if is_finite else CauseCode.NOT_FINITE,
        sentence=f"All values of the file are {shown}.",
        advice="Check that the program ran on the device, and that this is the file that it wrote.",
    )


def _are_zeros(data: NDArray[Any]) -> bool:
    """Whether all values are 0 or -0 as float32."""
    return not (np.frombuffer(data, "<u4") & 0x7FFFFFFF).any()


def _excluded(
    raw: RawOutput, tensor: ExpectedTensor, before: Comparison, result: Search
) -> tuple[str, ...]:
    """Return what was tried and does not explain a file, one sentence each."""
    sizes = explain_size(raw.data.size, tensor.name, tensor.array.shape)
    if result.best is None or before.reason.startswith("the file has"):
        return (*sizes, *result.tried)
    rest = (
        f"The best correction leaves an SQNR of {result.best.sqnr_db:.1f} dB, which is too low to name a "
        "cause."
    )
    return (*sizes, *result.tried, rest)


def _fix_program(best: Explanation, raw: RawOutput, tensor: ExpectedTensor) -> str:
    """Return a numpy program that reads a file and writes the corrected float32 values."""
    path = raw.source if raw.source != "array" else "output.bin"
    load = f"data = open({path!r}, 'rb').read()"
    if raw.dtype is not None and raw.source != "array":
        load = f"data = np.load({path!r}).tobytes()"
    end = f"x = np.ascontiguousarray(x, np.float32).reshape({tensor.array.shape})"
    return "\n".join(["import numpy as np", load, *best.code, end, "x.tofile('corrected.bin')"])
