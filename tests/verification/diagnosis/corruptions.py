"""Outputs of a small imagined encoder, and corruptions of their files, for the tests of the diagnosis."""

from collections.abc import Callable
from typing import Any

import numpy as np

from whisperport.verification.diagnosis.causes import CauseCode
from whisperport.verification.diagnosis.expected import Alternative, Expected, ExpectedTensor

Array = Any
FRAMES, CHANNELS = 180, 64
_C = CauseCode


def features(seed: int) -> Array:
    """(T, d) float32: channels with means of their own, and values that change slowly over time."""
    random = np.random.default_rng(seed)
    means = np.random.default_rng(99).standard_normal(CHANNELS)
    walk = np.cumsum(random.standard_normal((FRAMES, CHANNELS)), axis=0)
    smooth = walk - np.linspace(0, 1, FRAMES)[:, None] * walk[-1]
    return (means + smooth / smooth.std(axis=0)).astype(np.float32)


def expected() -> Expected:
    """The expected output, with two other clips and one wrong spectrogram."""
    tensor = ExpectedTensor("features", features(1)[None], 1)
    others = (
        Alternative(_C.OTHER_CLIP, "The file holds another clip.", {"features": features(2)[None]}),
        Alternative(
            _C.NATURAL_LOG, "It is the natural logarithm.", {"features": features(3)[None]}
        ),
    )
    return Expected("encoder", "clip", (tensor,), make_alternatives=lambda: others)


def stored(x: Array, scale: float = 0.05, zero_point: int = 11) -> Array:
    """The values in int8."""
    return np.clip(np.rint(x / scale) + zero_point, -128, 127).astype(np.int8)


def floats(x: Array) -> Array:
    return np.ascontiguousarray(x, np.float32)


