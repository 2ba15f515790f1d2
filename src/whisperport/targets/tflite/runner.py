"""Run .tflite files with LiteRT on the CPU, by its XNNPACK delegate; used by all targets that have them.

Integer inputs and outputs of a quantized file are float32 for the caller: the runner quantizes and
dequantizes with the scale and the zero point that the file states. A
binding copies to the buffers of the runtime only what they do not hold yet.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import ReferenceType, ref

import numpy as np

from whisperport.errors import BundleError, needs
from whisperport.program.runner import Array, Binding, Part, RunLock, Runner
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.system.machine import usable_cores
from whisperport.targets.stated_signature import (
    expect_counts,
    expect_tensor,
    other_signature,
)

RUNTIME = "LiteRT"


class BufferedRunner(Runner):
    """A program whose inputs are copied to buffers that keep them between runs."""

    def __init__(self, spec: ProgramSpec, lock: RunLock | None = None) -> None:
        super().__init__(spec, lock)
        self.holder: ReferenceType[Binding] | None = None  # whose arrays the buffers hold

    def binding(self) -> Binding:
        """Return a binding that copies bound arrays once, and then what changed of them."""
        return BufferedBinding(self)

    @abstractmethod
    def write(self, index: int, array: Array, part: Part = ()) -> None:
        """Copy a part of an input, `spec.inputs[index]`, to its buffer."""

    @abstractmethod
    def execute(self) -> Sequence[Array]:
        """Run the program on its buffers; return copies of its outputs."""

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        self.holder = None
        for index, array in enumerate(inputs):
            self.write(index, array)
        return self.execute()


class BufferedBinding(Binding):
    """Copies to the buffers only what they do not hold yet. All bindings of a runner share its buffers."""

    def __init__(self, runner: BufferedRunner) -> None:
        super().__init__(runner)
        self._buffered = runner
        self._missing: set[int] = set()  # bound inputs that the buffers do not hold
        self._parts: dict[
            int, list[Part]
        ] = {}  # input -> its parts that changed since the last run

    def changed(self, name: str, part: Part) -> None:
        self._parts.setdefault(self._index[name], []).append(part)

    def _bind(self, name: str, array: Array) -> None:
        self._missing.add(self._index[name])

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        holder = self._buffered.holder
        is_held = holder is not None and holder() is self
        self._buffered.holder = None  # until this run has succeeded
        for index, array in enumerate(inputs):
            if not is_held or index in self._unbound or index in self._missing:
                self._buffered.write(index, array)
            else:
                for part in self._parts.get(index, ()):
                    self._buffered.write(index, array, part)
        outputs = self._buffered.execute()
        self._missing.clear()
        self._parts.clear()
        self._buffered.holder = ref(self)
        return outputs


INT32 = np.iinfo(np.int32)
# Dtype of the program, and that of the file: pairs that are converted by a cast.
CONVERTED = {
    ("int64", "int32"),
    ("float64", "float32"),
    ("float32", "float16"),
    ("float16", "float32"),
}


class TfliteFile:
    """A loaded .tflite file, whose programs run one at a time.

    Args:
        path: of the file.
        threads: CPU threads; None: one per logical CPU.
        extra: pip extra that installs the runtime, for messages.
        target: name of the target, for messages.

    Raises:
        MissingPackageError: ai-edge-litert is not installed.
        BundleError: LiteRT cannot load the file.
    """

    def __init__(
        self, path: Path, threads: int | None, *, extra: str, target: str = "a .tflite file"
    ) -> None:
        self.name = path.name
        self.lock = Lock()  # of all programs of the file: they share the interpreter's memory
        from whisperport.model.inspection.quiet import quiet, quiet_natively

        litert = import_litert(extra, target)
        with quiet(), quiet_natively():
            try:
                self.interpreter = litert.Interpreter(
                    str(path), num_threads=threads or usable_cores()
                )
                self.interpreter.allocate_tensors()
                self.signatures: Mapping[str, Any] = self.interpreter.get_signature_list()
            except (RuntimeError, ValueError, OSError) as error:
                raise self.unreadable(error) from error

    def unreadable(self, error: Exception) -> BundleError:
        """Return the error for a file that LiteRT cannot load or run."""
        return BundleError(
            f"LiteRT cannot run {self.name}",
            why=str(error).strip().split("\n")[0][:200] or type(error).__name__,
            hint="export the bundle again with this version of ai-edge-litert",
        )


def import_litert(extra: str, target: str) -> Any:
    """Return LiteRT's Python module of interpreters.

    Raises:
        MissingPackageError: ai-edge-litert is not installed.
    """
    from whisperport.model.inspection.quiet import quiet, quiet_natively

    with (
        needs(
            f"cannot run {target}: LiteRT is not installed",
            extra=extra,
        ),
        quiet(),
        quiet_natively(),
    ):
        from ai_edge_litert import interpreter
    return interpreter


def quantized(array: Array, dtype: Any, scale: float, zero_point: int) -> Array:
    """Round real numbers to the integers that express them; those out of range become the nearest."""
    limits = np.iinfo(dtype)
    integers = np.rint(array / np.float32(scale)) + zero_point
    clipped: Array = np.clip(integers, limits.min, limits.max).astype(dtype)
    return clipped


def dequantized(array: Array, scale: float, zero_point: int) -> Array:
    """Return the real numbers, in float32, that integers express."""
    real: Array = (array.astype(np.float32) - np.float32(zero_point)) * np.float32(scale)
    return real


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An input or output in the file, and how the caller's arrays are converted to it."""

    index: int  # in the interpreter
    spec: TensorSpec  # as the program states it
    dtype: Any  # in the file
    scale: float = 0.0  # 0: the values are stored as they are
    zero_point: int = 0

    @property
    def is_same(self) -> bool:
        """Whether arrays need no conversion."""
        return not self.scale and np.dtype(self.dtype) == np.dtype(self.spec.dtype)

    def stored(self, array: Array) -> Array:
        """Convert an array of the program to the file's dtype."""
        if self.is_same:
            return array
        if self.scale:
            return quantized(array, self.dtype, self.scale, self.zero_point)
        if array.dtype == np.int64 and not _fits_int32(array):
            raise ValueError(
                f"{self.spec.name!r} holds an integer of more than 32 bits, which the file cannot store"
            )
        return array.astype(self.dtype)

    def returned(self, array: Array) -> Array:
        """Convert an array of the file to the program's dtype."""
        if self.is_same:
            return array
        if self.scale:
            return dequantized(array, self.scale, self.zero_point).astype(self.spec.dtype)
        return array.astype(self.spec.dtype)


