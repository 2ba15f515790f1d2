"""Run HEFs on a chip with HailoRT's Python package: 4.x for Hailo-8 and 8L, 5.x for Hailo-10H.

HailoRT quantizes inputs and dequantizes outputs, and its scheduler shares the chip between programs. Its
arrays are NHWC without the batch: the encoder's input `mel (1, 80, 1, 1000)` is passed as (1, 1000, 80).

Source: hailo-ai/hailort, hailo_platform/pyhailort/pyhailort.py and src/infer_model_api.cpp. This project
has never run it on a chip: tests compare calls, buffers and errors with signatures recorded from there.
"""

import os
import re
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np

from whisperport.errors import BundleError, LoweringError, MissingPackageError, WhisperportError
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.system.process import release_with
from whisperport.targets.vendors.hailo.chips import Chip
from whisperport.targets.vendors.hailo.layout import (
    Shape,
    as_stream,
    matches,
    result_outputs,
    stream_shape,
)

GROUP = "SHARED"  # group of the virtual device; users with the same group share the chip
TIMEOUT_MS = (
    10_000  # HailoRT's default for one run; an encoder with a 10 s window was measured at 33 ms
)

# HailoRT requires numpy 1 up to Python 3.12 and accepts any numpy from Python 3.13 on, as in Raspberry Pi
# OS Trixie. Source: hailo-ai/hailort@1adb330 (5.1.1), platform/setup.py. numpy 1 ends at Python 3.12.
FIRST_WITHOUT_NUMPY_1 = (3, 13)
NUMPY_1_COMMAND = "pip install \"numpy<2; python_version < '3.13'\""

_open: "weakref.WeakValueDictionary[tuple[int, bool], _Device]" = weakref.WeakValueDictionary()


def load_hefs(
    chip: Chip, specs: Sequence[ProgramSpec], hefs: Mapping[str, Path], *, service: bool = False
) -> dict[str, Runner]:
    """Load programs as `CompiledTarget.load_compiled` on one chip, released when no runner is left."""
    platform = _platform(chip)
    device = _device(platform, service)
    return {spec.name: HailoRunner(chip, spec, hefs[spec.name], device) for spec in specs}


@final
class HailoRunner(Runner):
    """One loaded HEF; only the process that loaded it may use it."""

    def __init__(self, chip: Chip, spec: ProgramSpec, hef: Path, device: "_Device") -> None:
        super().__init__(spec)
        self._device, self._what = device, f"`{spec.name}` on `{chip.name}`"
        float32 = device.platform.FormatType.FLOAT32
        with _translated_errors(self._what, chip):
            model = device.vdevice.create_infer_model(str(hef))
            ordered = device.platform.HEF(str(hef)).get_sorted_output_names()
            for stream in [*map(model.input, model.input_names), *map(model.output, ordered)]:
                stream.set_format_type(float32)
            names = sorted(model.input_names, key=_number)
            self._input_shapes = {name: tuple(model.input(name).shape) for name in names}
            self._output_shapes = {name: tuple(model.output(name).shape) for name in ordered}
            self._result_names = result_outputs(ordered, len(spec.outputs))
            _check_shapes(
                self._what,
                spec,
                self._input_shapes,
                [self._output_shapes[n] for n in self._result_names],
            )
            self._close = ExitStack()
            self._configured = self._close.enter_context(model.configure())
        release_with(self, self._close.close)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        buffers = {name: np.empty(shape, np.float32) for name, shape in self._output_shapes.items()}
        with _translated_errors(self._what):
            bindings = self._configured.create_bindings()
            for (name, shape), array in zip(self._input_shapes.items(), inputs, strict=True):
                bindings.input(name).set_buffer(as_stream(array).reshape(shape))
            for name, buffer in buffers.items():
                bindings.output(name).set_buffer(buffer)
            self._configured.run([bindings], TIMEOUT_MS)
            results = [bindings.output(name).get_buffer() for name in self._result_names]
        return [a.reshape(t.shape) for a, t in zip(results, self.spec.outputs, strict=True)]


class _Device:
    """The chip. A process opens it once and releases it when no runner is left."""

    def __init__(self, platform: Any, service: bool) -> None:
        self.platform = platform
        params = platform.VDevice.create_params()
        params.scheduling_algorithm = platform.HailoSchedulingAlgorithm.ROUND_ROBIN
        params.group_id = GROUP
        if service:
            params.multi_process_service = True
        self.vdevice = platform.VDevice(params)
        release_with(self, self.vdevice.release)


def _device(platform: Any, service: bool) -> _Device:
    """Return the device that this process has opened; open it if needed."""
    device = _open.get((os.getpid(), service))
    if device is None:
        with _translated_errors("the Hailo chip"):
            if not platform.Device.scan():
                raise LoweringError(
                    "no Hailo chip was found",
                    why="HailoRT's scan found no device",
                    hint="`hailortcli scan` must list a device: check that the board is connected, PCIe is "
                    "enabled, and the driver is loaded (`dmesg | grep hailo`)",
                )
            device = _open[os.getpid(), service] = _Device(platform, service)
    return device


