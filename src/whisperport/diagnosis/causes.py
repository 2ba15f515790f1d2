"""The causes that a diagnosis can name: why the output of a device differs from the expected output.

A cause is a statement about the file, not about the person or the tool that made it. Several histories give
the same bytes; they have one cause:

- A factor of exactly 1, an offset of exactly 0 and a shift by 0 frames change nothing: they are no cause.
- 8-bit integers that a program read as float32 and wrote again are the bytes of the 8-bit integers:
  `integers-read-as-floats`.
- A zero point that was not subtracted, was subtracted with the wrong sign, or is another number adds one
  constant to every value: `wrong-zero-point`. A scale that was not applied multiplies every value by one
  constant: `wrong-scale`. Only if neither was applied, so that the values are the stored integers, the
  cause is `not-dequantized`; with a zero point of 0, or if the integers minus the zero point also fit the
  dtype, this is the same as a scale that was not applied.
- A permutation that moves only axes of size 1 changes nothing. The layouts NCHW and NHWC of a tensor with
  one spatial axis are permutations: `axes-permuted`.
- The outputs of two clips exchanged are, for each file, `other-clip`.
- A factor or an offset of normally distributed weights cannot be told from one of the values: both are
  `wrong-scale` or `wrong-zero-point`.
- If every value of a frame is replaced by zeros from some frame to the end, the cause is `zero-tail`,
  whoever did not write it.

In the meanings, T is the number of frames (positions) and C the number of channels of the output.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

Family = Literal["bytes", "buffer", "quantization", "layout", "outputs", "input", "computation"]
"""Which part of the way from the audio to the array a cause belongs to."""


class CauseCode(StrEnum):
    """Names of all causes, in the order in which they are explained."""

    INTEGERS_READ_AS_FLOATS = "integers-read-as-floats"
    FLOATS_READ_AS_INTEGERS = "floats-read-as-integers"
    HALF_PRECISION = "half-precision"
    BFLOAT16 = "bfloat16"
    DOUBLE_PRECISION = "double-precision"
    BYTE_ORDER = "byte-order"
    EXTRA_BYTES = "extra-bytes"
    TRUNCATED = "truncated"
    ZERO_TAIL = "zero-tail"
    STALE_BUFFER = "stale-buffer"
    CONSTANT = "constant"
    NOT_FINITE = "not-finite"
    NOT_DEQUANTIZED = "not-dequantized"
    WRONG_SCALE = "wrong-scale"
    WRONG_ZERO_POINT = "wrong-zero-point"
    SCALE_AND_ZERO_POINT_SWAPPED = "scale-and-zero-point-swapped"
    WRONG_SIGNEDNESS = "wrong-signedness"
    WRONG_CHANNEL_SCALES = "wrong-channel-scales"
    SATURATED = "saturated"
    AXES_PERMUTED = "axes-permuted"
    PADDED_AXIS = "padded-axis"
    CHANNEL_TILES = "channel-tiles"
    CHANNEL_BLOCKS_REORDERED = "channel-blocks-reordered"
    FRAME_SHIFT = "frame-shift"
    DUPLICATED_FRAMES = "duplicated-frames"
    OUTPUTS_SWAPPED = "outputs-swapped"
    OTHER_CLIP = "other-clip"
    OTHER_WINDOW = "other-window"
    SILENT_INPUT = "silent-input"
    AUDIO_NOT_SCALED = "audio-not-scaled"
    WRONG_MEL_BINS = "wrong-mel-bins"
    WRONG_MEL_FRAMES = "wrong-mel-frames"
    MEL_TRANSPOSED = "mel-transposed"
    MEL_NOT_NORMALIZED = "mel-not-normalized"
    MEL_NOT_CLAMPED = "mel-not-clamped"
    NATURAL_LOG = "natural-log"
    QUANTIZATION_ERROR = "quantization-error"


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause: its family, and its meaning in one sentence."""

    family: Family
    meaning: str


_C = CauseCode

