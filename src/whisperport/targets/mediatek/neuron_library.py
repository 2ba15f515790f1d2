"""Run compiled programs with the Neuron runtime library, which keeps each program loaded between calls.

The library has two C interfaces. The older one, NeuronRuntime_*, is not used here: users' tests of
libneuron_runtime 7.3.15 on Android 16 found that it reads an input at the first inference of a program and
never again, whatever is set later. The newer one, NeuronRuntimeV2_*, reads its buffers in every run, as
long as the same descriptors point to the same memory. So every program has one set of buffers for its
lifetime, and a program is rejected if its outputs do not follow its inputs.

Sources: the headers RuntimeV2.h and Types.h of NeuroPilot's SDK, in MediaTek's published applications, and
mediatek.gitlab.io aiot-dev-guide, ml-guide/neuron-sdk/neuron_api. This project has never run it on a board:
tests use a small library of their own with the same functions.
"""

import ctypes
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np

from whisperport.errors import BundleError, LoweringError, MissingPackageError
from whisperport.program.runner import Array, Part
from whisperport.program.spec import ProgramSpec
from whisperport.system.process import release_with
from whisperport.targets.buffers import BufferedRunner
from whisperport.targets.mediatek.device_io import DeviceIo, DeviceTensor

NAMES = (
    "libneuronusdk_runtime.mtk.so",
    "libneuronusdk_runtime.mtk.so.8",
    "libneuron_runtime.so",
)
THREADS = 1  # each thread has its own working memory; a runner has one call at a time
BACKLOG = 2048  # "In most cases, using 2048 is enough"; source: RuntimeV2.h
NO_FD = -1  # of a normal buffer; source: RuntimeV2.h, IOBuffer
# Source: Types.h, RuntimeAPIErrorCode.
ERRORS = {
    1: "NEURONRUNTIME_OUT_OF_MEMORY: memory is not enough",
    2: "NEURONRUNTIME_INCOMPLETE",
    3: "NEURONRUNTIME_UNEXPECTED_NULL: a required pointer is null",
    4: "NEURONRUNTIME_BAD_DATA: failed to load data or to set an input or output",
    5: "NEURONRUNTIME_BAD_STATE",
    6: "NEURONRUNTIME_RUNTIME_ERROR: the hardware returned unexpectedly",
}
USE_COMMAND = "the run option `api=command` runs the same .dla with neuronrt"


class _IOBuffer(ctypes.Structure):
    """`IOBuffer` of RuntimeV2.h."""

    _fields_: ClassVar[Any] = [
        ("buffer", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("fd", ctypes.c_int),
        ("offset", ctypes.c_int),
        ("reserved2_should_be_init_zero", ctypes.c_uint64),
        ("reserved3_should_be_init_zero", ctypes.c_uint64),
    ]


class _Request(ctypes.Structure):
    """`SyncInferenceRequest` of RuntimeV2.h."""

    _fields_: ClassVar[Any] = [
        ("inputs", ctypes.POINTER(_IOBuffer)),
        ("outputs", ctypes.POINTER(_IOBuffer)),
    ]


class _Version(ctypes.Structure):
    """`NeuronVersion` of Types.h."""

    _fields_: ClassVar[Any] = [(n, ctypes.c_uint8) for n in ("major", "minor", "patch")]


_SIZE = ctypes.POINTER(ctypes.c_size_t)
_FUNCTIONS: dict[
    str, tuple[Any, list[Any]]
] = {  # name -> type of the result, types of the arguments
    "NeuronRuntimeV2_create": (
        ctypes.c_int,
        [ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t],
    ),
    "NeuronRuntimeV2_run": (ctypes.c_int, [ctypes.c_void_p, _Request]),
    "NeuronRuntimeV2_release": (None, [ctypes.c_void_p]),
    "NeuronRuntimeV2_getInputNumber": (ctypes.c_int, [ctypes.c_void_p, _SIZE]),
    "NeuronRuntimeV2_getOutputNumber": (ctypes.c_int, [ctypes.c_void_p, _SIZE]),
    "NeuronRuntimeV2_getInputSize": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_uint64, _SIZE]),
    "NeuronRuntimeV2_getOutputSize": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_uint64, _SIZE]),
}


