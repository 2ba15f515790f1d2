"""Load a bundle's modules: compiled ones on a NeuronCore, or those before compilation.

With TorchNeuron (torch-neuronx 2.13 or later; Trainium2 and Trainium3), a NeuronCore is a device of torch,
and `torch.compile` compiles each module when it first runs. Source: AWS Neuron 2.33, torch/compile
(`reference-torch-compile`: `fullgraph` and static shapes) and torch/about-pytorch-neuron.

With the torch-neuronx of torch 2.9, a compiled module is a TorchScript file. `torch_neuronx` keeps two
lists of tensors in it: `states`, which `input_output_aliases` named, in their order, and `weights`, by
name. Both are on the device, and `copy_` writes to them. Sources: aws-neuron-sdk@81ce03a,
api-torch-neuronx-trace.rst and t5-inference-tutorial.ipynb (`state.copy_(tensor)`); torch_neuronx,
xla_impl/trace.py (`NeuronModule.states`, `move_trace_to_device`).

This project has never run either on a device: tests compare its calls with these sources.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, final

import numpy as np

from whisperport.errors import (
    BundleError,
    LoweringError,
    MissingPackageError,
    WhisperportError,
    needs,
)
from whisperport.program.bundle import ProgramEntry, regular_file
from whisperport.program.json_records import to_json
from whisperport.program.program_kind import CROSS_KV
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.targets.vendors.aws_neuron.compiler import COMPILED, DESCRIPTION, WEIGHTS
from whisperport.targets.vendors.aws_neuron.resident import Module, ResidentRunner

DEVICES = Path("/dev")  # AWS's driver creates neuron0, neuron1, …
EMULATE = "`--run-option aws-neuron.emulate=on` emulates programs on the CPU"
EXPORT_AGAIN = (
    "export it again with `whisperport export CHECKPOINT --target aws-neuron --out BUNDLE`"
)


def load_modules(
    folder: Path,
    entries: Sequence[ProgramEntry],
    core: int | None,
    threads: int | None,
    backend: str | None = None,
) -> dict[str, Runner]:
    """Load programs.

    Args:
        folder: of the bundle.
        entries: the programs to load.
        core: number of the NeuronCore that runs them; None: torch runs them on the CPU.
        threads: CPU threads of torch in this process; None: torch chooses.
        backend: of `torch.compile`, which compiles them; None: they run as they are.

    Returns:
        Name of the program -> its runner.

    Raises:
        MissingPackageError: torch or the SDK is not installed.
        LoweringError: there is no device, or it cannot load a program.
        BundleError: a program is not compiled, or a file is damaged.
    """
    torch = import_torch()
    if threads and core is None:
        torch.set_num_threads(threads)
    sdk = _sdk() if core is not None and backend is None else None
    if core is not None and backend is not None:
        _torch_neuron()
    from whisperport.targets.vendors.aws_neuron import neuron_modules

    description_of = cache(neuron_modules.read_description)
    weights_of = cache(neuron_modules.read_weights)
    last = LastWindow()
    runners: dict[str, Runner] = {}
    for entry in entries:
        path = regular_file(folder, file_of(entry, DESCRIPTION))
        with _checked(path):
            record = _record(description_of(path), entry.spec, path)
            module: Module
            if sdk is None or core is None:
                weights = weights_of(regular_file(folder, file_of(entry, WEIGHTS)))
                device = "cpu" if core is None else f"neuron:{core}"
                module = TorchModule(
                    description_of(path), weights, entry.spec.name, device, backend
                )
            else:
                module = CompiledModule(sdk, regular_file(folder, file_of(entry, COMPILED)), core)
            runners[entry.spec.name] = _runner(entry.spec, module, record, last)
    return runners


def file_of(entry: ProgramEntry, suffix: str) -> str:
    """Return the file of a program with this suffix.

    Raises:
        BundleError: the program has no such file.
    """
    for file in entry.files:
        if file.endswith(suffix):
            return file
    name, listed = entry.spec.name, ", ".join(entry.files)
    if suffix == COMPILED:
        raise BundleError(
            f"`{name}` is not compiled for `aws-neuron` yet",
            why=f"the bundle contains {listed} for AWS's compiler, and no {COMPILED} file",
            hint="compile it with `whisperport compile BUNDLE`, or emulate it on the CPU with "
            "`--run-option aws-neuron.emulate=on`",
        )
    raise BundleError(
        f"cannot load `{name}` of `aws-neuron`",
        why=f"the bundle contains {listed}, and no {suffix} file",
        hint=EXPORT_AGAIN,
    )


@final
class TorchModule(Module):
    """A module of `neuron_modules`, run by torch on a device, as it is or compiled when it first runs."""

    def __init__(
        self,
        description: Mapping[str, Any],
        weights: Mapping[str, Any],
        program: str,
        device: str,
        backend: str | None,
    ) -> None:
        """
        Args:
            description: as `neuron_modules.read_description` returns it.
            weights: as `neuron_modules.read_weights` returns them.
            program: its name.
            device: of torch, such as "cpu" or "neuron:0".
            backend: of `torch.compile`; None: the module runs as it is, on the CPU.

        Raises:
            LoweringError: the device has no room for the module.
        """
        from whisperport.targets.vendors.aws_neuron import neuron_modules

        self._what = f"`{program}` on {device}"
        self._run = neuron_modules.run
        self._module, inputs, self._aliases = neuron_modules.build(description, weights, program)
        self._compiled: Callable[..., Sequence[Any]] | None = None
        if backend is not None:
            with _translated(self._what, BY_TORCH):
                self._module.to(device)
                # Arrays of one shape may have other strides, for which torch would compile again.
                self._inputs = [tensor.to(device) for tensor in inputs]
            self._compiled = neuron_modules.compiled(self._module, backend)
        self._states = {
            state_name(name): tensor
            for name, tensor in self._module.named_parameters()
            if neuron_modules.is_state(name)
        }

    def write(self, name: str, array: Array) -> None:
        """Copy an array to the state `name`, for example `self_k_0`."""
        _copy(self._states[name], array)

    def run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        """Run the module, and update its state.

        Raises:
            LoweringError: the backend cannot compile or run it.
        """
        tensors = _tensors(inputs)
        if self._compiled is None:
            return [_array(output) for output in self._run(self._module, tensors, self._aliases)]
        with _translated(self._what, BY_TORCH):
            for kept, tensor in zip(self._inputs, tensors, strict=True):
                kept.copy_(tensor)
            return [_array(output) for output in self._compiled(*self._inputs)]


@final
class CompiledModule(Module):
    """A compiled module on a NeuronCore."""

    def __init__(self, sdk: Any, path: Path, core: int) -> None:
        """Load a module, and move its weights and its state to a core.

        Raises:
            LoweringError: the SDK cannot load the file or move it to the core.
        """
        torch = import_torch()
        self._what = f"`{path.name}` on NeuronCore {core}"
        with _translated(self._what):
            self._module = torch.jit.load(str(path))
            sdk.move_trace_to_device(self._module, core)
            self._states = _states(self._module)

    def write(self, name: str, array: Array) -> None:
        """Copy an array to the state `name`.

        Raises:
            LoweringError: the module has no such state, or it cannot be written.
        """
        if name not in self._states:
            raise LoweringError(
                f"cannot run {self._what}: it has no state `{name}`",
                why=f"its states are {', '.join(self._states) or 'none'}",
                hint="compile the bundle again with `whisperport compile BUNDLE`",
            )
        with _translated(self._what):
            _copy(self._states[name], array)

    def run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        """Run the module; the device updates its state."""
        with _translated(self._what):
            outputs = self._module(*_tensors(inputs))
        outputs = outputs if isinstance(outputs, list | tuple) else (outputs,)
        return [_array(output) for output in outputs]


class LastWindow:
    """The cross-attention K/V that the encoder computed for its last features.

    The encoder's module computes them in the same graph. `cross_kv` is asked for them later, with the
    features as its input. It takes them from here if the features are equal, and computes them else: for
    features that were computed before, or elsewhere. So the engine needs no other programs than on other
    targets.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: tuple[Array, Sequence[Array]] | None = None

    def put(self, features: Array, cross_kv: Sequence[Array]) -> None:
        """Keep the K/V of `features`, in place of those kept before."""
        with self._lock:
            self._kept = (features.copy(), cross_kv)

    def take(self, features: Array) -> Sequence[Array] | None:
        """Return the K/V of `features`, once; None if those of others are kept."""
        with self._lock:
            if self._kept is None or not np.array_equal(self._kept[0], features):
                return None
            cross_kv, self._kept = self._kept[1], None
            return cross_kv


