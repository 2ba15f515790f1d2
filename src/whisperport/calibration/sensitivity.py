"""Find the activations of a program that one 8-bit scale ruins, from samples of its inputs.

    all activations ─► SQNR of typical values in 8 bits ─► the worst ones, each alone in 8 bits ─► output

The program is an ONNX file, and runs in ONNX Runtime. Activations are its additional outputs, a part of
them in each run, so that memory is bounded. For the worst ones, a QuantizeLinear and a DequantizeLinear
with the range of the samples are put behind the activation, and nothing else changes.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.errors import ProgramError
from whisperport.program.runner import Array
from whisperport.system.progress import Counted, Progress
from whisperport.targets.activations import MIN_SQNR_DB, Activation
from whisperport.verification.loss import loss_of

if TYPE_CHECKING:  # boards have no package onnx
    import onnx

MAX_BYTES = 256 * 2**20  # of the additional outputs of one run
WORST = 8  # activations that are measured alone
# Operators whose outputs have the values of their inputs.
MOVES = frozenset(
    {
        *("Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split"),
        *("Squeeze", "Transpose", "Unsqueeze"),
    }
)
WEIGHT = re.compile(r"^(?P<module>.+?)\.(weight|bias)\w*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """One activation.

    Attributes:
        operator: ONNX operator that computes it.
        tensor: its name in the file.
        activation: its values in the samples; its name is that of the module whose weight or bias it is
            computed with, if the file tells it.
        alone_db: SQNR of the program's worst output if only this activation is in 8 bits; None: not
            measured.
    """

    operator: str
    tensor: str
    activation: Activation
    alone_db: float | None = None

    @property
    def typical_db(self) -> float:
        """SQNR of the activation's typical values in 8 bits."""
        return self.activation.sqnr_db()

    @property
    def is_ruined(self) -> bool:
        """Whether one 8-bit scale ruins it."""
        return self.typical_db < MIN_SQNR_DB


def sensitivities(
    path: Path,
    samples: Sequence[Mapping[str, Array]],
    *,
    worst: int = WORST,
    progress: Progress = lambda _: None,
) -> list[Sensitivity]:
    """Return the activations of a program, the one whose typical values lose most first.

    Args:
        path: the ONNX file, with static shapes.
        samples: name of an input -> array; at least one sample.
        worst: number of activations that are measured alone.
        progress: called with the name of each stage.

    Raises:
        ProgramError: the program has no activation that could be quantized.
    """
    program = _Program.read(path)
    found = _measured(program, samples, progress)
    if not found:
        raise ProgramError(
            f"{path.name} has no activations to quantize",
            why="no operator computes a float32 tensor with frames and channels from its inputs",
            hint="give an encoder or a decoder with float32 inputs",
        )
    found.sort(key=lambda one: one.typical_db)
    exact = [outputs for outputs, _ in program.run([], samples[:2])]
    measured = []
    for index, one in enumerate(found[:worst]):
        progress(Counted(f"in 8 bits alone: {one.activation.name}", index, min(worst, len(found))))
        measured.append(_alone(program, one, samples[:2], exact))
    return [*measured, *found[worst:]]


def _measured(
    program: "_Program", samples: Sequence[Mapping[str, Array]], progress: Progress
) -> list[Sensitivity]:
    """Run the program, with a part of its activations as outputs in each run."""
    found: list[Sensitivity] = []
    for part in program.parts():
        progress(Counted("measuring the activations", len(found), program.count))
        activations = [Activation(program.labels[tensor]) for tensor in part]
        for _, tensors in program.run(part, samples):
            for activation, values in zip(activations, tensors, strict=True):
                activation.add(values)
        found += [
            Sensitivity(operator=program.operators[tensor], tensor=tensor, activation=activation)
            for tensor, activation in zip(part, activations, strict=True)
        ]
    return found


