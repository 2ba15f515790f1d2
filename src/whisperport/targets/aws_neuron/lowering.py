"""Write programs as a description and a weight file, which `neuron_modules` builds modules from.

Whisper's own programs become the modules of `neuron_modules`, with resident state; all other programs
become a list of aten's operators. A program is Whisper's own if its inputs, outputs and weights are.
Whether the module computes the same is verified afterwards, by `export` and by `lower`.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.errors import LoweringError
from whisperport.program.program_kind import ALIGN, CROSS_KV, ENCODER, PREFILL, kind_of
from whisperport.program.spec import ProgramSpec, TensorSpec

if TYPE_CHECKING:  # boards have no torch
    from torch import Tensor

    from whisperport.trace.program import Program

TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # precision -> dtype of weights and state

Record = dict[str, Any]
"""The description of one program, as JSON; see `neuron_modules`."""

Weights = Mapping[str, "Tensor"]
"""Name in the weight file -> tensor."""


@dataclass(slots=True)
class _Lowered:
    """The programs of one pair of files."""

    dtype: str
    records: dict[str, Record] = field(default_factory=dict)
    weights: dict[str, "Tensor"] = field(default_factory=dict)

    def add(self, program: "Program") -> None:
        """Add a program as a module if it is one of Whisper's own, else as a graph.

        Raises:
            LoweringError: it has an operator that a graph cannot have.
        """
        record, weights = _module(program, self.dtype) or _graph(program, self.dtype, self._names())
        if any(
            name in self.weights and not _same(self.weights[name], weights[name])
            for name in weights
        ):
            record, weights = _graph(program, self.dtype, self._names())
        signature = program.spec.to_json()
        self.records[program.name] = {
            **record,
            "inputs": signature["inputs"],
            "outputs": signature["outputs"],
        }
        self.weights |= weights

    def fuse(self) -> None:
        """Let the encoder compute the cross-attention K/V too, if `cross_kv` reads its features."""
        encoder, cross = self.records.get("encoder"), self.records.get("cross_kv")
        if not encoder or not cross or (encoder["kind"], cross["kind"]) != ("encoder", "cross_kv"):
            return
        if all(encoder[size] == cross[size] for size in ("positions", "width")):
            encoder |= {"cross_heads": cross["heads"], "cross_layers": cross["layers"]}

    def _names(self) -> dict[tuple[object, ...], str]:
        return {_identity(tensor): name for name, tensor in self.weights.items()}


def lower_programs(
    programs: Sequence["Program"], precision: str, description: Path
) -> dict[str, int]:
    """Write programs of one precision to two files: the description, and the weights beside it.

    Args:
        programs: the programs.
        precision: "fp32" or "bf16".
        description: path of the description; the weights have the suffix `.safetensors`.

    Returns:
        Program -> number of nodes of its graph.

    Raises:
        LoweringError: a program has an operator that cannot be lowered.
    """
    from whisperport.targets.aws_neuron import neuron_modules

    lowered = _Lowered(TORCH_DTYPES[precision])
    for program in programs:
        lowered.add(program)
    lowered.fuse()
    description.parent.mkdir(exist_ok=True)
    write_weights(description.with_suffix(".safetensors"), lowered.weights, lowered.dtype)
    content = {"format": neuron_modules.FORMAT, "programs": lowered.records}
    description.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
    return {
        one.name: sum(n.op == "call_function" for n in one.exported.graph.nodes) for one in programs
    }


def write_weights(path: Path, weights: Weights, dtype: str) -> None:
    """Write tensors in the layout of safetensors; floating-point tensors are converted to `dtype`."""
    import torch

    from whisperport.targets.aws_neuron import neuron_modules

    names = {value: name for name, value in neuron_modules.DTYPES.items()}
    floating = getattr(torch, dtype)
    header, offset = {}, 0
    dtypes = {
        name: floating if one.is_floating_point() else one.dtype for name, one in weights.items()
    }
    ordered = sorted(
        weights, key=lambda name: (-dtypes[name].itemsize, name)
    )  # keeps tensors aligned
    for name in ordered:
        end = offset + math.prod(weights[name].shape) * dtypes[name].itemsize
        shape = list(weights[name].shape)
        header[name] = {"dtype": names[dtypes[name]], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            tensor = weights[name].detach().to(dtypes[name]).contiguous()
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


# Whisper's own programs ---------------------------------------------------------------------------


def _module(program: "Program", dtype: str) -> tuple[Record, Weights] | None:
    """Return the description and the weights of one of Whisper's own programs; None for another."""
    from whisperport.targets.aws_neuron import neuron_modules

    named = _named_weights(program)
    try:
        record = _record(program, named)
        if record is None:
            return None
        record |= {"dtype": dtype}
        shapes = neuron_modules.weight_shapes({"programs": {program.name: record}}, program.name)
        weights = {name: named[name] for name in shapes}
    except (KeyError, IndexError, ValueError):  # another form, another name, other sizes
        return None
    fits = all(tuple(weights[name].shape) == shape for name, shape in shapes.items())
    expected = _signature(record)
    found = [(one.name, one.shape) for one in (*program.spec.inputs, *program.spec.outputs)]
    floats = all(one.dtype == "float32" for one in (*program.spec.inputs, *program.spec.outputs))
    return (record, weights) if fits and floats and found == expected else None


