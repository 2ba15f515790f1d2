"""The modules that AWS Neuron's tracer compiles, and that run eagerly on a CPU to emulate them.

This file stands alone: it needs torch (2.9 or later) and the standard library, so that it runs in the
environment of the Neuron SDK, whose torch is older than whisperport's.

    model = read_description("fp32.json")
    weights = read_weights("fp32.safetensors")
    module, inputs, aliases = build(model, weights, "step")
    torch_neuronx.trace(module, inputs, input_output_aliases=aliases, ...)

A program is a `Graph`: a list of aten's operators, as torch.export made it of the program that every
target gets. `Resident` keeps the caches that a graph reads on the device.

`build` returns a module in evaluation mode, example inputs (a tuple of tensors), and the aliases, state
parameter -> index of the output that replaces it. Aliased outputs come last. `run` does one call as the
device does: it returns the other outputs, and puts the aliased ones into the state.

    program   inputs                                             outputs, before the aliased ones
    encoder   mel                                                features, L keys, L values
    cross_kv  features                                           L keys, L values
    prefill_P x, mask, pick, position                            logits, L new keys, L new values
    step      x, mask, position                                  logits, L new keys, L new values
    step_B    x, mask, position, source                          logits, L new keys, L new values
    align     x, mask, position                                  rows, scores, L new keys, L new values

    mel       (1, n_mels, 2T) float32        pick      (1, R, P) float32, one 1 per row
    features  (1, T, d) float32              position  (B, P) int32: row of the cache that gets each token,
    x         (B, P, d) float32                        or -1 for none
    mask      (B, P, N + P) float32          source    (B,) int32: row b continues the row source[b]

Inputs and outputs that a program's signature has, have the shapes of the signature.

**State.** `self_k` (B, H, D, N), `self_v` (B, H, N, D), `cross_k` (B, H, D, C) and `cross_v` (B, H, C, D)
of each layer are parameters of the decode modules. They stay on the device. Every call updates the
self-attention caches, which are aliased outputs. The cross-attention K/V are copied once per window. They
are no outputs, so nothing copies them for each token.

**Operators.** A new row is written by `where`, from a comparison with `position`. A scatter would need an
int64 index in torch. The rows of a batch are reordered by `index_select` with int32 indices, which is a
gather along axis 0, as in AWS's T5 tutorial (aws-neuron-sdk@81ce03a, t5-inference-tutorial.ipynb,
`reorder_cache`).

**Precision.** In bfloat16, weights, state and matmuls are in bfloat16. Layer norms and softmax are computed
in float32. All inputs, and all outputs but the aliased ones, are float32 or int32.
"""

from __future__ import annotations

import json
import mmap
import operator
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

