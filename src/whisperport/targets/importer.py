"""Reading what a vendor or someone else has compiled and published."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from whisperport.dims import Dims
from whisperport.spec import ProgramSpec
from whisperport.targets.options import NoOptions

if TYPE_CHECKING:  # boards have no torch
    from whisperport.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportForm:
    """How a checkpoint is exported so that published artifacts fit in."""

    window_s: float | None = None  # None: the target's own
    options: Mapping[str, str] = field(default_factory=dict)  # for lowering: name -> value


class Importer(ABC):
    """Reads a vendor's published artifacts, without its SDK."""

    options: ClassVar[type[Any]] = NoOptions  # see `options.py`
    suffix: ClassVar[str]  # of an artifact
    programs: ClassVar[frozenset[str]]  # whose artifacts can be imported; one of them is "encoder"

    @abstractmethod
    def is_for(self, artifact: Path) -> bool:
        """Whether an artifact was compiled for just this target.

        Raises:
            BundleError: it is damaged, or of another format.
        """

    @abstractmethod
    def form(self, artifacts: Mapping[str, Path], dims: Dims) -> ImportForm:
        """What the artifacts, by program, demand of the export.

        Raises:
            BundleError: one is damaged, is for another chip, or is of another checkpoint.
        """

    @abstractmethod
    def check(self, artifact: Path, spec: ProgramSpec) -> Mapping[str, Any]:
        """Compare an artifact's own description with its program; JSON facts for the manifest.

        Raises:
            BundleError: it has other inputs or outputs.
        """

    def check_checkpoint(
        self, artifacts: Mapping[str, Path], checkpoint: "Checkpoint", options: Any
    ) -> None:
        """Compare the checkpoint with what `options` names besides the artifacts.

        Raises:
            BundleError: it is another checkpoint.
        """
        return
