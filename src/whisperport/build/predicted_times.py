"""Predict the times of a model on a machine from those that were published for models of other sizes.

The work of a part of Whisper follows from the model's sizes, up to one number c, which is assumed to be the
same for all machines of a vendor:

    encoder   operations + c · attention scores       a softmax is slow on an NPU
    token     bytes of weights + c · bytes of state   rows of a cache take longer than as many weights

A time is work / speed. c is the one with which the published times of the fitted models differ least from
such times, as ratios; each machine has a speed of its own with each version of the software. `build.work`
counts operations and bytes.

The interval should contain 80% of measured times. With the deviation s of the fitted times, which has a few
degrees of freedom, a time that follows from n of them is within exp(±t s √(1 + 1/n)), by Student's t. What
follows from one model alone has no interval: nothing tells how far other sizes are from it. Published times
that are not fitted test the predictions: see benchmarks/README.md.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from whisperport.build.work import (
    BYTES,
    Part,
    attention_scores,
    decoder_weights,
    encoder_operations,
    encoder_weights,
    state_numbers,
    token_numbers,
)
from whisperport.program.dims import Dims, published_dims
from whisperport.targets import TARGETS, Target
from whisperport.targets.base import PublishedTimes

PARTS: tuple[Part, Part] = ("encoder", "token")
QUANTILE = 0.9  # on both sides: 80% are between
ROUNDED = 1.001  # sizes that differ in two tokens of the vocabulary are alike
Floats = NDArray[np.float64]
CANDIDATES = np.geomspace(1e-2, 1e6, 3201)  # of c; neighbours differ by 0.6%


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A predicted time of one part of a model on a machine.

    Attributes:
        target: name of the target.
        machine: name of the machine whose times were published.
        precision: of the programs.
        part: "encoder": a window in the encoder, with the cross-attention K/V; or "token": one token.
        seconds: the predicted time.
        interval_s: the times that should contain 80% of measured ones; None: one model alone was measured.
        memory_bytes: the part's weights, and a token's self- and cross-attention K/V; no activations.
        published_s: the published time of a model of these sizes; None: there is none.
        context: rows of the self-attention cache with which a token was measured.
        extrapolated: the model has more work than the largest one with a published time, or less than the
            smallest.
        software: what the published times were measured with.
        source: where they were published.
    """

    target: str
    machine: str
    precision: str
    part: Part
    seconds: float
    interval_s: tuple[float, float] | None
    memory_bytes: int
    published_s: float | None
    context: int
    extrapolated: bool
    software: str
    source: str


def work(part: Part, dims: Dims, precision: str) -> tuple[float, float]:
    """Return the work of a part without c, and what c multiplies: see above."""
    if part == "encoder":
        return encoder_operations(dims), attention_scores(dims)
    weights = decoder_weights(dims)
    state = token_numbers(dims) - weights
    return _weight_bytes(precision) * weights, _state_bytes(precision) * state


def memory_of(part: Part, dims: Dims, precision: str) -> int:
    """Return the bytes of a part's weights, and of a token's self- and cross-attention K/V."""
    if part == "encoder":
        return _weight_bytes(precision) * encoder_weights(dims)
    weights, state = decoder_weights(dims), state_numbers(dims)
    return _weight_bytes(precision) * weights + _state_bytes(precision) * state


def _weight_bytes(precision: str) -> int:
    return 1 if precision.startswith("w8") else BYTES[precision]


def _state_bytes(precision: str) -> int:
    return 2 if precision == "w8a16" else _weight_bytes(precision)


def predict(target: Target, dims: Dims, precision: str) -> tuple[Prediction, ...]:
    """Predict the times of both parts from each table of published times; empty: there are none.

    Args:
        target: its published times, and for c also those of the vendor's other targets.
        dims: sizes of the model.
        precision: of the programs.
    """
    fits = {part: _fit(target, part) for part in PARTS} if target.published else {}
    return tuple(
        _predict(target, times, dims, part, fit)
        for times in target.published
        if times.precision == precision
        for part, fit in fits.items()
        if fit and _fitted(times, part)
    )


