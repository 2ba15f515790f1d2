"""Find the first layer of an app's graphs whose output is not the checkpoint's.

The weights tell which layer a node belongs to, whatever its name: what is computed within a few operators
from a weight that was found again is compared with the output of that layer in eager torch. The decoder is
given the checkpoint's features, so that a fault of the encoder is not its own. The graphs run in a child
process with limits.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whisperport.build.compare import BASE_BYTES, MEMORY
from whisperport.build.inspect import size_of
from whisperport.build.judge.graph_run import cache_of, cached_layer, recorded
from whisperport.build.judge.identity import (
    SCALES,
    ChangedWeight,
    Identity,
    kind_of_weight,
)
from whisperport.build.judge.operations import (
    INPUT,
    LATER,
    NO_BIAS,
    OF_AUDIO,
    Explanation,
    combined,
    is_norm,
)
from whisperport.build.layouts.onnx_graph.header import read_header
from whisperport.build.layouts.reference import KnownLogits, spectrogram
from whisperport.errors import WhisperportError
from whisperport.program.json_records import from_json
from whisperport.program.strict_json import Field
from whisperport.system.child import Limits, StoppedError, run_limited
from whisperport.system.locking import temporary_folder
from whisperport.system.progress import begin_stage
from whisperport.verification.array_comparison import Comparison, compare_output
from whisperport.verification.clips import Clip
from whisperport.verification.diagnosis.differences import listed, value_difference
from whisperport.verification.diagnosis.divergence import (
    ComparedPrograms,
    ComparedValue,
    divergence,
)
from whisperport.verification.diagnosis.matching import arrangements, error_of
from whisperport.verification.diagnosis.recording import Recording
from whisperport.verification.tolerances import GATES, LOWERED

if TYPE_CHECKING:  # torch may be missing at run time
    from torch import Tensor, nn

    from whisperport.model.checkpoint.checkpoint import Checkpoint
    from whisperport.model.inspection.graph import Graph, Node

Array = NDArray[Any]
NEAR = 3  # operators after one that reads a weight: its bias, a scale, an order of axes
FAR = 9  # operators before one that reads a weight: those of a layer norm, from its input
OUTPUT = {"encoder": "encoder.ln_post", "decoder": "logits"}  # part -> what its graph returns
SECONDS = 300.0
SWAPPED = "its weight is transposed: no other matrix of its kind is stored so"
# Gate of rounded weights -> an error that rounding does not make, and one that it may.
LOUD = {"w8": (0.5, 0.15), "fp16": (0.1, 0.01)}
RIGHT = 1e-4  # relative error of a value that is the checkpoint's
MOST_NODES = 4  # nodes that are named
MOVES = frozenset(
    {"reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "clone", "to"}
)
NORM, MVN = "layer_norm", "MVN"  # the second has no weight and no bias
QUANTIZES = frozenset({"DynamicQuantizeLinear", "QuantizeLinear", "DequantizeLinear"})
# What is kept beside outputs: inputs of these layers, and these arrays of one row for each place or column.
READ = ("conv1", "conv2", "out", "mlp.2", "ln", "ln_post")
SMALL = ("bias", "ln.weight", "ln_post.weight", "positional_embedding")
# End of a layer's name -> what is computed between it and the layers before it, whose outputs are right.
BETWEEN = {
    "conv1": "the convolution's padding, stride or bias",
    "conv2": "the activation before it, or the convolution's padding, stride or bias",
    "blocks.0.attn_ln": "the sum of embeddings and positions, or the layer norm's epsilon",
    "attn.out": "the mask, the scale or the heads of self-attention, or its order of keys and values",
    "cross_attn.out": "the scale or the heads of cross-attention, or its keys and values",
    "mlp.2": "the activation",
    "logits": "the matrix of the projection, or how it is used",
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
        computed: what it computes in place of the first value that diverges; empty: it is not known.
        reason: why it was not compared; empty: it was.
    """

    part: str
    file: str
    programs: ComparedPrograms | None = None
    computed: str = ""
    reason: str = ""

    def __bool__(self) -> bool:
        """Whether nothing that was compared differs."""
        return self.programs is None or bool(self.programs)

    @property
    def cause(self) -> str:
        """What is wrong, or must be, as all layers before are right; empty: it is not known."""
        if self.computed or self.programs is None or self.programs.first is None:
            return self.computed
        values = self.programs.values
        return _likely(values[self.programs.first].name, values[: self.programs.first])

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "part": self.part,
            "file": self.file,
            "cause": self.cause or None,
            "layers": None if self.programs is None else self.programs.to_json(),
            "reason": self.reason or None,
        }


