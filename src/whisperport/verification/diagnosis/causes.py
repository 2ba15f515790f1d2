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

from dataclasses import dataclass
from enum import StrEnum


class CauseCode(StrEnum):
    """Names of all causes, in the order in which they are explained."""

    # The file holds 8- or 16-bit integers, signed or unsigned, where floats are expected.
    INTEGERS_READ_AS_FLOATS = "integers-read-as-floats"
    # The file holds floats where integers are expected, or each byte of a float became one number.
    FLOATS_READ_AS_INTEGERS = "floats-read-as-integers"
    # The file holds float16 where float32 is expected.
    HALF_PRECISION = "half-precision"
    # The file holds bfloat16 where float32 is expected.
    BFLOAT16 = "bfloat16"
    # The file holds float64 where float32 is expected.
    DOUBLE_PRECISION = "double-precision"
    # The bytes of every number are in the opposite order (big-endian).
    BYTE_ORDER = "byte-order"
    # Bytes that belong to no value precede or follow the values, such as a header.
    EXTRA_BYTES = "extra-bytes"
    # The file ends early: it holds only the first part of the values.
    TRUNCATED = "truncated"
    # The file has its full size, but the values after some point are zeros.
    ZERO_TAIL = "zero-tail"
    # The values after some point, or before it, belong to another output, such as that of the previous
    # clip.
    STALE_BUFFER = "stale-buffer"
    # All values of the file are equal, for example 0.
    CONSTANT = "constant"
    # Some values are NaN or infinite, in every reading.
    NOT_FINITE = "not-finite"
    # The values are the stored integers as numbers: neither scale nor zero point was applied.
    NOT_DEQUANTIZED = "not-dequantized"
    # All values are multiplied by one constant: the scale is wrong.
    WRONG_SCALE = "wrong-scale"
    # One constant was added to all values: the zero point is wrong or was not subtracted.
    WRONG_ZERO_POINT = "wrong-zero-point"
    # Signed 8-bit integers were read as unsigned ones, or the reverse, and then dequantized.
    WRONG_SIGNEDNESS = "wrong-signedness"
    # Values beyond a limit are clipped to it: the range of the quantization is too small.
    SATURATED = "saturated"
    # The axes are in another order, such as (C, T) where (T, C) is expected.
    AXES_PERMUTED = "axes-permuted"
    # Rows, columns or channels are padded to a multiple of an alignment, such as 16.
    PADDED_AXIS = "padded-axis"
    # The channels are stored in tiles: (C / c, T, c) where (T, C) is expected (NC1HWC2).
    CHANNEL_TILES = "channel-tiles"
    # Blocks of consecutive channels are in another order, such as both halves exchanged.
    CHANNEL_BLOCKS_REORDERED = "channel-blocks-reordered"
    # Frame t of the file is frame t - n of the expected output; the n frames at the edge are those of the
    # other end, zeros, or a copy of the edge.
    FRAME_SHIFT = "frame-shift"
    # The file holds another output of the program than its name says.
    OUTPUTS_SWAPPED = "outputs-swapped"
    # The file holds the output of another clip of the bundle.
    OTHER_CLIP = "other-clip"
    # The input was another window of the clip: it begins later, or the silence precedes the audio.
    OTHER_WINDOW = "other-window"
    # The input was silence or zeros.
    SILENT_INPUT = "silent-input"
    # The samples were 16-bit integers, not divided by 32768, when the spectrogram was computed.
    AUDIO_NOT_SCALED = "audio-not-scaled"
    # The spectrogram had another number of mel bins (80 or 128); the input holds its first bins, or its
    # bins and then zeros.
    WRONG_MEL_BINS = "wrong-mel-bins"
    # The frames of the spectrogram do not begin every 160 samples, or they are not centred: the audio was
    # not padded with 200 reflected samples at its ends.
    WRONG_MEL_FRAMES = "wrong-mel-frames"
    # The spectrogram was stored as (frames, bins) instead of (bins, frames).
    MEL_TRANSPOSED = "mel-transposed"
    # The spectrogram lacks the last step of its computation, (x + 4) / 4.
    MEL_NOT_NORMALIZED = "mel-not-normalized"
    # The spectrogram lacks the floor at 8 below its maximum.
    MEL_NOT_CLAMPED = "mel-not-clamped"
    # The spectrogram was computed with the natural logarithm instead of log10.
    NATURAL_LOG = "natural-log"
    # The layout and the values' scale are right, but the error is larger than the file's dtype explains,
    # and spread over the values like noise. It may be as large as the values, as that of static 8 bits is
    # for a checkpoint with massive activations.
    QUANTIZATION_ERROR = "quantization-error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause that was found in one output.

    Attributes:
        cause: the cause.
        sentence: what was found, with its parameters, such as the scale or the number of frames.
        fix: lines of numpy that undo it, on the array `x`; empty if the file's values cannot be restored.
        advice: what to change so that it does not occur again.
    """

    cause: CauseCode
    sentence: str
    fix: str = ""
    advice: str = ""
