"""All mistakes of the cases: what each changes in a plan, and the label that it has.

A fault is drawn for a plan and returns the changed plan, or None if it cannot happen there. `slot` names
the step that it changes: two faults of one case have different slots.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from .device import INTEGERS, Plan, expected, position_axis
from .whisper import Spectrogram
from .worlds import Input, world

Random = np.random.Generator
Change = Callable[[Plan, Random], Plan | None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of mistake."""

    kind: str  # what happened, one for each physical history
    label: str  # what a diagnosis should say
    slot: str
    change: Change
    undo: tuple[str, ...]  # fields of the plan that it changes


FAULTS: dict[str, Fault] = {}


def _fault(kind: str, label: str, slot: str, *undo: str) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        assert kind not in FAULTS
        FAULTS[kind] = Fault(kind, label, slot, change, undo)
        return change

    return register


def _one(random: Random, *choices: object) -> object:
    return choices[int(random.integers(len(choices)))]


def _shape(plan: Plan) -> tuple[int, ...]:
    return tuple(n for n in expected(plan).shape if n > 1) or (1,)


# Input.


@_fault("other clip", "other clip", "clip", "given.clip")
def _other_clip(plan: Plan, random: Random) -> Plan | None:
    others = [c for c in range(len(world(plan.world).clips)) if c != plan.clip]
    return _given(plan, clip=int(random.choice(others)))


@_fault("later window", "other window", "window", "given.skip")
def _later_window(plan: Plan, random: Random) -> Plan | None:
    """The clip is read from a later second or from the half of the window on."""
    if plan.program != "encoder":
        return None
    return _given(plan, skip=int(random.integers(1, 6)) * 8_000)