def _likely(name: str, before: Sequence[ComparedValue]) -> str:
    """Return what is between a layer and those before it, which are right; empty: it is not known."""
    if any(value.name == INPUT + name for value in before):
        return BETWEEN["query"]
    ends = (end for end in sorted(BETWEEN, key=len, reverse=True) if name.endswith(end))
    return BETWEEN[end] if (end := next(ends, "")) else ""


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
    with temporary_folder() as work:
        values, order = work / "values.npz", list[str]()
        for part in OUTPUT:
            file = _file_of(part, identity)
            if not file:
                reason = "none of its weights was found, which would tell its layers"
                yield ComparedGraph(part=part, file=file, reason=reason)
                continue
            if not order:
                begin_stage("computing the layers in torch")
                layers = _layers(checkpoint, clip, known)
                np.savez(values, allow_pickle=False, **layers)
                order = list(layers)
                del layers
            begin_stage(f"comparing the layers of {file}")
            try:
                result = _result(
                    folder, file, part, identity, values, checkpoint.dims.text_head_width
                )
            except StoppedError as error:
                yield ComparedGraph(part=part, file=file, reason=str(error))
                continue
            except WhisperportError as error:
                why = ": ".join(filter(None, (error.what, error.why)))
                yield ComparedGraph(part=part, file=file, reason=why)
                continue
            answer = Field(result["programs"], "", "the answer of the child")
            programs = from_json(ComparedPrograms, answer)
            computed = _cause(_changed_weight(identity, programs, order), str(result["computed"]))
            if programs.first is not None:
                name = f"{programs.values[programs.first].name}.weight"
                computed = SWAPPED if name in identity.odd else computed
            yield ComparedGraph(part=part, file=file, programs=programs, computed=computed)


def _result(
    folder: Path, file: str, part: str, identity: Identity, values: Path, head_width: int
) -> dict[str, Any]:
    """Return what `in_child` returns of a part's graph.

    Raises:
        StoppedError, WhisperportError: the graph cannot be run.
    """
    path = folder / file
    arguments = {
        "path": os.fspath(path),
        "part": part,
        "values": os.fspath(values),
        "arrays": {
            name: [array for place, array in places if place == file]
            for name, places in identity.places.items()
        },
        "gate": _gate(path, identity),
        "head_width": head_width,
    }
    limits = Limits(round(BASE_BYTES + MEMORY * size_of(path)), SECONDS)
    result: dict[str, Any] = run_limited(
        "whisperport.build.judge.layers:in_child", arguments, limits
    )
    return result


def _gate(path: Path, identity: Identity) -> str:
    """Return the gate of limits of a graph: by its weights, or because it computes in float16."""
    if identity.eight_bits:
        return "w8"
    is_half = path.suffix == ".onnx" and read_header(path).computes_in_halves
    return "fp16" if identity.half or is_half else ""


def _cause(changed: ChangedWeight | None, computed: str) -> str:
    """Return in words why a layer diverges: by a changed weight, else by what is computed.

    Of a weight that is missing, it also states what is computed in its place.
    """
    if changed is None:
        return computed
    if changed.stored:
        return f"{changed.name} differs"
    return f"{changed.name} is missing" + (f"; {computed}" if computed else "")


