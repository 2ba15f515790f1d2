"""Quantize programs of a bundle that is being exported: calibrate with its own float32 programs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from whisperport.bundle import Bundle, ProgramEntry
from whisperport.calibration import CalibrationOptions, calibration_set
from whisperport.placing import Placed
from whisperport.progress import Progress
from whisperport.targets.compiler import CalibrationNeed, same_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A program to quantize, and the samples that this needs."""

    entry: ProgramEntry
    need: CalibrationNeed


def quantize_programs(
    bundle: Bundle, placed: Placed, calibration: CalibrationOptions, progress: Progress
) -> tuple[ProgramEntry, ...]:
    """Quantize every program whose target asks for a calibration set, in place.

    All calibration sets are made before the first program is quantized, so that they come from programs in
    float32.

    Args:
        bundle: the bundle, in the folder where it is written; its programs are in float32.
        placed: the targets, with their lowering options.
        calibration: the audio.
        progress: called with a line for each stage.

    Returns:
        The entries of all programs, in the order of the bundle.

    Raises:
        AudioError: audio is missing, or there are too few samples, or none can be used.
        MissingPackageError: a quantizer is not installed.
        LoweringError: a quantizer could not quantize a program.
    """
    entries = bundle.manifest.programs
    wanted = _wanted(entries, placed)
    if not wanted:
        return entries
    quantized: dict[str, ProgramEntry] = {}
    with TemporaryDirectory(prefix=".calibration-", dir=bundle.folder) as work:
        arrays: dict[str, dict[str, Path]] = {}
        for name, one in wanted.items():
            folder = Path(work, name)
            folder.mkdir()
            made = calibration_set(
                bundle, one.entry.spec, one.need, same_layout, folder, calibration, progress
            )
            names = (tensor.name for tensor in one.entry.spec.inputs)
            arrays[name] = {
                tensor: folder / file for tensor, file in zip(names, made.arrays, strict=True)
            }
        for name, one in wanted.items():
            target = placed.target_of(name)
            made_entry = target.quantize(one.entry, bundle.folder, arrays[name], progress)
            quantized[name] = replace(made_entry, placement=one.entry.placement)
    return tuple(quantized.get(entry.spec.name, entry) for entry in entries)


def _wanted(entries: Sequence[ProgramEntry], placed: Placed) -> dict[str, _Wanted]:
    found = {}
    for entry in entries:
        need = placed.target_of(entry.spec.name).calibration(entry.spec, entry.precision)
        if need is not None:
            found[entry.spec.name] = _Wanted(entry=entry, need=need)
    return found
