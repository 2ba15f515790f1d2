"""Run lowered programs with torch, and the compiler's quantized graphs in the TOSA reference model.

Both are emulations on the CPU: compiled programs run on a device only. The reference model runs in the
compiler's own environment.
"""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, final

import numpy as np

from whisperport.errors import BundleError, MissingPackageError, ProgramError
from whisperport.program.bundle import ProgramEntry, regular_file
from whisperport.program.runner import Array, RunLock, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.targets.stated_signature import expect_counts, expect_tensor
from whisperport.targets.toolchain import ServedPrograms, variable
from whisperport.targets.vendors.ethos_u.compiler import GRAPH, TENSORS, EthosUCompiler

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.trace.program import Program

TITLE = "the TOSA reference model"


class TorchRunner(Runner):
    """A lowered program, run by torch in float32."""

    def __init__(self, spec: ProgramSpec, path: Path) -> None:
        """
        Args:
            spec: the program's signature in the manifest.
            path: of the lowered file.

        Raises:
            BundleError: the file cannot be read, contains code, or has another signature.
        """
        super().__init__(spec)
        program = _read(path)
        _check_signature(program.spec, spec, path.name)
        self._module: Any = program.exported.module(check_guards=False)
        self._structure = program.exported.call_spec.in_spec

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        import torch
        from torch.utils import _pytree as pytree

        flat = [torch.from_numpy(np.require(array, requirements="W")) for array in inputs]
        arguments, named = pytree.tree_unflatten(flat, self._structure)
        with torch.no_grad():
            outputs = pytree.tree_leaves(self._module(*arguments, **named))
        return [output.numpy() for output in outputs]


def use_threads(threads: int | None) -> None:
    """Set the number of CPU threads of torch in this process; None: torch chooses."""
    import torch

    if threads:
        torch.set_num_threads(threads)


def _read(path: Path) -> "Program":
    from whisperport.model.trace.pt2 import read_pt2

    try:
        return read_pt2(path)
    except ProgramError as error:
        raise BundleError(
            f"cannot read the lowered program {path.name}",
            why=f"{error.what}: {error.why}",
            hint="export the bundle again with the installed torch",
        ) from error


def _check_signature(compiled: ProgramSpec, expected: ProgramSpec, file: str) -> None:
    """Compare shapes and dtypes; the names of outputs are in the manifest only."""
    expect_counts(file, expected, len(compiled.inputs), len(compiled.outputs))
    for actual, tensors in (
        (compiled.inputs, expected.inputs),
        (compiled.outputs, expected.outputs),
    ):
        for port, tensor in zip(actual, tensors, strict=True):
            expect_tensor(file, tensor, port.shape, port.dtype, fits=port.dtype == tensor.dtype)


@final
class GraphRunner(Runner):
    """A program's quantized graph, run by a process that it shares with the bundle's other programs."""

    def __init__(self, spec: ProgramSpec, served: ServedPrograms, lock: RunLock) -> None:
        super().__init__(spec, lock)
        self._served = served

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        names = (tensor.name for tensor in self.spec.inputs)
        outputs = self._served.run(self.spec.name, dict(zip(names, inputs, strict=True)))
        if len(outputs) != len(self.spec.outputs):
            raise BundleError(
                f"the quantized graph of `{self.spec.name}` has {len(outputs)} outputs",
                why=f"the program has {len(self.spec.outputs)}",
                hint="compile the bundle again with `whisperport compile BUNDLE`",
            )
        return outputs


def load_graphs(
    compiler: EthosUCompiler, folder: Path, entries: Sequence[ProgramEntry]
) -> dict[str, Runner]:
    """Load the quantized graphs that `compile` put into a bundle.

    Args:
        compiler: the compiler of the bundle's target.
        folder: of the bundle.
        entries: the programs to load.

    Returns:
        Name of the program -> its runner. All of them share one process.

    Raises:
        BundleError: a program is not compiled, or its graph cannot be loaded.
        MissingPackageError: the compiler's environment is not on this machine.
        LoweringError: that environment has other versions.
    """
    files = {
        entry.spec.name: [regular_file(folder, file) for file in _graph_files(entry)]
        for entry in entries
    }
    if not files:
        return {}
    installed = compiler.installed({})
    if installed is None:
        raise MissingPackageError(
            f"cannot run the quantized graphs of `{compiler.target}`: {TITLE} is not installed",
            why=f"{variable(compiler.toolchain)} names no Python interpreter",
            hint=f"set it to the interpreter that compiled the bundle ({compiler.source}), or choose "
            f"`--run-option {compiler.target}.emulate=on`, which runs the programs in float32",
        )
    served = ServedPrograms(installed, compiler.script, compiler.settings(), files, TITLE)
    lock = Lock()
    return {entry.spec.name: GraphRunner(entry.spec, served, lock) for entry in entries}


def _graph_files(entry: ProgramEntry) -> tuple[str, str]:
    """Return a program's graph and the description of its tensors, as paths in the bundle."""
    by_suffix = {Path(file).suffix: file for file in entry.files}
    graph, tensors = by_suffix.get(Path(GRAPH).suffix), by_suffix.get(Path(TENSORS).suffix)
    if graph is None or tensors is None:
        raise BundleError(
            f"the bundle has no quantized graph of `{entry.spec.name}`",
            why=f"it contains {', '.join(entry.files)}",
            hint="compile it with `whisperport compile BUNDLE`",
        )
    return graph, tensors
