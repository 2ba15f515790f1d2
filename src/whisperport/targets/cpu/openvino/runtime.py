"""Run OpenVINO models on one of OpenVINO's devices."""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from whisperport.errors import BundleError, LoweringError, needs
from whisperport.program.runner import Array, Binding, Part, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.targets.cpu.openvino.audio_length import with_any_audio
from whisperport.targets.cpu.openvino.bfloat16 import Bf16Copy, copies, inputs_in_bf16, read_in_bf16
from whisperport.targets.stated_signature import (
    expect_counts,
    expect_tensor,
    other_signature,
)

CPU, NPU = "CPU", "NPU"
# Some processors would compute in bfloat16, and the CPU keeps keys and values in 8 bits.
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
# The NPU's plugin rewrites a program, and runs its parts on the CPU: no NPU and no driver is needed.
NPUW_ON_CPU = {
    "NPU_USE_NPUW": "YES",
    "NPUW_DEVICES": CPU,
    "NPUW_ONLINE_PIPELINE": "NONE",
    "INFERENCE_PRECISION_HINT": "f32",
}
NO_NPU_PLUGIN = "OpenVINO's package for this system has no plugin for NPUs"
# Inputs that share a scale where a CPU multiplies them in 8 bits by weights of 8 bits. With 32, OpenVINO's
# default, the encoder of tiny has 1.5 dB less error, and takes 1.13 times as long.
BLOCK = 128
TYPES = {  # numpy's name of a dtype -> OpenVINO's
    "bool": "boolean",
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where and how OpenVINO runs programs.

    Attributes:
        name: name of the device, such as "CPU".
        threads: CPU threads of a program; None: OpenVINO chooses.
        streams: number of runs of one program that the device computes in parallel.
        emulated: whether the NPU's plugin runs the programs on the CPU.
    """

    name: str = CPU
    threads: int | None = None
    streams: int = 1
    emulated: bool = False

    def properties(self, *, bf16: bool = False, w8: bool = False) -> dict[str, Any]:
        """Return OpenVINO's properties for compiling a program.

        Args:
            bf16: whether the device computes in bfloat16; False: in float32.
            w8: whether the weights have 8 bits.

        Source: OpenVINO's pages "CPU Device", "GPU Device" and "NPU Device".
        """
        if self.emulated:
            return dict(NPUW_ON_CPU)
        # Without the hint, OpenVINO computes in bfloat16 or float16 where the device is faster in it, and
        # the results differ between machines. The NPU has no float32.
        properties: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
        if self.name != NPU:
            precision = "bf16" if bf16 else "f32"
            properties |= {"INFERENCE_PRECISION_HINT": precision, "NUM_STREAMS": str(self.streams)}
        if self.name == CPU:
            # A pinned thread waits while another process uses its core.
            properties |= {"ENABLE_CPU_PINNING": False, "ENABLE_HYPER_THREADING": False}
            if self.threads:
                properties["INFERENCE_NUM_THREADS"] = self.threads
            if w8:
                properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = str(BLOCK)
        return properties


class OpenVinoRunner(Runner):
    """A program that is compiled for a device when it runs for the first time.

    Many transcriptions need neither `align` nor the longer `prefill`, and a compiled program has a copy of
    its weights, in the order in which the device reads them.

    Attributes:
        in_bf16: the inputs that the program reads in bfloat16; empty if it computes in float32.
    """

    def __init__(
        self,
        core: Any,
        spec: ProgramSpec,
        model: Path,
        weights: Path,
        device: Device,
        properties: Mapping[str, Any],
        *,
        any_audio: bool = False,
    ) -> None:
        """Read the program.

        Args:
            core: an `openvino.Core`.
            spec: the program's signature in the manifest.
            model: the .xml file.
            weights: the .bin file.
            device: where the program runs.
            properties: of OpenVINO, for compiling the program.
            any_audio: whether the program reads audio of any length, on the CPU and if its form is known.

        Raises:
            BundleError: OpenVINO cannot read the files, or their signature differs from `spec`.
        """
        super().__init__(spec, nullcontext())  # a compiled program may run in several threads
        self._core, self._device, self._name = core, device, model.name
        self._properties = dict(properties)
        try:
            self._model = core.read_model(model, weights)
        except (RuntimeError, ValueError) as error:  # ValueError: a name is not UTF-8
            raise _unreadable(model.name, error) from error
        check_signature(self._model, spec, model.name)
        if any_audio and device.name == CPU:
            self._model, self.free_axes = with_any_audio(self._model, spec)
        in_bf16 = device.name == CPU and self._properties.get("INFERENCE_PRECISION_HINT") == "bf16"
        self.in_bf16 = inputs_in_bf16(spec) if in_bf16 else ()
        if self.in_bf16:
            self._model = read_in_bf16(self._model, self.in_bf16)
        self._compiling = Lock()
        self._requests: deque[Any] = deque()  # that no thread uses

    def binding(self) -> Binding:
        return _Bf16Binding(self) if self.in_bf16 else _OpenVinoBinding(self)

    def infer(self, tensors: Sequence[Any]) -> Sequence[Array]:
        """Run the program once on an `openvino.Tensor` per input, and return copies of its outputs.

        Raises:
            BundleError: OpenVINO cannot compile or run the program.
        """
        with self._compiling:  # other threads wait for the first to compile it
            compiled = self._compiled
        try:
            request = self._requests.pop()
        except IndexError:
            request = compiled.create_infer_request()
        try:
            for index, tensor in enumerate(tensors):
                request.set_input_tensor(index, tensor)
            request.infer()
            # Copies are needed: the next run writes to the same memory.
            return [tensor.data.copy() for tensor in request.output_tensors]
        except RuntimeError as error:
            raise _unreadable(self._name, error) from error
        finally:
            self._requests.append(request)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        named = zip(self.spec.inputs, inputs, strict=True)
        return self.infer([self._tensor(tensor.name, array) for tensor, array in named])

    def _tensor(self, name: str, array: Array) -> Any:
        return copies([array])[0].tensor if name in self.in_bf16 else as_tensor(array)

    @cached_property
    def _compiled(self) -> Any:
        try:
            return self._core.compile_model(self._model, self._device.name, self._properties)
        except RuntimeError as error:
            if self._device.name == CPU:
                raise _unreadable(self._name, error) from error
            raise LoweringError(
                f"OpenVINO's device `{self._device.name}` cannot run {self._name}",
                why=first_line(error),
                hint="use another device, or place this program on another target",
            ) from error


class _OpenVinoBinding(Binding):
    """A binding for which OpenVINO wraps the memory of bound arrays once and not in every run."""

    def __init__(self, runner: OpenVinoRunner) -> None:
        super().__init__(runner)
        self._infer = runner.infer
        self._tensors: list[Any] = [None] * len(runner.spec.inputs)

    def _bind(self, name: str, array: Array) -> None:
        self._tensors[self._index[name]] = as_tensor(array)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        for index in self._unbound:
            self._tensors[index] = as_tensor(inputs[index])
        return self._infer(self._tensors)


class _Bf16Binding(_OpenVinoBinding):
    """A binding that keeps bfloat16 copies of the bound arrays.

    The first run makes them. After it, only what has changed is converted. Two bindings share no copy: the
    next window may be written to the same arrays, and a binding of the last window can still exist then.
    """

    def __init__(self, runner: OpenVinoRunner) -> None:
        super().__init__(runner)
        self._copies: dict[str, Bf16Copy] = {}
        self._not_copied: dict[str, Array] = {}

    def changed(self, name: str, part: Part) -> None:
        if name in self._copies:
            self._copies[name].update(part)

    def _bind(self, name: str, array: Array) -> None:
        self._copies.pop(name, None)
        self._not_copied[name] = array

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        if self._not_copied:
            self._copy()
        return super()._run(inputs)

    def _copy(self) -> None:
        """Copy the arrays that were bound since the last run."""
        copied = copies(list(self._not_copied.values()))
        for name, copy in zip(self._not_copied, copied, strict=True):
            self._copies[name] = copy
            self._tensors[self._index[name]] = copy.tensor
        self._not_copied.clear()


def as_tensor(array: Array) -> Any:
    """Return an `openvino.Tensor` that reads the array in place, or a copy if the array is read-only."""
    from openvino import Tensor

    return Tensor(array, shared_memory=array.flags.writeable)


def has_bf16(core: Any, device: Device) -> bool:
    """Return whether a device of an `openvino.Core` has instructions for bfloat16."""
    return "BF16" in core.get_property(device.name, "OPTIMIZATION_CAPABILITIES")


def has_npu_plugin(core: Any) -> bool:
    """Return whether OpenVINO has its plugin for NPUs; packages for some systems lack it."""
    return bool(core.get_versions(NPU))


def start(device: Device) -> Any:
    """Return the process's `openvino.Core`, after a check that it has the device, or its emulation.

    Raises:
        MissingPackageError: OpenVINO is not installed.
        LoweringError: there is no such device on this machine, or no emulation of it.
    """
    with needs("cannot run programs for `openvino`: OpenVINO is not installed", extra="openvino"):
        started = shared_core()
    if device.emulated and not has_npu_plugin(started):
        raise LoweringError(
            NO_NPU_PLUGIN,
            why="it rewrites the programs, also where they run on the CPU",
            hint="export for the target `openvino`, or run the programs on another machine",
        )
    known = started.available_devices
    # OpenVINO calls the first of several devices of a kind `GPU` or `GPU.0`.
    if not device.emulated and device.name not in known and f"{device.name}.0" not in known:
        raise LoweringError(
            f"OpenVINO has no device `{device.name}` on this machine",
            why=f"it found {', '.join(known)}",
            hint="install its driver, or run with `openvino.device=CPU` or `openvino-npu.emulate=on`",
        )
    return started


def check_signature(model: Any, spec: ProgramSpec, name: str) -> None:
    """Compare the signature of an `openvino.Model` with the manifest.

    Args:
        spec: the program's signature in the manifest.
        name: of the file, for errors.

    Raises:
        BundleError: they differ.
    """
    expect_counts(name, spec, len(model.inputs), len(model.outputs))
    for ports, tensors in ((model.inputs, spec.inputs), (model.outputs, spec.outputs)):
        for port, tensor in zip(ports, tensors, strict=True):
            if tensor.name not in (names := port.get_names()):
                listed = ", ".join(sorted(names))[:80]
                raise other_signature(name, f"it has `{listed}`; expected `{tensor.name[:80]}`")
            kind, shape = port.get_element_type().get_type_name(), port.get_partial_shape()
            # Dynamic axes are not accepted: whisperport writes none.
            sizes = [-1 if axis.is_dynamic else axis.get_length() for axis in shape]
            fits = kind == TYPES.get(tensor.dtype)
            expect_tensor(name, tensor, sizes, kind, fits=fits)


def _unreadable(name: str, error: Exception) -> BundleError:
    return BundleError(
        f"OpenVINO cannot run {name}",
        why=first_line(error),
        hint="export the bundle again with this version of OpenVINO",
    )


def first_line(error: Exception) -> str:
    """Return the line that explains the error. Without one, the last: a check in OpenVINO's sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explained = [line for line in lines if not line.startswith(("Exception from", "Check '"))]
    return (explained or lines[::-1] or ["OpenVINO gave no reason"])[0][:200]


def shared_core() -> Any:
    """Return the process's `openvino.Core`, which lives until the process ends.

    OpenVINO's CPU plugin gives the thread an alternate stack for signals when a `Core` loads it, and takes
    it back when the `Core` is deleted. If two exist and the first is deleted first, the thread is left
    with a stack that is no longer mapped, and the next signal, such as Ctrl-C, is a segmentation fault.

    Source: openvino 2026.4.1, sigstack_manager.cpp of the plugin `intel_cpu`.

    Raises:
        ImportError: OpenVINO is not installed.
    """
    import openvino

    return _core_of(openvino)


@cache
def _core_of(openvino: Any) -> Any:
    return openvino.Core()