@_fault("silence before", "other window", "window", "given.skip")
def _silence_before(plan: Plan, random: Random) -> Plan | None:
    """The padding is before the audio, or half of it is."""
    if plan.program != "encoder":
        return None
    here = world(plan.world)
    free = here.model.sizes.frames * 160 - len(here.clips[plan.given.clip])
    if free < 16_000:
        return None
    return _given(plan, skip=-(free if random.random() < 0.5 else free // 2))


@_fault("silent input", "silent input", "silence", "given.silent")
def _silent(plan: Plan, random: Random) -> Plan | None:
    return _given(plan, silent=_one(random, "audio", "mel")) if plan.program == "encoder" else None


def _given(plan: Plan, **changes: object) -> Plan:
    return replace(plan, given=replace(plan.given, **changes))


def _mel_fault(kind: str, label: str, **changes: object) -> None:
    @_fault(kind, label, "mel", "given.how")
    def change(plan: Plan, random: Random) -> Plan | None:
        if plan.program != "encoder":
            return None
        return _given(plan, how=Spectrogram(**changes))


_mel_fault("samples not scaled", "samples not scaled", sample_scale=32768.0)
_mel_fault("mel transposed", "mel transposed", transposed=True)
_mel_fault("mel not normalized", "mel not normalized", normalized=False)
_mel_fault("mel without floor", "mel without floor", floor=False)
_mel_fault("natural log", "natural log", natural_log=True)


@_fault("wrong mel bins", "wrong mel bins", "mel", "given.how")
def _wrong_bins(plan: Plan, random: Random) -> Plan | None:
    if plan.program != "encoder":
        return None
    bins = 208 - world(plan.world).model.sizes.mels  # 80 for 128, 128 for 80
    return _given(plan, how=Spectrogram(bins=bins))


@_fault("wrong hop", "mel frames", "mel", "given.how")
def _wrong_hop(plan: Plan, random: Random) -> Plan | None:
    if plan.program != "encoder":
        return None
    return _given(plan, how=Spectrogram(hop=int(_one(random, 128, 200, 320))))


@_fault("frames not centred", "mel frames", "mel", "given.how")
def _not_centred(plan: Plan, random: Random) -> Plan | None:
    if plan.program != "encoder":
        return None
    return _given(plan, how=Spectrogram(centred=False))


# Arithmetic.


@_fault("layers rounded", "quantization error", "arithmetic", "rounded", "bits")
def _layers_rounded(plan: Plan, random: Random) -> Plan | None:
    groups = (("add1", "add3", "add2"), ("softmax",), ("norm1", "norm3"), ("gelu",), ("",))
    bits = int(random.integers(4, 9))
    return replace(plan, rounded=_one(random, *groups), bits=bits)


@_fault("not finite", "not finite", "finite", "not_finite")
def _not_finite(plan: Plan, random: Random) -> Plan | None:
    if plan.storage in INTEGERS or plan.rounded:
        return None  # integers have no NaN
    return replace(plan, not_finite=_one(random, "frame", "channel", "some", "all"))


# Frames, blocks and outputs.


@_fault("frames shifted", "frame shift", "frames", "shift", "shift_edge")
def _shifted(plan: Plan, random: Random) -> Plan | None:
    x = expected(plan)
    frames = x.shape[position_axis(plan.output)]
    if frames < 100:
        return None
    n = int(random.integers(1, 40)) * (1 if random.random() < 0.5 else -1)
    return replace(plan, shift=n, shift_edge=_one(random, "zeros", "wrap", "edge"))


@_fault("blocks reordered", "channel blocks", "blocks", "blocks")
def _blocks(plan: Plan, random: Random) -> Plan | None:
    x = expected(plan)
    if plan.output == "logits" or x.shape[position_axis(plan.output)] < 100:
        return None
    blocks = int(_one(random, 2, 4)) if plan.output == "features" else x.shape[0]
    order = list(range(blocks))
    while order == list(range(blocks)):
        order = [int(i) for i in random.permutation(blocks)]
    return replace(plan, blocks=tuple(order))


@_fault("outputs swapped", "outputs swapped", "outputs", "taken_from")
def _swapped(plan: Plan, random: Random) -> Plan | None:
    outputs = world(plan.world).outputs(plan.program, Input(plan.clip))
    size = outputs[plan.output].size
    others = [n for n, x in outputs.items() if n != plan.output and x.size == size]
    return replace(plan, taken_from=str(random.choice(others))) if others else None


# Storage in integers, and the script that should undo it.


def _integers(plan: Plan, random: Random, *, symmetric: bool | None = None) -> Plan | None:
    if plan.not_finite or plan.dtype == "stored":
        return None
    if plan.storage in INTEGERS:
        return plan if plan.dequantize == "right" else None
    kinds = ("int8", "uint8") if random.random() < 0.85 else ("int16",)
    chosen = random.random() < 0.3 if symmetric is None else symmetric
    return replace(plan, storage=_one(random, *kinds), symmetric=chosen)


@_fault("range too small", "saturated", "range", "range_factor")
def _small_range(plan: Plan, random: Random) -> Plan | None:
    stored = _integers(plan, random)
    return stored and replace(stored, range_factor=float(random.uniform(0.1, 0.5)))


@_fault("raw integers", "integer file", "script", "dtype")
def _raw_integers(plan: Plan, random: Random) -> Plan | None:
    stored = _integers(plan, random)
    return stored and replace(stored, dtype="stored")


def _script_fault(kind: str, label: str, wrong: str) -> None:
    @_fault(kind, label, "script", "dequantize")
    def change(plan: Plan, random: Random) -> Plan | None:
        stored = _integers(plan, random)
        return stored and replace(stored, dequantize=wrong)


_script_fault("not dequantized", "not dequantized", "not at all")
_script_fault("scale not applied", "wrong scale", "no scale")
_script_fault("zero point not subtracted", "wrong zero point", "no zero point")
_script_fault("zero point added", "wrong zero point", "added zero point")


@_fault("other signedness", "signedness", "script", "dequantize")
def _other_signedness(plan: Plan, random: Random) -> Plan | None:
    stored = _integers(plan, random)
    if stored is None or stored.storage == "int16":
        return None
    return replace(stored, dequantize="other signedness")


@_fault("zero point off by 128", "wrong zero point", "script", "dequantize", "offset_steps")
def _off_by_128(plan: Plan, random: Random) -> Plan | None:
    stored = _integers(plan, random)
    if stored is None or stored.storage == "int16":
        return None
    steps = 128 if random.random() < 0.5 else -128
    return replace(stored, dequantize="other zero point", offset_steps=steps)


@_fault("other zero point", "wrong zero point", "script", "dequantize", "offset_steps")
def _other_zero_point(plan: Plan, random: Random) -> Plan | None:
    stored = _integers(plan, random)
    if stored is None:
        return None
    widest = 5000 if stored.storage == "int16" else 60
    steps = int(random.integers(widest // 10, widest)) * (1 if random.random() < 0.5 else -1)
    return replace(stored, dequantize="other zero point", offset_steps=steps)


@_fault("wrong scale", "wrong scale", "factor", "factor")
def _wrong_scale(plan: Plan, random: Random) -> Plan | None:
    """The scale of another tensor, or of another calibration."""
    if plan.dtype == "stored" or plan.not_finite == "all":
        return None
    factor = float(np.exp(random.uniform(np.log(1.2), np.log(30))))
    return replace(plan, factor=factor if random.random() < 0.5 else 1 / factor)


# Layout.


@_fault("axes permuted", "axes permuted", "order", "order")
def _permuted(plan: Plan, random: Random) -> Plan | None:
    n = len(_shape(plan))
    if n < 2 or plan.tile or plan.pad_axis >= 0:
        return None
    order = list(range(n))
    while order == list(range(n)):
        order = [int(i) for i in random.permutation(n)]
    return replace(plan, order=tuple(order))


@_fault("axis padded", "padded axis", "padding", "pad_axis", "alignment", "pad_with")
def _padded(plan: Plan, random: Random) -> Plan | None:
    shape = _shape(plan)
    if plan.tile:
        return None
    in_memory = [shape[i] for i in plan.order] if plan.order else list(shape)
    possible = [
        (axis, alignment)
        for axis, n in enumerate(in_memory)
        for alignment in (8, 16, 32, 64)
        if n % alignment and n > 4
    ]
    if not possible:
        return None
    axis, alignment = possible[int(random.integers(len(possible)))]
    fill = _one(random, "zeros", "zeros", "garbage")
    return replace(plan, pad_axis=axis, alignment=alignment, pad_with=fill)


@_fault("channels in tiles", "channel tiles", "order", "tile")
def _tiled(plan: Plan, random: Random) -> Plan | None:
    shape = _shape(plan)
    if plan.output != "features" or plan.order or plan.pad_axis >= 0:
        return None
    tiles = [c for c in (4, 8, 16, 32) if shape[1] % c == 0 and c < shape[1]]
    return replace(plan, tile=int(random.choice(tiles)))


# Buffer.


@_fault("stale buffer", "stale buffer", "buffer", "stale", "stale_first")
def _stale(plan: Plan, random: Random) -> Plan | None:
    share = float(random.uniform(0.08, 0.9))
    return replace(plan, stale=share, stale_first=bool(random.random() < 0.3))


@_fault("zeros at the end", "zero tail", "buffer", "zeros")
def _zeros(plan: Plan, random: Random) -> Plan | None:
    return replace(plan, zeros=float(random.uniform(0.05, 0.9)))


@_fault("constant", "constant", "buffer", "constant")
def _constant(plan: Plan, random: Random) -> Plan | None:
    return replace(plan, constant=float(_one(random, 0.0, 0.0, 1.0, -7.0)))


# File.


def _dtype_fault(kind: str, label: str, dtype: str) -> None:
    @_fault(kind, label, "dtype", "dtype")
    def change(plan: Plan, random: Random) -> Plan | None:
        return replace(plan, dtype=dtype) if plan.dtype == "float32" else None


_dtype_fault("half precision", "half precision", "float16")
_dtype_fault("bfloat16", "bfloat16", "bfloat16")
_dtype_fault("double precision", "double precision", "float64")


@_fault("big endian", "byte order", "endian", "big_endian")
def _big_endian(plan: Plan, random: Random) -> Plan | None:
    return replace(plan, big_endian=True)


@_fault("bytes as numbers", "bytes as numbers", "dtype", "bytes_as_numbers")
def _bytes_as_numbers(plan: Plan, random: Random) -> Plan | None:
    if plan.dtype != "float32":
        return None
    return replace(plan, bytes_as_numbers=_one(random, "int8", "uint8"))


@_fault("header", "extra bytes", "length", "header")
def _header(plan: Plan, random: Random) -> Plan | None:
    return replace(plan, header=int(_one(random, 8, 16, 20, 32, 64, 128)))


@_fault("bytes after the end", "extra bytes", "length", "extra")
def _extra(plan: Plan, random: Random) -> Plan | None:
    return replace(plan, extra=4 * int(random.integers(1, 40)) + int(random.integers(0, 4)))


@_fault("file cut", "truncated", "length", "kept")
def _cut(plan: Plan, random: Random) -> Plan | None:
    if prod(_shape(plan)) < 1000:
        return None
    return replace(plan, kept=float(random.uniform(0.15, 0.97)))
