"""Draw cases: a file of a device, made with no, one or two mistakes, and the causes that explain it.

A case is the same for the same seed and number. Its labels follow from the plan and are then checked
against the bytes: a mistake whose removal changes nothing is no cause. A mistake whose effect is close to
the tolerance is drawn again, so that no label depends on the choice of a tolerance.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from .device import INTEGERS, Array, Plan, Steps, expected, representable, run
from .faults import FAULTS, Fault
from .worlds import PROGRAMS, RANDOM_SIZES, Input, world

GATE_DB = {
    "fp32": 60.0,
    "fp16": 35.0,
    "w8a8": 14.0,
}  # SQNR that an output of each precision must have
LARGEST_ERROR = {  # that one value may have, in parts of the largest expected one
    "fp32": 1e-3,
    "fp16": 1e-2,
    "w8a8": np.inf,
}
MARGIN = 1.6  # no case is nearer to its largest error than by this factor: 4 dB
MARGIN_DB = 4.0  # no case is nearer to its tolerance
FAINT_DB = 3.0  # of layers' rounding: less than this is no output any more
CLEAN_SHARE = 0.1
PAIR_SHARE = 1 / 3
LARGEST_HALF = 65504


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One file of a device, and what is true about it.

    Attributes:
        seed, number: what `draw` was called with.
        plan: how the file was made.
        kinds: the mistakes that were made.
        labels: the causes that the file shows; empty: none.
        accepted: sets of causes that are true, or give the same bytes; `labels` is the first.
        precision: precision of the device's arithmetic, whose tolerance applies.
        quantized: (dtype, scale, zero point) if the user expects a file of integers and knows them.
        file: the bytes.
        true: the expected output, in its whole shape.
        sqnr_db: of the numbers in the file, if they are as many as expected; NaN otherwise.
    """

    seed: int
    number: int
    plan: Plan
    kinds: tuple[str, ...]
    labels: frozenset[str]
    accepted: tuple[frozenset[str], ...]
    precision: str
    quantized: tuple[str, float, int] | None
    file: bytes
    true: Array  # the expected output, in its whole shape
    sqnr_db: float


def draw(
    seed: int, number: int, *, worlds: tuple[str, ...] = (), kinds: tuple[str, ...] = ()
) -> Case:
    """Draw one case.

    Args:
        seed, number: the same numbers give the same case.
        worlds: names of the models to choose from; empty: all.
        kinds: the mistakes to make; empty: drawn.
    """
    random = np.random.default_rng([seed, number])
    for _ in range(400):
        case = _attempt(seed, number, random, worlds, kinds)
        if case is not None:
            return case
    raise RuntimeError(f"no case of {kinds} in {worlds}")


def one(seed: int, number: int, *, worlds: tuple[str, ...] = ()) -> Case:
    """Draw case `number` of a set: kinds equally often, a third with two mistakes, a tenth with none."""
    random = np.random.default_rng([seed, number, 1])
    kind = [*FAULTS][number % len(FAULTS)]
    share = random.random()
    if share < CLEAN_SHARE:
        return draw(seed, number, worlds=worlds, kinds=("clean",))
    if share < CLEAN_SHARE + PAIR_SHARE and kind != "constant":
        return draw(seed, number, worlds=worlds, kinds=(kind, "another"))
    return draw(seed, number, worlds=worlds, kinds=(kind,))


def _attempt(
    seed: int,
    number: int,
    random: np.random.Generator,
    worlds: tuple[str, ...],
    kinds: tuple[str, ...],
) -> Case | None:
    plan = _right_plan(random, worlds, number)
    wanted = [kind for kind in kinds if kind not in ("clean", "another")]
    if "another" in kinds:
        wanted.append(str(random.choice([k for k in FAULTS if k not in (*wanted, "constant")])))
    faults = [FAULTS[kind] for kind in wanted]
    if len({fault.slot for fault in faults}) < len(faults):
        return None
    if len([fault for fault in faults if fault.slot in _INPUT]) > 1:
        return None  # no diagnosis runs the encoder on inputs with two mistakes
    for fault in sorted(faults, key=lambda f: _ORDER.index(f.slot)):
        changed = fault.change(plan, random)
        if changed is None:
            return None
        plan = changed
    plan = _benign(plan, random)
    precision = _precision(plan, random)
    return _labelled(seed, number, plan, faults, precision, random)


_INPUT = ("clip", "window", "silence", "mel")
# Faults are applied in this order, so that each sees what the earlier ones have decided.
_ORDER = (
    *("clip", "window", "silence", "mel", "arithmetic", "finite", "frames", "blocks", "outputs"),
    *("range", "script", "factor", "order", "padding", "buffer", "dtype", "endian", "length"),
)