def _alone(
    program: "_Program",
    one: Sensitivity,
    samples: Sequence[Mapping[str, Array]],
    exact: Sequence[Sequence[Array]],
) -> Sensitivity:
    """Return the sensitivity with the SQNR of the outputs if only this activation is in 8 bits."""
    rounded = program.rounded(one)
    found = [
        loss_of(_rows(actual), _rows(expected)).sqnr_db
        for (outputs, _), wanted in zip(rounded.run([], samples), exact, strict=True)
        for actual, expected in zip(outputs, wanted, strict=True)
        if expected.dtype == np.float32 and expected.ndim
    ]
    return replace(one, alone_db=min(found, default=None))


def _rows(values: Array) -> Array:
    return values.reshape(-1, values.shape[-1])


@dataclass(frozen=True, slots=True)
class _Program:
    """An ONNX model without its external data, and the tensors that can be quantized.

    Attributes:
        operators: tensor -> operator that computes it.
        labels: tensor -> its name for people.
        bytes_of: tensor -> bytes of its values.
    """

    model: "onnx.ModelProto"
    folder: Path
    operators: Mapping[str, str]
    labels: Mapping[str, str]
    bytes_of: Mapping[str, int]

    @classmethod
    def read(cls, path: Path) -> "_Program":
        import onnx

        from whisperport.inspection.onnx_shapes import with_shapes

        model = with_shapes(onnx.load(path, load_external_data=False))
        weights = {one.name for one in model.graph.initializer}
        depends = {one.name for one in model.graph.input} - weights
        values = (*model.graph.value_info, *model.graph.output)
        kinds = {one.name: one.type.tensor_type for one in values}
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
        sizes = {name: 4 * math.prod(_axes(kinds[name])) for name in operators}
        return cls(model, path.parent, operators, _labels(model, depends), sizes)

    @property
    def count(self) -> int:
        """Number of activations."""
        return len(self.operators)

    def parts(self) -> Iterator[list[str]]:
        """Yield the activations in parts of at most `MAX_BYTES`, at least one in each."""
        part: list[str] = []
        size = 0
        for tensor in self.operators:
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
        own = [one.name for one in model.graph.output]
        model.graph.output.extend(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
            for name in further
            if name not in own
        )
        session = self._session(model)
        for sample in samples:
            outputs = session.run([*own, *further], dict(sample))
            yield outputs[: len(own)], outputs[len(own) :]

    def rounded(self, one: Sensitivity) -> "_Program":
        """Return the program with one activation in 8 bits."""
        import onnx

        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        low, high = one.activation.low, one.activation.high
        scale = (high - low) / 255 or 1.0
        exact, integers, step, zero = (
            f"{one.tensor}/{n}" for n in ("exact", "integers", "step", "zero")
        )
        model.graph.initializer.extend(
            [
                onnx.numpy_helper.from_array(np.array(scale, np.float32), step),
                onnx.numpy_helper.from_array(np.array(round(-low / scale), np.uint8), zero),
            ]
        )
        index = next(i for i, n in enumerate(model.graph.node) if one.tensor in n.output)
        made = model.graph.node[index]
        made.output[:] = [exact if name == one.tensor else name for name in made.output]
        pair = [
            onnx.helper.make_node("QuantizeLinear", [exact, step, zero], [integers]),
            onnx.helper.make_node("DequantizeLinear", [integers, step, zero], [one.tensor]),
        ]
        for offset, node in enumerate(pair, start=1):
            model.graph.node.insert(index + offset, node)
        return replace(self, model=model)

    def _session(self, model: "onnx.ModelProto") -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
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
    sources = {out: node.input[0] for node in model.graph.node for out in node.output if node.input}
    labels = {one.name: one.name for one in model.graph.input}
    for node in model.graph.node:
        known = [labels[name] for name in node.input if name in labels]
        weights = [name for name in node.input if name not in depends]
        named = (WEIGHT.match(name) for one in weights for name in (one, sources.get(one, "")))
        module = next((match["module"] for match in named if match), "")
        label = node.output[0]
        if node.op_type in MOVES and known:
            label = known[0]
        elif module:
            label = module
        elif node.op_type == "Add" and len(known) == 2:
            label = f"sum behind {known[-1]}".replace("sum behind sum behind", "sum behind")
        elif len(known) == 1 and node.op_type != "MatMul":
            label = f"{node.op_type} of {known[0]}"
        labels |= dict.fromkeys(node.output, label[:100])
    return labels