@final
class NeuronLibrary:
    """The loaded library."""

    def __init__(self, target: str, path: Path | None = None) -> None:
        """Load the library.

        Args:
            target: name of the target, for errors.
            path: of the library; None: the system's search path.

        Raises:
            MissingPackageError: there is no such library, or it cannot be loaded.
            LoweringError: the library has no NeuronRuntimeV2 functions.
        """
        self.target = target
        self._library = _loaded(target, path)
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(self._library, name)
            except AttributeError as error:
                raise LoweringError(
                    f"cannot use `{target}` through {self._library._name}: it has no function `{name}`",
                    why="NeuroPilot's older versions have only the functions NeuronRuntime_*, which were "
                    "seen to return outputs of earlier inputs",
                    hint=USE_COMMAND,
                ) from error
            function.restype, function.argtypes = result, arguments

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function, and return its error code; 0: success."""
        return int(getattr(self._library, f"NeuronRuntimeV2_{name}")(*arguments))

    def release(self, runtime: ctypes.c_void_p) -> None:
        """Free a loaded program."""
        self._library.NeuronRuntimeV2_release(runtime)

    def version(self) -> str:
        """Return the library's version, such as "8.2.16"; empty if it does not tell."""
        found = _Version()
        try:
            function = self._library.NeuronRuntime_getVersion
        except AttributeError:
            return ""
        if function(ctypes.byref(found)):
            return ""
        return f"{found.major}.{found.minor}.{found.patch}"