CAUSES: Mapping[CauseCode, Cause] = MappingProxyType(
    {
        _C.INTEGERS_READ_AS_FLOATS: Cause(
            "bytes",
            "The file holds 8- or 16-bit integers, signed or unsigned, where floats are expected.",
        ),
        _C.FLOATS_READ_AS_INTEGERS: Cause(
            "bytes",
            "The file holds floats where integers are expected, or each byte of a float became one number.",
        ),
        _C.HALF_PRECISION: Cause("bytes", "The file holds float16 where float32 is expected."),
        _C.BFLOAT16: Cause("bytes", "The file holds bfloat16 where float32 is expected."),
        _C.DOUBLE_PRECISION: Cause("bytes", "The file holds float64 where float32 is expected."),
        _C.BYTE_ORDER: Cause(
            "bytes", "The bytes of every number are in the opposite order (big-endian)."
        ),
        _C.EXTRA_BYTES: Cause(
            "buffer",
            "Bytes that belong to no value precede or follow the values, such as a header.",
        ),
        _C.TRUNCATED: Cause(
            "buffer", "The file ends early: it holds only the first part of the values."
        ),
        _C.ZERO_TAIL: Cause(
            "buffer", "The file has its full size, but the values after some point are zeros."
        ),
        _C.STALE_BUFFER: Cause(
            "buffer",
            "The values after some point, or before it, belong to another output, such as that of the "
            "previous clip.",
        ),
        _C.CONSTANT: Cause("buffer", "All values of the file are equal, for example 0."),
        _C.NOT_FINITE: Cause("computation", "Some values are NaN or infinite, in every reading."),
        _C.NOT_DEQUANTIZED: Cause(
            "quantization",
            "The values are the stored integers as numbers: neither scale nor zero point was applied.",
        ),
        _C.WRONG_SCALE: Cause(
            "quantization", "All values are multiplied by one constant: the scale is wrong."
        ),
        _C.WRONG_ZERO_POINT: Cause(
            "quantization",
            "One constant was added to all values: the zero point is wrong or was not subtracted.",
        ),
        _C.SCALE_AND_ZERO_POINT_SWAPPED: Cause(
            "quantization",
            "Scale and zero point are exchanged: value = (q - scale) * zero_point.",
        ),
        _C.WRONG_SIGNEDNESS: Cause(
            "quantization",
            "Signed 8-bit integers were read as unsigned ones, or the reverse, and then dequantized.",
        ),
        _C.WRONG_CHANNEL_SCALES: Cause(
            "quantization",
            "Each channel is multiplied by its own constant: one scale was used for all channels, or the "
            "scales belong to other channels.",
        ),
        _C.SATURATED: Cause(
            "quantization",
            "Values beyond a limit are clipped to it: the range of the quantization is too small.",
        ),
        _C.AXES_PERMUTED: Cause(
            "layout", "The axes are in another order, such as (C, T) where (T, C) is expected."
        ),
        _C.PADDED_AXIS: Cause(
            "layout",
            "Rows, columns or channels are padded to a multiple of an alignment, such as 16.",
        ),
        _C.CHANNEL_TILES: Cause(
            "layout",
            "The channels are stored in tiles: (C / c, T, c) where (T, C) is expected (NC1HWC2).",
        ),
        _C.CHANNEL_BLOCKS_REORDERED: Cause(
            "layout",
            "Blocks of consecutive channels are in another order, such as both halves exchanged.",
        ),
        _C.FRAME_SHIFT: Cause(
            "layout",
            "Frame t of the file is frame t - n of the expected output; the n frames at the edge are those "
            "of the other end, zeros, or a copy of the edge.",
        ),
        _C.DUPLICATED_FRAMES: Cause(
            "layout",
            "Frames are repeated: every frame n times, or some frames overwrite their neighbours.",
        ),
        _C.OUTPUTS_SWAPPED: Cause(
            "outputs", "The file holds another output of the program than its name says."
        ),
        _C.OTHER_CLIP: Cause("input", "The file holds the output of another clip of the bundle."),
        _C.OTHER_WINDOW: Cause(
            "input",
            "The input was another window of the clip: it begins later, or the silence precedes the audio.",
        ),
        _C.SILENT_INPUT: Cause("input", "The input was silence or zeros."),
        _C.AUDIO_NOT_SCALED: Cause(
            "input",
            "The samples were 16-bit integers, not divided by 32768, when the spectrogram was computed.",
        ),
        _C.WRONG_MEL_BINS: Cause(
            "input",
            "The spectrogram had another number of mel bins (80 or 128); the input holds its first bins, "
            "or its bins and then zeros.",
        ),
        _C.WRONG_MEL_FRAMES: Cause(
            "input",
            "The frames of the spectrogram do not begin every 160 samples, or they are not centred: the "
            "audio was not padded with 200 reflected samples at its ends.",
        ),
        _C.MEL_TRANSPOSED: Cause(
            "input", "The spectrogram was stored as (frames, bins) instead of (bins, frames)."
        ),
        _C.MEL_NOT_NORMALIZED: Cause(
            "input", "The spectrogram lacks the last step of its computation, (x + 4) / 4."
        ),
        _C.MEL_NOT_CLAMPED: Cause(
            "input", "The spectrogram lacks the floor at 8 below its maximum."
        ),
        _C.NATURAL_LOG: Cause(
            "input", "The spectrogram was computed with the natural logarithm instead of log10."
        ),
        _C.QUANTIZATION_ERROR: Cause(
            "computation",
            "The layout and the values' scale are right, but the error is larger than the file's dtype "
            "explains, and spread over the values like noise.",
        ),
    }
)
