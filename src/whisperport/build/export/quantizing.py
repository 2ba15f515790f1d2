"""Quantize programs of a bundle that is being exported: calibrate with its own float32 programs."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from whisperport.build.calibration import (
    CalibrationOptions,
    CalibrationRequest,
    calibration_sets,
)
from whisperport.build.export.placing import Placed
from whisperport.program.bundle import ProgramEntry
from whisperport.targets.compiler import same_layout
from whisperport.verification.recording import BundleSession


def quantize_programs(
    session: BundleSession, placed: Placed, calibration: CalibrationOptions
) -> tuple[ProgramEntry, ...]:
    """Quantize every program whose target asks for a calibration set, in place.

    All calibration sets are made before the first program is quantized, so that they come from programs in
    float32.

    Args:
        session: the bundle, in the folder where it is written; its programs are in float32. They are
            released.
        placed: the targets, with their lowering options.
        calibration: the audio.

    Returns:
        The entries of all programs, in the order of the bundle.

    Raises:
        AudioError: audio is missing, or there are too few samples, or none can be used.
        MissingPackageError: a quantizer is not installed.
        LoweringError: a quantizer could not quantize a program.
    """
    bundle = session.bundle
    entries = bundle.manifest.programs
    with TemporaryDirectory(prefix=".calibration-", dir=bundle.folder) as work:
        requests = [
            CalibrationRequest(spec=entry.spec, need=need, folder=Path(work, entry.spec.name))
            for entry in entries
            for need in [placed.target_of(entry.spec.name).calibration(entry.spec, entry.precision)]
            if need is not None
        ]
        for request in requests:
            request.folder.mkdir()
        sets = calibration_sets(session, requests, same_layout, calibration)
        session.release()
        quantized = {}
        for request in requests:
            spec, entry = request.spec, bundle.manifest.program(request.spec.name)
            files = zip(spec.inputs, sets[spec.name].arrays, strict=True)
            arrays = {tensor.name: request.folder / file for tensor, file in files}
            target = placed.target_of(spec.name)
            result = target.quantize(entry, bundle.folder, arrays)
            quantized[spec.name] = replace(result, placement=entry.placement)
    return tuple(quantized.get(entry.spec.name, entry) for entry in entries)
