"""Run an ONNX program in ONNX Runtime with its activations as additional outputs, and measure them.

Weights stay in their files. A part of the activations is read in each run, so that memory is bounded.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.program.runner import Array
from whisperport.system.progress import Counted, begin_stage
from whisperport.targets.activations import Activation

if TYPE_CHECKING:  # boards have no package onnx
    import onnx

MAX_BYTES = 128 * 2**20  # of the additional outputs of one run
# Operators whose outputs have the values of their inputs.
MOVES = frozenset(
    {
        *("Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split"),
        *("Squeeze", "Transpose", "Unsqueeze"),
    }
)


@dataclass(frozen=True, slots=True)
class OnnxActivations:
    """An ONNX model without its external data, and its activations.

    Attributes:
        operators: activation that an operator computes in float32, with frames and channels -> that.
        labels: activation -> its name for people: that of the module whose weight or bias it is computed
            with, if the file tells it.
        bytes_of: activation of known shape -> bytes of its values.
    """

    model: "onnx.ModelProto"
    folder: Path
    operators: Mapping[str, str]
    labels: Mapping[str, str]
    bytes_of: Mapping[str, int]

    @classmethod
    def read(cls, path: Path) -> "OnnxActivations":
        import onnx

        from whisperport.model.inspection.onnx_shapes import with_shapes

        model = with_shapes(onnx.load(path, load_external_data=False))
        weights = {weight.name for weight in model.graph.initializer}
        depends = {tensor.name for tensor in model.graph.input} - weights
        values = (*model.graph.value_info, *model.graph.output)
        kinds = {value.name: value.type.tensor_type for value in values}
        operators: dict[str, str] = {}
        for node in model.graph.node:
            if depends.intersection(node.input):
                depends.update(node.output)
                if node.op_type not in MOVES and _has_frames(kinds.get(node.output[0])):
                    operators[node.output[0]] = node.op_type
        for node in model.graph.node:  # a bias is added in the same step of an accelerator
            if node.op_type == "Add" and any(name not in depends for name in node.input):
                for name in node.input:
                    operators.pop(name, None)
        sizes = {name: 4 * math.prod(_axes(kinds[name])) for name in depends if name in kinds}
        return cls(model, path.parent, operators, _labels(model, depends), sizes)

    def measured(
        self,
        tensors: Collection[str],
        samples: Sequence[Mapping[str, Array]],
    ) -> dict[str, Activation]:
        """Return the activations of these names over all samples: name of an input -> array."""
        measured: dict[str, Activation] = {}
        for part in self._parts(tensors):
            begin_stage(Counted("measuring the activations", len(measured), len(tensors)))
            added = {tensor: Activation(self.labels[tensor]) for tensor in part}
            for _, values in self.run(part, samples):
                for activation, array in zip(added.values(), values, strict=True):
                    activation.add(array)
            measured |= added
        return measured

    def _parts(self, tensors: Collection[str]) -> Iterator[list[str]]:
        """Yield the tensors in parts of at most `MAX_BYTES`, at least one in each."""
        part: list[str] = []
        size = 0
        for tensor in tensors:
            if part and size + self.bytes_of[tensor] > MAX_BYTES:
                yield part
                part, size = [], 0
            part.append(tensor)
            size += self.bytes_of[tensor]
        if part:
            yield part

    def run(
        self, further: Sequence[str], samples: Sequence[Mapping[str, Array]]
    ) -> Iterator[tuple[list[Array], list[Array]]]:
        """Load the program once, and yield its outputs and further tensors for each sample."""
        import onnx

        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        own = [output.name for output in model.graph.output]
        model.graph.output.extend(
            onnx.ValueInfoProto(name=name)  # of any dtype
            for name in further
            if name not in own
        )
        session = self._session(model)
        for sample in samples:
            outputs = session.run([*own, *further], dict(sample))
            yield outputs[: len(own)], outputs[len(own) :]

    def rounded(self, tensor: str, activation: Activation) -> "OnnxActivations":
        """Return the program with one activation in 8 bits."""
        import onnx

        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        low, high = activation.low, activation.high
        scale = (high - low) / 255 or 1.0
        exact, integers, step, zero = (
            f"{tensor}/{n}" for n in ("exact", "integers", "step", "zero")
        )
        model.graph.initializer.extend(
            [
                onnx.numpy_helper.from_array(np.array(scale, np.float32), step),
                onnx.numpy_helper.from_array(np.array(round(-low / scale), np.uint8), zero),
            ]
        )
        index = next(i for i, n in enumerate(model.graph.node) if tensor in n.output)
        producer = model.graph.node[index]
        producer.output[:] = [exact if name == tensor else name for name in producer.output]
        pair = [
            onnx.helper.make_node("QuantizeLinear", [exact, step, zero], [integers]),
            onnx.helper.make_node("DequantizeLinear", [integers, step, zero], [tensor]),
        ]
        for offset, node in enumerate(pair, start=1):
            model.graph.node.insert(index + offset, node)
        return replace(self, model=model)

    def _session(self, model: "onnx.ModelProto") -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED  # see `calibrated`
        options.enable_mem_pattern = False
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(self.folder)
        )
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )


def _axes(kind: Any) -> list[int]:
    return [axis.dim_value for axis in kind.shape.dim]


def _has_frames(kind: Any) -> bool:
    """Return whether a tensor is in float32 and has at least one axis beside its channels."""
    import onnx

    if kind is None or kind.elem_type != onnx.TensorProto.FLOAT:
        return False
    axes = _axes(kind)
    return len(axes) > 1 and axes[-1] > 1 and all(axes)


def _labels(model: "onnx.ModelProto", depends: Collection[str]) -> dict[str, str]:
    """Return tensor -> the module whose weight or bias it is computed with, or what it is computed from.

    Args:
        depends: tensors that depend on the inputs; others are weights.
    """
    from whisperport.model.inspection.node_modules import WEIGHT

    sources = {out: node.input[0] for node in model.graph.node for out in node.output if node.input}
    labels = {tensor.name: tensor.name for tensor in model.graph.input}
    for node in model.graph.node:
        known = [labels[name] for name in node.input if name in labels]
        weights = [name for name in node.input if name not in depends]
        named = (
            WEIGHT.match(name) for weight in weights for name in (weight, sources.get(weight, ""))
        )
        module = next((match["module"] for match in named if match), "")
        label = node.output[0]
        if node.op_type in MOVES and known:
            label = known[0]
        elif module:
            label = module
        elif node.op_type == "Add" and len(known) == 2:
            label = f"sum behind {known[-1]}".replace("sum behind sum behind", "sum behind")
        elif len(known) == 2 and node.op_type == "MatMul":
            label = " times ".join(known)
        elif len(known) == 1 and node.op_type in ("Div", "Mul"):  # a scale
            label = known[0]
        elif len(known) == 1 and node.op_type != "MatMul":
            label = f"{node.op_type} of {known[0]}"
        labels |= dict.fromkeys(node.output, label[:100])
    return labels
