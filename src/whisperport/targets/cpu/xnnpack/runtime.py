"""Load ExecuTorch programs and run their methods.

`share_packed_weights` lets the methods of a process share the packed copies of their weights. XNNPACK
copies every weight into the layout of its kernels when a method is loaded. prefill_4, prefill_64, step
and align use the same decoder weights, so without sharing a process holds four packed copies of them.
ExecuTorch's XNNPACK backend has an option that keeps one copy for each content of a weight,
`weight_cache_enabled`, but its Python binding cannot set options. This module calls the C++ function

    Error executorch::runtime::set_option(const char* backend, const Span<BackendOption> options)

of include/executorch/runtime/backend/interface.h by its symbol. The structures below follow options.h and
span.h of the version named here; with any other version, weights are not shared and nothing else changes.
"""

import ctypes
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

import numpy as np

from whisperport.errors import BundleError, needs
from whisperport.program.bundle import ProgramEntry
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.system.machine import usable_cores
from whisperport.system.process import SPAWN, OwnProcess
from whisperport.targets.stated_signature import (
    expect_counts,
    expect_tensor,
    other_signature,
)

SCALAR_TYPES = {  # executorch/runtime/core/portable_type/scalar_type.h
    "uint8": 0,
    "int8": 1,
    "int16": 2,
    "int32": 3,
    "int64": 4,
    "float16": 5,
    "float32": 6,
    "float64": 7,
    "bool": 11,
}

# One method runs at a time: the methods of a program share its memory, all programs of a process share one
# thread pool, and the Python binding holds the interpreter's lock while a method runs.
# Source: executorch 1.5.1, runtime/__init__.py, Program.load_method.
_turn = Lock()


class XnnpackRunner(Runner):
    """Runs one method of an ExecuTorch program."""

    def __init__(self, entry: ProgramEntry, program: Any) -> None:
        super().__init__(entry.spec, _turn)
        self._method = _load_method(program, entry.method, entry.spec)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        from torch import from_numpy

        outputs = self._method.execute([from_numpy(_readable_behind(array)) for array in inputs])
        return [output.numpy() for output in outputs]


PAGE = 4096
EXTRA = 16  # bytes behind an input that XNNPACK may read, and ignores: xnnpack.h, XNN_EXTRA_BYTES