FORMAT = "whisperport graphs for neuron"
MAX_DESCRIPTION_BYTES = 64 * 2**20
MAX_HEADER_BYTES = 16 * 2**20
DTYPES = {  # name in a weight file -> dtype
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
STATE = ("self_k", "self_v", "cross_k", "cross_v")
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TENSOR_DTYPES = {  # of inputs, outputs and arguments of a graph
    name: getattr(torch, name)
    for name in ("float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
}
IN_FLOAT32 = ("aten.layer_norm.default", "aten.softmax.int")  # in every precision


class ModuleError(ValueError):
    """A description or a weight file is damaged, or does not fit to the other."""


# Files -------------------------------------------------------------------------------------------


def read_description(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a description: JSON with `format` and `programs`, name -> what `Graph` and `Resident` read.

    Raises:
        ModuleError: it is not such a file.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        text = file.read(MAX_DESCRIPTION_BYTES + 1)
    if len(text) > MAX_DESCRIPTION_BYTES:
        raise ModuleError(f"the description has more than {MAX_DESCRIPTION_BYTES} bytes")
    data = _json(text, "the description")
    if data.get("format") != FORMAT or not isinstance(data.get("programs"), dict):
        stated = str(data.get("format"))[:80]
        raise ModuleError(f"the description has the format {stated!r}; expected {FORMAT!r}")
    return data


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Map the tensors of a weight file into memory: name -> tensor, which shares the file's pages.

    The layout is that of safetensors: the length of the header (8 bytes, little-endian), the header (JSON:
    name -> dtype, shape, data_offsets), and the tensors one after the other, without gaps.

    Raises:
        ModuleError: the file does not have this layout.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise ModuleError(f"the weight file has {size} bytes, and a header of {length}")
        header = _json(file.read(length), "the header of the weight file")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    header.pop("__metadata__", None)
    tensors: dict[str, Tensor] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(*item)):
        dtype, shape = _dtype_and_shape(name, entry)
        count = 1
        for axis in shape:
            count *= axis
        begin, stop = _offsets(name, entry)
        if begin != end or stop - begin != count * dtype.itemsize or begin % dtype.itemsize:
            raise ModuleError(f"the weight file has a wrong offset for the tensor {name[:80]!r}")
        end = stop
        if 8 + length + end > size:
            raise ModuleError("the weight file is truncated")
        start = 8 + length + begin
        flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=start) if count else None
        tensors[name] = torch.empty(shape, dtype=dtype) if flat is None else flat.reshape(shape)
    if 8 + length + end != size:
        raise ModuleError("the weight file has bytes after its last tensor")
    return tensors


def _json(text: bytes, what: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModuleError(f"{what} is not JSON: {str(error)[:200]}") from None
    if not isinstance(data, dict):
        raise ModuleError(f"{what} is not a JSON object")
    return data


def _offsets(name: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise ModuleError(f"the weight file has no offsets for the tensor {name[:80]!r}")
    return offsets[0], offsets[1]


def _dtype_and_shape(name: str, entry: Mapping[str, Any]) -> tuple[torch.dtype, list[int]]:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ModuleError(f"the weight file has a wrong dtype for the tensor {name[:80]!r}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_count, shape)):
        raise ModuleError(f"the weight file has a wrong shape for the tensor {name[:80]!r}")
    return DTYPES[dtype], shape


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48


# Graphs ------------------------------------------------------------------------------------------


class Node(NamedTuple):
    """One operator of a graph. An argument {"node": name} stands for the result of another node."""

    name: str
    op: str  # such as "aten.linear.default"
    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]

    def reads(self) -> list[str]:
        """Return the names of the nodes that this one reads."""
        return _names([self.args, *self.kwargs.values()])


class Graph(nn.Module):
    """A program as a list of aten's operators: what torch.export made of it.

    Args:
        record: JSON: `nodes`, with `name`, `op` such as "aten.linear.default", `args` and `kwargs` of each;
            `inputs`, with `name`, `shape` and `dtype` of each; `results`, with `node` and `dtype` of each
            tensor that is returned; `weights`, name of a node that reads a weight -> name of the tensor;
            and `dtype`, in which the graph computes.
        weights: as `read_weights` returns them.

    Raises:
        ModuleError: an operator is not a function of tensors, or a name is unknown.
        KeyError, TypeError, ValueError, AttributeError: the record is not complete.
    """

    def __init__(self, record: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.inputs = [str(tensor["name"]) for tensor in record["inputs"]]
        self.results = [str(result["node"]) for result in record["results"]]
        self.dtypes = [TENSOR_DTYPES[result["dtype"]] for result in record["results"]]
        self.floating = PRECISIONS[record["dtype"]]
        tensors = {str(node): self.cast(weights[name]) for node, name in record["weights"].items()}
        known = {*self.inputs, *tensors}
        nodes = []
        for entry in record["nodes"]:
            node = _node(entry, self.floating)
            if unknown := [name for name in node.reads() if name not in known]:
                raise ModuleError(f"the node {node.name!r} reads {unknown[0]!r}, not before it")
            if node.name in known:
                raise ModuleError(f"two nodes have the name {node.name!r}")
            nodes.append(node)
            known.add(node.name)
        if unknown := [name for name in self.results if name not in known]:
            raise ModuleError(f"the output {unknown[0]!r} is not a node")
        self.use(nodes, tensors)

    def use(self, nodes: Sequence[Node], tensors: Mapping[str, Tensor]) -> None:
        """Run these nodes, with these weights: name of a node -> tensor, of which some may be unread."""
        self.nodes = list(nodes)
        last = {name: index for index, node in enumerate(nodes) for name in node.reads()}
        last |= dict.fromkeys(self.results, len(self.nodes))
        self.weights = [name for name in tensors if name in last]
        self.tensors = nn.ParameterList(
            nn.Parameter(tensors[name], requires_grad=False) for name in self.weights
        )
        self._unread: list[list[str]] = [[] for _ in range(len(self.nodes) + 1)]
        for name, index in last.items():
            self._unread[index].append(name)

    def cast(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the graph's precision; integers as they are."""
        return tensor.to(self.floating) if tensor.is_floating_point() else tensor

    def compute(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Run the nodes in their order. Results are in the graph's precision."""
        values: dict[str, Any] = {name: self.cast(tensor) for name, tensor in inputs.items()}
        values |= dict(zip(self.weights, self.tensors, strict=True))
        for node, unread in zip(self.nodes, self._unread, strict=False):
            named = {key: _filled(value, values) for key, value in node.kwargs.items()}
            values[node.name] = node.function(*_filled(node.args, values), **named)
            for name in unread:  # the scores of all layers would need gigabytes
                del values[name]
        return [values[name] for name in self.results]

    def returned(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Return results in the dtypes of the outputs."""
        return [result.to(dtype) for result, dtype in zip(results, self.dtypes, strict=True)]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the graph once."""
        return tuple(self.returned(self.compute(dict(zip(self.inputs, inputs, strict=True)))))


class Resident(nn.Module):
    """A graph whose caches are parameters, so that they stay on the device; see the top of this file.

    Args:
        record: as for `Graph`, with `outputs`, the `name` of each; and `state`, name of an input that stays
            on the device -> name of the output with its new rows, or None for cross-attention K/V.
        weights: as for `Graph`.

    Raises:
        As for `Graph`.
    """

    def __init__(self, record: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.program = Graph(record, weights)
        shapes = {str(tensor["name"]): tensor["shape"] for tensor in record["inputs"]}
        self.batch, self.tokens, _ = shapes["x"]
        self.passed = [name for name in self.program.inputs if name not in record["state"]]
        self.kept = {kind: [n for n in shapes if n.startswith(f"{kind}_")] for kind in STATE}
        if sorted(record["state"]) != sorted(
            name for names in self.kept.values() for name in names
        ):
            raise ModuleError("the state is not that of a decoder")
        for kind, names in self.kept.items():
            setattr(self, kind, nn.ParameterList(self._state(shapes[name]) for name in names))
        self.cached = shapes[self.kept["self_k"][0]][2]
        outputs = [tensor["name"] for tensor in record["outputs"]]
        self.new = {
            kind: [outputs.index(record["state"][name]) for name in self.kept[kind]]
            for kind in ("self_k", "self_v")
        }

    def _state(self, shape: Sequence[int]) -> nn.Parameter:
        """Return a cache of zeros, with the axis of rows of a batch apart from that of heads."""
        zeros = torch.zeros(shape, dtype=self.program.floating)
        return nn.Parameter(self._by_row(zeros), requires_grad=False)

    def _by_row(self, heads: Tensor) -> Tensor:
        """Return (B·H, …) as (B, H, …)."""
        return heads.reshape(self.batch, -1, *heads.shape[1:])

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run once on the inputs that are no state; return the outputs, and the updated caches."""
        count = len(self.passed)
        position = inputs[count]
        caches = {kind: list(getattr(self, kind)) for kind in STATE}
        if self.batch > 1:
            for kind in self.new:
                caches[kind] = [cache.index_select(0, inputs[count + 1]) for cache in caches[kind]]
        values = dict(zip(self.passed, inputs[:count], strict=True))
        for kind, names in self.kept.items():
            values |= {n: cache.flatten(0, 1) for n, cache in zip(names, caches[kind], strict=True)}
        results = self.program.compute(values)
        rows = torch.arange(self.cached, dtype=torch.int32, device=position.device)
        chosen = (position[:, :, None] == rows).to(self.program.floating)[:, None]  # (B, 1, P, N)
        updated = [
            self._written(kind, cache, results[index], chosen)
            for kind, indices in self.new.items()
            for cache, index in zip(caches[kind], indices, strict=True)
        ]
        return (*self.program.returned(results), *updated)

    def _written(self, kind: str, cache: Tensor, new: Tensor, chosen: Tensor) -> Tensor:
        """Return a cache with the new rows, each at the position where its row of `chosen` is 1."""
        new = self._by_row(new)
        written = chosen.sum(dim=2, keepdim=True) > 0  # (B, 1, 1, N)
        if kind == "self_k":
            return torch.where(written, new @ chosen if self.tokens > 1 else new, cache)
        return torch.where(written.mT, chosen.mT @ new if self.tokens > 1 else new, cache)

    def aliases(self) -> dict[Tensor, int]:
        """Return the aliases: cache -> index of its output."""
        return {state: len(self.program.results) + i for i, state in enumerate(self.updated())}

    def updated(self) -> list[nn.Parameter]:
        """Return the caches that every call updates, in the order of their outputs."""
        return [state for kind in self.new for state in getattr(self, kind)]


# Operators ---------------------------------------------------------------------------------------

FACTORIES = {"full", "zeros", "ones", "arange", "scalar_tensor", "empty", "eye"}
FLOATS = {"inf", "-inf", "nan"}  # JSON has none of them
TEXTS = {"none", "tanh", "trunc", "floor", "linear", "nearest", "bilinear"}  # values of options


def operator_of(name: str) -> Callable[..., Any]:
    """Return an operator of aten that computes tensors from tensors and changes none of them.

    Args:
        name: such as "aten.linear.default", or "getitem" of a list of tensors.

    Raises:
        ModuleError: there is no such operator, or it does something else, such as reading a file.
    """
    if name == "getitem":
        return operator.getitem
    library, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    function: Any = None
    if library == "aten" and base.isidentifier() and overload.isidentifier():
        function = getattr(getattr(torch.ops.aten, base, None), overload, None)
    schema = getattr(function, "_schema", None)
    if schema is None or schema.is_mutable:
        raise ModuleError(f"{name[:80]!r} is not an operator of a program")
    reads = any("Tensor" in str(argument.type) for argument in schema.arguments)
    returns = all("Tensor" in str(returned.type) for returned in schema.returns)
    if not (reads or base in FACTORIES) or not returns or not schema.returns:
        raise ModuleError(f"{name[:80]!r} does not compute a tensor from tensors")
    return function  # type: ignore[no-any-return]  # torch does not declare its operators


def _node(record: Mapping[str, Any], floating: torch.dtype) -> Node:
    """Return a node of a record, computed in float32 where `IN_FLOAT32` says so."""
    op = str(record["op"])
    function = operator_of(op)
    if op in IN_FLOAT32 and floating != torch.float32:
        function = _in_float32(function)
    if op == "aten.linear.default":
        function = _linear
    kwargs = {str(key): _decoded(value) for key, value in record["kwargs"].items()}
    return Node(str(record["name"]), op, function, _decoded(list(record["args"])), kwargs)


def _in_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an operator that computes in float32, and returns the dtype of its first argument."""

    def raised(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return function(raised(x), *map(raised, args), **kwargs).to(x.dtype)

    return run


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute aten.linear on rank 2: for an x (1, B, d) that was (B, 1, d), torch would copy the weight."""
    rows = torch.ops.aten.linear.default(x.reshape(-1, x.shape[-1]), weight, bias)
    return cast(Tensor, rows).reshape(*x.shape[:-1], -1)


def _decoded(value: Any) -> Any:
    """Return an argument of an operator without JSON's forms of dtypes and infinite numbers.

    Raises:
        ModuleError: it is no argument of an operator.
    """
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if isinstance(value, dict) and len(value) == 1:
        ((form, content),) = value.items()
        if form == "node":
            return {"node": str(content)}
        if form == "dtype" and content in TENSOR_DTYPES:
            return TENSOR_DTYPES[content]
        if form == "float" and content in FLOATS:
            return float(content)
    if isinstance(value, dict) or (isinstance(value, str) and value not in TEXTS):
        raise ModuleError(f"{str(value)[:80]!r} is not an argument of an operator")
    return value


def _names(value: Any) -> list[str]:
    """Return the names of the nodes that a decoded argument reads."""
    if isinstance(value, list):
        return [name for item in value for name in _names(item)]
    return [value["node"]] if isinstance(value, dict) else []


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a decoded argument with the results of nodes."""
    if isinstance(value, list):
        return [_filled(item, values) for item in value]
    return values[value["node"]] if isinstance(value, dict) else value


# Building ----------------------------------------------------------------------------------------


def build(
    description: Mapping[str, Any], weights: Mapping[str, Tensor], program: str
) -> tuple[nn.Module, tuple[Tensor, ...], dict[Tensor, int]]:
    """Build the module of one program.

    Args:
        description: as `read_description` returns it.
        weights: as `read_weights` returns them.
        program: name of one of the description's programs.

    Returns:
        The module, example inputs, and the aliases: state parameter -> index of its output.

    Raises:
        ModuleError: there is no such program, it is not complete, or it does not fit to the weights.
    """
    record = description["programs"].get(program)
    if not isinstance(record, dict):
        known = ", ".join(map(str, description["programs"]))
        raise ModuleError(f"there is no program {program!r}; the programs are {known}")
    try:
        module = Resident(record, weights) if record["state"] else Graph(record, weights)
        aliases = module.aliases() if isinstance(module, Resident) else {}
        return module.eval(), _examples(module, record), aliases
    except ModuleError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ModuleError(f"{program!r} is damaged: {error!r}"[:400]) from None


def _examples(module: Graph | Resident, record: Mapping[str, Any]) -> tuple[Tensor, ...]:
    passed = module.passed if isinstance(module, Resident) else module.inputs
    inputs = tuple(
        torch.zeros(tensor["shape"], dtype=TENSOR_DTYPES[tensor["dtype"]])
        for tensor in record["inputs"]
        if tensor["name"] in passed
    )
    if isinstance(module, Graph):
        return inputs
    position = torch.arange(module.tokens, dtype=torch.int32).repeat(module.batch, 1)
    source = torch.arange(module.batch, dtype=torch.int32)
    return (*inputs, position, source) if module.batch > 1 else (*inputs, position)


def compiled(module: nn.Module, backend: str) -> Callable[..., tuple[Tensor, ...]]:
    """Return what `run` does as one graph, which `torch.compile` compiles when it is first called.

    The graph updates the state too, so that a device needs one launch per call. All shapes are fixed: no
    call compiles it again. torch keeps compiled graphs at the code of a function, at most 8, and not by
    module: this function has code of its own.

    Args:
        module: as `build` returns it, on the device where it will run.
        backend: of `torch.compile`, such as "neuron".
    """

    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = module(*inputs)
        if not isinstance(module, Resident):
            return outputs
        count = len(module.program.results)
        for state, new in zip(module.updated(), outputs[count:], strict=True):
            state.copy_(new)
        return outputs[:count]

    code = call.__code__.replace(co_firstlineno=call.__code__.co_firstlineno)
    own = types.FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)
    graph = torch.compile(own, backend=backend, fullgraph=True, dynamic=False)
    return cast("Callable[..., tuple[Tensor, ...]]", torch.no_grad()(graph))


def is_state(parameter: str) -> bool:
    """Whether a parameter is a part of the state, and not a weight."""
    return parameter.partition(".")[0] in STATE


def run(
    module: nn.Module, inputs: Sequence[Tensor], aliases: Mapping[Tensor, int]
) -> tuple[Tensor, ...]:
    """Run a module once, as the device does: update its state, and return the outputs without aliases."""
    with torch.no_grad():
        outputs: tuple[Tensor, ...] = module(*inputs)
    for state, index in aliases.items():
        state.data = outputs[index]
    return outputs[: min(aliases.values(), default=len(outputs))]
