"""How a device stores the encoder's output: dtype, quantization and layout; stated, or found by example."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import UsageError
from whisperport.program.bundle import Bundle
from whisperport.program.program_kind import ENCODER
from whisperport.system.option import Option
from whisperport.system.progress import begin_stage
from whisperport.targets import RunOptions
from whisperport.verification.diagnosis.causes import CauseCode
from whisperport.verification.diagnosis.layouts import Layout, explain_size
from whisperport.verification.diagnosis.raw_files import RawOutput, raw_of
from whisperport.verification.diagnosis.readings import FORMATS, read_as

Floats = NDArray[np.float32]
Order = Literal["frames-channels", "channels-frames"]

DTYPES = tuple(dict.fromkeys(form.name for form in FORMATS))
DIAGNOSE = "`whisperport diagnose BUNDLE FILE` finds out how a file stores its values"
BY_EXAMPLE = "give the device's output for a reference clip with --features-like, or state it"
# Causes that concern every file of the device alike, so that they can be undone in another file.
SAME_IN_EVERY_FILE = frozenset(
    {
        CauseCode.INTEGERS_READ_AS_FLOATS,
        CauseCode.HALF_PRECISION,
        CauseCode.BFLOAT16,
        CauseCode.DOUBLE_PRECISION,
        CauseCode.BYTE_ORDER,
        CauseCode.EXTRA_BYTES,
        CauseCode.NOT_DEQUANTIZED,
        CauseCode.WRONG_SCALE,
        CauseCode.WRONG_ZERO_POINT,
        CauseCode.AXES_PERMUTED,
        CauseCode.PADDED_AXIS,
        CauseCode.CHANNEL_TILES,
        CauseCode.QUANTIZATION_ERROR,
    }
)
SCALING = frozenset(
    {
        CauseCode.INTEGERS_READ_AS_FLOATS,
        CauseCode.NOT_DEQUANTIZED,
        CauseCode.WRONG_SCALE,
        CauseCode.WRONG_ZERO_POINT,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureStorage:
    """How a file stores the features (T, d) of one window: value = (stored - zero_point) * scale.

    Attributes:
        is_big_endian: whether the bytes of each value are in the opposite order.
        layout: layout with padding or tiles; None: `order` without padding.
        skipped: bytes before the values.

    Raises:
        UsageError: there is no such dtype, or a number is not finite.
    """

    dtype: Annotated[
        str | None,
        Option(
            "Type of the numbers in each --features file",
            default="that of an .npy file; else float32 or float16, by the file's size",
            flag="--features-dtype",
            choices=DTYPES,
        ),
    ] = None
    scale: Annotated[
        float | None,
        Option(
            "Scale of the stored numbers: a feature is (stored - zero point) * scale",
            default="1; integers require it",
            flag="--features-scale",
        ),
    ] = None
    zero_point: Annotated[
        float,
        Option(
            "Stored number that stands for a feature of 0. Requires --features-scale",
            default="0",
            flag="--features-zero-point",
        ),
    ] = 0.0
    order: Annotated[
        Order,
        Option(
            "Order of the axes in each --features file; an .npy file states its own",
            flag="--features-layout",
        ),
    ] = "frames-channels"
    is_big_endian: bool = False
    layout: Layout | None = None
    skipped: int = 0

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(
                f"features cannot be stored as `{self.dtype}`",
                hint=f"choose one of {', '.join(DTYPES)}",
            )
        if self.scale is not None and not (_is_float32(self.scale) and self.scale != 0):
            raise UsageError(
                f"the scale of features cannot be {str(self.scale)[:40]}",
                hint="give a number other than 0",
            )
        if not _is_float32(self.zero_point):
            raise UsageError(
                f"the zero point of features cannot be {str(self.zero_point)[:40]}",
                hint="give a number that float32 can store",
            )
        if self.zero_point and self.scale is None:
            raise UsageError(
                "a zero point requires a scale",
                why="a stored value q stands for (q - zero point) * scale",
                hint="give the scale too; the compiled model states both for its output",
            )


def _is_float32(number: float) -> bool:
    """Whether a number, also an integer of any size, is finite in float32."""
    return abs(number) <= float(np.finfo(np.float32).max)


def read_features(
    path: str | Path, shape: tuple[int, int], storage: FeatureStorage | None = None
) -> Floats:
    """Read the features of one window from the file that a device wrote.

    Args:
        path: a headerless file, or an `.npy` file.
        shape: (T, d) of the bundle's encoder.
        storage: how the file stores them; None: as float32 or float16 in this shape.

    Returns:
        (T, d) float32; values that are not finite are not checked.

    Raises:
        UsageError: the file cannot be read, or has another size.
    """
    storage = storage or FeatureStorage()
    raw = raw_of(path, 4 * shape[0] * shape[1])
    layout = storage.layout or _layout(shape, _order_in(raw, shape) or storage.order)
    data = raw.data[storage.skipped :]
    dtype = storage.dtype or _dtype_of(raw, layout, shape)
    is_integer = "int" in dtype
    if is_integer and storage.scale is None:
        raise UsageError(
            f"the features in {path} are {dtype} integers without a scale",
            why="a stored integer q stands for (q - zero point) * scale",
            hint="give --features-scale and --features-zero-point, which the compiled model states for "
            f"its output; or {BY_EXAMPLE}",
        )
    itemsize = next(form.itemsize for form in FORMATS if form.name == dtype)
    if data.size != layout.size * itemsize and (
        not storage.skipped or data.size < layout.size * itemsize
    ):
        raise _other_size(raw, shape, layout.size * itemsize)
    values = read_as(data[: layout.size * itemsize], dtype, is_big_endian=storage.is_big_endian)
    features = layout.view(values)
    if storage.scale is not None:
        features = (features - np.float32(storage.zero_point)) * np.float32(storage.scale)
    return np.ascontiguousarray(features, np.float32)


def storage_by_example(
    bundle: Bundle,
    example: str | Path,
    clip: str = "",
    *,
    run: RunOptions | None = None,
) -> tuple[FeatureStorage, tuple[str, ...]]:
    """Find out how a device stores features, by its output for a reference clip of the bundle.

    Args:
        bundle: an open bundle.
        example: the file that the device wrote for the clip.
        clip: name of the clip; "": the first of the reference.
        run: how the bundle's programs are run here.

    Returns:
        How the file stores them; and what was found, one sentence each.

    Raises:
        UsageError: the file cannot be read, holds something else, or has a fault that other files may not
            have, such as a missing part.
    """
    # Imported here: transcribing, which reads `FeatureStorage` for its options, rarely needs them.
    from whisperport.verification.diagnosis.diagnosing import DiagnoseOptions, diagnose
    from whisperport.verification.diagnosis.expected_outputs import expected_outputs

    run = run or RunOptions()
    begin_stage("computing the expected features")
    expected = expected_outputs(bundle, ENCODER, clip, run=run)
    (diagnosis,) = diagnose(expected, example, DiagnoseOptions(run=run)).outputs
    sentences = tuple(finding.sentence for finding in diagnosis.findings)
    faults = [f for f in diagnosis.findings if f.cause not in SAME_IN_EVERY_FILE]
    if not diagnosis.explained or faults:
        raise UsageError(
            f"{example} does not show how the device stores features",
            why=" ".join(f.sentence for f in faults)
            or f"it is not the encoder's output for the clip `{expected.clip}`, in any known form",
            hint=f"`whisperport diagnose {bundle.folder} {example}` says what to change",
        )
    if diagnosis.passed:
        return FeatureStorage(), sentences
    (tensor,) = expected.tensors
    assert diagnosis.storage is not None, "the diagnosis explains the file"
    causes = {finding.cause for finding in diagnosis.findings}
    reading, layout = diagnosis.storage.reading, diagnosis.storage.layout
    scale, zero_point = None, 0.0
    if causes & SCALING:
        stored = layout.view(reading.values).astype(np.float64)
        a, b = np.polyfit(tensor.array.astype(np.float64).reshape(-1), stored.reshape(-1), 1)
        scale, zero_point = float(1 / a), float(b)
    return FeatureStorage(
        dtype=reading.dtype,
        scale=scale,
        zero_point=zero_point,
        is_big_endian=CauseCode.BYTE_ORDER in causes,
        layout=layout,
        skipped=diagnosis.storage.cut[0],
    ), sentences


def _layout(shape: tuple[int, int], order: Order) -> Layout:
    axes = (0, 1) if order == "frames-channels" else (1, 0)
    return Layout(shape, axes, tuple(shape[axis] for axis in axes))


def _order_in(raw: RawOutput, shape: tuple[int, int]) -> Order | None:
    """Return the order that the shape of an `.npy` file states; None if it states none of both."""
    stated = tuple(size for size in raw.shape or () if size > 1)
    if stated == shape:
        return "frames-channels"
    return "channels-frames" if stated == shape[::-1] else None


def _dtype_of(raw: RawOutput, layout: Layout, shape: tuple[int, int]) -> str:
    if raw.dtype is not None:
        name = raw.dtype.name
        if name in DTYPES:
            return name
        raise UsageError(
            f"the features in {raw.source} are {name}",
            why=f"expected one of {', '.join(DTYPES)}",
            hint="convert the array to float32",
        )
    by_size = {4 * layout.size: "float32", 2 * layout.size: "float16"}
    if raw.data.size in by_size:
        return by_size[raw.data.size]
    raise _other_size(raw, shape, 4 * layout.size)


def _other_size(raw: RawOutput, shape: tuple[int, int], needed: int) -> UsageError:
    return UsageError(
        f"{raw.source} has {raw.data.size:,} bytes; the features of one window need {needed:,}",
        why=" ".join(explain_size(raw.data.size, "features", shape)),
        hint=f"state how the file stores them with the options --features-...; {DIAGNOSE}",
    )