@final
class LibraryRunner(BufferedRunner):
    """One compiled program that stays loaded. Only the process that loaded it may use it."""

    def __init__(self, library: NeuronLibrary, spec: ProgramSpec, dla: Path, io: DeviceIo) -> None:
        """Load the program, and check that its outputs follow its inputs; this runs it twice.

        Raises:
            BundleError: the library rejects the file, or the file has other inputs or outputs than `io`.
            LoweringError: a run fails, or the outputs do not follow the inputs.
        """
        super().__init__(spec)
        self._library, self._what = library, f"`{spec.name}` on `{library.target}`"
        self._runtime = self._created(dla)
        release_with(self, partial(library.release, self._runtime))
        self._check_sizes("Input", io.inputs)
        self._check_sizes("Output", io.outputs)
        self._inputs_of_device = [_zeros(tensor) for tensor in io.inputs]
        self._outputs_of_device = [_zeros(tensor) for tensor in io.outputs]
        # These descriptors must stay the same in all runs; see the text at the top of this file.
        self._descriptors = [_descriptors(self._inputs_of_device)]
        self._descriptors.append(_descriptors(self._outputs_of_device))
        self._request = _Request(*self._descriptors)
        by_name = {tensor.name: place for place, tensor in enumerate(io.inputs)}
        self._places = [by_name[tensor.name] for tensor in spec.inputs]
        by_name = {tensor.name: place for place, tensor in enumerate(io.outputs)}
        self._result_places = [by_name[tensor.name] for tensor in spec.outputs]
        self._io = io
        self._check_follows_inputs()

    def write(self, index: int, array: Array, part: Part = ()) -> None:
        """Copy a part of an input, `spec.inputs[index]`, to the device's buffer."""
        place = self._places[index]
        buffer = self._inputs_of_device[place].reshape(self.spec.inputs[index].shape)
        buffer[part] = self._io.inputs[place].to_device(array[part], self.spec.name)

    def execute(self) -> list[Array]:
        """Run the program on the device's buffers, and return copies of its outputs.

        Raises:
            LoweringError: the library reports an error.
        """
        if code := self._library.call("run", self._runtime, self._request):
            raise LoweringError(
                f"cannot run {self._what}: the Neuron runtime reported an error",
                why=_error(code),
                hint=f"check the kernel's messages (`dmesg`); {USE_COMMAND}",
            )
        found = []
        for place, tensor in zip(self._result_places, self.spec.outputs, strict=True):
            output = self._outputs_of_device[place].reshape(tensor.shape).copy()
            found.append(self._io.outputs[place].from_device(output, tensor.dtype))
        return found

    def _created(self, dla: Path) -> ctypes.c_void_p:
        runtime = ctypes.c_void_p()
        path = str(dla.absolute()).encode()
        code = self._library.call("create", path, THREADS, ctypes.byref(runtime), BACKLOG)
        if code or not runtime:
            version = self._library.version()
            raise BundleError(
                f"the Neuron runtime cannot load the .dla of {self._what}",
                why=_error(code) + (f"; the library has version {version}" if version else ""),
                hint="compile the bundle for this board, with a NeuroPilot of the library's major version",
            )
        return runtime

    def _check_sizes(self, side: str, tensors: Sequence[DeviceTensor]) -> None:
        number = self._number(f"get{side}Number")
        sizes = [self._number(f"get{side}Size", index) for index in range(number)]
        expected = [tensor.nbytes for tensor in tensors]
        if sizes != expected:
            raise BundleError(
                f"the .dla of {self._what} has other {side.lower()}s than the program in the bundle",
                why=f"the library states the sizes {sizes} in bytes; expected {expected}",
                hint="compile the bundle again with `whisperport compile`",
            )

    def _number(self, function: str, *arguments: int) -> int:
        found = ctypes.c_size_t()
        if code := self._library.call(function, self._runtime, *arguments, ctypes.byref(found)):
            raise LoweringError(
                f"the Neuron runtime does not describe {self._what}",
                why=f"NeuronRuntimeV2_{function}: {_error(code)}",
                hint=USE_COMMAND,
            )
        return found.value

    def _check_follows_inputs(self) -> None:
        """Run the program on two different random inputs; its outputs must differ and not be zeros."""
        runs = []
        for seed in range(2):
            random = np.random.default_rng(seed)
            for buffer in self._inputs_of_device:
                buffer[...] = _random(buffer, random)
            self.execute()
            runs.append([output.copy() for output in self._outputs_of_device])
        if not any(output.any() for outputs in runs for output in outputs):
            raise LoweringError(
                f"{self._what} returned only zeros for random inputs",
                why="the library reported no error, but nothing was executed",
                hint=f"check that the .dla is for the NPU of this board; {USE_COMMAND}",
            )
        if all(
            np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(*runs, strict=True)
        ):
            raise LoweringError(
                f"{self._what} returned the same outputs for different inputs",
                why="some versions of the library read the inputs at the first run only",
                hint=USE_COMMAND,
            )


def _loaded(target: str, path: Path | None) -> Any:
    faults = []
    for name in (str(path),) if path is not None else NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            faults.append(str(error))
    raise MissingPackageError(
        f"cannot use `{target}`: the Neuron runtime library is not installed or cannot be loaded",
        why=faults[0],
        hint="Genio's Yocto images contain it; on Ubuntu, `sudo apt install mediatek-libneuron` from "
        f"ppa:mediatek-genio/genio-public installs it; `{target}.library=PATH` names another place",
    )


def _error(code: int) -> str:
    return ERRORS.get(code, "the program is null" if not code else f"unknown error code {code}")


def _zeros(tensor: DeviceTensor) -> Array:
    return np.zeros(tensor.shape, np.dtype(tensor.dtype))


def _descriptors(buffers: Sequence[Array]) -> Any:
    return (_IOBuffer * len(buffers))(
        *(_IOBuffer(buffer.ctypes.data, buffer.nbytes, NO_FD, 0, 0, 0) for buffer in buffers)
    )


def _random(buffer: Array, random: np.random.Generator) -> Array:
    if buffer.dtype.kind == "f":
        return random.standard_normal(buffer.shape).astype(buffer.dtype)
    if buffer.dtype in (np.int8, np.uint8, np.int16):
        limits = np.iinfo(buffer.dtype)
        return random.integers(limits.min, limits.max, buffer.shape, buffer.dtype, endpoint=True)
    return random.integers(0, 2, buffer.shape).astype(buffer.dtype)
