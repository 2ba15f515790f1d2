"""The stages of AWS's compiler: check, compile. Run by `toolchain/driver.py`.

This script needs `torch_neuronx` with torch, and the program `neuronx-cc`; it does not import whisperport:
a copy of it is the `stages.py` of a work folder. No device is needed: the program is traced on the CPU.
Tests compare its calls with signatures from AWS's documents.

    neuron_modules.py, description, weights ─check─► io.json    builds the module, and runs it on the CPU
                                            ─compile─► step.pt, built.json     torch_neuronx.trace
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

COMPILER = "neuronx-cc"
MODULES = "neuron_modules.py"
IO, BUILT = "io.json", "built.json"
WORK, LOG = "neuronx-cc", "log-neuron-cc.txt"  # folder of the compiler's files, and its log in it
KEYWORDS = (
    *("input_output_aliases", "compiler_workdir", "compiler_args", "inline_weights_to_neff"),
    "cpu_backend",
)
DTYPES = ("float32", "bfloat16", "int32", "int64")  # the compiler computes int64 in int32
KEPT_BYTES = 4 * 2**20  # of a log that is examined: its end
LONGEST_LINE = 280


class CompilerError(Exception):
    """`neuronx-cc` failed for a reason that is not known."""


class CodeError(CompilerError):
    """`neuronx-cc` reported an error with a code, with which the message begins."""


class OutOfMemoryError(CompilerError):
    """The system killed `neuronx-cc`."""


class CrashedError(CompilerError):
    """`neuronx-cc` crashed."""


class UnusedInputError(CompilerError):
    """The tracer dropped an input, because no output depends on it."""


class IgnoredArgumentError(CompilerError):
    """The tracer ignored an argument that this version does not have."""


class ModuleMismatchError(Exception):
    """The module does not have the form that the tracer needs."""


def version() -> str:
    """Return the version of `torch_neuronx`, "" if it is unknown.

    Raises:
        ImportError: the SDK is not installed.
    """
    import torch_neuronx

    return str(getattr(torch_neuronx, "__version__", "")) or _installed("torch-neuronx")


def check(version: str, settings: Mapping[str, Any]) -> str:
    """Return why this SDK cannot compile the programs; "" if it can, as far as can be seen.

    Args:
        settings: `torch`, major and minor numbers of the versions of torch that the modules run with.
    """
    import torch
    import torch_neuronx

    trace = getattr(torch_neuronx, "trace", None)
    if trace is None:
        return (
            f"torch_neuronx {version} has no function `trace`: the package of this name in the public "
            "index is a placeholder; install it from AWS's own index, as the SDK's setup page says"
        )
    missing = [name for name in KEYWORDS if name not in inspect.signature(trace).parameters]
    if missing:
        return f"`trace` of torch_neuronx {version} has no argument {', '.join(missing)}"
    if torch.__version__.split("+")[0].rsplit(".", 1)[0] not in settings["torch"]:
        expected = " or ".join(settings["torch"])
        return f"torch {torch.__version__} is installed with it; expected torch {expected}"
    folders = [*_folders(), os.environ.get("PATH", "")]
    if shutil.which(COMPILER, path=os.pathsep.join(folders)) is None:
        return f"the program {COMPILER} is neither in PATH nor beside {sys.executable}"
    return ""


def _check(job: Any, kit: Any) -> None:
    """Build the module, run it once on the CPU, and describe its inputs, outputs and state."""
    import torch

    module, inputs, aliases = _built(job)
    with torch.no_grad():
        outputs = module(*inputs)
    described = describe(module, inputs, outputs, aliases)
    kit.write_json(job.folder / IO, described)


def describe(module: Any, inputs: Any, outputs: Any, aliases: Any) -> Mapping[str, Any]:
    """Describe a module for its tracer, and check what the tracer assumes without saying so.

    The tracer finds a state among the module's parameters, and numbers the outputs and inputs as tensors: a
    tensor that occurs twice is counted once, which would shift all later indices. Source: torch_neuronx,
    xla_impl/hlo_conversion.py, `xla_trace`.

    Raises:
        ModuleMismatchError: an assumption does not hold.
    """
    for what, tensors in (("inputs", inputs), ("outputs", outputs)):
        if not isinstance(tensors, tuple) or len({id(tensor) for tensor in tensors}) != len(
            tensors
        ):
            raise ModuleMismatchError(f"the {what} are not a tuple of tensors that occur once each")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    state = []
    for parameter, index in aliases.items():
        if id(parameter) not in names:
            raise ModuleMismatchError(f"the state of output {index} is no parameter of the module")
        state.append({"name": names[id(parameter)], "output": index, **_tensor(parameter)})
    first = len(outputs) - len(state)
    if [entry["output"] for entry in state] != list(range(first, len(outputs))):
        raise ModuleMismatchError(
            "the outputs that replace the state are not the last ones, in order"
        )
    described = {
        "inputs": [_tensor(tensor) for tensor in inputs],
        "outputs": [_tensor(tensor) for tensor in outputs[:first]],
        "state": state,
    }
    for entry, output in zip(state, outputs[first:]):  # noqa: B905  # Python 3.9 has no `strict`
        if (entry["shape"], entry["dtype"]) != tuple(
            _tensor(output)[key] for key in ("shape", "dtype")
        ):
            raise ModuleMismatchError(
                f"the state {entry['name']} has another shape or type than its output"
            )
    for tensor in (*described["inputs"], *described["outputs"], *state):
        if tensor["dtype"] not in DTYPES:
            raise ModuleMismatchError(f"a tensor has the type {tensor['dtype']}; expected {DTYPES}")
    return described


def _compile(job: Any, kit: Any) -> None:
    """Trace and compile a module. Weights and state are separate from the compiled graph."""
    import torch
    import torch_neuronx

    folder, own = job.folder, job.settings
    work = folder / WORK
    shutil.rmtree(str(work), ignore_errors=True)  # of a run that was interrupted
    work.mkdir()
    module, inputs, aliases = _built(job)
    arguments = [*own["arguments"], "--logfile", str(work / LOG)]
    print("$ torch_neuronx.trace:", COMPILER, *arguments, flush=True)
    with _explained(folder, work), torch.no_grad():
        traced = torch_neuronx.trace(
            module,
            inputs,
            input_output_aliases=aliases,
            compiler_workdir=str(work),
            compiler_args=arguments,
            inline_weights_to_neff=False,
            cpu_backend=True,
        )
    built = {
        "versions": {
            name: _installed(name) for name in ("torch", "torch-neuronx", "torch-xla", COMPILER)
        },
        "arguments": list(own["arguments"]),
        "chip": own["chip"],
        "lnc": own["lnc"],
    }
    with kit.written(folder / own["artifact"]) as partial:
        torch.jit.save(traced, str(partial))
        kit.write_json(folder / BUILT, built)
    shutil.rmtree(str(work), ignore_errors=True)  # it has a second copy of all weights


def _built(job: Any) -> Any:
    """Build a program's module: the module, its example inputs, and its aliases."""
    folder, own = job.folder, job.settings
    modules = _loaded(folder / MODULES)
    description = modules.read_description(folder / own["description"])
    weights = modules.read_weights(folder / own["weights"])
    return modules.build(description, weights, job.name)