def _named_weights(program: "Program") -> dict[str, "Tensor"]:
    """Return the weights of a program under the names that openai-whisper would give them."""
    side = "encoder" if kind_of(program.name).name == ENCODER else "decoder"

    def renamed(name: str) -> str:
        if name.startswith("attentions."):
            layer, _, rest = name.removeprefix("attentions.").partition(".")
            return f"decoder.blocks.{layer}.cross_attn.{rest}"
        return "decoder.token_embedding.weight" if name == "head.weight" else f"{side}.{name}"

    return {renamed(name): tensor for name, tensor in program.exported.state_dict.items()}


def _record(program: "Program", weights: Weights) -> Record | None:
    """Return the sizes of a program with the name of one of Whisper's own; None for other names."""
    spec = program.spec
    kind = spec.kind
    if kind.name == ENCODER:
        _, n_mels, frames = spec.inputs[0].shape
        return {
            "kind": "encoder",
            "batch": 1,
            "n_mels": n_mels,
            "positions": frames // 2,
            "width": spec.outputs[0].shape[2],
            "heads": _encoder_heads(program),
            "layers": _layers(weights, "encoder.blocks"),
            "inner": weights["encoder.blocks.0.mlp.0.weight"].shape[0],
            "cross_heads": 0,
            "cross_layers": 0,
        }
    if kind.name == CROSS_KV:
        _, positions, width = spec.inputs[0].shape
        heads, layers = spec.outputs[0].shape[0], len(spec.outputs) // 2
        sizes = {"positions": positions, "width": width, "heads": heads, "layers": layers}
        return {"kind": "cross_kv", "batch": 1, **sizes}
    if kind.reads != "caches":
        return None
    shapes = {tensor.name: tensor.shape for tensor in (*spec.inputs, *spec.outputs)}
    tokens, context = shapes["x"][1], shapes["cross_k_0"][2]
    head = weights.get("decoder.token_embedding.weight") if kind.name != ALIGN else None
    return {
        "kind": kind.name,
        "batch": kind.batch,
        "tokens": tokens,
        "cached": shapes["mask"][2] - tokens,
        "context": context,
        "width": shapes["x"][2],
        "heads": shapes["self_k_0"][0] // kind.batch,
        "layers": _layers(weights, "decoder.blocks"),
        "inner": weights["decoder.blocks.0.mlp.0.weight"].shape[0],
        "vocab": 0 if head is None else head.shape[0],
        **({"picked": shapes["pick"][1]} if kind.name == PREFILL else {}),
        **({"alignment_heads": _alignment_heads(program)} if kind.name == ALIGN else {}),
    }


def _layers(weights: Weights, prefix: str) -> int:
    return sum(
        name.startswith(f"{prefix}.") and name.endswith(".mlp_ln.weight") for name in weights
    )


def _encoder_heads(program: "Program") -> int:
    """Return the number of the encoder's heads, from the shape of its attention scores: (H, T, T)."""
    softmax = next(n for n in program.exported.graph.nodes if "softmax" in str(n.target))
    return int(softmax.meta["val"].shape[0])


def _alignment_heads(program: "Program") -> list[list[int]]:
    """Return the (layer, head) pairs whose scores `align` computes: those of the slices of its keys."""
    found = []
    for node in program.exported.graph.nodes:
        if str(node.target) == "aten.slice.Tensor" and str(node.args[0]).startswith("cross_k_"):
            layer = int(str(node.args[0]).removeprefix("cross_k_"))
            found.append([layer, int(node.args[2])])
    return found


