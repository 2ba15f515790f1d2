"""Let `encoder` and `cross_kv` read audio of any length up to their window.

The files have a window of one length, which OpenVINO's NPU needs. For the CPU, the axis of time becomes one
of 1 to T positions: 5 s then take 0.1 of the CPU time of 30 s, and 30 s take 1.05 of that of the static
model. The table of positions is cut, and sizes of T in a Reshape are left open; OpenVINO then infers all
shapes again. The model stays static if a result does not have the length of the audio.
"""

from typing import Any

import numpy as np

from whisperport.program.program_kind import CROSS_KV, ENCODER
from whisperport.program.spec import ProgramSpec

INPUTS = {ENCODER: (2, 2), CROSS_KV: (1, 1)}  # program -> axis of time, its size per position


def with_any_audio(model: Any, spec: ProgramSpec) -> tuple[Any, dict[str, int]]:
    """Return a copy of an `openvino.Model` that reads and returns arrays for fewer positions of audio.

    Args:
        model: of a program with the signature `spec`.

    Returns:
        The model, and its inputs and outputs with an axis of time, which may be shorter: name -> axis. The
        given model and none if its form is not known.
    """
    from openvino import Dimension, PartialShape

    axis, per_position = INPUTS.get(spec.kind.name, (0, 0))
    mel, *further = spec.inputs
    if not per_position or further or len(mel.shape) != 3 or mel.shape[axis] % per_position:
        return model, {}
    positions = mel.shape[axis] // per_position
    sizes: list[Any] = list(mel.shape)
    sizes[axis] = Dimension(per_position, mel.shape[axis])
    free = model.clone()
    _free_constants(free, positions)
    try:
        free.reshape({mel.name: PartialShape(sizes)})
    except RuntimeError:
        return model, {}
    axes = {mel.name: axis}
    for port, tensor in zip(free.outputs, spec.outputs, strict=True):
        own = list(port.get_partial_shape())
        timed = [i for i, size in enumerate(own) if size == Dimension(1, positions)]
        rest = [tensor.shape[i] if i in timed else size for i, size in enumerate(own)]
        if len(timed) != 1 or rest != list(tensor.shape):
            return model, {}
        axes[tensor.name] = timed[0]
    return free, axes


def _free_constants(model: Any, positions: int) -> None:
    """Cut tables with a row per position, and leave sizes of that number open."""
    from openvino import opset13

    for node in model.get_ordered_ops():
        if node.get_type_name() == "Reshape":
            sizes = _constant(node.input_value(1))
            if sizes is not None and [*sizes].count(positions) == 1 and -1 not in sizes:
                open_sizes = np.where(sizes == positions, -1, sizes)
                node.input(1).replace_source_output(opset13.constant(open_sizes).output(0))
        elif node.get_type_name() == "Add":
            for index in (0, 1):
                table, audio = node.input_value(index), node.input_value(1 - index)
                if _constant(table) is not None and table.get_shape()[:1] == [positions]:
                    cut = _cut(table, audio, len(audio.get_shape()) - len(table.get_shape()))
                    node.input(index).replace_source_output(cut.output(0))


def _cut(table: Any, audio: Any, axis: int) -> Any:
    """Return a node with the first rows of a table, as many as the audio has in an axis."""
    from openvino import opset13

    first, step = (opset13.constant(np.array([number], np.int64)) for number in (0, 1))
    place = opset13.constant(np.array([axis], np.int64))
    length = opset13.gather(opset13.shape_of(audio), place, opset13.constant(np.int64(0)))
    return opset13.slice(table, first, length, step, first)


def _constant(output: Any) -> Any:
    """Return the values of a constant, also of one that is stored in another type; None: it is none."""
    node = output.get_node()
    while node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return node.data if node.get_type_name() == "Constant" else None
