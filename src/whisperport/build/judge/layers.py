"""Find the first layer of an app's graphs whose output is not the checkpoint's.

The weights tell which layer a node belongs to, whatever its name: what is computed within a few operators
from a weight that was found again is compared with the output of that layer in eager torch. The decoder is
given the checkpoint's features, so that a fault of the encoder is not its own. The graphs run in a child
process with limits.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whisperport.build.compare import BASE_BYTES, MEMORY
from whisperport.build.inspect import size_of
from whisperport.build.judge.identity import SCALES, Identity
from whisperport.build.layouts.reference import KnownLogits, spectrogram
from whisperport.errors import WhisperportError
from whisperport.program.json_records import from_json
from whisperport.program.strict_json import Field
from whisperport.system.child import Limits, StoppedError, run_limited
from whisperport.system.progress import begin_stage
from whisperport.verification.array_comparison import compare_output
from whisperport.verification.clips import Clip
from whisperport.verification.diagnosis.divergence import (
    ComparedPrograms,
    ComparedValue,
    divergence,
)
from whisperport.verification.diagnosis.matching import arrangements, error_of
from whisperport.verification.diagnosis.recording import opened
from whisperport.verification.tolerances import GATES, LOWERED

if TYPE_CHECKING:  # torch may be missing at run time
    from torch import Tensor, nn

    from whisperport.model.checkpoint.checkpoint import Checkpoint
    from whisperport.model.inspection.graph import Graph, Node, Value

Array = NDArray[Any]
NEAR = 3  # operators after one that reads a weight: its bias, a scale, an order of axes
OUTPUT = {"encoder": "encoder.ln_post", "decoder": "logits"}  # part -> what its graph returns
SECONDS = 300.0
# End of a layer's name -> what is computed between it and the layers before it, whose outputs are right.
BETWEEN = {
    "conv1": "the convolution's padding, stride or bias",
    "conv2": "the activation before it, or the convolution's padding, stride or bias",
    "blocks.0.attn_ln": "the sum of embeddings and positions, or the layer norm's epsilon",
    "attn.out": "the mask, the scale or the heads of self-attention, or its order of keys and values",
    "cross_attn.out": "the scale or the heads of cross-attention, or its keys and values",
    "mlp.2": "the activation",
    **dict.fromkeys(("ln", "ln_post"), "the sum before it, or the layer norm's epsilon"),
    **dict.fromkeys(("query", "key", "value", "mlp.0"), "how its weight or its bias is used"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedGraph:
    """One graph of an app's files, compared with the checkpoint.

    Attributes:
        part: "encoder" or "decoder".
        file: its name.
        programs: errors from layer to layer; None: it was not compared.
        reason: why not; empty: it was.
    """

    part: str
    file: str
    programs: ComparedPrograms | None = None
    reason: str = ""

    def __bool__(self) -> bool:
        """Whether nothing that was compared differs."""
        return self.programs is None or bool(self.programs)

    @property
    def cause(self) -> str:
        """What must be wrong, as all layers before are right; empty: it is not known."""
        if self.programs is None or self.programs.first is None:
            return ""
        layer = self.programs.values[self.programs.first].name
        ends = (end for end in sorted(BETWEEN, key=len, reverse=True) if layer.endswith(end))
        return BETWEEN[end] if (end := next(ends, "")) else ""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "part": self.part,
            "file": self.file,
            "cause": self.cause or None,
            "layers": None if self.programs is None else self.programs.to_json(),
            "reason": self.reason or None,
        }


def compare_graphs(
    folder: Path, identity: Identity, checkpoint: "Checkpoint", clip: Clip, known: KnownLogits
) -> Iterator[ComparedGraph]:
    """Compare the encoder and the decoder of an app's files, layer by layer.

    Args:
        folder: of the files.
        identity: where each weight is.
        checkpoint: computes the right values.
        clip: read by the encoder.
        known: the tokens that the decoder reads.
    """
    with TemporaryDirectory(prefix="whisperport-") as work:
        values = Path(work, "values.npz")
        for part in OUTPUT:
            file = _file_of(part, identity)
            if not file:
                continue
            if not values.exists():
                begin_stage("computing the layers in torch")
                np.savez(values, allow_pickle=False, **_layers(checkpoint, clip, known))
            arrays = {
                name: [array for place, array in places if place == file]
                for name, places in identity.places.items()
            }
            path = folder / file
            arguments = {
                "path": os.fspath(path),
                "part": part,
                "values": os.fspath(values),
                "arrays": arrays,
                "gate": "w8" if identity.eight_bits else "fp16" if identity.half else "",
                "head_width": checkpoint.dims.text_head_width,
            }
            begin_stage(f"comparing the layers of {file}")
            limits = Limits(round(BASE_BYTES + MEMORY * size_of(path)), SECONDS)
            try:
                result = run_limited("whisperport.build.judge.layers:in_child", arguments, limits)
            except (StoppedError, WhisperportError) as error:
                yield ComparedGraph(part=part, file=file, reason=str(error))
                continue
            programs = from_json(ComparedPrograms, Field(result, "", "the answer of the child"))
            yield ComparedGraph(part=part, file=file, programs=programs)


def _file_of(part: str, identity: Identity) -> str:
    """Return the file that has most weights of a part, the first of several; empty: none has one."""
    n_weights = Counter(
        file
        for name, places in identity.places.items()
        if name.startswith(f"{part}.")
        for file in dict.fromkeys(file for file, _ in places)
    )
    return max(n_weights, key=n_weights.__getitem__, default="")


def in_child(
    *,
    path: str,
    part: str,
    values: str,
    arrays: dict[str, list[str]],
    gate: str,
    head_width: int,
) -> dict[str, Any]:
    """Compare one graph in the child process, and return the result as JSON.

    Args:
        path: of the graph.
        part: of the model.
        values: file with what eager torch computes.
        arrays: weight -> arrays of the graph.
        gate: limits of weights that are rounded; empty: they are not.
        head_width: by whose powers queries and keys may be scaled.
    """
    with np.load(values) as stored, TemporaryDirectory(prefix="whisperport-") as work:
        expected = dict(stored)
        with opened(os.fspath(_without_branches(Path(path), Path(work)))) as program:
            begin_stage(f"running {Path(path).name}")
            inputs = [_input(value, expected) for value in program.graph.inputs]
            run = program.record(inputs)
            graph = program.graph
    scales = [1.0, *(float(head_width) ** power for power in SCALES)]
    compared = tuple(_compared(expected, graph, run.values, arrays, scales))
    name = OUTPUT[part]
    outputs = [array for array in run.outputs if array.size == expected[name].size]
    if len(outputs) != 1 and compared:  # an encoder that returns keys and values
        name, outputs = compared[-1].name, [run.values[compared[-1].other]]
    output = compare_output(
        name,
        next((array.reshape(expected[name].shape) for array in outputs), None),
        expected[name],
        GATES[gate] if gate else LOWERED["float32"],
    )
    first, worst = divergence(compared, ["float32"])
    return asdict(
        ComparedPrograms(
            a="the checkpoint",
            b=Path(path).name,
            values=compared,
            kept=(len(expected), len(run.values)),
            outputs=(output,),
            first=None if gate else first,  # the error of rounding begins at the first layer
            worst=worst,
        )
    )


def _layers(checkpoint: "Checkpoint", clip: Clip, known: KnownLogits) -> dict[str, Array]:
    """Return the inputs, and the output of each layer in the order in which eager torch computes them."""
    import torch

    from whisperport.model.network.whisper import build_model

    dims = checkpoint.dims
    mel = spectrogram(clip.samples, known.n_mels, dims.n_frames, known.padding)[:, : dims.n_frames]
    values: dict[str, Array] = {
        "mel": mel[None],
        "tokens": np.array([known.tokens], np.int64),
    }
    model = build_model(checkpoint)

    def keep(name: str) -> Any:
        def hook(_module: "nn.Module", _inputs: Any, output: "Tensor") -> None:
            values[name] = output.numpy()

        return hook

    for name, module in model.named_modules():
        if getattr(module, "weight", None) is not None:
            module.register_forward_hook(keep(name))
    with torch.no_grad():
        features = model.encode(torch.from_numpy(values["mel"]))
        logits = model.logits(torch.tensor(known.tokens), model.cross_kv(features))
    values["logits"] = logits.numpy()
    return values


def _input(value: "Value", expected: Mapping[str, Array]) -> Array:
    """Return an input of a graph: by its name or shape, else zeros; a cache of unknown length is empty."""
    name = value.name
    if "encoder_hidden_states" in name:
        return expected["encoder.ln_post"]
    if name.endswith(("cross_k", "cross_v")):
        end = ".cross_attn.key" if name.endswith("k") else ".cross_attn.value"
        return np.stack([array for layer, array in expected.items() if layer.endswith(end)])
    shape = value.shape or ()
    if shape == expected["encoder.ln_post"].shape:
        return expected["encoder.ln_post"]
    for mel in (expected["mel"][0], expected["mel"][0].T):
        if tuple(size for size in shape if size != 1) == mel.shape:
            return np.ascontiguousarray(mel).reshape([int(size) for size in shape])
    if value.dtype == "float32" and len(shape) == 3:  # its sizes may not be known
        return expected["mel"]
    if value.dtype.startswith("int") and len(shape) == 2:
        return expected["tokens"].astype(value.dtype)
    sizes = [size if isinstance(size, int) else int(place == 0) for place, size in enumerate(shape)]
    return np.zeros(sizes, value.dtype)


def _without_branches(path: Path, work: Path) -> Path:
    """Return a file; of a decoder with a branch for the first tokens, a copy that has only this branch."""
    if path.suffix != ".onnx":
        return path
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    if not any(node.op_type == "If" for node in graph.node):
        return path
    model = onnx.load(path)
    graph = model.graph
    (choice,) = (node for node in graph.node if node.op_type == "If")
    branch = next(a.g for a in choice.attribute if a.name == "else_branch")
    graph.node.remove(choice)
    graph.node.extend(branch.node)
    graph.initializer.extend(branch.initializer)
    del graph.output[:]
    graph.output.extend(branch.output)
    onnx.save(model, work / path.name)
    return work / path.name


def _compared(
    expected: Mapping[str, Array],
    graph: "Graph",
    values: Mapping[str, Array],
    arrays: Mapping[str, Sequence[str]],
    scales: Sequence[float],
) -> Iterator[ComparedValue]:
    """Yield the error of each layer whose weights were found again, in the order of eager torch."""
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for tensor in node.tensors:
            readers.setdefault(tensor.name, []).append(node)
    before = 0.0
    for layer, array in expected.items():
        stored = [n for end in ("weight", "bias") for n in arrays.get(f"{layer}.{end}", ())]
        if not stored:
            continue
        candidates = {
            output.name: node
            for node in _behind(stored, readers)
            for output in node.outputs
            if output.name in values and values[output.name].size == array.size
        }
        errors = {name: _error(array, values[name], scales) for name in candidates}
        if not errors:
            continue
        nearest = min(errors, key=errors.__getitem__)
        yield ComparedValue(
            name=layer,
            other=nearest,
            operator=candidates[nearest].op,
            other_operator="",
            module=layer,
            line="",
            error=errors[nearest],
            before=before,
        )
        before = max(before, errors[nearest])


def _behind(names: Iterable[str], readers: Mapping[str, Sequence["Node"]]) -> list["Node"]:
    """Return the nodes that read one of these arrays, and those within a few operators behind them."""
    nodes: dict[str, Node] = {}
    current = list(names)
    for _ in range(1 + NEAR):
        reading = {node.name: node for name in current for node in readers.get(name, ())}
        nodes |= reading
        current = [output.name for node in reading.values() for output in node.outputs]
    return list(nodes.values())


def _error(expected: Array, actual: Array, scales: Sequence[float]) -> float:
    fitted = arrangements(expected.shape, actual)
    return min(error_of(expected * scale, array) for array in fitted for scale in scales)
