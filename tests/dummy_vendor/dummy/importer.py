"""Import compiled files that others have published."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, final

from whisperport.errors import BundleError
from whisperport.program.dims import SECONDS_PER_POSITION, Dims
from whisperport.program.spec import ProgramSpec
from whisperport.targets.importer import Importer, ImportForm
from whisperport.targets.vendors.dummy.artifact import SUFFIX, check_artifact, read_artifact


@final
class DummyImporter(Importer):
    """Imports compiled files for one chip."""

    suffix: ClassVar[str] = SUFFIX
    programs: ClassVar[frozenset[str]] = frozenset({"encoder", "step"})

    def __init__(self, chip: str) -> None:
        self._chip = chip

    def is_for(self, artifact: Path) -> bool:
        return read_artifact(artifact).chip == self._chip

    def form(self, artifacts: Mapping[str, Path], dims: Dims) -> ImportForm:
        path = artifacts["encoder"]
        encoder = read_artifact(path)
        if len(encoder.outputs) != 1 or encoder.outputs[0][-1] != dims.n_audio_state:
            raise BundleError(
                f"{path.name} is not an encoder of this checkpoint",
                why=f"its outputs are {encoder.outputs}; expected one with {dims.n_audio_state} channels",
                hint="give the checkpoint from which it was compiled",
            )
        return ImportForm(window_s=encoder.outputs[0][1] * SECONDS_PER_POSITION)

    def check(self, artifact: Path, spec: ProgramSpec) -> Mapping[str, Any]:
        return {"compiler": check_artifact(artifact, self._chip, spec).compiler}
