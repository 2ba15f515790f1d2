"""Lower programs to XNNPACK, as methods of one ExecuTorch program.

`weights_on_disk` keeps the serialized weights of methods in files meanwhile, each content once:
ExecuTorch holds the serialized weights of a method in memory until the file is written. Several methods
have equal weights, and all of them are in memory as tensors too.

`read_delegation` reads from the written file which operators run in a delegate.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from whisperport.errors import BundleError, LoweringError
from whisperport.system.progress import begin_stage
from whisperport.targets.cpu.xnnpack.runtime import needs_executorch

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.trace.program import Program


def lower_to_pte(
    programs: Mapping[str, "Program"], path: Path, constants: Mapping[str, str | int] | None = None
) -> dict[str, dict[str, Any]]:
    """Lower programs and write them to one .pte file.

    Args:
        programs: name of the method -> its program.
        path: of the file.
        constants: name of a further method -> the text or the number that it returns; None: there are none.

    Returns:
        For each method, what was delegated, as JSON.

    Raises:
        LoweringError: ExecuTorch could not lower a program.
        MissingPackageError: ExecuTorch is not installed.
    """
    from whisperport.model.inspection.quiet import quiet
    from whisperport.model.trace.shared_copies import shared_node_history, shared_weights

    import_executorch()
    path.parent.mkdir(exist_ok=True)
    with weights_on_disk(path.parent):
        edge, delegated = _lower_to_edge(programs, constants)
        begin_stage("writing the ExecuTorch file")
        with quiet(), shared_node_history(), shared_weights(), path.open("wb") as file:
            edge.to_executorch(_inputs_of_the_caller()).write_to_file(file)
    # The file is mapped, not read: most of it is weights.
    with path.open("rb") as pte, mmap(pte.fileno(), 0, access=ACCESS_READ) as mapped:
        delegations = read_delegation(mapped)
    return {name: {"delegated": n, **delegations[name].to_json()} for name, n in delegated.items()}


def _inputs_of_the_caller() -> Any:
    """Let a method read its inputs where the caller has them, without memory of its own for them.

    ExecuTorch would copy all inputs in every run: for one token of tiny 23 MB, most of them keys and values
    of the audio, which is a fifth of the time of the step (benchmarks/apps/steps.py).
    """
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    return ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False))


def import_executorch() -> None:
    """Import what lowering needs, with the text that it prints kept off the screen.

    Raises:
        MissingPackageError: ExecuTorch is not installed.
    """
    from whisperport.model.inspection.quiet import quiet

    with needs_executorch(), quiet(), _yaml_read_by_libyaml():
        import executorch.backends.xnnpack.partition.xnnpack_partitioner
        import executorch.devtools.backend_debug
        import executorch.exir  # noqa: F401


@contextmanager
def _yaml_read_by_libyaml() -> Iterator[None]:
    """Within the block, texts in YAML are read in C.

    ExecuTorch reads its list of operators, 138 KB, when it is imported, with a parser in Python: 1.7 CPU
    seconds; libyaml needs 0.1, with the same result (executorch 1.5.1). Where it is not installed, nothing
    changes.
    """
    try:
        from ruamel.yaml import YAML
        from yaml import CSafeLoader, load
    except ImportError:
        yield
        return
    reader: Any = YAML
    in_python = reader.load

    def in_c(self: Any, text: Any) -> Any:
        return load(text, CSafeLoader) if isinstance(text, str) else in_python(self, text)

    reader.load = in_c
    try:
        yield
    finally:
        reader.load = in_python


def _lower_to_edge(
    programs: Mapping[str, "Program"], constants: Mapping[str, str | int] | None = None
) -> tuple[Any, dict[str, int]]:
    """The lowered methods, and for each the number of nodes in its delegates.

    Programs are lowered one by one, so that what ExecuTorch copies of one is freed before the next.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.devtools.backend_debug import get_delegation_info
    from executorch.exir import EdgeCompileConfig, EdgeProgramManager, to_edge_transform_and_lower

    from whisperport.model.inspection.quiet import quiet
    from whisperport.model.trace.shared_copies import shared_node_history, shared_weights

    config = EdgeCompileConfig()
    methods, delegated = {}, {}
    try:
        for method, program in programs.items():
            begin_stage(f"lowering {program.name} to XNNPACK")
            with quiet(), shared_node_history(), shared_weights():
                edge = to_edge_transform_and_lower(
                    {method: program.exported},
                    partitioner=[XnnpackPartitioner()],
                    compile_config=config,
                ).exported_program(method)
            methods[method] = edge
            delegated[method] = get_delegation_info(edge.graph_module).num_delegated_nodes
            gc.collect()  # graphs refer to themselves, and the copied weights are in graphs
        returned = dict(constants) if constants else None
        return EdgeProgramManager(methods, returned, compile_config=config), delegated
    except Exception as error:  # ExecuTorch raises anything, from AssertionError to its own
        raise LoweringError(
            "ExecuTorch could not lower the programs for XNNPACK",
            why=str(error).strip().split("\n")[0],
        ) from error


