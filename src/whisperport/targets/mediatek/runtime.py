"""Run compiled programs on a board: with the command `neuronrt`, or with the Neuron runtime library.

Neither has been run on a board by this project.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from whisperport.errors import UsageError
from whisperport.program.runner import Runner
from whisperport.program.spec import ProgramSpec
from whisperport.targets.mediatek.chips import Chip
from whisperport.targets.mediatek.device_io import DeviceIo
from whisperport.targets.mediatek.neuron_library import LibraryRunner, NeuronLibrary
from whisperport.targets.mediatek.neuronrt import NeuronrtRunner
from whisperport.targets.mediatek.options import RunOptions


def load_dlas(
    chip: Chip,
    specs: Sequence[ProgramSpec],
    files: Mapping[str, Path],
    options: RunOptions,
    io: Mapping[str, DeviceIo] | None = None,
) -> dict[str, Runner]:
    """Load programs as `CompiledTarget.load_compiled` on the board that this process runs on.

    Args:
        io: name of the program -> inputs and outputs of the .tflite that was compiled; needed for quantized
            programs, and where their order differs from the signature's. Programs without an entry have
            those of their signature.
    """
    known = io or {}
    ios = {spec.name: known.get(spec.name) or DeviceIo.of_spec(spec) for spec in specs}
    if options.api == "command":
        return {
            spec.name: NeuronrtRunner(chip.name, spec, files[spec.name], ios[spec.name], options)
            for spec in specs
        }
    for name, value in (("boost", options.boost), ("files", options.files)):
        if value is not None:
            raise UsageError(
                f"the option `{chip.name}.{name}` has no effect with `{chip.name}.api=library`",
                why="it is for neuronrt, which exchanges data through files",
                hint=f"leave it out, or use `{chip.name}.api=command`",
            )
    library = NeuronLibrary(chip.name, options.library)
    return {
        spec.name: LibraryRunner(library, spec, files[spec.name], ios[spec.name]) for spec in specs
    }
