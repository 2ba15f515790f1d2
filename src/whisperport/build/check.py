"""Check programs against a target's limits: which nodes the target rejects, why, and what to do."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from whisperport.errors import UsageError, WhisperportError
from whisperport.program.bundle import Bundle
from whisperport.program.sizes import NO_SIZES, not_fixable
from whisperport.system.progress import begin_stage
from whisperport.targets import PROFILERS, Target, get_target
from whisperport.targets.partitioner import Partition
from whisperport.targets.preflight import requires_torch

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from torch import nn
    from torch.export import ExportedProgram

    from whisperport.model.inspection.graph import Graph
    from whisperport.model.inspection.rejections import CheckedProgram
    from whisperport.model.trace.program import Program


@dataclass(frozen=True, slots=True)
class Partitioned:
    """The answer of a vendor's partitioner about one file.

    Attributes:
        program: name of the program in the file; several are separated by commas.
        partitioner: name of the partitioner, with the device that it was asked for.
        partition: which operators it accepts; None: it could not be asked.
        reason: why it could not be asked; empty if it was.
    """

    program: str
    partitioner: str
    partition: Partition | None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "program": self.program,
            "partitioner": self.partitioner,
            "not_asked": self.reason or None,
            "partition": self.partition.to_json() if self.partition is not None else None,
        }


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of `check`; true if neither the target nor its partitioner rejects a node of any program.

    Attributes:
        target: name of the target.
        programs: the findings of every program of the file.
        partitions: the answers of the vendor's partitioner, where the target has one and the
            partitioner reads it.
    """

    target: str
    programs: "tuple[CheckedProgram, ...]"
    partitions: tuple[Partitioned, ...] = ()

    def __bool__(self) -> bool:
        """Return True if no node is rejected. A node that is only `not seen` is not rejected."""
        declined = any(
            answer.partition is not None and not answer.partition for answer in self.partitions
        )
        return not declined and not any(program.rejected for program in self.programs)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "target": self.target,
            "passed": bool(self),
            "programs": [program.to_json() for program in self.programs],
            "partitions": [answer.to_json() for answer in self.partitions],
        }


@overload
def check(
    program: "Program | ExportedProgram | str | os.PathLike[str]",
    target: str,
    /,
    *,
    sizes: Mapping[str, int] = ...,
) -> Checked: ...


@overload
def check(
    program: "Program | ExportedProgram | str | os.PathLike[str]",
    *,
    target: str,
    sizes: Mapping[str, int] = ...,
) -> Checked: ...


@overload
def check(
    program: "nn.Module",
    args: "Sequence[Any] | Mapping[str, Any]",
    target: str,
) -> Checked: ...


def check(
    program: "Program | ExportedProgram | nn.Module | str | os.PathLike[str]",
    args: "Sequence[Any] | Mapping[str, Any] | None" = None,
    target: str = "",
    *,
    sizes: Mapping[str, int] = NO_SIZES,
) -> Checked:
    """Check a program against a target's limits. Neither the target's compiler nor the weights are needed.

    Call it as `check(program, target)`, or as `check(module, args, target)`.

    Some vendors have a partitioner that tells which operators of a file their compiler would receive. Where
    it can be asked on this machine, its answer is a part of the result.

    Args:
        program: a `.pt2`, `.onnx` or `.tflite` file, a bundle, a folder with a
            config.json of transformers, a `Program` from `whisperport.model.trace.program.trace`, what
            `torch.export.export` returned, or a module of torch, which is exported in evaluation mode.
        args: of the module: its positional arguments as a tuple, or its keyword arguments as a mapping.
        target: name of a target, as `whisperport targets` lists them.
        sizes: numbers for the dynamic sizes of a `.pt2` file, as it names them: {"s27": 128}.

    Returns:
        The nodes that the target rejects, does not delegate or was not seen to compile, for every program.

    Raises:
        UsageError: there is no such target, or a module has no arguments.
        ProgramError: the program is missing, damaged, or of another format.
        BundleError: the bundle is damaged.
        LoweringError: torch cannot export the module.
        MissingPackageError: torch, or the reader of the program's format, is not installed.
    """
    if isinstance(args, str):  # `check(program, target)`
        target = target or args
    chosen = get_target(target)
    spec = chosen.spec
    with requires_torch("check a program"):
        from whisperport.model.inspection.read import read_graphs
        from whisperport.model.inspection.read_model_folder import (
            is_model_folder,
            read_model_folder,
        )
        from whisperport.model.inspection.rejections import check_graph
    partitions: tuple[Partitioned, ...] = ()
    is_file = isinstance(program, str | os.PathLike) and not is_model_folder(Path(program))
    if sizes and not is_file:
        raise not_fixable("the program")
    if isinstance(program, str | os.PathLike) and is_model_folder(Path(program)):
        begin_stage(f"exporting the model of {Path(program).name}")
        graphs = [read_model_folder(Path(program))]
    elif isinstance(program, str | os.PathLike):
        begin_stage(f"reading {Path(program).name}")
        graphs = read_graphs(Path(program), sizes, PROFILERS)
        partitions = _partitions(chosen, Path(program))
    else:
        graphs = [_graph_of(program, args)]
    return Checked(target, tuple(check_graph(graph, spec) for graph in graphs), partitions)


def _graph_of(
    program: "Program | ExportedProgram | nn.Module",
    args: "Sequence[Any] | Mapping[str, Any] | None",
) -> "Graph":
    """Read the graph of an object of torch; a module is exported first."""
    from torch import Tensor, nn
    from torch.export import ExportedProgram

    from whisperport.model.inspection.read_exported import read_exported
    from whisperport.model.trace.program import exported_module

    if isinstance(program, ExportedProgram):
        return read_exported("program", program)
    if not isinstance(program, nn.Module):
        return read_exported(program.name, program.exported)
    name = type(program).__name__
    if args is None or isinstance(args, str | Tensor):
        raise UsageError(
            f"cannot check the module `{name}` without its arguments",
            why="a module is exported with an example of each of its inputs",
            hint="call `whisperport.check(module, (x, y), target)`; for one input, `(x,)`",
        )
    begin_stage(f"exporting {name}")
    positional, named = ((), args) if isinstance(args, Mapping) else (tuple(args), {})
    return read_exported(name, exported_module(name, program, positional, named))


def _partitions(target: Target, path: Path) -> tuple[Partitioned, ...]:
    """Ask the target's partitioner about the files that it reads: the only one, or those of a bundle."""
    if target.partitioner is None:
        return ()
    programs: dict[Path, list[str]] = {}
    if path.is_dir():
        bundle = Bundle.open(path)
        for entry in bundle.manifest.programs:
            for name in entry.files:
                programs.setdefault(bundle.path(name), []).append(entry.spec.name)
    else:
        programs[path] = [path.stem]
    return tuple(
        _partitioned(target, ", ".join(names), file)
        for file, names in programs.items()
        if target.partitioner.recognizes(_head(file))
    )


def _partitioned(target: Target, name: str, file: Path) -> Partitioned:
    partitioner = target.partitioner
    assert partitioner is not None  # `_partitions` has checked it
    if reason := partitioner.unavailable():
        return Partitioned(name, partitioner.title, None, reason)
    begin_stage(f"{name}: asking {partitioner.title}")
    try:
        return Partitioned(name, partitioner.title, partitioner.partition(file))
    except WhisperportError as error:
        return Partitioned(name, partitioner.title, None, f"{error.what}: {error.why}")


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(8)
