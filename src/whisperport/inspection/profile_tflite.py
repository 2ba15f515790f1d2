"""What LiteRT's delegate takes of a .tflite, and the time of the whole.

LiteRT's Python interpreter does not give the time of single nodes, so that is not measured. It gives the
nodes that a delegate took, and a run with the delegate and without.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whisperport.errors import MissingPackageError, ProgramError, UsageError
from whisperport.inspection.graph import Value
from whisperport.inspection.inputs import hint_for, inputs_for
from whisperport.inspection.profile import NodeProfile, Profile, ProfileOptions, by_time
from whisperport.runner import Array

XNNPACK = "XNNPACK"  # what LiteRT's interpreter applies on its own
DELEGATE = "DELEGATE"
NOT_TIMED = "the time of a node is not measured: LiteRT's Python interpreter does not give it"

Op = Mapping[str, Any]


def profile_tflite(path: Path, options: ProfileOptions) -> Profile:
    """Run a .tflite, and say which of its nodes the delegate took.

    Raises:
        ProgramError: it cannot be loaded or run, or has dynamic shapes and no inputs were given.
        UsageError: `options.options` is not empty: LiteRT has none here.
        MissingPackageError: LiteRT is not installed.
    """
    if options.options:
        raise UsageError(f"LiteRT has no run option `{next(iter(options.options))}`")
    litert = _litert()
    plain = litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    feed: list[Array] = []
    try:
        delegated = litert.Interpreter(str(path), num_threads=options.threads)
        alone = litert.Interpreter(
            str(path), num_threads=options.threads, experimental_op_resolver_type=plain
        )
        details = delegated.get_input_details()
        feed = inputs_for([_value(detail) for detail in details], options.inputs)
        run_ms = _median_ms(delegated, details, feed, options.repeat)
        alone_ms = _median_ms(alone, details, feed, options.repeat)
        ops: list[Op] = delegated._get_ops_details()
    except (RuntimeError, ValueError) as error:
        raise ProgramError(
            f"LiteRT cannot run {path.name}",
            why=str(error).strip().split("\n")[0][:200],
            hint=hint_for(feed),
        ) from error
    return Profile(
        program=path.stem,
        runtime="LiteRT",
        target=XNNPACK,
        subgraphs=sum(op["op_name"] == DELEGATE for op in ops),
        nodes=by_time(_nodes(ops)),
        rest_ms=None,
        run_ms=run_ms,
        runs=options.repeat,
        notes=(NOT_TIMED, f"the whole without its delegate takes {alone_ms:.3g} ms"),
    )


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


def _nodes(ops: Sequence[Op]) -> list[NodeProfile]:
    """The file's nodes. The delegate's own come after them, and stand for those between their tensors."""
    original = [op for op in ops if op["op_name"] != DELEGATE]
    calls = [op for op in ops if op["op_name"] == DELEGATE]
    taken = {
        index: number
        for number, call in enumerate(calls, start=1)
        for index in _replaced(call, original)
    }
    return [
        NodeProfile(
            name=f"{op['op_name']} [{op['index']}]",
            operator=str(op["op_name"]),
            where=f"{XNNPACK} {taken[op['index']]}" if op["index"] in taken else "no delegate",
            delegated=op["index"] in taken,
            ms=None,
            reason="" if op["index"] in taken else "the delegate did not take it",
        )
        for op in original
    ]


def _replaced(call: Op, original: Sequence[Op]) -> set[int]:
    """Indices of the nodes that lead from the inputs of a delegate's call to its outputs."""
    makers = {int(tensor): op for op in original for tensor in op["outputs"]}
    given = {int(tensor) for tensor in call["inputs"]}
    found: set[int] = set()
    pending = [int(tensor) for tensor in call["outputs"]]
    while pending:
        tensor = pending.pop()
        op = makers.get(tensor)
        if op is None or tensor in given or op["index"] in found:
            continue
        found.add(op["index"])
        pending += [int(t) for t in op["inputs"] if int(t) not in given]
    return found
