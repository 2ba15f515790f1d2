"""Compare the layers that a device dumped with float32, in order, and find where the error begins."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from whisperport.errors import UsageError
from whisperport.program.json_records import Member
from whisperport.program.runner import Array
from whisperport.system.progress import begin_stage
from whisperport.verification.diagnosis.causes import CauseCode
from whisperport.verification.diagnosis.diagnosing import DiagnoseOptions, diagnose
from whisperport.verification.diagnosis.expected import Expected, ExpectedTensor
from whisperport.verification.diagnosis.raw_files import SUFFIXES, raw_of

LARGEST_BYTES = 2**30  # of one layer's file
DROP_DB = 6.0  # a drop of the SQNR by this much, half of the amplitude, is reported
GOOD_DB = 30.0  # layers above it are good, whatever the drop


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerComparison:
    """One layer of the device, compared with float32.

    Attributes:
        name: name of the layer.
        sqnr_db: signal-to-error ratio in dB, after corrections of layout and scale.
        causes: the causes that were corrected, or that explain the error.
        problem: why the layer cannot be compared; empty if it can.
    """

    name: Annotated[str, Member("layer")]
    sqnr_db: float
    causes: tuple[CauseCode, ...] = ()
    problem: str = ""


def compare_layers(device: Path, reference: Path) -> tuple[LayerComparison, ...]:
    """Compare every layer of the reference that the device dumped, in the natural order of the names.

    Args:
        device: folder of the device's files, `NAME.npy` or `NAME.bin`, in any layout.
        reference: folder of the layers in float32, `NAME.npy`.

    Raises:
        UsageError: a folder does not exist, or they have no layer in common.
    """
    for folder in (device, reference):
        if not folder.is_dir():
            raise UsageError(
                f"there is no folder {folder} of layers",
                hint="dump the layers as NAME.npy or NAME.bin, one file each",
            )
    names = sorted((path.stem for path in reference.glob("*.npy")), key=_natural)
    comparisons = []
    for name in names:
        files = [path for suffix in SUFFIXES if (path := device / f"{name}{suffix}").is_file()]
        if files:
            begin_stage(f"comparing the layer {name}")
            comparisons.append(_compared(name, files[0], reference / f"{name}.npy"))
    if not comparisons:
        raise UsageError(
            f"no layer of {reference} is in {device}",
            why=f"the reference has {', '.join(names[:5]) or 'no .npy file'}",
            hint="give both files of a layer the same name",
        )
    return tuple(comparisons)


def layer_sentences(layers: Sequence[LayerComparison]) -> tuple[str, ...]:
    """Return one line per layer, and a sentence that names the layer where the error begins."""
    lines = []
    for layer in layers:
        causes = f", {', '.join(layer.causes)}" if layer.causes else ""
        shown = layer.problem or f"SQNR {layer.sqnr_db:.1f} dB"
        lines.append(f"{layer.name}: {shown}{causes}")
    first = first_bad_layer(layers)
    if first is None:
        return (
            *lines,
            f"No layer has an SQNR below {GOOD_DB:g} dB that drops by more than {DROP_DB:g} dB.",
        )
    earlier = [layer for layer in layers[: layers.index(first)] if not layer.problem]
    from_ = f" from {earlier[-1].sqnr_db:.1f} dB" if earlier else ""
    return (
        *lines,
        f"The error begins at the layer {first.name}: its SQNR drops{from_} to {first.sqnr_db:.1f} dB.",
    )


def first_bad_layer(layers: Sequence[LayerComparison]) -> LayerComparison | None:
    """Return the layer where the error begins; None: there is none."""
    before: float | None = None
    for layer in layers:
        if layer.problem:
            continue
        if layer.sqnr_db < GOOD_DB and (before is None or layer.sqnr_db < before - DROP_DB):
            return layer
        before = layer.sqnr_db
    return None


def compared_layer(name: str, device: Path, array: Array) -> LayerComparison:
    """Compare one file of a device with a layer in float32, in whatever dtype and layout it is stored."""
    if not np.isfinite(array).all() or not array.any():
        problem = "the reference is not finite, or all zeros"
        return LayerComparison(name=name, sqnr_db=float("nan"), problem=problem)
    axis = int(np.argmax(array.shape)) if array.ndim else 0
    tensor = ExpectedTensor(name, np.atleast_1d(array).astype(np.float32), axis)
    diagnosis = diagnose(Expected("layers", "", (tensor,)), {name: device}, DiagnoseOptions())
    output = diagnosis.outputs[0]
    return LayerComparison(name=name, sqnr_db=output.after.sqnr_db, causes=diagnosis.causes)


def _compared(name: str, device: Path, reference: Path) -> LayerComparison:
    raw = raw_of(reference, LARGEST_BYTES)
    if raw.dtype is None or raw.shape is None or raw.dtype.kind != "f":
        return LayerComparison(
            name=name, sqnr_db=float("nan"), problem="the reference holds no floats"
        )
    return compared_layer(name, device, np.frombuffer(raw.data, raw.dtype).reshape(raw.shape))


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts `block_10` after `block_9`."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(int(p), "") if p.isdigit() and len(p) < 10 else (-1, p) for p in parts]