def _changed_weight(
    identity: Identity, programs: ComparedPrograms, order: Sequence[str]
) -> ChangedWeight | None:
    """Return the weight that explains the first layer that diverges; None: none diverges, or none does.

    Args:
        identity: what was found of the weights.
        programs: the layers.
        order: of all layers; those that no node of the graph shows were not compared.
    """
    if programs.first is None:
        return None
    *right, wrong = [value.name for value in programs.values[: programs.first + 1]]
    side = "encoder." if wrong.removeprefix(INPUT).startswith("encoder.") else "decoder."
    layers = [x for x in order[: order.index(wrong) + 1] if x not in right and x.startswith(side)]
    weights = {f"{layer}.{kind}" for layer in (*layers, wrong) for kind in ("weight", "bias")}
    # What a weight multiplies does not depend on it, but on a table that is added before.
    if wrong.endswith("blocks.0.attn_ln"):
        weights.add(f"{wrong.removeprefix(INPUT).partition('.')[0]}.positional_embedding")
    return next((weight for weight in identity.changed if weight.name in weights), None)


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
    with np.load(values) as stored:
        expected = dict(stored)
    compare = partial(_compare, Path(path), part, expected, arrays, gate, head_width)
    programs, computed = compare(0)
    if part == "decoder" and not computed and programs.first is None:
        try:
            with_cache = compare(expected["tokens"].shape[1] - 1)
        except WhisperportError:  # it has no cache, or one of another form
            pass
        else:
            if with_cache[1]:
                programs, computed = with_cache
    return {"programs": asdict(programs), "computed": computed}


def _compare(
    path: Path,
    part: str,
    expected: Mapping[str, Array],
    arrays: dict[str, list[str]],
    gate: str,
    head_width: int,
    n_cached: int,
) -> tuple[ComparedPrograms, str]:
    """Run a graph; return how its layers differ, and what is computed in place of the first.

    Args:
        path, part, arrays, gate, head_width: as those of `in_child`.
        expected: what eager torch computes.
        n_cached: tokens that the decoder finds in its cache; it reads those after them.

    Raises:
        ProgramError: the graph cannot be run, or has no cache.
    """
    explanation = Explanation(expected, head_width, slice(n_cached, None))
    graph, run = recorded(path, expected, n_cached, head_width)
    located = _Located(
        graph, run.values, _with_folded(graph, arrays), explanation, is_exact=not gate
    )
    compared = tuple(located.compared(OUTPUT[part]))
    first, worst = divergence(compared, ["float32"])
    if gate:  # the error of rounding begins at the first layer
        loud, quiet = LOUD[gate]
        first = next((i for i, v in enumerate(compared) if v.error > loud > quiet > v.before), None)
    programs = ComparedPrograms(
        a="the checkpoint",
        b=path.name,
        values=compared,
        kept=(len(expected), len(run.values)),
        outputs=(_compared_output(OUTPUT[part], explanation, run, compared, gate),),
        first=first,
        worst=worst,
    )
    if first is not None:
        computed = located.computed(compared, compared[first])
    else:
        # Where an output only repeats a value, the graph that was read calls it by that value's name.
        names = (
            read_header(path).outputs
            if path.suffix == ".onnx"
            else [value.name for value in graph.outputs]
        )
        returned = dict(zip(names, run.outputs, strict=False))
        # A branch of ONNX that finds a cache returns anything for the keys and values of the audio.
        of_audio = not (n_cached and path.suffix == ".onnx")
        computed = located.wrong_cache(returned, of_audio=of_audio)
    return programs, computed and f"{LATER * bool(n_cached)}{computed}"


def _compared_output(
    name: str,
    explanation: Explanation,
    run: Recording,
    compared: Sequence[ComparedValue],
    gate: str,
) -> Comparison:
    """Compare what a graph returns; of an encoder that returns keys and values, the last layer.

    Args:
        name: of what it returns.
        explanation: what eager torch computes.
        run: of the graph.
        compared: its layers.
        gate: as that of `in_child`.
    """
    right = explanation.cut(name, explanation.expected[name])
    outputs = [array for array in run.outputs if array.size == right.size]
    if len(outputs) != 1 and compared:
        last = next((value for value in reversed(compared) if value.other), compared[-1])
        name, outputs = last.name, [run.values[last.other]] if last.other else []
        right = explanation.cut(name, explanation.expected[name])
    return compare_output(
        name,
        next((array.reshape(right.shape) for array in outputs), None),
        right,
        GATES[gate] if gate else LOWERED["float32"],
    )


