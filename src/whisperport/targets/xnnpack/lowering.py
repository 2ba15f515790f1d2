"""Lower programs to XNNPACK, as methods of one ExecuTorch program."""

import gc
from collections.abc import Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.errors import LoweringError
from whisperport.system.progress import Progress
from whisperport.targets.xnnpack.runtime import missing
from whisperport.targets.xnnpack.weights_on_disk import weights_on_disk

if TYPE_CHECKING:  # boards have no torch
    from whisperport.inspection.delegation import Delegation
    from whisperport.trace.program import Program


def lower_to_pte(
    programs: Sequence["Program"], path: Path, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Lower programs and write them to one .pte file.

    Returns:
        For each program, what was delegated, as JSON.

    Raises:
        LoweringError: ExecuTorch could not lower a program.
        MissingPackageError: ExecuTorch is not installed.
    """
    from whisperport.inspection.quiet import quiet
    from whisperport.trace.node_history import shared_node_history
    from whisperport.trace.shared_weights import shared_weights

    _import_executorch()
    path.parent.mkdir(exist_ok=True)
    with weights_on_disk(path.parent):
        edge, delegated = _lower_to_edge(programs, progress)
        progress("writing the ExecuTorch file")
        with quiet(), shared_node_history(), shared_weights(), path.open("wb") as file:
            edge.to_executorch().write_to_file(file)
    found = _delegation(path)
    return {name: {"delegated": n, **found[name].to_json()} for name, n in delegated.items()}


def _import_executorch() -> None:
    """Import what lowering needs, with the text that it prints kept off the screen."""
    from whisperport.inspection.quiet import quiet

    try:
        with quiet():
            import executorch.backends.xnnpack.partition.xnnpack_partitioner
            import executorch.devtools.backend_debug
            import executorch.exir  # noqa: F401
    except ImportError as error:
        raise missing(error) from error


def _delegation(path: Path) -> "dict[str, Delegation]":
    """What each method delegates. The file is mapped, not read: most of it is weights."""
    from whisperport.inspection.delegation import read_delegation

    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
        return read_delegation(mapped)


def _lower_to_edge(programs: Sequence["Program"], progress: Progress) -> tuple[Any, dict[str, int]]:
    """The lowered methods, and for each the number of nodes in its delegates.

    Programs are lowered one by one, so that what ExecuTorch copies of one is freed before the next.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.devtools.backend_debug import get_delegation_info
    from executorch.exir import EdgeCompileConfig, EdgeProgramManager, to_edge_transform_and_lower

    from whisperport.inspection.quiet import quiet
    from whisperport.trace.node_history import shared_node_history
    from whisperport.trace.shared_weights import shared_weights

    config = EdgeCompileConfig()
    methods, delegated = {}, {}
    try:
        for program in programs:
            progress(f"lowering {program.name} to XNNPACK")
            with quiet(), shared_node_history(), shared_weights():
                edge = to_edge_transform_and_lower(
                    {program.name: program.exported},
                    partitioner=[XnnpackPartitioner()],
                    compile_config=config,
                ).exported_program(program.name)
            methods[program.name] = edge
            delegated[program.name] = get_delegation_info(edge.graph_module).num_delegated_nodes
            gc.collect()  # graphs refer to themselves, and the copied weights are in graphs
        return EdgeProgramManager(methods, compile_config=config), delegated
    except Exception as error:  # ExecuTorch raises anything, from AssertionError to its own
        raise LoweringError(
            "ExecuTorch could not lower the programs for XNNPACK",
            why=str(error).strip().split("\n")[0],
        ) from error
