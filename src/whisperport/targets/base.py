"""What a target is: a spec, three methods, and what only some targets have."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.bundle import ProgramEntry
from whisperport.dims import Dims
from whisperport.ranges import MAX_THREADS, check_range
from whisperport.runner import Runner
from whisperport.spec import FullForm, Refusal, TargetSpec
from whisperport.targets.compiler import Compiler
from whisperport.targets.importer import Importer

if TYPE_CHECKING:  # boards have no torch
    from whisperport.programs.program import Program

Say = Callable[[str], None]
"""Told what is being done, in a few words, for a progress line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run a bundle's programs.

    Raises:
        UsageError: `threads` is below 1 or above `MAX_THREADS`.
    """

    threads: int | None = None  # None: one per physical core, as the runtime chooses
    options: Mapping[str, str] = field(default_factory=dict)  # the target's own
    trust: bool = False  # load programs of unknown origin without a trial run under limits

    def __post_init__(self) -> None:
        check_range("threads", self.threads, 1, MAX_THREADS)


class Target(ABC):
    """One accelerator or runtime. Adding one: a folder here and a line in the list, an extra, a page."""

    spec: TargetSpec
    compiler: Compiler | None = None  # the vendor's own, for what `lower` wrote
    importer: Importer | None = None  # of files that the vendor's compiler made elsewhere

    @abstractmethod
    def check(self, program: "Program") -> list[Refusal]:
        """What this target would refuse of a program as it stands; needs no SDK and no runtime."""

    @abstractmethod
    def lower(self, programs: Sequence["Program"], folder: Path, say: Say) -> list[ProgramEntry]:
        """Compile programs, already rewritten, into files in `folder`, the root of a bundle.

        Raises:
            MissingPackageError: the compiler is not installed.
            LoweringError: the compiler refused.
        """

    @abstractmethod
    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        """Load programs that `lower` wrote, by name; needs the runtime only.

        Raises:
            MissingPackageError: the runtime is not installed.
            BundleError: the runtime cannot read a file.
        """

    def configured(self, options: Mapping[str, str]) -> "Target":
        """This target with options for lowering, each named in `spec.lower_options`.

        Raises:
            UsageError: a value that it cannot take.
        """
        return self

    def full_form(self, dims: Dims) -> FullForm | None:
        """How it wants `decode_full` of a checkpoint of these sizes; None: it has no use for it."""
        return None

    def too_large(self, dims: Dims) -> str:
        """Why its compiler cannot be expected to take a checkpoint of these sizes; empty if it can."""
        return ""