def _right_plan(random: np.random.Generator, worlds: tuple[str, ...], number: int) -> Plan:
    names = worlds or ("embedded", "embedded", *RANDOM_SIZES)
    name = names[int(random.integers(len(names)))]
    program = PROGRAMS[int(random.choice(4, p=(0.7, 0.12, 0.08, 0.1)))]
    clip = int(random.integers(len(world(name).clips)))
    outputs = [*world(name).outputs(program, Input(clip))]
    output = outputs[int(random.integers(len(outputs)))]
    return Plan(
        world=name,
        program=program,
        output=output,
        clip=clip,
        given=Input(clip),
        seed=int(random.integers(2**31)),
    )


def _benign(plan: Plan, random: np.random.Generator) -> Plan:
    """Let some devices that store floats compute in float16, or in integers that are read rightly."""
    if plan.storage != "float32" or plan.not_finite:
        return plan
    kind = random.random()
    if kind < 0.3:
        return replace(plan, storage="float16")
    if kind < 0.45 and plan.dequantize == "right":
        return replace(plan, storage="int8" if random.random() < 0.5 else "uint8")
    return plan


def _precision(plan: Plan, random: np.random.Generator) -> str:
    if plan.storage in INTEGERS:
        return "fp16" if plan.storage == "int16" else "w8a8"
    exact = plan.storage == "float32" and plan.dtype in ("float32", "float64") and not plan.rounded
    return "fp32" if exact and random.random() < 0.5 else "fp16"


def _labelled(
    seed: int,
    number: int,
    plan: Plan,
    faults: list[Fault],
    precision: str,
    random: np.random.Generator,
) -> Case | None:
    """Return the case with the labels that its bytes show; None: a label would depend on a tolerance."""
    made = run(plan)
    if len(faults) > 1 and _are_equal(made.numbers):
        return None  # equal values show nothing of another mistake
    if plan.dtype == "float16" and np.nanmax(np.abs(made.numbers)) > LARGEST_HALF:
        return None  # a third mistake: float16 overflows
    effects = [_visible(made, run(_without(plan, [fault])), precision) for fault in faults]
    together = _visible(made, run(_without(plan, faults)), precision)
    if None in (*effects, together) or together is not any(effects):
        return None  # about the tolerance; or either mistake alone gives this file
    seen = [fault for fault, effect in zip(faults, effects, strict=True) if effect]
    sqnr = _sqnr(expected(plan), made.numbers)
    labels = frozenset(fault.label for fault in seen)
    plain = len(made.file) == 4 * made.numbers.size and not plan.big_endian
    if plain and bool(labels) is is_within(expected(plan), made.numbers, precision):
        return None  # each effect is small, and together they are not, or the other way round
    if "quantization error" in labels and not _is_noise(plan, faults):
        return None
    if _is_clipped(plan):
        return None  # a wrong input leaves the calibrated range: a third mistake
    # A mistake whose effect is within the tolerance need not be named. It is true, so it may be.
    faint = frozenset(
        fault.label
        for fault in faults
        if fault not in seen and run(_without(plan, [fault])).file != made.file
    )
    known = plan.dtype == "stored" and random.random() < 0.5
    if known:
        labels -= {"integer file"}
        sqnr = _sqnr(expected(plan), (made.numbers - made.zero_point) * np.float32(made.scale))
    return Case(
        seed,
        number,
        plan,
        tuple(fault.kind for fault in faults),
        labels,
        _accepted(labels, faint, plan, made),
        precision,
        (plan.storage, made.scale, made.zero_point) if known else None,
        made.file,
        expected(plan),
        sqnr,
    )


def _accepted(
    labels: frozenset[str], faint: frozenset[str], plan: Plan, made: Steps
) -> tuple[frozenset[str], ...]:
    """Return the sets of causes that are true: with and without the faint ones, and what is the same."""
    own = [labels, *([labels | faint] if labels and faint else [])]
    return (*own, *(same for one in own for same in _equivalent(one, plan, made)))


def _equivalent(labels: frozenset[str], plan: Plan, made: Steps) -> Iterator[frozenset[str]]:
    """Yield other sets of causes that give exactly the same bytes.

    - Integers whose zero point is 0 are the same numbers whether only the scale was not applied, or nothing
      was. So are integers from which a zero point was subtracted, if they fit into the same signed dtype:
      a device whose zero point is 0 stores these numbers.
    - Integers q that were multiplied by a factor f are (q · scale) · (f / scale): a zero point that was not
      subtracted, if it is not 0, and a wrong scale.
    """
    same = {"not dequantized", "wrong scale"}
    if same <= labels:
        other = replace(plan, dequantize="no zero point", factor=plan.factor / made.scale)
        if np.allclose(run(other).numbers, made.numbers, rtol=1e-5, atol=0, equal_nan=True):
            yield (
                (labels - same)
                | {"wrong scale"}
                | ({"wrong zero point"} if made.zero_point else set())
            )
    if len(labels & same) != 1 or plan.factor != 1:
        return
    at_zero = plan.dequantize == "not at all" and made.zero_point == 0
    limit = 2 ** (8 * np.dtype(plan.storage).itemsize - 1)
    fits = plan.dequantize == "no scale" and bool(np.all(np.abs(made.numbers + 0.5) < limit))
    if at_zero or fits:
        yield (labels - same) | (same - labels)


