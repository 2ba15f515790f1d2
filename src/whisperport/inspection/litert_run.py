"""Run a .tflite with LiteRT, in a process of its own: a library that crashes takes nobody along, and
what it prints stays off the screen."""

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

from whisperport.errors import MissingPackageError, ProgramError
from whisperport.inspection.graph import Value
from whisperport.inspection.inputs import hint_for, inputs_for
from whisperport.inspection.litert_profiler import ProfilerUnavailableError, Run, profiled_runs
from whisperport.inspection.profile import ProfileOptions
from whisperport.runner import Array

CRASHED = "its profiler crashed"


@dataclass(frozen=True, slots=True)
class Op:
    """A node as LiteRT's interpreter has it; a delegate's call is one more, after the file's own."""

    index: int
    name: str
    inputs: tuple[int, ...]  # numbers of tensors
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """What LiteRT said of one model."""

    ops: tuple[Op, ...]
    run_ms: float  # of a whole run, median
    alone_ms: float  # the same, without its delegate
    runs: tuple[Run, ...]  # node by node; none where that was not measured
    why: str  # it was not; empty if it was


def run_litert(path: Path, options: ProfileOptions) -> Measured:
    """Run a model with the delegate, without, and once more under LiteRT's profiler.

    Raises:
        ProgramError: it cannot be loaded or run, or has dynamic shapes and no inputs were given.
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
            why="the process it ran in ended without an answer",
            hint="the file is damaged, or not for this version of LiteRT",
        ) from error


def _in_child(path: Path, options: ProfileOptions, *, profiled: bool) -> Measured:
    # Not a fork: libraries that were loaded here with their threads would deadlock there.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_silence) as pool:
        return pool.submit(_measure, path, options, profiled).result()


def _silence() -> None:
    """LiteRT writes to the screen from C++."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _measure(path: Path, options: ProfileOptions, profiled: bool) -> Measured:
    litert = _litert()
    plain = litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    threads = options.threads or 1  # LiteRT's own choice
    feed: list[Array] = []
    try:
        delegated = litert.Interpreter(str(path), num_threads=threads)
        alone = litert.Interpreter(
            str(path), num_threads=threads, experimental_op_resolver_type=plain
        )
        details = delegated.get_input_details()
        feed = inputs_for([_value(detail) for detail in details], options.inputs)
        run_ms = _median_ms(delegated, details, feed, options.repeat)
        alone_ms = _median_ms(alone, details, feed, options.repeat)
        ops = tuple(_op(described) for described in delegated._get_ops_details())
    except (RuntimeError, ValueError) as error:
        raise ProgramError(
            f"LiteRT cannot run {path.name}",
            why=str(error).strip().split("\n")[0][:200],
            hint=hint_for(feed),
        ) from error
    runs: tuple[Run, ...] = ()
    why = "" if profiled else CRASHED
    if profiled:
        named = {str(d["name"]): array for d, array in zip(details, feed, strict=True)}
        try:
            runs = tuple(profiled_runs(_library(litert), path, named, threads, options.repeat))
        except ProfilerUnavailableError as error:
            why = str(error)
    return Measured(ops, run_ms, alone_ms, runs, why)


def _litert() -> Any:
    try:
        from ai_edge_litert import interpreter
    except ImportError as error:
        raise MissingPackageError(
            "cannot inspect a .tflite: LiteRT is not installed",
            why=str(error),
            hint='pip install "whisperport[litert]"',
        ) from error
    return interpreter


def _library(litert: Any) -> Path:
    """`libLiteRt.so`, on other systems `.dylib` and `.dll`."""
    folder = Path(litert.__file__).parent
    return next(iter(sorted(folder.glob("libLiteRt.*"))), folder / "libLiteRt.so")


def _value(detail: Mapping[str, Any]) -> Value:
    shape = tuple(int(axis) if axis >= 0 else "?" for axis in detail["shape_signature"])
    return Value(str(detail["name"]), shape, _dtype_name(detail["dtype"]))


def _dtype_name(dtype: Any) -> str:
    return str(getattr(dtype, "__name__", dtype))


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


def _op(described: Mapping[str, Any]) -> Op:
    inputs, outputs = (tuple(map(int, described[side])) for side in ("inputs", "outputs"))
    return Op(int(described["index"]), str(described["op_name"]), inputs, outputs)
