"""Execution providers of ONNX Runtime: those of its package, and those in libraries that it loads.

Such a library is a plug-in. It comes in a package or with the system, and lists its devices. Sources:
onnxruntime.ai, Plugin Execution Provider Libraries, whose page on packaging names `get_library_path` and
`get_ep_names`; learn.microsoft.com, Windows ML, register execution providers.
"""

import importlib
import importlib.util
import logging
import os
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from whisperport.errors import LoweringError, needs

CPU = "CPUExecutionProvider"
# By these, ONNX Runtime chooses the provider and its device. Source: OrtExecutionProviderDevicePolicy.
POLICIES = (
    "prefer_npu",
    "prefer_gpu",
    "prefer_cpu",
    "max_performance",
    "max_efficiency",
    "min_overall_power",
)
# OrtCompiledModelCompatibility
ANSWERS: Mapping[str, Literal["best", "works", "not"]] = {
    "EP_SUPPORTED_OPTIMAL": "best",
    "EP_SUPPORTED_PREFER_RECOMPILATION": "works",
    "EP_UNSUPPORTED": "not",
}
PLUG_INS = "onnxruntime_"  # how the names of their modules begin
LIBRARY = "get_library_path"  # the function of such a module
NAMES = ("FULL_DEVICE_NAME", "Description")  # where a device's name is, in the order to look
SHOWN = 80  # characters of a name that an error shows

