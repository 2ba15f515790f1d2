"""What a target is: a spec, three methods, and what only some targets have."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from whisperport.bundle import ProgramEntry
from whisperport.dims import Dims
from whisperport.errors import UsageError
from whisperport.progress import Progress
from whisperport.ranges import MAX_THREADS, check_range
from whisperport.runner import Runner
from whisperport.spec import Rejection, TargetSpec, UncachedForm
from whisperport.targets.compiler import Compiler
from whisperport.targets.importer import Importer
from whisperport.targets.options import NoOptions, own_options, parse_options

if TYPE_CHECKING:  # boards have no torch
    from whisperport.programs.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run a bundle's programs.

    Raises:
        UsageError: `threads` is below 1 or above `MAX_THREADS`.
    """

    threads: int | None = None  # None: one per physical core, as the runtime chooses
    options: Mapping[str, str] = field(default_factory=dict)  # "TARGET.NAME" -> value
    trust: bool = False  # load programs of unknown origin without a trial run under limits

    def __post_init__(self) -> None:
        check_range("threads", self.threads, 1, MAX_THREADS)

    def of(self, target: "Target") -> Any:
        """The options of one target, as an instance of its `run_options`.

        Raises:
            UsageError: a name that it does not have, or a value out of range.
        """
        name = target.spec.name
        return parse_options(target.run_options, own_options(self.options, name), name)


class Target(ABC):
    """One accelerator or runtime. Adding one: a folder here and a line in the list, an extra, a page."""

    spec: TargetSpec
    lower_options: ClassVar[type[Any]] = NoOptions  # for `configured`; see `options.py`
    run_options: ClassVar[type[Any]] = NoOptions  # for `load`
    compiler: Compiler | None = None  # the vendor's own, for what `lower` wrote
    importer: Importer | None = None  # of files that the vendor's compiler made elsewhere

    @abstractmethod
    def check(self, program: "Program") -> list[Rejection]:
        """What this target rejects of a program as it stands; needs no SDK and no runtime."""

    @abstractmethod
    def lower(
        self, programs: Sequence["Program"], folder: Path, progress: Progress
    ) -> list[ProgramEntry]:
        """Compile programs, already rewritten, into files in `folder`, the root of a bundle.

        Raises:
            MissingPackageError: the compiler is not installed.
            LoweringError: the compiler rejected the program.
        """

    def lower_file(
        self, program: "Program", path: Path, progress: Progress, *, simplify: bool = False
    ) -> tuple[ProgramEntry, dict[str, Any]]:
        """Compile one program, already rewritten, into files that no other program shares.

        Args:
            path: where its file may be written; it may be another one in the same folder.
            simplify: simplify the ONNX graph.

        Returns:
            Its entry, with files relative to the folder of `path`, the program's own first; and facts to
            show.

        Raises:
            UsageError: it writes no ONNX, and is to simplify it.
            MissingPackageError: the compiler is not installed.
            LoweringError: the compiler rejected the program.
        """
        if simplify:
            raise UsageError(
                f"`{self.spec.name}` writes no ONNX that could be simplified",
                hint="leave `--simplify` out",
            )
        (entry,) = self.lower([program], path.parent, progress)
        return entry, dict(entry.delegation)

    @abstractmethod
    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        """Load programs that `lower` wrote, by name; needs the runtime only.

        Raises:
            MissingPackageError: the runtime is not installed.
            BundleError: the runtime cannot read a file.
        """

    def configured(self, options: Any) -> Self:
        """This target with options for lowering, an instance of its `lower_options`."""
        return self

    def uncached_form(self, dims: Dims) -> UncachedForm | None:
        """The form of `uncached_decoder` at these sizes; None: this target does not run it."""
        return None

    def too_large(self, dims: Dims) -> str:
        """Why its compiler cannot be expected to take a checkpoint of these sizes; empty if it can."""
        return ""