def halves_exchanged(x: Array) -> Array:
    return np.concatenate([x[:, CHANNELS // 2 :], x[:, : CHANNELS // 2]], axis=1)


def noisy(x: Array, db: float) -> Array:
    noise = np.random.default_rng(5).standard_normal(x.shape)
    return x + noise * np.sqrt(np.mean(x**2)) * 10 ** (-db / 20)


def read_as_unsigned(x: Array) -> Array:
    """The values in int8 over its whole range, dequantized as if they were unsigned."""
    low, high = float(x.min()), float(x.max())
    scale = (high - low) / 255
    zero_point = round(-128 - low / scale)
    q = np.clip(np.rint(x / scale) + zero_point, -128, 127).astype(np.int8)
    return (q.view(np.uint8).astype(np.float64) - zero_point) * scale


def with_end_of(x: Array, other: Array) -> Array:
    return np.where(np.arange(FRAMES)[:, None] < 60, x, other)


def with_nan(x: Array) -> Array:
    wrong = x.copy()
    wrong[7, 3:9] = np.nan
    return wrong


ONE: dict[str, tuple[Callable[[Array], Array], set[CauseCode]]] = {
    "int8": (stored, {_C.INTEGERS_READ_AS_FLOATS}),
    "int16": (
        lambda x: np.rint(x / 0.001).astype(np.int16),
        {_C.INTEGERS_READ_AS_FLOATS},
    ),
    "bytes of floats as numbers": (
        lambda x: floats(np.frombuffer(floats(x).tobytes(), np.int8)),
        {_C.FLOATS_READ_AS_INTEGERS},
    ),
    "float16": (lambda x: x.astype("<f2"), {_C.HALF_PRECISION}),
    "bfloat16": (lambda x: (floats(x).view("<u4") >> 16).astype("<u2"), {_C.BFLOAT16}),
    "float64": (lambda x: x.astype("<f8"), {_C.DOUBLE_PRECISION}),
    "big-endian": (lambda x: x.astype(">f4"), {_C.BYTE_ORDER}),
    "header": (
        lambda x: np.frombuffer(b"HEADER12" * 5 + floats(x).tobytes(), np.uint8),
        {_C.EXTRA_BYTES},
    ),
    "trailer": (
        lambda x: np.frombuffer(floats(x).tobytes() + b"trailer", np.uint8),
        {_C.EXTRA_BYTES},
    ),
    "truncated": (lambda x: floats(x)[: FRAMES // 2], {_C.TRUNCATED}),
    "zeros at the end": (
        lambda x: floats(np.where(np.arange(FRAMES)[:, None] < 120, x, 0)),
        {_C.ZERO_TAIL},
    ),
    "end of another clip": (
        lambda x: floats(np.where(np.arange(FRAMES)[:, None] < 120, x, features(2))),
        {_C.STALE_BUFFER},
    ),
    "end of something unknown": (
        lambda x: floats(np.where(np.arange(FRAMES)[:, None] < 120, x, features(77)[:, ::-1])),
        {_C.STALE_BUFFER},
    ),
    "zeros": (lambda x: floats(0 * x), {_C.CONSTANT}),
    "some NaN": (lambda x: floats(with_nan(x)), {_C.NOT_FINITE}),
    "only NaN": (lambda x: floats(np.nan * x), {_C.NOT_FINITE}),
    "stored integers as numbers": (lambda x: floats(stored(x)), {_C.NOT_DEQUANTIZED}),
    "scale": (lambda x: floats(1.3 * x), {_C.WRONG_SCALE}),
    "zero point": (
        lambda x: floats((stored(x).astype(np.float32) - 11 + 7) * 0.05),
        {_C.WRONG_ZERO_POINT},
    ),
    "int8 read as uint8": (
        lambda x: floats(read_as_unsigned(x)),
        {_C.WRONG_SIGNEDNESS},
    ),
    "clipped": (lambda x: floats(np.clip(x, -1, 1.2)), {_C.SATURATED}),
    "transposed": (lambda x: floats(x.T), {_C.AXES_PERMUTED}),
    "padded": (
        lambda x: floats(np.pad(x, ((0, 0), (0, 64)))),
        {_C.PADDED_AXIS},
    ),
    "tiles": (
        lambda x: floats(x.reshape(FRAMES, 4, 16).transpose(1, 0, 2)),
        {_C.CHANNEL_TILES},
    ),
    "halves exchanged": (lambda x: floats(halves_exchanged(x)), {_C.CHANNEL_BLOCKS_REORDERED}),
    "shifted": (lambda x: floats(np.roll(x, 5, axis=0)), {_C.FRAME_SHIFT}),
    "shifted, with zeros": (
        lambda x: floats(np.concatenate([np.zeros((20, CHANNELS)), x[:-20]])),
        {_C.FRAME_SHIFT},
    ),
    "another clip": (lambda x: floats(features(2)), {_C.OTHER_CLIP}),
    "natural logarithm": (lambda x: floats(features(3)), {_C.NATURAL_LOG}),
    "noise": (lambda x: floats(noisy(x, 18)), {_C.QUANTIZATION_ERROR}),
}

TWO: dict[str, tuple[Callable[[Array], Array], set[CauseCode]]] = {
    "int8, transposed": (
        lambda x: np.ascontiguousarray(stored(x).T),
        {_C.INTEGERS_READ_AS_FLOATS, _C.AXES_PERMUTED},
    ),
    "float16, shifted": (
        lambda x: np.roll(x, -4, axis=0).astype("<f2"),
        {_C.HALF_PRECISION, _C.FRAME_SHIFT},
    ),
    "padded, scale": (
        lambda x: floats(np.pad(2 * x, ((0, 0), (0, 64)))),
        {_C.PADDED_AXIS, _C.WRONG_SCALE},
    ),
    "padded and transposed": (
        lambda x: floats(np.pad(x.T, ((0, 0), (0, 4)))),
        {_C.PADDED_AXIS, _C.AXES_PERMUTED},
    ),
    "noise, transposed": (
        lambda x: floats(noisy(x, 18).T),
        {_C.QUANTIZATION_ERROR, _C.AXES_PERMUTED},
    ),
    "float16 of another clip": (
        lambda x: features(2).astype("<f2"),
        {_C.HALF_PRECISION, _C.OTHER_CLIP},
    ),
    "halves exchanged, end of another clip": (
        lambda x: floats(halves_exchanged(with_end_of(x, features(2)))),
        {_C.CHANNEL_BLOCKS_REORDERED, _C.STALE_BUFFER},
    ),
    "truncated, big-endian": (
        lambda x: x.astype(">f4")[:90],
        {_C.TRUNCATED, _C.BYTE_ORDER},
    ),
}