log = logging.getLogger(__name__)
_loading = Lock()  # a library is loaded once per process
_loaded: dict[str, str] = {}  # path of a library -> what it was loaded from


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that an execution provider can use.

    Attributes:
        provider: name of the execution provider.
        kind: "cpu", "gpu" or "npu".
        name: the device's name; its vendor, where the provider tells no name.
        origin: the package, or the path of the library, that has the provider.
        version: of the provider; "" if it tells none.
    """

    provider: str
    kind: str
    name: str
    origin: str
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """An execution provider as a user names it, and what it is created with.

    Attributes:
        name: of the execution provider, or one of `POLICIES`.
        device: kind of the device, or its name; "": the provider's first.
        library: path of a plug-in's library; "": that of an installed package.
        options: of the provider, name -> value; ONNX Runtime passes none of them where it chooses itself.
    """

    name: str = CPU
    device: str = ""
    library: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def require(self) -> Any:
        """Return the module onnxruntime, after loading the provider if it is in a plug-in.

        Raises:
            MissingPackageError: onnxruntime is not installed.
            LoweringError: the execution provider or the device is not on this machine, or the library
                cannot be loaded.
        """
        with needs(
            "cannot use `onnxruntime`: it is not installed, or does not support this Python",
            hint="pip install --upgrade whisperport",
        ):
            import onnxruntime as ort
        if self.name == CPU:
            return ort
        for error in _load_plug_ins(ort, self).values():
            log.warning("%s: %s", error.what, error.why)
        if self.name not in (*ort.get_available_providers(), *POLICIES):
            raise LoweringError(
                f"ONNX Runtime has no execution provider `{self.name[:SHOWN]}` on this machine",
                why=f"installed are {', '.join(ort.get_available_providers())}",
                hint="install the package that contains it, or name its library with the option `library`; "
                "a virtual environment sees the system's package only if it was made with "
                f"--system-site-packages; or use {CPU}. `whisperport doctor` lists what is here; the "
                f"policies are {', '.join(POLICIES)}",
            )
        self._devices(ort)
        return ort

    def session(self, ort: Any, model: bytes | str, settings: Any) -> Any:
        """Return an `onnxruntime.InferenceSession` on this provider.

        Args:
            ort: the module, from `require`.
            model: path of an ONNX file, or its content.
            settings: `onnxruntime.SessionOptions`, which are changed.

        Raises:
            Exception: what ONNX Runtime raises.
        """
        named = None
        if self.name in POLICIES:
            policy = ort.OrtExecutionProviderDevicePolicy.__members__[self.name.upper()]
            settings.set_provider_selection_policy(policy)
        elif devices := self._devices(ort):
            settings.add_provider_for_devices(devices, dict(self.options))
        else:
            named = [(self.name, dict(self.options))]
        # Without `enable_fallback=0`, ONNX Runtime hides an error of the provider and uses the CPU.
        return ort.InferenceSession(model, settings, providers=named, enable_fallback=0)

    def _devices(self, ort: Any) -> Sequence[Any]:
        """Return the device to use, an `OrtEpDevice`; none: ONNX Runtime chooses one of its own provider.

        Raises:
            LoweringError: the provider lists no such device.
        """
        own = [device for device in _listed(ort) if device.ep_name == self.name]
        chosen = [d for d in own if self.device.lower() in ("", _kind(d), _name(d).lower())]
        if self.device and not chosen:
            has = ", ".join(f"{_kind(device)} ({_name(device)})" for device in own)
            raise LoweringError(
                f"`{self.name[:SHOWN]}` has no device `{self.device[:SHOWN]}` on this machine",
                why=f"it lists {has or 'no device'}",
                hint="name another one, or none for its first. `whisperport doctor` lists what is here",
            )
        return chosen[:1] if self.device or any(map(_is_of_a_plug_in, own)) else ()


def compatibility(devices: Sequence[Any], stated: str) -> Literal["", "best", "works", "not"]:
    """Ask a provider whether it can run a compiled file, from what the file states about its compiler.

    Args:
        devices: `OrtEpDevice` of one provider, on which the file would run.
        stated: the file's metadata `ep_compatibility_info.PROVIDER`.

    Returns:
        "best"; "works", but faster if it is compiled again; "not"; or "": the provider cannot tell.
    """
    from onnxruntime.capi import _pybind_state

    ask = getattr(_pybind_state, "get_model_compatibility_for_ep_devices", None)
    if ask is None or not devices or not stated:
        return ""
    try:
        return ANSWERS.get(ask(list(devices), stated).name, "")
    except Exception:  # ONNX Runtime's exceptions have no common base; this provider cannot tell
        return ""


def list_devices() -> list[dict[str, str]]:
    """Return the devices of every execution provider that is installed, as the fields of `Device`.

    A provider that lists none, or whose library cannot be loaded, is there without a kind.

    This loads all plug-ins, which are libraries of others: call it in a process of its own.
    """
    ort = Provider().require()
    failures = _load_plug_ins(ort, None)
    devices = [
        Device(
            provider=device.ep_name,
            kind=_kind(device),
            name=_name(device),
            origin=_loaded.get(device.ep_metadata.get("library_path", ""), "onnxruntime"),
            version=device.ep_metadata.get("version", ""),
        )
        for device in _listed(ort)
    ]
    listed = {device.provider for device in devices}
    devices += [
        Device(provider=name, kind="", name="", origin="onnxruntime", version=ort.__version__)
        for name in ort.get_available_providers()
        if name not in listed
    ]
    devices += [
        Device(provider=name, kind="", name=f"not loaded: {error.why}", origin="")
        for name, error in failures.items()
    ]
    return [asdict(device) for device in devices]


def _load_plug_ins(ort: Any, provider: Provider | None) -> dict[str, LoweringError]:
    """Load the library that has a provider, if ONNX Runtime does not have it yet; None, or a policy: all.

    Returns:
        Name of a provider -> why its library could not be loaded, where all are.

    Raises:
        LoweringError: the library of the provider cannot be loaded.
    """
    failures: dict[str, LoweringError] = {}
    if not hasattr(ort, "register_execution_provider_library"):  # an older ONNX Runtime
        return failures
    with _loading:
        if provider is not None and provider.library:
            path = os.fspath(Path(provider.library).absolute())
            _load(ort, provider.name, path, path)
        if provider is not None and provider.name in ort.get_available_providers():
            return failures  # the packages are searched only for what is not there yet
        for package, path, names in _plug_ins():
            if set(ort.get_available_providers()).issuperset(names):
                continue
            if provider is None or provider.name in POLICIES:
                try:
                    _load(ort, names[0], path, package)
                except LoweringError as error:
                    failures[names[0]] = error
            elif provider.name in names:
                _load(ort, names[0], path, package)
    return failures


def _load(ort: Any, name: str, path: str, origin: str) -> None:
    """Load a plug-in's library. Some name their provider by the name under which they are registered."""
    if path in _loaded:
        return
    try:
        ort.register_execution_provider_library(name, path)
    except Exception as error:  # ONNX Runtime's exceptions have no common base class but Exception
        raise LoweringError(
            f"ONNX Runtime cannot load the execution provider of {origin}",
            why=str(error).strip().split("\n")[0][:300],
            hint=f"check that it is for onnxruntime {ort.__version__} and for this machine",
        ) from error
    _loaded[path] = origin


def _plug_ins() -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield each installed package of a plug-in: its name, the path of its library, its providers' names.

    Only packages that state a library are imported; others of ONNX Runtime load much.
    """
    for module in pkgutil.iter_modules():
        if not module.ispkg or not module.name.startswith(PLUG_INS):
            continue
        try:
            spec = importlib.util.find_spec(module.name)
            source = Path(spec.origin or "").read_text(encoding="utf-8") if spec else ""
            if LIBRARY not in source:
                continue
            package = importlib.import_module(module.name)
            yield module.name, str(package.get_library_path()), tuple(package.get_ep_names())
        except (ImportError, OSError, ValueError, AttributeError):
            continue  # it is damaged, or is no plug-in


def _listed(ort: Any) -> Sequence[Any]:
    """Return the `OrtEpDevice` of all providers; none of an older ONNX Runtime."""
    return tuple(ort.get_ep_devices()) if hasattr(ort, "get_ep_devices") else ()


def _kind(device: Any) -> str:
    return str(device.device.type).rpartition(".")[2].lower()


def _name(device: Any) -> str:
    facts = {**device.device.metadata, **device.ep_metadata}
    return str(next((facts[key] for key in NAMES if facts.get(key)), device.device.vendor))


def _is_of_a_plug_in(device: Any) -> bool:
    return bool(device.ep_metadata.get("library_path"))
