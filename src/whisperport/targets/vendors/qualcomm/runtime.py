"""Run compiled files with onnxruntime-qnn: on the NPU of an Arm machine, or in the simulator on x86-64."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from whisperport.errors import BundleError, LoweringError, MissingPackageError
from whisperport.program.execution_providers import Provider, compatibility
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.targets.compiled_file import RECOMPILE
from whisperport.targets.onnx.runner import check_signature, session_settings
from whisperport.targets.target_options import EmulationOptions, Option
from whisperport.targets.vendors.qualcomm.chips import EXTRA, Chip
from whisperport.targets.vendors.qualcomm.compiler import check_chip
from whisperport.targets.vendors.qualcomm.context import PROVIDER, Context, check_context

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions(EmulationOptions):
    """Options for running: on the chip, in the simulator, or emulated on the CPU."""

    library: Annotated[
        Path | None,
        Option(
            "Path of the device's HTP library, libQnnHtp.so or QnnHtp.dll; the default is the library of "
            "the package onnxruntime-qnn, which on x86-64 is the simulator"
        ),
    ] = None
    performance: Annotated[
        Literal["default", "burst", "balanced", "high_performance", "power_saver"],
        Option(
            "Clock and power of the NPU (htp_performance_mode); without effect in the simulator"
        ),
    ] = "default"


class QnnRunner(Runner):
    """A compiled program in a session of ONNX Runtime. No node runs on the CPU."""

    def __init__(self, spec: ProgramSpec, path: Path, session: Any) -> None:
        """
        Args:
            spec: the program's signature in the manifest.
            path: of the compiled file.
            session: an `onnxruntime.InferenceSession` that loaded it.

        Raises:
            BundleError: the session's signature differs from `spec`.
        """
        super().__init__(spec)
        check_signature(session, spec, path.name)
        self._session = session
        self._input_names = [tensor.name for tensor in spec.inputs]
        self._output_names = [tensor.name for tensor in spec.outputs]

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        feed = dict(zip(self._input_names, inputs, strict=True))
        outputs: Sequence[Array] = self._session.run(self._output_names, feed)
        return outputs


def load_contexts(
    chip: Chip, specs: Sequence[ProgramSpec], files: Mapping[str, Path], options: DeviceOptions
) -> dict[str, Runner]:
    """Load compiled programs as `CompiledTarget.load_compiled`."""
    ort, provider = _packages(chip)
    devices = _devices(ort, chip)
    runners: dict[str, Runner] = {}
    for spec in specs:
        path = files[spec.name]
        context = check_context(path, spec)
        check_chip(context, chip, path)
        _check_version(_npus(ort, devices), context, path)
        session = _session(ort, provider, devices, chip, path, options)
        runners[spec.name] = QnnRunner(spec, path, session)
    return runners


def _packages(chip: Chip) -> tuple[Any, Any]:
    """Import onnxruntime and onnxruntime-qnn, and register the provider.

    Raises:
        MissingPackageError: one of them is not installed, or onnxruntime is too old for it.
    """
    try:
        import onnxruntime_qnn as provider

        ort = Provider(name=PROVIDER).require()
    except (ImportError, LoweringError) as error:
        raise MissingPackageError(
            f"cannot run the compiled programs of `{chip.name}`: onnxruntime-qnn is not installed, or "
            "does not fit the installed onnxruntime",
            why=str(error),
            hint=f'pip install "whisperport[{EXTRA}]"; or emulate them on the CPU with `--run-option '
            f"{chip.name}.emulate=on`",
        ) from error
    return ort, provider


def _devices(ort: Any, chip: Chip) -> list[Any]:
    """Return the device to run on, an `OrtEpDevice`: the NPU, or else the simulator."""
    devices = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
    if not devices:
        raise LoweringError(
            f"onnxruntime-qnn offers no device for `{chip.name}` on this machine",
            why=f"{PROVIDER} is registered and lists none",
            hint=f"emulate the programs on the CPU with `--run-option {chip.name}.emulate=on`",
        )
    return (_npus(ort, devices) or devices)[:1]


def _npus(ort: Any, devices: Sequence[Any]) -> list[Any]:
    return [device for device in devices if device.device.type == ort.OrtHardwareDeviceType.NPU]


def _check_version(npus: Sequence[Any], context: Context, path: Path) -> None:
    """Ask the provider whether it can run a file on an NPU.

    It is not asked about the simulator: it cannot tell, and the question crashed about 1 in 20 processes
    (onnxruntime-qnn 2.7.0).

    Raises:
        BundleError: it cannot.
    """
    answer = compatibility(npus, context.compatibility)
    if answer == "not":
        raise BundleError(
            f"onnxruntime-qnn cannot run {path.name} on this NPU",
            why=f"the file states {context.compatibility[:80]!r}, which the provider rejects for this "
            "device, its driver or its version",
            hint=RECOMPILE,
        )
    if answer == "works":
        log.warning("%s runs on this NPU, and would be faster if you %s", path.name, RECOMPILE)


def _session(
    ort: Any, provider: Any, devices: list[Any], chip: Chip, path: Path, options: DeviceOptions
) -> Any:
    settings = session_settings(ort, None)
    settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    settings.add_provider_for_devices(
        devices,
        {
            "backend_path": str(options.library or provider.get_qnn_htp_path()),
            "soc_model": str(chip.soc_model),
            "htp_arch": str(chip.architecture.number),
            "htp_performance_mode": options.performance,
        },
    )
    try:
        return ort.InferenceSession(str(path), settings, enable_fallback=0)
    except Exception as error:  # ONNX Runtime's exceptions have no common base class but Exception
        raise BundleError(
            f"onnxruntime-qnn cannot load {path.name} for `{chip.name}`",
            why=str(error).strip().split("\n")[0][:300],
            hint=f"on the device, name its library with `--run-option {chip.name}.library=PATH`; or "
            + RECOMPILE,
        ) from error