def _loaded(file: Path) -> Any:
    """Import a file beside this one."""
    spec = importlib.util.spec_from_file_location(file.stem, str(file))
    assert spec is not None and spec.loader is not None  # noqa: PT018  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _explained(folder: Path, work: Path) -> Iterator[None]:
    """Run the tracer with the compiler in PATH; raise an error that tells what its messages mean.

    Raises:
        CompilerError: the compiler failed, or the tracer warned that it changed the program.
    """
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([*_folders(), before])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except Exception as error:
            raise _error(error, _messages(folder, work)) from error
        finally:
            os.environ["PATH"] = before
            texts = [f"{warning.category.__name__}: {warning.message}" for warning in caught]
            print(*texts, sep="\n", flush=True)
    for text in texts:
        if "input tensor that was unused" in text:
            raise UnusedInputError(_short(text.partition(": ")[2]))
        if "Unexpected keyword arguments" in text:
            raise IgnoredArgumentError(_short(text.partition(": ")[2]))


def _error(error: Exception, messages: str) -> Exception:
    """Return the error that a failure of the tracer means; the same error if it is not the compiler's."""
    code = _line_with_code(str(error)) or _line_with_code(messages)
    if code:
        return CodeError(_short(code))
    failed = re.search(COMPILER + r" failed with (-?\d+)", str(error))
    if failed is None:
        return error
    status = int(failed.group(1))
    if status in (-9, 137):
        return OutOfMemoryError("the system killed it, most likely because memory ran out")
    if status < 0:
        return CrashedError(f"it was ended by signal {-status}")
    return CompilerError(_problem(messages) or f"it ended with exit status {status}")


def _line_with_code(text: str) -> str:
    """Return the first message with an error code, from the code on: "NCC_EVRF007: …"; "" if none."""
    match = re.search(r"NCC_[A-Z]{4}[0-9]{3}[^\n]*", text)
    return re.sub(r"^(NCC_[A-Z]{4}[0-9]{3})\W*", r"\1: ", match.group()) if match else ""


def _messages(folder: Path, work: Path) -> str:
    """Return the end of what the compiler printed, and of its log."""
    sys.stdout.flush()
    return _end(folder / "compile.log") + "\n" + _end(work / LOG)


def _end(path: Path) -> str:
    try:
        with open(str(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - KEPT_BYTES))
            return file.read(KEPT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _problem(messages: str) -> str:
    """Return the first line that names an error, "" if none does."""
    lines = (line.strip() for line in messages.splitlines())
    return _short(next((line for line in lines if re.search("error", line[:2000], re.I)), ""))


def _short(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:LONGEST_LINE]).strip()


def _tensor(tensor: Any) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).rpartition(".")[2]}


def _folders() -> Sequence[str]:
    """Return the folder of this interpreter's programs: `--toolchain` starts it without its environment."""
    return [os.path.dirname(os.path.abspath(sys.executable))]


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


STAGES: Mapping[str, Callable[[Any, Any], None]] = {
    "check": _check,
    "compile": _compile,
}