@final
class EncoderRunner(ResidentRunner):
    """Runs the encoder's module, and keeps the cross-attention K/V that it returns after the features."""

    def __init__(self, spec: ProgramSpec, module: Module, last: LastWindow) -> None:
        super().__init__(spec, module)
        self._last = last

    def run_module(self, inputs: Sequence[Array]) -> Sequence[Array]:
        features, *cross_kv = self.module.run(inputs)
        self._last.put(features, cross_kv)
        return [features]


@final
class CrossKvRunner(ResidentRunner):
    """Returns the cross-attention K/V that the encoder has computed, or runs the module of `cross_kv`."""

    def __init__(self, spec: ProgramSpec, module: Module, last: LastWindow) -> None:
        super().__init__(spec, module)
        self._last = last

    def run_module(self, inputs: Sequence[Array]) -> Sequence[Array]:
        results = self._last.take(inputs[0])
        return super().run_module(inputs) if results is None else results


def _runner(
    spec: ProgramSpec, module: Module, record: Mapping[str, Any], last: LastWindow
) -> Runner:
    if len(record["results"]) > len(spec.outputs):
        return EncoderRunner(spec, module, last)
    if spec.kind.name == CROSS_KV:
        return CrossKvRunner(spec, module, last)
    return ResidentRunner(spec, module, stateful=bool(record["state"]))


