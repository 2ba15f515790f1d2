"""Predict the times of a model on a machine from those that were published for models of other sizes.

The work of a part of Whisper follows from the model's sizes, up to one number c, which all machines of a
vendor have in common:

    encoder   operations + c · attention scores       a softmax is slow on an NPU
    token     bytes of weights + c · bytes of state   rows of a cache take longer than as many weights

A time is work / speed. c is the one with which the published times of the fitted models differ least from
such times, as ratios; each machine has a speed of its own with each version of the software. `build.work`
counts operations and bytes.

The interval is to hold 80 of 100 times. With the deviation s of the fitted times, a time that follows from
n of them is within exp(±1.28 s √(1 + 1/n)). Where versions of the software differ, the interval reaches
from one to the other. Published times that are not fitted test the predictions: see benchmarks/README.md.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean

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
DEVIATIONS = NormalDist().inv_cdf(0.9)  # on both sides, between which are 80 of 100 times
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
        interval_s: the times between which it is expected to be, with a probability of 0.8.
        memory_bytes: the part's weights, and a token's self- and cross-attention K/V; no activations.
        published_s: the published time of a model of these sizes; None: there is none.
        extrapolated: the model has more work than the largest one with a published time, or less than the
            smallest.
        software: what the published times were measured with.
        sources: where they were published.
    """

    target: str
    machine: str
    precision: str
    part: Part
    seconds: float
    interval_s: tuple[float, float]
    memory_bytes: int
    published_s: float | None
    extrapolated: bool
    software: tuple[str, ...]
    sources: tuple[str, ...]


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
    """Predict the times of both parts on each machine with published times; empty: there are none.

    Args:
        target: its published times, and for c also those of the vendor's other targets.
        dims: sizes of the model.
        precision: of the programs.
    """
    machines = dict.fromkeys(
        times.machine for times in target.published if times.precision == precision and times.fitted
    )
    predictions = (
        _predict(target, machine, dims, precision, part) for machine in machines for part in PARTS
    )
    return tuple(prediction for prediction in predictions if prediction)


def _predict(
    target: Target, machine: str, dims: Dims, precision: str, part: Part
) -> Prediction | None:
    fit = _fit(target, part)
    tables = [
        times
        for times in target.published
        if (times.machine, times.precision) == (machine, precision) and _fitted(times, part)
    ]
    if fit is None or not tables:
        return None
    c, deviation = fit
    own = math.log(_amount(part, dims, precision, c))
    logs, spreads, published, amounts = [], [], [], []
    for times in tables:
        n = len(_fitted(times, part))
        logs.append(own + float(_log_ratios(times, part, c).mean()))
        spreads.append(DEVIATIONS * deviation * math.sqrt(1 + 1 / n))
        alike_context = replace(dims, n_text_ctx=times.context)
        for model, milliseconds in ms_of(times, part).items():
            amounts.append(_amount(part, as_measured(model, times), precision, c))
            if _alike(alike_context, as_measured(model, times)):
                published.append(milliseconds / 1e3)
    size = _amount(part, alike_context, precision, c)
    return Prediction(
        target=target.spec.name,
        machine=machine,
        precision=precision,
        part=part,
        seconds=math.exp(fmean(logs)),
        interval_s=(
            math.exp(min(log - spread for log, spread in zip(logs, spreads, strict=True))),
            math.exp(max(log + spread for log, spread in zip(logs, spreads, strict=True))),
        ),
        memory_bytes=memory_of(part, dims, precision),
        published_s=published[-1] if published else None,
        extrapolated=not min(amounts) / ROUNDED <= size <= max(amounts) * ROUNDED,
        software=tuple(times.software for times in tables),
        sources=tuple(times.source for times in tables),
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
    return replace(dims, n_audio_ctx=round(times.window_s * 50), n_text_ctx=times.context)


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


def _fit(target: Target, part: Part) -> tuple[float, float] | None:
    """Return c and the deviation of the fitted times; None: no two machines have two fitted times."""
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
    return float(CANDIDATES[best]), math.sqrt(squares[best] / freedom)
