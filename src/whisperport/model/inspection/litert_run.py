"""Run a .tflite with LiteRT in a child process.

If the library crashes, only the child process ends. What the library prints is discarded.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whisperport.errors import ProgramError, needs
from whisperport.model.inspection.graph import Value
from whisperport.model.inspection.inputs import hint_for, inputs_for
from whisperport.model.inspection.litert_profiler import (
    ProfilerUnavailableError,
    Run,
    profiled_runs,
)
from whisperport.program.profiling import ProfileOptions
from whisperport.program.runner import Array

CRASHED = "LiteRT's profiler crashed"


@dataclass(frozen=True, slots=True)
class Op:
    """A node in LiteRT's interpreter: a node of the file, or after all of these a call of a delegate."""

    index: int
    name: str
    inputs: tuple[int, ...]  # indices of tensors
    outputs: tuple[int, ...]  # indices of tensors


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one model."""

    ops: tuple[Op, ...]
    run_ms: float  # milliseconds of a complete run, median
    no_delegate_ms: float  # the same without the delegate
    runs: tuple[Run, ...]  # times of single nodes; empty if they were not measured
    profiler_error: str  # why single nodes were not measured; empty if they were


def run_litert(path: Path, options: ProfileOptions) -> Measured:
    """Run a model with its delegate, without it, and with LiteRT's profiler.

    Raises:
        ProgramError: the model cannot be loaded or run, or has dynamic shapes and no inputs were given.
        MissingPackageError: LiteRT is not installed.
    """
    try:
        return _in_child(path, options, profiled=True)
    except BrokenProcessPool:
        pass
    try:
        return _in_child(path, options, profiled=False)
    except BrokenProcessPool as error:
        raise ProgramError(
            f"LiteRT crashed on {path.name}",
            why="the child process that ran LiteRT ended without a result",
            hint="convert the model again; the file may be damaged, or made for another LiteRT version",
        ) from error


def _in_child(path: Path, options: ProfileOptions, *, profiled: bool) -> Measured:
    # `spawn`, not `fork`: libraries that this process loaded have threads, and would deadlock after a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_silence) as pool:
        return pool.submit(_measure, path, options, profiled).result()


def _silence() -> None:
    """Discard everything that this process prints, also from C++."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _measure(path: Path, options: ProfileOptions, profiled: bool) -> Measured:
    litert = _litert()
    plain = litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    threads = options.threads or 1  # LiteRT's default
    feed: list[Array] = []
    try:
        delegated = litert.Interpreter(str(path), num_threads=threads)
        no_delegate = litert.Interpreter(
            str(path), num_threads=threads, experimental_op_resolver_type=plain
        )
        details = delegated.get_input_details()
        feed = inputs_for([_value(detail) for detail in details], options.inputs)
        run_ms = _median_ms(delegated, details, feed, options.repeat)
        no_delegate_ms = _median_ms(no_delegate, details, feed, options.repeat)
        ops = listed_ops(delegated)
    except (RuntimeError, ValueError) as error:
        raise ProgramError(
            f"LiteRT cannot run {path.name}",
            why=str(error).strip().split("\n")[0][:200],
            hint=hint_for(feed),
        ) from error
    runs: tuple[Run, ...] = ()
    profiler_error = "" if profiled else CRASHED
    if profiled:
        named = {str(d["name"]): array for d, array in zip(details, feed, strict=True)}
        try:
            runs = tuple(profiled_runs(_library(litert), path, named, threads, options.repeat))
        except ProfilerUnavailableError as error:
            profiler_error = str(error)
    return Measured(ops, run_ms, no_delegate_ms, runs, profiler_error)


def _litert() -> Any:
    with needs("cannot inspect a .tflite: LiteRT is not installed", extra="litert"):
        from ai_edge_litert import interpreter
    return interpreter


def _library(litert: Any) -> Path:
    """Return the path of LiteRT's shared library: `libLiteRt.so`, `.dylib` or `.dll`."""
    folder = Path(litert.__file__).parent
    return next(iter(sorted(folder.glob("libLiteRt.*"))), folder / "libLiteRt.so")


def _value(detail: Mapping[str, Any]) -> Value:
    shape = tuple(int(axis) if axis >= 0 else "?" for axis in detail["shape_signature"])
    dtype = detail["dtype"]
    return Value(str(detail["name"]), shape, str(getattr(dtype, "__name__", dtype)))


def _median_ms(
    interpreter: Any, details: Sequence[Mapping[str, Any]], feed: list[Array], repeat: int
) -> float:
    for detail, array in zip(details, feed, strict=True):
        interpreter.resize_tensor_input(detail["index"], array.shape)
    interpreter.allocate_tensors()
    times = []
    for _ in range(repeat + 1):
        for detail, array in zip(details, feed, strict=True):
            interpreter.set_tensor(detail["index"], array)
        started = time.perf_counter()
        interpreter.invoke()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def listed_ops(interpreter: Any) -> tuple[Op, ...]:
    """Return the nodes of an interpreter's first subgraph, and the calls of its delegates."""
    return tuple(_op(described) for described in interpreter._get_ops_details())


def _op(described: Mapping[str, Any]) -> Op:
    inputs, outputs = (tuple(map(int, described[side])) for side in ("inputs", "outputs"))
    return Op(int(described["index"]), str(described["op_name"]), inputs, outputs)
