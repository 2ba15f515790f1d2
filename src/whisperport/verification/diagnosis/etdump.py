"""The values that ExecuTorch keeps of a run: those at the borders of delegates and of other operators."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.program.runner import Array

if TYPE_CHECKING:  # torch may be missing at run time
    from whisperport.model.inspection.graph import Graph
    from whisperport.model.inspection.read_pte import Method

DELEGATE = "delegate"
CALLS = ("OPERATOR_CALL", "DELEGATE_CALL")


def border_graph(method: "Method") -> "Graph":
    """Return the calls of a method as nodes; each is taken to read what the call before it computes.

    ETDump tells the last output of a delegate, and all outputs of another operator.
    """
    from whisperport.model.inspection.graph import Node, Value

    read = tuple(value for value in method.inputs if value is not None)[:1]
    read = tuple(replace(value, name="input_0") for value in read)
    nodes = []
    for (chain, place), call in method.instructions.items():
        if call.backend:
            outputs: tuple[Value, ...] = (Value(f"{DELEGATE} {chain}.{place}", None, "float32"),)
            node = Node(outputs[0].name, DELEGATE, call.backend, read, outputs)
        elif call.node is not None:
            node = replace(call.node, inputs=read)
        else:
            continue
        nodes.append(node)
        read = node.outputs[:1] or read
    return replace(method.graph, nodes=tuple(nodes))


def dumped_values(
    path: Path, method: "Method", inputs: Sequence[Array], buffer_bytes: int
) -> tuple[dict[str, Array], list[Array]]:
    """Run a method, and return the values that ETDump kept by their names, and the outputs.

    Raises:
        ProgramError: the runtime was built without ETDump.
        RuntimeError: ExecuTorch cannot load or run the method.
    """
    from torch import Tensor, from_numpy

    from whisperport.model.inspection.profile_pte import with_etdump
    from whisperport.model.inspection.quiet import quiet

    with quiet():
        program = with_etdump(path, buffer_bytes)
        results = program.load_method(method.name).call([from_numpy(np.array(a)) for a in inputs])
        outputs = [
            np.array(result.float() if _is_bfloat16(result) else result)
            for result in results
            if isinstance(result, Tensor)
        ]
        with tempfile.TemporaryDirectory(prefix="whisperport-") as folder:
            dump, values = Path(folder, "etdump"), Path(folder, "values")
            program.write_etdump_result_to_file(str(dump), str(values))
            return _named(method, _events(dump, values)), outputs


def _is_bfloat16(tensor: Any) -> bool:
    return str(tensor.dtype) == "torch.bfloat16"


def _events(dump: Path, values: Path) -> list[Any]:
    from executorch.devtools.inspector import Inspector

    inspector = Inspector(etdump_path=str(dump), debug_buffer_path=str(values))
    return [event for block in inspector.event_blocks for event in block.events]


def _named(method: "Method", events: Sequence[Any]) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for event in events:
        data = event.debug_data
        call = method.instructions.get((0, event._instruction_id))
        if event.name not in CALLS or call is None or data is None or not len(data):
            continue
        names = [f"{DELEGATE} 0.{event._instruction_id}"]
        if call.node is not None and not call.backend:
            names = [output.name for output in call.node.outputs]
        for name, tensor in zip(reversed(names), reversed(list(data)), strict=False):
            arrays[name] = np.array(tensor.float() if _is_bfloat16(tensor) else tensor)
    return arrays