def _with_folded(graph: "Graph", arrays: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return arrays, and what is computed of them alone: converted, multiplied by steps, transposed."""
    computed: dict[str, list[str]] = {}
    for node in reversed(graph.folded):
        results = [name for out in node.outputs for name in (out.name, *computed.get(out.name, ()))]
        for tensor in node.tensors:
            computed.setdefault(tensor.name, []).extend(results)
    return {
        weight: [every for name in names for every in (name, *computed.get(name, ()))]
        for weight, names in arrays.items()
    }


@dataclass(frozen=True)
class _Located:
    """The values of one run of a graph, found by the weights that its nodes read.

    Attributes:
        graph: what ran.
        values: of its nodes, by name.
        arrays: weight -> arrays of the graph that hold it.
        explanation: what eager torch computes.
        is_exact: whether the weights are not rounded.
    """

    graph: "Graph"
    values: Mapping[str, Array]
    arrays: Mapping[str, Sequence[str]]
    explanation: Explanation
    is_exact: bool

    def compared(self, output: str) -> Iterator[ComparedValue]:
        """Yield the error of each layer whose weights were found, in the order of eager torch."""
        scales = [1.0, *(float(self.explanation.head_width) ** power for power in SCALES)]
        before = 0.0
        for name, whole in self.explanation.expected.items():
            array = self.explanation.cut(name, whole)
            errors = {
                candidate: _error(array, self.values[candidate], scales)
                for candidate in self._candidates(name, array.size, output)
            }
            nearest = min(errors, key=errors.__getitem__, default="")
            if not nearest and not self._is_unused(name):
                continue
            producer = self._makers.get(nearest)
            yield ComparedValue(
                name=name,
                other=nearest,
                operator=producer.op if producer is not None else "",
                other_operator="",
                module=name.removeprefix(INPUT),
                line="",
                error=errors.get(nearest, 1.0),
                before=before,
            )
            before = max(before, errors.get(nearest, 1.0))

    def computed(self, compared: Sequence[ComparedValue], value: ComparedValue) -> str:
        """Return in words what is computed in place of a value, and in which nodes; empty: unknown."""
        if not value.other:
            return self._another_weight() or "no node reads its weight: the layer is missing"
        right = {entry.other: entry.name for entry in compared if entry.error < RIGHT}
        expected = self.explanation.expected
        size = self.explanation.cut(value.name, expected[value.name]).size
        candidates = self._candidates(value.name, size, value.name)
        if not value.name.startswith(INPUT):
            places = {
                out.name: i for i, node in enumerate(self.graph.nodes) for out in node.outputs
            }
            candidates.sort(key=lambda name: places.get(name, 0), reverse=True)
        known = [self.explanation.cut(name, expected[name]) for name in right.values()]
        last, *earlier = [self.values[name] for name in candidates]
        new = [
            array for array in earlier if not any(_error(k, array, [1.0]) < RIGHT for k in known)
        ]
        own = "" if value.name.startswith(INPUT) else self._misread(value.name)
        sentence = own or self.explanation.of(value.name, [last, *new])
        result = candidates[0] if value.name.startswith(INPUT) else value.other
        between = {node.name for node in self._making([result], right)}
        nodes = [n for n in self.graph.nodes if n.name in between and n.op not in MOVES]
        shown = ", ".join(f"{node.original_op} {node.name}" for node in nodes[-MOST_NODES:])
        if sentence == NO_BIAS and (other := self._with_bias_of(value.name)):
            sentence = f"its bias is added to the matmul with {other}: the two are exchanged"
        if not sentence:
            wrong = (later.name for later in compared if later.error > RIGHT)
            if misread := next(filter(None, map(self._misread, wrong)), ""):
                return misread
            sentence = self.explanation.difference(value.name, [last, *new])
        sentence = sentence or self._another_weight()
        if not sentence:
            sentence = _likely(value.name, [v for v in compared if v.name in right.values()])
        return f"{sentence} ({shown})" if shown else sentence

    def _another_weight(self) -> str:
        """Return in words which weight is used in place of one that no node reads; empty: none is."""
        matrices = [name for name in self.arrays if name.endswith(".weight")]
        count = {
            name: len({n.name for array in self.arrays[name] for n in self._readers.get(array, ())})
            for name in matrices
        }
        for name in matrices:
            alike = (o for o in matrices if kind_of_weight(o) == kind_of_weight(name))
            twice = [o for o in alike if count[o] > 1]
            if not count[name] and len(twice) == 1:
                return f"{twice[0]} is used in place of {name}, which no node reads"
        return ""

    def _misread(self, name: str) -> str:
        """Return in words which other layer's value a layer's weight is used with; empty: none is known."""
        layer = name.removeprefix(INPUT)
        right = self._right_source(layer)
        source = self._source(layer)
        if right and not source and is_norm(right):
            others = (
                self.explanation.norm_of_another(right, self.values[v]) for v in self._read(layer)
            )
            if other := next(filter(None, others), ""):
                return f"{layer} reads what is normalized with the weight and bias of {other}"
        if not (right and source) or source == right:
            return ""
        read, expected = (
            f"the {'input' if key.startswith(INPUT) else 'output'} of {key.removeprefix(INPUT)}"
            for key in (source, right)
        )
        if right == INPUT + layer:
            return f"{layer} reads {read}: the two are exchanged, or in another order"
        return f"{layer} reads {read}, and not {expected}"

    def _right_source(self, layer: str) -> str:
        """Return the name of what a layer must read; empty: it is not known."""
        block, _, end = layer.rpartition(".")
        of_audio = f"{block}.{end}".endswith(OF_AUDIO)
        names = (INPUT + layer, "encoder.ln_post" if of_audio else f"{block}_ln")
        return next((name for name in names if name in self.explanation.expected), "")

    def _source(self, layer: str) -> str:
        """Return the name of the value that a layer's weight is used with; empty: it is not known."""
        return next(filter(None, map(self._known, self._read(layer))), "")

    def _read(self, layer: str) -> list[str]:
        """Return the value that a layer's weight is used with, and what it was before it was converted.

        Of a norm of several operators, whose weight multiplies what they return, it is not known.
        """
        arrays = set(self.arrays.get(f"{layer}.weight", ()))
        nodes = [node for array in arrays for node in self._readers.get(array, ())]
        passed = MOVES | QUANTIZES | ({MVN} if is_norm(layer) else set())
        names, ops = dict[str, None](), {node.op for node in nodes}
        while nodes and len(names) < FAR:
            tensors = dict.fromkeys(tensor.name for node in nodes for tensor in node.tensors)
            read = [name for name in tensors if name in self.values and name not in arrays]
            makers = {node.name: node for n in read if (node := self._makers.get(n))}
            if len(makers) > 1 or not read:
                break
            names[read[0]] = None
            nodes = [node for node in makers.values() if node.op in passed]
            ops |= {node.op for node in nodes}
        return [] if is_norm(layer) and not ops & {NORM, MVN} else list(names)

    def _known(self, value: str) -> str:
        """Return the name of the layer's value that a value of the graph is; empty: it is none."""
        if value not in self._names:
            array = self.values[value]
            known = (
                name
                for name, whole in self.explanation.expected.items()
                if not name.endswith(SMALL) and name not in ("mel", "tokens", "logits")
                if (right := self.explanation.cut(name, whole)).size == array.size
                if _error(right, array, [1.0]) < RIGHT
            )
            self._names[value] = next(known, "")
        return self._names[value]

    def _with_bias_of(self, layer: str) -> str:
        """Return the weight of another layer to whose matmul the bias of a layer is added; empty: none."""
        weights = {
            array: weight
            for weight, arrays in self.arrays.items()
            for array in arrays
            if weight.endswith(".weight") and weight != f"{layer}.weight"
        }
        for bias in self.arrays.get(f"{layer}.bias", ()):
            for node in self._readers.get(bias, ()):
                added = [t.name for t in node.tensors]
                makers = [self._makers[name] for name in added if name in self._makers]
                for name in (*added, *(t.name for maker in makers for t in maker.tensors)):
                    if name in weights:
                        return weights[name]
        return ""

    def wrong_cache(self, outputs: Mapping[str, Array], *, of_audio: bool) -> str:
        """Return in words which keys or values a decoder returns wrongly, of the audio too; empty: none."""
        expected, width = self.explanation.expected, self.explanation.head_width
        for name, array in outputs.items() if self.is_exact else ():
            cached = cached_layer(name)
            if cached is None or not (of_audio or cached[0].startswith("attn.")):
                continue
            right = cache_of(cached, array.shape, expected, expected["tokens"].shape[1], width)
            if right.shape[-2] > array.shape[-2]:
                new = right[..., -array.shape[-2] :, :]
                if new.shape == array.shape and _error(new, array, [1.0]) < RIGHT:
                    return f"{name} holds the new tokens only, and not those of the cache"
            if right.shape != array.shape:
                return f"{name} has the shape {array.shape}, and not {right.shape}"
            if _error(right, array, [1.0]) > RIGHT:
                reason = combined({"it": right}, array, RIGHT) or self._held(cached, right, array)
                reason = reason or value_difference(right, array, width) or _reordered(right, array)
                return f"{name}: {reason or 'its values are others'}"
        return ""

    def _held(self, cached: tuple[str, int | None], right: Array, array: Array) -> str:
        """Return in words which other keys or values a cache holds; empty: none, or different ones.

        Args:
            cached: what `cached_layer` returns.
            right: what it must hold, (L, …) of one layer, or of all.
            array: what it holds.
        """
        layers = range(len(array)) if cached[1] is None else [cached[1]]
        pairs = ((right[i : i + 1], array[i : i + 1]) for i in range(len(array)))
        wrong = {
            layer: self._held_by_layer(cached[0], layer, *pair)
            for layer, pair in zip(layers, pairs, strict=True)
            if _error(*pair, [1.0]) > RIGHT
        }
        reasons = {*wrong.values()}
        if len(reasons) != 1:
            return ""
        where = f"in layers {listed([*wrong])}, " if len(wrong) < len(array) else ""
        return where + reasons.pop() if "" not in reasons else ""

    def _held_by_layer(self, cached: str, layer: int, right: Array, array: Array) -> str:
        """Return in words which keys or values the cache (1, …) of a layer holds; empty: unknown."""
        expected, width = self.explanation.expected, self.explanation.head_width
        n_tokens, n_cached = expected["tokens"].shape[1], self.explanation.rows.start or 0
        old, new = slice(n_cached), slice(n_cached, n_tokens)
        kind = cached.partition(".")[0]
        parts = {"": slice(None)}
        if n_cached and kind == "attn":
            parts |= {" in place of what the cache held": old, " in place of the new ones": new}
        for end in expected:
            match = re.fullmatch(rf"decoder\.blocks\.(\d+)\.{kind}\.(key|value)", end)
            if match is None:
                continue
            of_other = f"{kind}.{match[2]}", int(match[1])
            candidate = cache_of(of_other, array.shape, expected, n_tokens, width)
            for where, rows in parts.items():
                mine, held, own = (a[..., rows, :] for a in (array, candidate, right))
                if _error(own, mine, [1.0]) > RIGHT > _error(held, mine, [1.0]):
                    of_layer = f" of decoder layer {match[1]}" if int(match[1]) != layer else ""
                    return f"it holds the {match[2]}s{of_layer}{where}"
        return ""

    @cached_property
    def _names(self) -> dict[str, str]:
        """Value of the graph -> the layer's value that it is, as far as it was asked for."""
        return {}

    @cached_property
    def _readers(self) -> dict[str, list["Node"]]:
        """Value or array -> the nodes that read it."""
        readers: dict[str, list[Node]] = {}
        for node in self.graph.nodes:
            for tensor in node.tensors:
                readers.setdefault(tensor.name, []).append(node)
        return readers

    @cached_property
    def _makers(self) -> dict[str, "Node"]:
        """Value -> the node that computes it."""
        return {output.name: node for node in self.graph.nodes for output in node.outputs}

    def _stored(self, name: str) -> list[str]:
        layer = name.removeprefix(INPUT)
        return [n for end in ("weight", "bias") for n in self.arrays.get(f"{layer}.{end}", ())]

    def _is_unused(self, name: str) -> bool:
        stored = self._stored(name)
        # Keys and values of the audio may come from a cache; rounded weights are converted first.
        if not self.is_exact or name.startswith(INPUT) or name.endswith(OF_AUDIO):
            return False
        return bool(stored) and not any(map(self._readers.get, stored))

    def _candidates(self, name: str, size: int, output: str) -> list[str]:
        """Return the values of a size that may be that of a layer, or what its weight multiplies."""
        stored = self._stored(name)
        if name == output == "logits":
            names = [value.name for value in self.graph.outputs]
        elif name.startswith(INPUT):
            reading = [node for array in stored for node in self._readers.get(array, ())]
            multiplied = [tensor.name for node in reading for tensor in node.tensors]
            names = [out.name for node in self._making(multiplied) for out in node.outputs]
            direct = [
                n for n in self._read(name.removeprefix(INPUT)) if self.values[n].size == size
            ]
            names = direct or names
        else:
            names = [out.name for node in self._behind(stored) for out in node.outputs]
        return [n for n in dict.fromkeys(names) if n in self.values and self.values[n].size == size]

    def _making(self, names: Iterable[str], right: Collection[str] = ()) -> list["Node"]:
        """Return the nodes that compute values, at most `FAR` in a row, the nearest first.

        Args:
            names: of the values.
            right: values before which it ends.
        """
        nodes: dict[str, Node] = {}
        current = list(names)
        for _ in range(FAR):
            making = [self._makers[name] for name in current if name in self._makers]
            new = {node.name: node for node in making if node.name not in nodes}
            nodes |= new
            current = [t.name for node in new.values() for t in node.tensors if t.name not in right]
        return list(nodes.values())

    def _behind(self, names: Iterable[str]) -> list["Node"]:
        """Return the nodes that read one of these arrays, and those within a few operators behind them."""
        nodes: dict[str, Node] = {}
        current = list(names)
        for _ in range(1 + NEAR):
            reading = {node.name: node for name in current for node in self._readers.get(name, ())}
            nodes |= reading
            current = [output.name for node in reading.values() for output in node.outputs]
        return list(nodes.values())


def _reordered(right: Array, array: Array) -> str:
    """Return in words in which order a cache (…, H, n, D) has the right values; empty: it has others."""
    apart = np.ascontiguousarray(right.swapaxes(-3, -2)).reshape(array.shape)
    if _error(apart, array, [1.0]) < RIGHT:
        return "it is split into heads without their order of axes"
    is_same = error_of(np.sort(right, axis=None), np.sort(array, axis=None)) < RIGHT
    return "its values are in another order" if is_same else ""


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
        def hook(_module: "nn.Module", inputs: Any, output: "Tensor") -> None:
            if name.endswith(READ):
                values[INPUT + name] = inputs[0].numpy()
            values[name] = output.numpy()

        return hook

    for name, module in model.named_modules():
        if getattr(module, "weight", None) is not None:
            module.register_forward_hook(keep(name))
    with torch.no_grad():
        features = model.encode(torch.from_numpy(values["mel"]))
        logits = model.logits(torch.tensor(known.tokens), model.cross_kv(features))
    values["logits"] = logits.numpy()[None]
    small = (item for item in model.state_dict().items() if item[0].endswith(SMALL))
    return values | {name: tensor.numpy() for name, tensor in small}


def _error(expected: Array, actual: Array, scales: Sequence[float]) -> float:
    fitted = arrangements(expected.shape, actual)
    errors = (error_of(expected * scale, array) for array in fitted for scale in scales)
    return min(errors, default=float("inf"))