SMALLEST = 4096  # bytes; smaller data stays in memory


@contextmanager
def weights_on_disk(folder: Path) -> Iterator[None]:
    """Within the block, data that a delegate gives to ExecuTorch's data store is moved to files.

    Args:
        folder: where the files are; they are deleted at the end of the block.
    """
    from executorch.exir._serialize._cord import FileBackedData
    from executorch.exir._serialize._named_data_store import NamedDataStore

    original = NamedDataStore.add_named_data
    with TemporaryDirectory(prefix=".weights-", dir=folder) as temporary:
        known: dict[bytes, Any] = {}

        def moved(data: bytes) -> Any:
            digest = sha256(data).digest()
            if digest not in known:
                path = Path(temporary, digest.hex())
                path.write_bytes(data)
                known[digest] = FileBackedData(str(path), sha256=digest)
            return known[digest]

        def add_named_data(store: Any, key: str, data: Any, *rest: Any, **named: Any) -> None:
            if isinstance(data, bytes) and len(data) >= SMALLEST:
                data = moved(data)
            original(store, key, data, *rest, **named)

        NamedDataStore.add_named_data = add_named_data
        try:
            yield
        finally:
            NamedDataStore.add_named_data = original


HEADER_BYTES = 64  # contain the extended header of a .pte: executorch/schema/extended_header.h


@dataclass(frozen=True, slots=True)
class Delegation:
    """How much of one method of a program runs in a delegate."""

    method: str
    subgraphs: int  # calls into a delegate
    undelegated: tuple[str, ...]  # operators that run in no delegate, one entry per call

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON, without the method's name."""
        return {"subgraphs": self.subgraphs, "undelegated": list(self.undelegated)}


def read_delegation(pte: bytes | mmap) -> dict[str, Delegation]:
    """Read the delegation of every method of a .pte, by the method's name; weights are not read.

    Raises:
        BundleError: `pte` is not an ExecuTorch program, or is damaged.

    Source: the instructions of `ExecutionPlan.chains`, executorch/schema/program.fbs.
    """
    from executorch.exir._serialize._program import _flatbuffer_to_program, _get_extended_header

    try:
        header = _get_extended_header(pte[:HEADER_BYTES])
        program = _flatbuffer_to_program(pte[: header.program_size] if header else pte[:])
        return {plan.name: _of_plan(plan) for plan in program.execution_plan if plan.chains}
    except Exception as error:  # struct.error, IndexError, TypeError where a table is missing, ...
        raise BundleError(
            "this is not an ExecuTorch program", why=f"{type(error).__name__}: {error}"
        ) from error


def _of_plan(plan: Any) -> Delegation:
    subgraphs, undelegated = 0, []
    for instruction in (step for chain in plan.chains for step in chain.instructions):
        kind = type(instruction.instr_args).__name__
        if kind == "DelegateCall":
            subgraphs += 1
        elif kind == "KernelCall":
            operator = plan.operators[instruction.instr_args.op_index]
            undelegated.append(f"{operator.name}.{operator.overload}".rstrip("."))
    return Delegation(plan.name, subgraphs, tuple(undelegated))
