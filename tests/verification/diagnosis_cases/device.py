"""What happens between the audio of a user and the file of a device, step by step, right or wrong.

    input ─► arithmetic ─► frames ─► storage ─► layout ─► buffer ─► script ─► file
    (clip,    (rounding     (copied   (integers,  (axes,     (stale,   (scale,    (dtype,
     mel)      in layers)    wrongly)  range)      padding)   zeros)    zero point) bytes)

A `Plan` holds one decision for every step. With the defaults, every step is right, and the file holds the
expected output in float32.
"""

import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .whisper import Floats
from .worlds import Input, world

INTEGERS = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767)}
Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decisions of every step."""

    world: str
    program: str
    output: str
    clip: int  # the clip that the user asked for
    given: Input
    seed: int = 0  # of the noise and of the places of damage
    # arithmetic
    rounded: tuple[str, ...] = ()  # layers whose tensors are rounded to `bits`
    bits: int = 8
    not_finite: str = ""  # "frame", "channel", "some", "all"
    # frames and outputs
    taken_from: str = ""  # another output of the program
    shift: int = 0
    shift_edge: str = "zeros"  # "zeros", "wrap", "edge"
    blocks: tuple[int, ...] = ()  # order of equal blocks of channels, or of heads
    # storage
    storage: str = "float32"  # "float32", "float16", or a name of INTEGERS
    symmetric: bool = False
    range_factor: float = 1.0  # below 1: the calibrated range was too small
    # layout in the device's memory
    order: tuple[int, ...] = ()  # of the axes without those of size 1
    pad_axis: int = -1  # axis of the memory that is padded; -1: none
    alignment: int = 1
    pad_with: str = "zeros"  # or "garbage"
    tile: int = 0  # channels per tile
    # buffer
    stale: float = 0.0  # share of the memory that the previous run wrote
    stale_first: bool = False  # the stale part is the first one
    zeros: float = 0.0  # share of the memory, at its end, that nobody wrote
    constant: float | None = None
    # script
    dequantize: str = "right"  # see `_dequantized`
    factor: float = 1.0
    offset_steps: int = 0
    # file
    dtype: str = "float32"  # "float32", "float16", "bfloat16", "float64", "stored"
    big_endian: bool = False
    bytes_as_numbers: str = ""  # "int8", "uint8": each byte became one float32
    header: int = 0
    extra: int = 0
    kept: float = 1.0  # share of the file that was copied


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """What a plan makes: the file, the numbers in it as the script knew them, and how they were stored."""

    file: bytes
    numbers: Floats  # flat, before they were encoded as a dtype
    scale: float  # of the storage; 0: floats
    zero_point: int
    big_endian: bool


def expected(plan: Plan) -> Floats:
    """Return the output that a right run gives, in its whole shape."""
    return world(plan.world).outputs(plan.program, Input(plan.clip))[plan.output]


def run(plan: Plan) -> Steps:
    """Make the file of a plan."""
    memory, scale, zero = _memory(plan)
    if plan.stale:
        clips = range(len(world(plan.world).clips))
        clip = next(c for c in clips if c not in (plan.clip, plan.given.clip))
        before = _memory(replace(plan, given=Input(clip), not_finite=""))[0]
        n = round(plan.stale * memory.size)
        part = slice(0, n) if plan.stale_first else slice(memory.size - n, None)
        memory[part] = before[part]
    if plan.zeros:
        memory[memory.size - round(plan.zeros * memory.size) :] = 0
    if plan.constant is not None:
        memory[:] = np.array(plan.constant).astype(memory.dtype)
    if plan.storage in INTEGERS and plan.dtype != "stored":
        numbers = _dequantized(memory, plan, scale, zero)
    else:
        numbers = memory * memory.dtype.type(plan.factor) if plan.factor != 1 else memory
    return Steps(
        _file(numbers, plan),
        numbers.astype(np.float32),
        scale,
        zero,
        plan.big_endian,
    )


def _memory(plan: Plan) -> tuple[Array, float, int]:
    """Return the device's memory, flat, its scale, and its zero point."""
    x = _frames(_computed(plan), plan)
    if plan.storage not in INTEGERS:
        kind = np.float16 if plan.storage == "float16" else np.float32
        return _laid_out(x.astype(kind).astype(np.float32), plan, 0), 0.0, 0
    lowest, highest = INTEGERS[plan.storage]
    scale, zero = _parameters(plan)
    q = np.rint(x / scale) + zero
    q = np.clip(q, lowest, highest).astype(plan.storage)
    return _laid_out(q, plan, zero), scale, zero