def _predict(
    target: Target, times: PublishedTimes, dims: Dims, part: Part, fit: "Fit"
) -> Prediction:
    n, precision = len(_fitted(times, part)), times.precision
    speed = float(_log_ratios(times, part, fit.c).mean())
    seconds = math.exp(speed) * _amount(part, dims, precision, fit.c)
    spread = math.exp(student_t(QUANTILE, fit.freedom) * fit.deviation * math.sqrt(1 + 1 / n))
    with_context = replace(dims, n_text_ctx=times.context)
    measured = {as_measured(model, times): ms / 1e3 for model, ms in ms_of(times, part).items()}
    amounts = [_amount(part, sizes, precision, fit.c) for sizes in measured]
    own = _amount(part, with_context, precision, fit.c)
    return Prediction(
        target=target.spec.name,
        machine=times.machine,
        precision=precision,
        part=part,
        seconds=seconds,
        interval_s=(seconds / spread, seconds * spread) if n > 1 else None,
        memory_bytes=memory_of(part, dims, precision),
        published_s=next((s for sizes, s in measured.items() if _alike(with_context, sizes)), None),
        context=times.context,
        extrapolated=not min(amounts) / ROUNDED <= own <= max(amounts) * ROUNDED,
        software=times.software,
        source=times.source,
    )


def ms_of(times: PublishedTimes, part: Part) -> dict[str, float]:
    """Return model -> published milliseconds of a part."""
    return dict(times.encoder_ms if part == "encoder" else times.token_ms)


def _fitted(times: PublishedTimes, part: Part) -> dict[str, float]:
    return {model: ms for model, ms in ms_of(times, part).items() if model in times.fitted}


def as_measured(model: str, times: PublishedTimes) -> Dims:
    """Return the sizes of a model as it was measured."""
    dims = published_dims(model)
    if dims is None:
        raise ValueError(f"no model `{model}`")
    return replace(dims, n_text_ctx=times.context)


def _alike(dims: Dims, measured: Dims) -> bool:
    """Return whether both models have the same sizes, up to two tokens of the vocabulary."""
    return (
        abs(dims.n_vocab - measured.n_vocab) < 3
        and replace(dims, n_vocab=measured.n_vocab) == measured
    )


def _amount(part: Part, dims: Dims, precision: str, c: float) -> float:
    base, multiplied = work(part, dims, precision)
    return base + c * multiplied


def _log_ratios(times: PublishedTimes, part: Part, c: float | Floats) -> Floats:
    """Return log(seconds / work) of each fitted time (rows), with each c (columns)."""
    rows = []
    for model, milliseconds in _fitted(times, part).items():
        base, multiplied = work(part, as_measured(model, times), times.precision)
        rows.append(math.log(milliseconds / 1e3) - np.log(base + np.asarray(c) * multiplied))
    return np.stack(rows)


@dataclass(frozen=True, slots=True)
class Fit:
    """What the published times of a vendor's machines have in common.

    Attributes:
        c: see above.
        deviation: of the logarithms of the fitted times.
        freedom: degrees of freedom of the deviation: those of the times, less one for c and for each speed.
    """

    c: float
    deviation: float
    freedom: int


def _fit(target: Target, part: Part) -> Fit | None:
    """Return what a part's times have in common; None: no two tables have two fitted times."""
    family = [sibling for sibling in TARGETS if type(sibling) is type(target)] or [target]
    tables = [
        times for sibling in family for times in sibling.published if len(_fitted(times, part)) > 1
    ]
    if len(tables) < 2:
        return None
    squares, freedom = np.zeros_like(CANDIDATES), -1  # one for c
    for times in tables:
        logs = _log_ratios(times, part, CANDIDATES)
        squares += ((logs - logs.mean(0)) ** 2).sum(0)
        freedom += len(logs) - 1  # one for the speed
    best = int(squares.argmin())
    return Fit(float(CANDIDATES[best]), math.sqrt(squares[best] / freedom), freedom)


def student_t(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t, by the first terms of its expansion around the normal distribution.

    Source: Abramowitz and Stegun, 26.7.5. With 5 degrees of freedom or more, 0.9 is right to three digits.
    """
    z = NormalDist().inv_cdf(probability)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
