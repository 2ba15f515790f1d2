"""The interface for importing compiled files that a vendor or others have published."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from whisperport.program.dims import Dims
from whisperport.program.spec import ProgramSpec
from whisperport.targets.target_options import NoOptions

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportForm:
    """How a checkpoint must be exported so that published artifacts fit into the bundle."""

    window_s: float | None = None  # length of the window in seconds; None: the target's default
    options: Mapping[str, str] = field(default_factory=dict)  # options for lowering: name -> value


class Importer(ABC):
    """Reads a vendor's published artifacts, without its SDK."""

    options: ClassVar[type[Any]] = NoOptions  # see `target_options.py`
    suffix: ClassVar[str]  # file name suffix of an artifact
    programs: ClassVar[frozenset[str]]  # programs that can be imported; "encoder" is one of them

    @abstractmethod
    def is_for(self, artifact: Path) -> bool:
        """Whether an artifact was compiled for this target.

        Raises:
            BundleError: the artifact is damaged or has another format.
        """

    @abstractmethod
    def form(self, artifacts: Mapping[str, Path], dims: Dims) -> ImportForm:
        """Determine how the checkpoint must be exported to fit the artifacts.

        Args:
            artifacts: name of the program -> its artifact.
            dims: sizes of the checkpoint.

        Raises:
            BundleError: an artifact is damaged, for another chip, or of another checkpoint.
        """

    @abstractmethod
    def check(self, artifact: Path, spec: ProgramSpec) -> Mapping[str, Any]:
        """Compare the description inside an artifact with its program.

        Returns:
            JSON facts for the manifest.

        Raises:
            BundleError: the artifact has other inputs or outputs.
        """

    def check_checkpoint(
        self, artifacts: Mapping[str, Path], checkpoint: "Checkpoint", options: Any
    ) -> None:
        """Compare the checkpoint with other files that `options` names, if the target has such options.

        Raises:
            BundleError: the files belong to another checkpoint.
        """
        return