class TfliteRunner(BufferedRunner):
    """Runs one program of a .tflite file.

    The program is the signature with the program's name; in a file with one subgraph and no such signature,
    it is this subgraph, whose inputs and outputs are in the program's order.

    Raises:
        BundleError: the file has no such program, or its inputs or outputs differ from `spec`.
    """

    def __init__(self, spec: ProgramSpec, file: TfliteFile) -> None:
        super().__init__(spec, file.lock)
        self.file = file
        # LiteRT's public functions write to and read from the first subgraph only.
        self.inputs, self.outputs, self.is_first = _tensors(spec, file)

    def binding(self) -> Binding:
        return super().binding() if self.is_first else Binding(self)

    def write(self, index: int, array: Array, part: Part = ()) -> None:
        """Copy a part of an input to the first subgraph."""
        tensor, interpreter = self.inputs[index], self.file.interpreter
        stored = tensor.stored(array[part])
        with self._explained():
            if part:
                interpreter.tensor(tensor.index)()[part] = stored
            else:
                interpreter.set_tensor(tensor.index, stored)

    def execute(self) -> list[Array]:
        """Run the first subgraph on what its inputs hold."""
        interpreter = self.file.interpreter
        with self._explained():
            interpreter.invoke()
        return [tensor.returned(interpreter.get_tensor(tensor.index)) for tensor in self.outputs]

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        return super()._run(inputs) if self.is_first else self._run_signature(inputs)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise self.file.unreadable(error) from error

    def _run_signature(self, inputs: Sequence[Array]) -> list[Array]:
        named = zip(self.spec.inputs, self.inputs, inputs, strict=True)
        feed = {tensor.name: file.stored(array) for tensor, file, array in named}
        with self._explained():
            # Made for every run: LiteRT does not run the first subgraph while such an object exists.
            outputs = self.file.interpreter.get_signature_runner(self.spec.name)(**feed)
        return [tensor.returned(outputs[tensor.spec.name]) for tensor in self.outputs]


