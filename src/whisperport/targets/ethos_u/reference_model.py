"""Run the compiler's quantized graphs in the TOSA reference model, in the compiler's own environment."""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import final

from whisperport.bundle import ProgramEntry, regular_file
from whisperport.errors import BundleError, MissingPackageError
from whisperport.program.runner import Array, RunLock, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.targets.ethos_u.compiler import GRAPH, TENSORS, EthosUCompiler
from whisperport.toolchain import ServedPrograms, variable

TITLE = "the TOSA reference model"


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
        one.spec.name: [regular_file(folder, file) for file in _graph_files(one)] for one in entries
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
    return {one.spec.name: GraphRunner(one.spec, served, lock) for one in entries}


def _graph_files(entry: ProgramEntry) -> tuple[str, str]:
    """Return a program's graph and the description of its tensors, as paths in the bundle."""
    found = {Path(file).suffix: file for file in entry.files}
    graph, tensors = found.get(Path(GRAPH).suffix), found.get(Path(TENSORS).suffix)
    if graph is None or tensors is None:
        raise BundleError(
            f"the bundle has no quantized graph of `{entry.spec.name}`",
            why=f"it contains {', '.join(entry.files)}",
            hint="compile it with `whisperport compile BUNDLE`",
        )
    return graph, tensors