def _signature(record: Record) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and shape of the inputs and outputs that whisperport gives a program of these sizes."""
    width: int = record["width"]
    layers: int = record["layers"]
    if record["kind"] == "encoder":
        positions: int = record["positions"]
        mel = (1, int(record["n_mels"]), 2 * positions)
        return [("mel", mel), ("features", (1, positions, width))]
    kv = _kv(layers, record["batch"] * record["heads"], width // record["heads"])
    if record["kind"] == "cross_kv":
        positions = record["positions"]
        return [("features", (1, positions, width)), *kv("cross", positions)]
    batch, tokens = record["batch"], record["tokens"]
    x, mask = (batch, tokens, width), (batch, tokens, record["cached"] + tokens)
    pick = [("pick", (1, record["picked"], tokens))] if record["kind"] == "prefill" else []
    return [
        ("x", x),
        ("mask", mask),
        *pick,
        *kv("self", record["cached"]),
        *kv("cross", record["context"]),
        *_results(record),
        *kv("new", tokens),
    ]


def _results(record: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    width: int = record["width"]
    tokens: int = record["tokens"]
    if record["kind"] == "align":
        scores = (len(record["alignment_heads"]), tokens, int(record["context"]))
        return [("rows", (1, tokens, width)), ("scores", scores)]
    rows = int(record.get("picked", record["batch"]))
    vocab = int(record["vocab"])
    return [("logits", (rows, vocab)) if vocab else ("hidden", (1, rows, width))]


def _kv(
    layers: int, heads: int, head: int
) -> Callable[[str, int], Iterator[tuple[str, tuple[int, ...]]]]:
    def of(name: str, length: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        for kind, shape in (("k", (heads, head, length)), ("v", (heads, length, head))):
            yield from ((f"{name}_{kind}_{layer}", shape) for layer in range(layers))

    return of


# Other programs ----------------------------------------------------------------------------------


def _graph(
    program: "Program", dtype: str, known: Mapping[tuple[object, ...], str]
) -> tuple[Record, Weights]:
    """Return a program as a list of aten's operators, and its weights.

    Args:
        program: the program.
        dtype: of weights and state.
        known: tensors that are in the weight file already -> their names.

    Raises:
        LoweringError: it has an operator that is no function of tensors.
    """
    from torch.export.graph_signature import InputKind

    exported = program.exported
    if any(_is_mutable(node) for node in exported.graph.nodes):
        exported = exported.run_decompositions({})
    weights: dict[str, Tensor] = {}
    reads: dict[str, str] = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            continue
        tensor = exported.state_dict.get(spec.target)
        tensor = exported.constants[spec.target] if tensor is None else tensor
        name = known.get(_identity(tensor), f"{program.name}/{spec.target}")
        reads[spec.arg.name], weights[name] = name, tensor
    record = {
        "kind": "graph",
        "dtype": dtype,
        "batch": 1,
        "nodes": [_node(program.name, node) for node in exported.graph.nodes if _computes(node)],
        "results": [str(name) for name in exported.graph_signature.user_outputs],
        "weights": reads,
    }
    return record, weights


def _node(program: str, node: Any) -> Record:
    """
    Raises:
        LoweringError: the operator cannot be described.
    """
    from whisperport.targets.aws_neuron.neuron_modules import ModuleError, operator

    name = "getitem" if getattr(node.target, "__name__", "") == "getitem" else str(node.target)
    try:
        operator(name)
        kwargs = {key: _argument(value) for key, value in node.kwargs.items() if key not in _PLACES}
        return {"name": node.name, "op": name, "args": _argument(node.args), "kwargs": kwargs}
    except (ModuleError, TypeError) as error:
        raise LoweringError(
            f"`aws-neuron` cannot lower the program `{program}`",
            why=f"`{node.name}`: {error}",
            hint="use a program of aten's operators that return new tensors",
        ) from error


_PLACES = ("device", "layout", "pin_memory", "memory_format")  # where a tensor is, not what it is


def _argument(value: Any) -> Any:
    """Return an argument of an operator as JSON.

    Raises:
        TypeError: it is none of node, number, text, dtype, None, or a list of them.
    """
    import torch

    if isinstance(value, torch.fx.Node):
        return {"node": value.name}
    if isinstance(value, list | tuple):
        return [_argument(one) for one in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"an argument is {type(value).__name__}")


def _computes(node: Any) -> bool:
    """Whether a node computes a value, and does not only check one while a program is exported."""
    return bool(node.op == "call_function" and not str(node.target).startswith("aten._assert"))


def _is_mutable(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _identity(tensor: "Tensor") -> tuple[object, ...]:
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _same(one: "Tensor", other: "Tensor") -> bool:
    return _identity(one) == _identity(other) or bool(
        one.shape == other.shape and (one == other).all()
    )


def signature_of(record: Mapping[str, Any], name: str) -> ProgramSpec:
    """Return the signature in a program's description.

    Raises:
        KeyError, TypeError, ValueError: the description has none.
    """
    inputs, outputs = (
        tuple(TensorSpec.from_json(one) for one in record[side]) for side in ("inputs", "outputs")
    )
    return ProgramSpec(name, inputs, outputs)