def _computed(plan: Plan) -> Floats:
    """Return the output as the device computes it, in its whole shape."""
    here = world(plan.world)
    name = plan.taken_from or plan.output
    if plan.rounded:
        return _rounded(plan.world, plan.program, plan.given, plan.rounded, plan.bits)[name].copy()
    x = here.outputs(plan.program, plan.given)[name].copy()
    random = np.random.default_rng(plan.seed)
    axis = int(np.argmax(x.shape[:-1])) if x.ndim > 1 else 0
    match plan.not_finite:
        case "frame":
            first = int(random.integers(x.shape[axis]))
            np.moveaxis(x, axis, 0)[first : first + 3] = np.nan
        case "channel":
            x[..., int(random.integers(x.shape[-1]))] = np.inf
        case "some":
            x.reshape(-1)[random.choice(x.size, max(1, x.size // 500), replace=False)] = np.nan
        case "all":
            x[...] = np.nan
    return x


@lru_cache(maxsize=60)
def _rounded(
    of: str, program: str, given: Input, layers: tuple[str, ...], bits: int
) -> dict[str, Floats]:
    """Run a program whose tensors are stored in few bits, with ranges calibrated on the first clips."""
    here = world(of)
    ranges = _ranges(of, program, layers)

    def store(name: str, x: Floats) -> Floats:
        if name not in ranges:
            return x
        low, high = ranges[name]
        step = max(high - low, 1e-9) / (2**bits - 1)
        return (np.clip(np.rint((x - low) / step), 0, 2**bits - 1) * step + low).astype(np.float32)

    return dict(here.run(program, given, store))


@lru_cache(maxsize=40)
def _ranges(of: str, program: str, layers: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest value of every tensor whose name ends with one of `layers`."""
    found: dict[str, tuple[float, float]] = {}

    def note(name: str, x: Floats) -> Floats:
        if name.endswith(layers):
            low, high = found.get(name, (0.0, 0.0))
            found[name] = (min(low, float(x.min())), max(high, float(x.max())))
        return x

    for clip in (0, 1):
        world(of).run(program, Input(clip), note)
    return found


def _frames(x: Floats, plan: Plan) -> Floats:
    """Copy frames and blocks of channels, rightly or wrongly; returns the whole shape."""
    axis = position_axis(plan.output)
    frames = np.moveaxis(x, axis, 0)
    if plan.shift:
        moved = np.roll(frames, plan.shift, axis=0)
        n = abs(plan.shift)
        edge = slice(0, n) if plan.shift > 0 else slice(len(frames) - n, None)
        if plan.shift_edge == "zeros":
            moved[edge] = 0
        elif plan.shift_edge == "edge":
            moved[edge] = frames[0] if plan.shift > 0 else frames[-1]
        frames = moved
    x = np.moveaxis(frames, 0, axis)
    if plan.blocks:
        axis = _block_axis(x.shape, plan.output)
        parts = np.split(x, len(plan.blocks), axis=axis)
        x = np.concatenate([parts[i] for i in plan.blocks], axis=axis)
    return np.ascontiguousarray(x)


def position_axis(output: str) -> int:
    """Return the axis of positions or tokens of an output in its whole shape."""
    return {"features": 1, "logits": 0}.get(output, 2 if "_k_" in output else 1)


def _block_axis(shape: tuple[int, ...], output: str) -> int:
    return 2 if output == "features" else 0  # channels, or heads


def _parameters(plan: Plan) -> tuple[float, int]:
    """Return scale and zero point, calibrated on the right outputs of all clips."""
    here = world(plan.world)
    name = plan.taken_from or plan.output
    values = [here.outputs(plan.program, Input(c))[name] for c in range(len(here.clips))]
    every = np.stack(values) * np.float32(plan.range_factor)
    lowest, highest = INTEGERS[plan.storage]
    low, high = min(0.0, float(every.min())), max(0.0, float(every.max()))
    if plan.symmetric:
        scale = max(-low, high) / (highest if lowest < 0 else highest / 2)
        return float(np.float32(scale)), 0 if lowest < 0 else 128
    scale = float(np.float32((high - low) / (highest - lowest)))
    return scale, int(np.clip(round(lowest - low / scale), lowest, highest))


def representable(plan: Plan) -> tuple[float, float]:
    """Return the smallest and the largest value that the storage of a plan can hold."""
    scale, zero = _parameters(plan)
    lowest, highest = INTEGERS[plan.storage]
    return float((lowest - zero) * scale), float((highest - zero) * scale)


def _laid_out(x: Array, plan: Plan, neutral: int) -> Array:
    """Return the elements in the order of the device's memory, flat, with padding."""
    x = x.reshape([n for n in x.shape if n > 1] or [1])
    if plan.tile:
        frames, channels = x.shape
        x = x.reshape(frames, channels // plan.tile, plan.tile).swapaxes(0, 1)
    if plan.order:
        x = x.transpose(plan.order)
    if plan.pad_axis >= 0:
        axis = plan.pad_axis
        more = -x.shape[axis] % plan.alignment
        shape = [*x.shape]
        shape[axis] = more
        if plan.pad_with == "garbage":
            random = np.random.default_rng(plan.seed)
            padding = random.choice(x.reshape(-1), tuple(shape)).astype(x.dtype)
        else:
            padding = np.zeros(shape, x.dtype)
        x = np.concatenate([x, padding], axis=axis)
    return x.reshape(-1).copy()


def _dequantized(q: Array, plan: Plan, scale: float, zero: int) -> Floats:
    """Apply scale and zero point as the user's script does."""
    s, z = np.float64(scale), float(zero)
    x = q.astype(np.float64)
    match plan.dequantize:
        case "not at all":
            x = x.copy()
        case "no zero point":
            x = x * s
        case "added zero point":
            x = (x + z) * s
        case "other zero point":
            x = (x - z - plan.offset_steps) * s
        case "no scale":
            x = x - z
        case "other signedness":
            viewed = q.view({"int8": np.uint8, "uint8": np.int8}[plan.storage])
            x = (viewed.astype(np.float64) - z) * s
        case _:
            x = (x - z) * s
    return (x * plan.factor).astype(np.float32)


def _file(numbers: Array, plan: Plan) -> bytes:
    data = _encoded(numbers, plan)
    random = np.random.default_rng(plan.seed + 1)
    if plan.bytes_as_numbers:
        data = np.frombuffer(data, plan.bytes_as_numbers).astype("<f4").tobytes()
    if plan.header:
        # A magic number, the number of dimensions, their sizes, and reserved bytes, as tools write them.
        words = [0x4C4E4E41, 3, 1, numbers.size // 4, 4]
        data = struct.pack("<5I", *words).ljust(plan.header, b"\0")[: plan.header] + data
    if plan.extra:
        data += random.integers(0, 256, plan.extra, np.uint8).tobytes()
    return data[: round(plan.kept * len(data))]


def _encoded(numbers: Array, plan: Plan) -> bytes:
    """Return the numbers as bytes of the file's dtype."""
    end = ">" if plan.big_endian else "<"
    if plan.dtype == "stored":
        return numbers.astype(numbers.dtype.newbyteorder(end)).tobytes()
    if plan.dtype == "bfloat16":
        bits = numbers.astype("<f4").view("<u4").astype(np.uint64)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return even.astype(f"{end}u2").tobytes()
    size = {"float16": 2, "float32": 4, "float64": 8}[plan.dtype]
    with np.errstate(over="ignore"):
        return numbers.astype(f"{end}f{size}").tobytes()
