"""Use LiteRT's profiler through the C API of the library in its wheel; the Python API does not offer it.

Every call is checked, because another version of the library may have another layout. A missing function,
a status other than 0, or records of another size raise `ProfilerUnavailableError`.

Source: LiteRT 2.3, litert/c/litert_compiled_model.h, litert_profiler.h, litert_profiler_event.h and
litert/c/options/litert_runtime_options.cc.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from ctypes import byref, c_char_p, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whisperport.program.runner import Array

CPU = 1  # from LiteRtHwAccelerators
WRITE = 1  # from LiteRtTensorBufferLockMode
RANKED_TYPE_BYTES = 512  # larger than a LiteRtRankedTensorType, whose content is not read here
FILL = 0xA5  # fills the memory for records, so that the size of what LiteRT writes can be measured
MAX_RECORD_BYTES = 512  # of memory per record

# Bits of `kind` in a record.
SPAN, OPERATOR, IN_DELEGATE = 1, 2, 8
RUN = "Invoke"  # the name of the span that covers one run


class ProfilerUnavailableError(Exception):
    """The profiler of this LiteRT version cannot be used; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Event:
    """One node in one run."""

    name: str  # an operator of the file, or the delegate's own name of its node
    index: int  # of the node in the file, or in the delegate's own graph
    delegated: bool
    ms: float  # measured in microseconds, rounded down


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the model's first subgraph; events are in the order in which the nodes ran."""

    ms: float
    events: tuple[Event, ...]


class _Record(ctypes.Structure):
    """The C struct `ProfiledEventData`."""

    _fields_ = (
        ("tag", c_char_p),
        ("kind", c_int),
        ("start_us", c_uint64),
        ("elapsed_us", c_uint64),
        ("memory", c_int64 * 6),  # memory use before and after
        ("index", c_uint64),
        ("subgraph", c_uint64),
        ("source", c_int),
    )


def profiled_runs(
    library: Path, model: Path, feed: Mapping[str, Array], threads: int, repeat: int
) -> list[Run]:
    """Run a model `repeat` times after one warm-up run, and return the profile of each run.

    Args:
        library: LiteRT's shared library.
        model: a .tflite file.
        feed: an array for every input, by its name.
        threads: CPU threads of XNNPACK.

    Raises:
        ProfilerUnavailableError: this LiteRT version cannot profile, or cannot profile this model.
    """
    with ExitStack() as stack:
        session = _Session(_Library(library), stack, model, threads)
        inputs, outputs = session.inputs(feed), session.outputs()
        session.run(inputs, outputs)
        profiler = session.profiler()
        for _ in range(repeat):
            session.run(inputs, outputs)
        return list(_runs(session.records(profiler)))


class _Library:
    """Call functions of the library; every function returns a status."""

    def __init__(self, path: Path) -> None:
        try:
            self._loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise ProfilerUnavailableError(str(error)) from error

    def __call__(self, name: str, *arguments: Any) -> None:
        status = self.function(name)(*arguments)
        if status:
            raise ProfilerUnavailableError(f"{name} returned status {status}")

    def create(self, name: str, *arguments: Any) -> c_void_p:
        """Call a function and return the pointer that it writes to its last argument."""
        created = c_void_p()
        self(name, *arguments, byref(created))
        return created

    def function(self, name: str) -> Any:
        """Look up a function of the library."""
        try:
            return getattr(self._loaded, name)
        except AttributeError as error:
            raise ProfilerUnavailableError(f"the LiteRT library has no function {name}") from error