def _platform(chip: Chip) -> Any:
    try:
        import hailo_platform
    except ImportError as error:  # also raised if the native library has another version
        raise MissingPackageError(
            f"cannot use `{chip.name}`: HailoRT's Python package is not installed or cannot be loaded",
            why=str(error),
            hint=_how_to_install(chip, str(error), sys.version_info[:2]),
        ) from error
    return hailo_platform


def _how_to_install(chip: Chip, fault: str, python: tuple[int, int]) -> str:
    """Return a hint for a package that could not be imported."""
    major, package = ("5", "hailo-h10-all") if chip.compiler[0] == 5 else ("4", "hailo-all")
    if "numpy" not in fault.lower():
        return (
            f"this chip needs HailoRT {major}.x: `sudo apt install {package}` on Raspberry Pi OS, or the "
            "wheel from Hailo's developer zone"
        )
    if python < FIRST_WITHOUT_NUMPY_1:
        return f"this HailoRT needs numpy 1: `{NUMPY_1_COMMAND}`"
    return (
        f"this HailoRT needs numpy 1, which does not support Python {python[0]}.{python[1]}: install the "
        "HailoRT package that was built for this Python, which works with numpy 2; or use Python 3.11 or "
        "3.12"
    )


def _number(name: str) -> tuple[int, str]:
    """Sort key of an input. The compiler names inputs `NETWORK/input_layer1`, 2, … in the graph's order."""
    digits = re.search(r"(\d+)$", name)
    return (int(digits[1]) if digits else 0, name)


def _check_shapes(
    what: str, spec: ProgramSpec, inputs: Mapping[str, Shape], outputs: Sequence[Shape]
) -> None:
    tensors = (*spec.inputs, *spec.outputs)
    shapes = [*inputs.values(), *outputs]
    if len(shapes) == len(tensors) and all(map(matches, shapes, tensors)):
        return
    raise BundleError(
        f"the HEF of {what} does not have the shapes of the program in the bundle",
        why=f"expected {[stream_shape(tensor.shape) for tensor in tensors]}, got {shapes}",
        hint="compile the bundle again with `whisperport compile BUNDLE --calibration AUDIO_DIR`",
    )


# HailoRT's statuses; the source is libhailort/include/hailo/hailort.h. The classes of exceptions differ
# between versions. The status is always in the message or implied by the class.
_BUSY = (
    "another process uses the chip: end that process, or share the chip through HailoRT's service "
    "(`sudo systemctl start hailort.service`, and `--run-option CHIP.service=on`, where CHIP is the "
    "target, such as hailo8l)"
)
_STATUSES = (
    (("DEVICE_IN_USE", "OUT_OF_PHYSICAL_DEVICES"), "the chip is in use", _BUSY),
    (
        ("HEF_NOT_COMPATIBLE", "INVALID_DEVICE_ARCHITECTURE"),
        "the HEF is for another chip",
        "`hailortcli fw-control identify` shows your chip: export for it with `--target`, and compile with "
        "`whisperport compile`",
    ),
    (
        ("HEF_NOT_SUPPORTED", "INVALID_HEF", "InvalidHEF"),
        "this HailoRT cannot read the HEF, or it is for another chip",
        "the versions must match: compiler 3.x with HailoRT 4.x, or compiler 5.x with HailoRT 5.x",
    ),
    (
        ("DRIVER_NOT_INSTALLED", "INVALID_DRIVER_VERSION", "DRIVER_FAIL", "PCIeDriver"),
        "the chip's driver is missing, or its version differs from HailoRT's",
        "install both from one release and restart: `sudo apt install hailo-all`; for a Hailo-10H "
        "`sudo apt install hailo-h10-all`",
    ),
    (
        ("TIMEOUT", "Timeout"),
        f"the chip did not answer within {TIMEOUT_MS // 1000} s",
        "`hailortcli run FILE.hef` checks whether the chip runs this file; if not, restart the board",
    ),
)


@contextmanager
def _translated_errors(what: str, chip: Chip | None = None) -> Iterator[None]:
    """Convert HailoRT's exceptions to whisperport's exceptions."""
    try:
        yield
    except WhisperportError:
        raise
    except Exception as error:  # the classes differ between versions, and some belong to pybind
        message = f"{type(error).__name__}: {error}"
        for statuses, happened, hint in _STATUSES:
            if any(status in message for status in statuses):
                kind = BundleError if "HEF" in happened else LoweringError
                named = f" (compiled for {chip.name})" if chip and "HEF" in happened else ""
                raise kind(
                    f"cannot run {what}: {happened}{named}", why=message, hint=hint
                ) from error
        raise LoweringError(
            f"cannot run {what}: HailoRT reported an error",
            why=message,
            hint="see `hailort.log` in the current folder for details",
        ) from error