def _are_equal(numbers: Array) -> bool:
    """Return whether all numbers are equal, or none is a number."""
    return bool(np.all(numbers == numbers.flat[0]) or np.all(np.isnan(numbers)))


def _visible(made: Steps, other: Steps, precision: str) -> bool | None:
    """Return whether two files differ by more than a tolerance; None: by about the tolerance."""
    if made.file == other.file:
        return False
    if len(made.file) != len(other.file) or made.big_endian != other.big_endian:
        return True
    finite = other.numbers[np.isfinite(other.numbers)]
    middle = float(finite.mean()) if finite.size else 0.0
    true, found = other.numbers - middle, made.numbers - middle  # an offset is no signal
    below = GATE_DB[precision] - _sqnr(true, found)  # NaN and infinity: not within
    beyond = _largest(true, found) / LARGEST_ERROR[precision]
    if below > MARGIN_DB or beyond > MARGIN:
        return True
    return False if below < -MARGIN_DB and beyond < 1 / MARGIN else None


def is_within(true: Array, found: Array, precision: str) -> bool:
    """Return whether numbers are the expected ones, within both tolerances of a precision."""
    near = _largest(true, found) <= LARGEST_ERROR[precision]
    return near and _sqnr(true, found) >= GATE_DB[precision]


def _largest(true: Array, found: Array) -> float:
    """Return the largest error in parts of the largest expected value, where both are finite."""
    if true.size != found.size:
        return float("nan")
    e, f = true.reshape(-1).astype(np.float64), found.reshape(-1).astype(np.float64)
    finite = np.isfinite(e) & np.isfinite(f)
    if not finite.any() or not np.any(e[finite]):
        return float("nan")
    return float(np.abs(e - f)[finite].max() / np.abs(e[finite]).max())


def _sqnr(true: Array, found: Array) -> float:
    """Return the SQNR in dB, where both are finite; NaN for other sizes; -inf: NaN in other places."""
    if true.size != found.size:
        return float("nan")
    e, f = true.reshape(-1).astype(np.float64), found.reshape(-1).astype(np.float64)
    finite = np.isfinite(e)
    if not np.array_equal(finite, np.isfinite(f)):
        return float("-inf")
    e, f = e[finite], f[finite]
    noise, signal = float(np.sum((e - f) ** 2)), float(np.sum(e**2))
    if noise == 0:
        return float("inf")
    return 10 * float(np.log10(signal / noise)) if signal else float("-inf")


def _is_noise(plan: Plan, faults: list[Fault]) -> bool:
    """Return whether the rounding of layers leaves an output that can be recognized.

    It must be nearer to the expected output than the outputs of other clips are: an error as large as
    their distance is not the expected output with noise, but any output.
    """
    others = [fault for fault in faults if fault.slot != "arithmetic"]
    alone = run(_without(plan, others))
    here, true = world(plan.world), expected(plan)
    clips = (c for c in range(len(here.clips)) if c != plan.clip)
    distances = [_sqnr(true, here.outputs(plan.program, Input(c))[plan.output]) for c in clips]
    least = max([FAINT_DB, *(d + MARGIN_DB for d in distances if d < np.inf)])
    return _sqnr(true, alone.numbers) > least


def _is_clipped(plan: Plan) -> bool:
    """Return whether integers clip an output although their range was calibrated as it should be."""
    if plan.storage not in INTEGERS or plan.range_factor != 1:
        return False
    right = replace(plan, storage="float32", dequantize="right", dtype="float32", factor=1.0)
    x = run(right).numbers
    low, high = representable(plan)
    margin = (high - low) / 256  # one step of 8 bits
    return bool(np.any((x < low - margin) | (x > high + margin)))


_DEFAULTS = {field.name: field.default for field in fields(Plan)}


def _without(plan: Plan, faults: list[Fault]) -> Plan:
    """Return the plan with some mistakes not made."""
    for name in (name for fault in faults for name in fault.undo):
        if name == "given.clip":
            plan = replace(plan, given=replace(plan.given, clip=plan.clip))
        elif name.startswith("given."):
            part = name.removeprefix("given.")
            right: Any = getattr(Input(0), part)
            plan = replace(plan, given=replace(plan.given, **{part: right}))
        else:
            plan = replace(plan, **{name: _DEFAULTS[name]})
    return plan