class _Session:
    """One compiled model on the CPU, and the objects that it depends on."""

    def __init__(self, call: _Library, stack: ExitStack, model: Path, threads: int) -> None:
        self._call, self._stack = call, stack
        self._kept: list[object] = []  # Python objects that the library has pointers to
        self._environment = self._owned("Environment", "LiteRtCreateEnvironment", 0, None)
        path = str(model).encode()
        self._model = self._owned("Model", "LiteRtCreateModelFromFile", self._environment, path)
        options = self._owned("Options", "LiteRtCreateOptions")
        call("LiteRtSetOptionsHardwareAccelerators", options, CPU)
        self._set(options, b"runtime_options_string", b"enable_profiling = true\n")
        self._set(options, b"xnnpack", f"num_threads = {threads}\n".encode())
        self._compiled = self._owned(
            "CompiledModel", "LiteRtCreateCompiledModel", self._environment, self._model, options
        )
        self._place, self._signature = self._first_subgraph()

    def _owned(self, kind: str, name: str, *arguments: Any) -> c_void_p:
        handle = self._call.create(name, *arguments)
        destroy = self._call.function(f"LiteRtDestroy{kind}")
        destroy.restype = None
        self._stack.callback(destroy, handle)
        return handle

    def _set(self, options: c_void_p, name: bytes, text: bytes) -> None:
        """Set options of one component, as TOML."""
        kept = ctypes.create_string_buffer(text)
        no_destructor = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: None)
        self._kept += (kept, no_destructor)
        handle = self._call.create("LiteRtCreateOpaqueOptions", name, kept, no_destructor)
        self._call("LiteRtAddOpaqueOptions", options, handle)

    def _first_subgraph(self) -> tuple[c_size_t, c_void_p]:
        """Return index and handle of the signature of subgraph 0, which LiteRT's interpreter runs."""
        first = self._call.create("LiteRtGetModelSubgraph", self._model, c_size_t(0))
        count = c_size_t()
        self._call("LiteRtGetNumModelSignatures", self._model, byref(count))
        for place in map(c_size_t, range(count.value)):
            signature = self._call.create("LiteRtGetModelSignature", self._model, place)
            subgraph = self._call.create("LiteRtGetSignatureSubgraph", signature)
            if subgraph.value == first.value:
                return place, signature
        raise ProfilerUnavailableError("no signature of the model runs its first subgraph")

    def inputs(self, feed: Mapping[str, Array]) -> Any:
        """Create the input buffers and copy the arrays into them."""
        buffers = self._buffers("Input")
        for buffer, name in zip(buffers, self._names(), strict=True):
            if name not in feed:
                raise ProfilerUnavailableError(f"the interpreter has no input named {name}")
            self._fill(c_void_p(buffer), feed[name])
        return buffers

    def outputs(self) -> Any:
        """Create the output buffers."""
        return self._buffers("Output")

    def _names(self) -> Iterator[str]:
        for tensor in self._tensors("Input"):
            name = c_char_p()
            self._call("LiteRtGetTensorName", tensor, byref(name))
            yield (name.value or b"").decode("utf-8", "replace")

    def _tensors(self, side: str) -> Iterator[c_void_p]:
        count = c_size_t()
        self._call(f"LiteRtGetNumSignature{side}s", self._signature, byref(count))
        for place in map(c_size_t, range(count.value)):
            yield self._call.create(
                f"LiteRtGetSignature{side}TensorByIndex", self._signature, place
            )

    def _buffers(self, side: str) -> Any:
        buffers = []
        for place, tensor in enumerate(self._tensors(side)):
            kind = ctypes.create_string_buffer(RANKED_TYPE_BYTES)
            self._call("LiteRtGetRankedTensorType", tensor, kind)
            needs = self._call.create(
                f"LiteRtGetCompiledModel{side}BufferRequirements",
                *(self._compiled, self._place, c_size_t(place)),
            )
            create = "LiteRtCreateManagedTensorBufferFromRequirements"
            buffers.append(self._owned("TensorBuffer", create, self._environment, kind, needs))
        return (c_void_p * len(buffers))(*buffers)

    def _fill(self, buffer: c_void_p, array: Array) -> None:
        size = c_size_t()
        self._call("LiteRtGetTensorBufferPackedSize", buffer, byref(size))
        if size.value != array.nbytes:
            raise ProfilerUnavailableError(
                f"an input needs {size.value} bytes; the array has {array.nbytes}"
            )
        memory = c_void_p()
        self._call("LiteRtLockTensorBuffer", buffer, byref(memory), WRITE)
        ctypes.memmove(memory, array.ctypes.data, array.nbytes)
        self._call("LiteRtUnlockTensorBuffer", buffer)

    def run(self, inputs: Any, outputs: Any) -> None:
        """Run the model once."""
        counted = (c_size_t(len(inputs)), inputs, c_size_t(len(outputs)), outputs)
        self._call("LiteRtRunCompiledModel", self._compiled, self._place, *counted)

    def profiler(self) -> c_void_p:
        """Start the profiler of the model and return it."""
        profiler = self._call.create("LiteRtCompiledModelGetProfiler", self._compiled)
        self._call("LiteRtStartProfiler", profiler)
        return profiler

    def records(self, profiler: c_void_p) -> list[_Record]:
        """Stop the profiler and return its records, after a check that they have the expected size."""
        self._call("LiteRtStopProfiler", profiler)
        count = c_int()
        self._call("LiteRtGetNumProfilerEvents", profiler, byref(count))
        memory = (ctypes.c_ubyte * (max(1, count.value) * MAX_RECORD_BYTES))()
        ctypes.memset(memory, FILL, len(memory))
        self._call("LiteRtGetProfilerEvents", profiler, count, memory)
        written = len(bytes(memory).rstrip(bytes([FILL])))
        expected = count.value * ctypes.sizeof(_Record)
        if not count.value or not expected - 8 < written <= expected:
            raise ProfilerUnavailableError(
                f"{count.value} profiler records have {written} bytes; expected {expected}"
            )
        return [_Record.from_buffer(memory, i * ctypes.sizeof(_Record)) for i in range(count.value)]


def _runs(records: Sequence[_Record]) -> Iterator[Run]:
    """Group the records by run."""
    run_ms: float | None = None
    events: list[Event] = []
    for record in records:
        name = (record.tag or b"").decode("utf-8", "replace")
        if record.subgraph:  # of control flow: its time is part of the node that calls it
            continue
        if record.kind == SPAN and name == RUN:
            if run_ms is not None:
                yield Run(run_ms, tuple(events))
            run_ms, events = record.elapsed_us / 1e3, []
        elif record.kind in (OPERATOR, IN_DELEGATE) and run_ms is not None:
            delegated = record.kind == IN_DELEGATE
            events.append(Event(name, record.index, delegated, record.elapsed_us / 1e3))
    if run_ms is not None:
        yield Run(run_ms, tuple(events))