def _tensors(
    spec: ProgramSpec, file: TfliteFile
) -> tuple[tuple[_Tensor, ...], tuple[_Tensor, ...], bool]:
    """Find a program's inputs and outputs, and whether the program is the file's first subgraph."""
    interpreter = file.interpreter
    if spec.name in file.signatures:
        signature = interpreter.get_signature_runner(spec.name)
        accepted, returned = signature.get_input_details(), signature.get_output_details()
        is_first = getattr(signature, "_subgraph_index", None) == 0
        inputs = [(tensor, accepted.pop(tensor.name, None)) for tensor in spec.inputs]
        outputs = [(tensor, returned.pop(tensor.name, None)) for tensor in spec.outputs]
        extra = next(iter((*accepted, *returned)), None)
        if extra is not None:
            raise other_signature(_shown(spec, file), f"{extra[:80]!r} is only in the file")
    elif interpreter.num_subgraphs() == 1:
        first, last = interpreter.get_input_details(), interpreter.get_output_details()
        expect_counts(_shown(spec, file), spec, len(first), len(last))
        is_first = True
        inputs = list(zip(spec.inputs, first, strict=True))
        outputs = list(zip(spec.outputs, last, strict=True))
    else:
        raise other_signature(_shown(spec, file), "it has several programs, and none has this name")
    return (
        tuple(_tensor(spec, file, *pair) for pair in inputs),
        tuple(_tensor(spec, file, *pair) for pair in outputs),
        is_first,
    )


def _tensor(
    spec: ProgramSpec, file: TfliteFile, tensor: TensorSpec, detail: Mapping[str, Any] | None
) -> _Tensor:
    if detail is None:
        raise other_signature(
            _shown(spec, file), f"the name {tensor.name[:80]!r} is only in the manifest"
        )
    shape = tuple(int(size) for size in detail["shape"])
    dtype = np.dtype(detail["dtype"])
    quantized = detail["quantization_parameters"]
    scales = [float(scale) for scale in quantized["scales"]]
    stored = _Tensor(int(detail["index"]), tensor, dtype)
    if len(scales) == 1 and dtype.kind in "iu" and np.dtype(tensor.dtype).kind == "f":
        stored = replace(stored, scale=scales[0], zero_point=int(quantized["zero_points"][0]))
    known = stored.scale > 0 or stored.is_same or (tensor.dtype, dtype.name) in CONVERTED
    expect_tensor(_shown(spec, file), tensor, shape, dtype.name, fits=known)
    return stored


def _shown(spec: ProgramSpec, file: TfliteFile) -> str:
    return f"`{spec.name}` in {file.name}"


def _fits_int32(array: Array) -> bool:
    return not array.size or (array.min() >= INT32.min and array.max() <= INT32.max)


def run_keeping(
    path: Path, inputs: Sequence[Array], indices: Mapping[str, int]
) -> tuple[dict[str, Array], list[Array]]:
    """Run the first subgraph of a file once with LiteRT's own kernels, no delegate, and keep every value.

    Quantized tensors are real numbers for the caller.

    Args:
        path: of the file.
        inputs: in the order of the file.
        indices: name -> index of a tensor.

    Returns:
        The values of the wanted tensors that the file has, and the outputs.

    Raises:
        MissingPackageError: ai-edge-litert is not installed.
        RuntimeError, ValueError: LiteRT cannot load or run the file.
    """
    litert = import_litert("litert", path.name)
    interpreter = litert.Interpreter(
        str(path),
        experimental_op_resolver_type=litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        experimental_preserve_all_tensors=True,
    )
    interpreter.allocate_tensors()
    for detail, array in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(detail["index"], _stored(array, detail))
    interpreter.invoke()
    details = {detail["index"]: detail for detail in interpreter.get_tensor_details()}
    values = {
        name: _real(interpreter, details[index])
        for name, index in indices.items()
        if index in details
    }
    return values, [_real(interpreter, detail) for detail in interpreter.get_output_details()]


def _stored(array: Array, detail: Mapping[str, Any]) -> Array:
    scale, zero_point = detail["quantization"]
    if scale and array.dtype.kind == "f":
        return quantized(array, detail["dtype"], scale, zero_point)
    return array.astype(detail["dtype"])


def _real(interpreter: Any, detail: Mapping[str, Any]) -> Array:
    stored: Array = interpreter.get_tensor(detail["index"])
    scale, zero_point = detail["quantization"]
    is_quantized = scale and stored.dtype.kind in "iu"
    return dequantized(stored, scale, zero_point) if is_quantized else stored