def state_name(parameter: str) -> str:
    """Return the name of the state of a module's parameter: that of `self_k.0` is `self_k_0`."""
    return parameter.replace(".", "_")


def _states(module: Any) -> dict[str, Any]:
    """Return the writable state of a compiled module: name -> tensor on the device.

    Aliased state has numbers in place of names; its order is that of the aliases, all keys before all
    values.
    """
    aliased = [tensor for _, tensor in module.states.named_parameters()]
    layers = len(aliased) // 2
    states = {
        f"self_{kind}_{layer}": aliased[index * layers + layer]
        for index, kind in enumerate("kv")
        for layer in range(layers)
    }
    weights = getattr(module, "weights", None)
    for name, tensor in [] if weights is None else weights.named_parameters():
        kind, _, layer = name.replace("->", ".").removeprefix("model.").partition(".")
        if kind in ("cross_k", "cross_v"):
            states[f"{kind}_{layer}"] = tensor
    return states


def _copy(state: Any, array: Array) -> None:
    import torch

    with torch.no_grad():
        state.copy_(torch.from_numpy(np.require(array, requirements="W")).reshape(state.shape))


def _tensors(arrays: Sequence[Array]) -> list[Any]:
    import torch

    return [torch.from_numpy(np.require(array, requirements="W")) for array in arrays]


def _array(tensor: Any) -> Array:
    values: Array = tensor.detach().cpu().numpy()
    return np.array(values, order="C")  # an output may be an input, or share memory with another


def _record(description: Mapping[str, Any], spec: ProgramSpec, path: Path) -> Mapping[str, Any]:
    """Return the description of one program.

    Raises:
        BundleError: it has another signature than the manifest lists.
        KeyError, TypeError, ValueError: it is not complete.
    """
    record: Mapping[str, Any] = description["programs"][spec.name]
    if {name: record[name] for name in ("name", "inputs", "outputs")} != to_json(spec):
        raise BundleError(
            f"`{spec.name}` in {path.name} has another signature than the manifest lists",
            hint="export the bundle again",
        )
    return record


@contextmanager
def _checked(path: Path) -> Iterator[None]:
    """Convert the errors of a damaged description or weight file.

    Raises:
        BundleError: in place of them.
    """
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError) as error:
        raise BundleError(
            f"{path.name} or its weights are damaged, or of another version of whisperport",
            why=f"{type(error).__name__}: {error}"[:400],
            hint=EXPORT_AGAIN,
        ) from error