def _readable_behind(array: Array) -> Array:
    """Return an array behind which memory can be read: a copy of one that ends with its page, else itself.

    Methods read inputs where the caller has them, and kernels load many values at a time.
    """
    end = int(array.__array_interface__["data"][0]) + array.nbytes
    if -end % PAGE >= EXTRA:
        return array
    memory = np.empty(array.nbytes + EXTRA, np.uint8)
    copy = memory[: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def start_runtime(threads: int | None) -> Any:
    """ExecuTorch's runtime, with its thread pool set; None: one thread per logical CPU.

    Raises:
        MissingPackageError: ExecuTorch is not installed.
    """
    with needs_executorch():
        portable_lib, runtime = _import_runtime()
    _first_load().check("ExecuTorch", hint=SPAWN)
    # Must come before any method is loaded: later it changes the pool and not the methods' use of it.
    with _turn:
        portable_lib._unsafe_reset_threadpool(threads or usable_cores())
        share_packed_weights()
    return runtime.get()


_EXPORTER = "executorch.exir"


def _import_runtime() -> tuple[Any, Any]:
    """Import `portable_lib` and the class `Runtime`, without ExecuTorch's exporter.

    `portable_lib` reads one module of warnings from the exporter's package, whose `__init__` takes 5 of the
    6 CPU seconds in which the runtime starts (executorch 1.5.1). Versions that read more of the exporter
    import all of it, as they always do.
    """
    try:
        with _without_init(_EXPORTER):
            return _import_all_of_runtime()
    except ImportError:
        return _import_all_of_runtime()


def _import_all_of_runtime() -> tuple[Any, Any]:
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime

    return portable_lib, Runtime


@contextmanager
def _without_init(package: str) -> Iterator[None]:
    """Within the block, modules of this package are imported without its `__init__`, and then forgotten."""
    if package in sys.modules:
        yield
        return
    parent, _, name = package.rpartition(".")
    bare = ModuleType(package)
    bare.__path__ = [str(Path(folder) / name) for folder in import_module(parent).__path__]
    sys.modules[package] = bare
    try:
        yield
    finally:
        for module in [m for m in list(sys.modules) if m == package or m.startswith(f"{package}.")]:
            del sys.modules[module]


@cache
def _first_load() -> OwnProcess:
    """The process that first loaded a program. In a fork of it, every run may wait permanently."""
    return OwnProcess()


def load_program(runtime: Any, path: Path) -> Any:
    """Load a .pte file.

    The identifier is checked first: ExecuTorch prints that of a file that it rejects, and aborts where it
    is not text.
    """
    try:
        with path.open("rb") as file:
            identifier = file.read(8)[4:]  # b"ET12": executorch/schema/program.fbs
        if not (identifier.startswith(b"ET") and identifier[2:].isdigit()):
            raise ValueError("it is not an ExecuTorch program")
        return runtime.load_program(path)
    except (RuntimeError, OSError, ValueError) as error:
        raise _unreadable(path.name, error) from error


def _load_method(program: Any, method: str, spec: ProgramSpec) -> Any:
    if method not in program.method_names:
        raise BundleError(f"the ExecuTorch file has no method `{method}`, which the manifest lists")
    try:
        loaded = program.load_method(method)
    except (RuntimeError, ValueError) as error:
        raise _unreadable(f"method `{method}`", error) from error
    _check_signature(loaded.metadata, spec)
    return loaded


def _check_signature(method: Any, spec: ProgramSpec) -> None:
    """Compare a loaded method's metadata with the manifest."""
    name = f"method `{method.name()}`"
    expect_counts(name, spec, method.num_inputs(), method.num_outputs())
    for tensors, info in (
        (spec.inputs, method.input_tensor_meta),
        (spec.outputs, method.output_tensor_meta),
    ):
        for i, tensor in enumerate(tensors):
            try:
                shape, dtype = tuple(info(i).sizes()), info(i).dtype()
            except (RuntimeError, IndexError) as error:  # it is no tensor
                raise other_signature(name, f"{tensor.name!r}: {error}") from error
            fits = SCALAR_TYPES.get(tensor.dtype) == dtype
            expect_tensor(name, tensor, shape, f"of type {dtype}", fits=fits)


def _unreadable(what: str, error: Exception) -> BundleError:
    return BundleError(
        f"ExecuTorch cannot load {what}",
        why=str(error).strip().split("\n")[0],
        hint="export the bundle again with this version of executorch",
    )


def needs_executorch() -> AbstractContextManager[None]:
    """Raise MissingPackageError if ExecuTorch, which the block imports, is not installed."""
    return needs("cannot use `xnnpack`: ExecuTorch is not installed", extra="xnnpack")


VERSION = "1.5.1"  # of executorch, whose headers were read and with which sharing was measured
BACKEND = b"XnnpackBackend"
OPTION = b"weight_cache_enabled"
SYMBOL = "_ZN10executorch7runtime10set_optionEPKcNS0_4SpanINS0_13BackendOptionEEE"

log = logging.getLogger(__name__)


class _BackendOption(ctypes.Structure):
    """A key and a std::variant<bool, int, std::array<char, 256>>: its storage, then its index."""

    _fields_ = (
        ("key", ctypes.c_char * 64),
        ("storage", ctypes.c_ubyte * 256),
        ("index", ctypes.c_uint32),  # 0: a bool. libstdc++ uses one byte of it, libc++ all four
    )


class _Span(ctypes.Structure):
    _fields_ = (("data", ctypes.POINTER(_BackendOption)), ("size", ctypes.c_size_t))


def share_packed_weights() -> bool:
    """Switch sharing on for all methods that this process loads from now on.

    Returns:
        Whether it is on. False with another version of ExecuTorch, or on another system than Linux.
    """
    library = _library()
    if library is None:
        return False
    option = _BackendOption(key=OPTION, index=0)
    option.storage[0] = True
    try:
        set_option = ctypes.CDLL(str(library))[SYMBOL]
    except (OSError, AttributeError) as error:
        log.info("ExecuTorch's weights cache is not available: %s", error)
        return False
    set_option.argtypes, set_option.restype = (ctypes.c_char_p, _Span), ctypes.c_uint32
    code = set_option(BACKEND, _Span(ctypes.pointer(option), 1))
    if code:
        log.info("ExecuTorch did not switch its weights cache on: error %d", code)
    return not code


def _library() -> Path | None:
    """ExecuTorch's shared library; None where its layout in memory is not known."""
    try:
        known = version("executorch") == VERSION and sys.platform == "linux"
    except PackageNotFoundError:
        return None
    package = find_spec("executorch")
    if not known or package is None:
        return None
    folders = [Path(folder) for folder in package.submodule_search_locations or ()]
    candidates = [folder / "lib" / "libexecutorch.so" for folder in folders]
    return next((path for path in candidates if path.is_file()), None)
