"""Measure the programs of several candidates in turn, and keep the times for this machine."""

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.build.export.bundle_cache import cache_folder
from whisperport.build.export.exported import Candidate, Timed
from whisperport.errors import WhisperportError
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.system.atomic import write_atomic

ROUNDS = 5  # runs of each program of the fastest candidates, after one that is not measured
HEATS = 2  # rounds after which a candidate leaves that cannot win
HOPELESS = 1.3  # times the fastest: such a candidate leaves


def race(rivals: Mapping[Candidate, Sequence[Runner]], runs: int = 1) -> list[Timed]:
    """Measure the programs of candidates, which do the same together.

    The candidates run in turn, so that other load on the machine affects all of them. Those that are much
    slower leave early.

    Args:
        rivals: candidate -> the programs that do the work.
        runs: of a program one after the other, as in a window: its weights may stay in the CPU's caches.
    """
    calls = {
        candidate: {runner.spec.name: noise_call(runner) for runner in runners}
        for candidate, runners in rivals.items()
    }
    times: dict[tuple[Candidate, str], list[float]] = {
        (candidate, name): [] for candidate, own in calls.items() for name in own
    }
    running = set(calls)
    for number in range(1 + ROUNDS):
        for candidate in calls.keys() & running:
            for name, call in calls[candidate].items():
                started = time.perf_counter()
                for _ in range(runs):
                    call()
                times[candidate, name].append((time.perf_counter() - started) / runs)
        if number >= HEATS:
            running = _contending(times, running)
    return [
        Timed(name, candidate, 1e3 * statistics.median(seconds[1:]))
        for (candidate, name), seconds in times.items()
    ]


def _contending(
    times: Mapping[tuple[Candidate, str], Sequence[float]], running: set[Candidate]
) -> set[Candidate]:
    """Return the candidates that may still be the fastest."""
    total = dict.fromkeys(running, 0.0)
    for (candidate, _), seconds in times.items():
        if candidate in total:
            total[candidate] += statistics.median(seconds[1:])
    return {
        candidate
        for candidate, seconds in total.items()
        if seconds <= HOPELESS * min(total.values())
    }


def noise_call(runner: Runner) -> Callable[[], object]:
    """Return a function that runs a program on noise, with constants and state bound as in a decoder."""
    inputs = _inputs(runner.spec)
    binding = runner.binding()
    for name, role in runner.roles.items():
        if role != "input":
            binding.bind(name, inputs[name])
    return partial(binding.run, inputs)


def _inputs(spec: ProgramSpec) -> dict[str, Array]:
    """Return noise for every input, and masks that hide nothing."""
    random = np.random.default_rng(0)
    return {
        tensor.name: (
            np.zeros(tensor.shape, tensor.dtype)
            if tensor.name == "mask"
            else (0.1 * random.standard_normal(tensor.shape)).astype(tensor.dtype)
        )
        for tensor in spec.inputs
    }


def known_times(about: Any) -> tuple[Timed, ...] | None:
    """Return the times of an earlier run on this machine; None: there are none.

    Args:
        about: JSON of all that they depend on.
    """
    try:
        if not (record := _record(about)).is_file():  # reading a pipe could block
            return None
        rows = json.loads(record.read_text(encoding="utf-8"))
        return tuple(
            Timed(str(row["program"]), Candidate(**row["candidate"]), float(row["ms"]))
            for row in rows
        )
    except (OSError, ValueError, TypeError, KeyError, WhisperportError):
        return None


def remember(about: Any, timed: Sequence[Timed]) -> None:
    """Keep times in the user's cache; nothing is kept if it cannot be written."""
    try:
        record = _record(about)
        record.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(record, json.dumps([asdict(timing) for timing in timed], indent=1).encode())
    except (OSError, WhisperportError):
        return


def _record(about: Any) -> Path:
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "times" / f"{key}.json"