def import_torch() -> Any:
    """Return torch.

    Raises:
        MissingPackageError: it is not installed.
    """
    with needs(
        "cannot use `aws-neuron`: torch is not installed",
        hint='pip install "whisperport[export]" to emulate programs on the CPU; the Neuron SDK has its '
        "own torch",
    ):
        import torch
    return torch


def _sdk() -> Any:
    """Return `torch_neuronx`.

    Raises:
        MissingPackageError: it is not installed, or is another package.
        LoweringError: this machine has no Neuron device.
    """
    torch_neuronx, version = _imported(
        "cannot run on a NeuronCore: torch_neuronx is not installed",
        "run whisperport in the environment of AWS's Neuron SDK, which has torch-neuronx",
    )
    if not hasattr(torch_neuronx, "move_trace_to_device"):
        raise MissingPackageError(
            f"cannot run on a NeuronCore: torch_neuronx {version} has no function `move_trace_to_device`",
            why="it is TorchNeuron, a placeholder from the public index, or an unknown version",
            hint="with TorchNeuron, use `--run-option aws-neuron.torch-compile=neuron`; else install "
            f"torch-neuronx for torch 2.9 from AWS's own index; {EMULATE}",
        )
    _check_device()
    return torch_neuronx


def _torch_neuron() -> None:
    """Check that torch has the device of TorchNeuron.

    Raises:
        MissingPackageError: TorchNeuron is not installed.
        LoweringError: this machine has no Neuron device.
    """
    torch = import_torch()
    number = torch.__version__.partition("+")[0]
    _, version = _imported(
        "cannot run on a NeuronCore: TorchNeuron is not installed",
        f"install torch-neuronx for torch {number} from AWS's own index",
    )
    if torch._C._get_privateuse1_backend_name() != "neuron":
        raise MissingPackageError(
            f"cannot run on a NeuronCore: torch_neuronx {version} adds no device `neuron` to torch",
            why="TorchNeuron is torch-neuronx 2.13 and later; before, programs were traced and compiled",
            hint="on Inferentia2 and Trainium, compile the bundle with `whisperport compile BUNDLE`, and "
            f"run it without `aws-neuron.torch-compile`; {EMULATE}",
        )
    _check_device()


def _imported(absent: str, hint: str) -> tuple[Any, str]:
    """Return `torch_neuronx` and its version.

    Args:
        absent: the error if it is not installed.
        hint: what helps then, beside emulation.

    Raises:
        MissingPackageError: it is not installed.
    """
    with needs(absent, hint=f"{hint}; {EMULATE}"):
        import torch_neuronx
    return torch_neuronx, getattr(torch_neuronx, "__version__", "of an unknown version")


def _check_device() -> None:
    """Check that the machine has a device.

    Raises:
        LoweringError: it has none.
    """
    if not any(DEVICES.glob("neuron[0-9]*")):
        raise LoweringError(
            "cannot run on a NeuronCore: this machine has no Neuron device",
            why=f"there is no {DEVICES}/neuron0, which AWS's driver creates",
            hint="use an instance with Inferentia2 or Trainium, on which `neuron-ls` lists a device; a "
            f"container needs the device passed to it; {EMULATE}",
        )


BY_SDK = (
    "the Neuron runtime reported an error",
    "`neuron-ls` shows the devices and the processes that use them; the bundle must be compiled for this "
    "chip and for the installed SDK",
)
BY_TORCH = (
    "torch.compile reported an error",
    "export the bundle again; `neuron-ls` shows the devices and the processes that use them",
)


@contextmanager
def _translated(what: str, by: tuple[str, str] = BY_SDK) -> Iterator[None]:
    """Convert the errors of the SDK, or of torch: what is reported, and what helps.

    Raises:
        LoweringError: in place of them.
    """
    try:
        yield
    except WhisperportError:
        raise
    except Exception as error:  # torch_neuronx raises RuntimeError and types of its own
        raise LoweringError(
            f"cannot run {what}: {by[0]}",
            why=f"{type(error).__name__}: {error}"[:400],
            hint=by[1],
        ) from error
