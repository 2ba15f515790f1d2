"""What OpenVINO GenAI's pipelines demand of a folder, on a CPU and on an NPU.

For an NPU, its plug-in (NPUW) rewrites the decoder, or GenAI itself does in its static pipeline. Both look
for patterns of nodes. On a CPU, a decoder without them returns the right text.

Source: openvinotoolkit/openvino@064c576, src/plugins/intel_npu/src/plugin/npuw/whisper, and
openvinotoolkit/openvino.genai@da1db86, src/cpp/src/whisper; each message from a run of a graph in which
this pattern alone was broken.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whisperport.build.layouts import layout_of
from whisperport.build.layouts.checkpoint_rules import Setting, checkpoint_rules
from whisperport.build.layouts.client import is_installed, run_script
from whisperport.build.layouts.huggingface_files import (
    generation_config,
    tokenizer_json,
    write_json,
)
from whisperport.build.layouts.huggingface_rules import GENERATION, TOKENIZER, merges, settings
from whisperport.build.layouts.huggingface_rules import RULES as SETTINGS
from whisperport.build.layouts.openvino_genai.folder import write_graphs
from whisperport.build.layouts.openvino_genai.graphs import EPSILON
from whisperport.build.layouts.openvino_genai.repairs import (
    ATTENTION,
    EARLY,
    LATE,
    READ,
    EditedIr,
    audio_states,
    position_chain,
    write_frames,
    write_layer_names,
    write_mask,
    write_positions,
    write_state_names,
)
from whisperport.build.layouts.openvino_genai.tokenizer_graphs import DETOKENIZER, tokenizer_graphs
from whisperport.build.layouts.reading import Files, Reader, StoredArray, in_steps
from whisperport.build.layouts.rules import Draft, LayoutRule, layout_rule
from whisperport.errors import ProgramError
from whisperport.targets.cpu.openvino.ir import IrGraph, IrNode, constants, places, read_ir

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

ENCODER, DECODER = "openvino_encoder_model.xml", "openvino_decoder_model.xml"
# The whole name of a self-attention state; the groups after the layer and part are what may be added.
STATE = re.compile(
    r"past_key_values\.(\d+)\.decoder\.(key|value)(\w*)present\.\1\.decoder\.\2(\w*)"
)
# File -> tensors that the pipeline looks for by name.
TENSORS = {
    ENCODER: ("input_features", "last_hidden_state"),
    DECODER: ("input_ids", "encoder_hidden_states", "beam_idx", "logits"),
}
TYPES = {
    "input_features": "f32",
    "encoder_hidden_states": "f32",
    "input_ids": "i64",
    "beam_idx": "i32",
}
# Operator -> its attributes in the graphs of `graphs.py`; one that is missing has this value, too.
ATTRIBUTES = {
    "MVN": {"eps": str(EPSILON), "normalize_variance": "true", "eps_mode": "INSIDE_SQRT"},
    "Gelu": {"approximation_mode": "ERF"},
    "ScaledDotProductAttention": {"causal": "false"},
}
CONVOLUTION = {"pads_begin": "1", "pads_end": "1", "dilations": "1", "auto_pad": "explicit"}
AUTOMATIC = ("same_upper", "same_lower", "valid")  # values of `auto_pad` that replace the pads
SAME = [(1, "same_upper"), (1, "same_lower")]  # convolutions that they pad as Whisper does
MOVES = frozenset(
    {"Concat", "Gather", "Select", "Convert", "Reshape", "Transpose", "Slice", "StridedSlice"}
) | {"Unsqueeze", "Squeeze", "VariadicSplit", "Split"}
MISSING = "unordered_map::at"  # what NPUW says of positions that it does not find
NEEDED = (GENERATION, DETOKENIZER)
APP = "openvino-genai"


def _graph_repair(
    name: str, change: Callable[[EditedIr], bool], what: str
) -> Callable[[Draft], str]:
    """Return the repair of a graph; `what` it changes."""

    def repair(draft: Draft) -> str:
        ir = EditedIr(draft.files.path / name)
        if not change(ir):
            return ""
        ir.write()
        return f"{name}: {what}"

    return repair


def _write_missing(draft: Draft) -> str:
    """Write the settings from the checkpoint, and the graphs of the tokenizer in the app's environment."""
    folder, changes = draft.files.path, []
    if not draft.files.has(GENERATION) and draft.checkpoint is not None:
        write_json(folder / GENERATION, generation_config(draft.checkpoint))
        changes.append(GENERATION)
    if not draft.files.has(DETOKENIZER):
        if not draft.files.has(TOKENIZER) and draft.checkpoint is not None:
            write_json(folder / TOKENIZER, tokenizer_json(draft.checkpoint))
        app = layout_of(APP).apps[APP]
        if (folder / TOKENIZER).is_file() and is_installed(app):
            run_script(app, Path(__file__).with_name("tokenizer.py"), folder)
            changes.append("the graphs of the tokenizer")
    return ", ".join(changes)


def _write_decoder(draft: Draft) -> str:
    """Write the decoder of the checkpoint, in the precision that is there, in place of all decoders."""
    if draft.checkpoint is None:
        return ""
    precision = _precisions(draft.files)[0]
    for path in draft.files.path.glob("openvino_decoder*"):
        path.unlink()
    write_graphs(draft.checkpoint, precision, draft.files.path, ("decoder",))
    return f"{DECODER} of the checkpoint"


def _with_graphs(rule: LayoutRule) -> LayoutRule:
    """Return a rule of the settings; if its repair changes the tokenizer, WP737 makes its graphs again."""
    correct = rule.repair
    if correct is None:
        return rule

    def repair(draft: Draft) -> str:
        tokenizer = draft.files.path / TOKENIZER
        before = tokenizer.read_bytes() if tokenizer.is_file() else b""
        change = correct(draft)
        if before and tokenizer.read_bytes() != before:
            for path in draft.files.path.glob("openvino_*tokenizer.*"):
                path.unlink()
        return change

    return replace(rule, repair=repair)


@layout_rule(
    "WP731",
    "The name of a node before a cross-attention state lacks its layer",
    remedy="fix",
    repair=_graph_repair(DECODER, write_layer_names, "nodes are named after their layers"),
)
def layer_names(files: Files) -> Iterator[tuple[str, str]]:
    """For an NPU, the keys and values of the audio become outputs of a graph of their own. Their layer is
    the first number in the name of the node that computes a state's first value, such as
    `decoder.layers.3.encoder_attn.key`. Without it, loading fails with "Input string does not match the
    expected pattern".

    What to do: `whisperport convert CHECKPOINT --for openvino-genai`.
    """
    graph = files.read(DECODER, read_ir)
    layers: dict[str, int] = {}
    for index in sorted(audio_states(graph)):
        before = graph.source(index, 0)
        name = before.name if before else ""
        number = re.search(r"\d+", name)
        if number is None:
            yield DECODER, f"`{name}` has no number; an NPU reads the layer from it"
            return
        layers[number.group()] = layers.get(number.group(), 0) + 1
    if uneven := [layer for layer, count in layers.items() if count != 2]:
        yield DECODER, f"{layers[uneven[0]]} states are named after layer {uneven[0]}; expected 2"


@layout_rule(
    "WP732",
    "The mask of self-attention does not come from a Select or a Slice",
    remedy="fix",
    repair=_graph_repair(DECODER, write_mask, "the mask passes a Slice"),
)
def mask(files: Files) -> Iterator[tuple[str, str]]:
    """For an NPU, the mask of the decoder's self-attention becomes an input. It is found where it enters
    `ScaledDotProductAttention` directly from a Select or a Slice. Otherwise, loading fails with
    "!self_attn_nodes.empty()".

    What to do: `whisperport convert CHECKPOINT --for openvino-genai`.
    """
    graph = files.read(DECODER, read_ir)
    audio = audio_states(graph)
    for index, node in graph.of_type(ATTENTION):
        if audio & {source for source, _ in node.inputs}:
            continue  # cross-attention
        before = graph.source(index, 3)
        if before is None or before.type not in ("Select", "Slice"):
            form = before.type if before else "nothing"
            yield DECODER, f"the mask of `{node.name}` comes from {form}"
            return


@layout_rule(
    "WP733",
    "The positions of tokens are computed in a form that an NPU's pipeline does not find",
    remedy="fix",
    repair=_graph_repair(DECODER, write_positions, "positions as transformers 4 writes them"),
)
def positions(files: Files) -> Iterator[tuple[str, str]]:
    """For an NPU, the positions of new tokens become the input `cache_position`. They are found as
    Range, from a Gather to an Add, followed by Unsqueeze and Tile, as transformers before version 5 writes
    them; NPUW alone also finds Range, Add, Unsqueeze and Tile, as version 5.4 writes them. Otherwise, the
    first decoding fails: NPUW with "unordered_map::at" (older versions: "invalid unordered_map key"), the
    static pipeline with "Port for tensor name cache_position was not found".

    What to do: `whisperport convert CHECKPOINT --for openvino-genai`.
    """
    graph = files.read(DECODER, read_ir)
    tiles = [index for index, _ in graph.of_type("Tile")]
    if not any(_is_early(graph, tile) for tile in tiles):
        is_late = any(position_chain(graph, tile, LATE) for tile in tiles)
        fails = "the static pipeline does not find" if is_late else "no pipeline of an NPU finds"
        message = "Port for tensor name cache_position was not found" if is_late else MISSING
        yield DECODER, f'{fails} the positions of the tokens: "{message}"'


@layout_rule(
    "WP734",
    "A self-attention state has another name than an NPU's pipeline expects",
    remedy="fix",
    repair=_graph_repair(DECODER, write_state_names, "states are named after their layers"),
)
def states(files: Files) -> Iterator[tuple[str, str]]:
    """For an NPU, the keys and values of earlier tokens become inputs and outputs, paired by the name of
    their state: `past_key_values.I.decoder.keypresent.I.decoder.key`, and the same for values. Otherwise,
    loading fails: NPUW with "While validating node 'opset1::Add" or "RemoveEmptyKVInputs", the static
    pipeline with "cst_node".

    What to do: `whisperport convert CHECKPOINT --for openvino-genai`.
    """
    graph = files.read(DECODER, read_ir)
    audio = audio_states(graph)
    names = [
        node.attributes.get("variable_id", "")
        for index, node in graph.of_type(READ)
        if index not in audio
    ]
    matches = [STATE.fullmatch(name) for name in names]
    # NPUW fails only if no state has the exact name; the form of the others is needed.
    is_named = any(match and not (match[3] or match[4]) for match in matches)
    for name, match in zip(names, matches, strict=True):
        if not (match and is_named):
            yield DECODER, f"the state `{name[:80]}`"
            return


@layout_rule("WP735", "The decoder has no states", remedy="fix --checkpoint", repair=_write_decoder)
def stateful(files: Files) -> Iterator[tuple[str, str]]:
    """The pipeline does not load a decoder whose caches are inputs and outputs, which optimum-intel writes
    with `--disable-stateful`.

    What to do: `whisperport convert CHECKPOINT --for openvino-genai`.
    """
    if not any(files.read(DECODER, read_ir).of_type(READ)):
        yield DECODER, "no node reads a state"


@layout_rule(
    "WP736",
    "The encoder's number of frames is not fixed",
    remedy="fix",
    repair=_graph_repair(ENCODER, write_frames, "input_features has 3000 frames"),
)
def frames(files: Files) -> Iterator[tuple[str, str]]:
    """An NPU compiles static shapes only. GenAI gives the encoder 3000 frames.

    What to do: fix the last axis of `input_features`, or
    `whisperport convert CHECKPOINT --for openvino-genai`.
    """
    for _, node in files.read(ENCODER, read_ir).of_type("Parameter"):
        sizes = node.sizes[0] if node.sizes else []
        if "input_features" in node.names and (len(sizes) != 3 or sizes[2] < 1):
            yield ENCODER, f"input_features has the sizes {sizes}"


@layout_rule(
    "WP737", "A file that the pipeline needs is missing", remedy="fix", repair=_write_missing
)
def needed(files: Files) -> Iterator[tuple[str, str]]:
    """Without `openvino_detokenizer.xml`, the first transcription fails: "Detokenizer model has not been
    provided". Without `generation_config.json`, the pipeline does not load.

    What to do: `whisperport convert CHECKPOINT --for openvino-genai`.
    """
    for name in NEEDED:
        if not files.has(name):
            yield name, "the file is missing"


def _settings(files: Files, checkpoint: "Checkpoint") -> Iterator[Setting]:
    yield from settings(files, checkpoint)
    yield from tokenizer_graphs(files, checkpoint)
    dims = checkpoint.dims
    sizes = {"num_mel_bins": dims.n_mels, "vocab_size": dims.n_vocab}
    for name, size in _sizes(files).items():
        yield Setting(
            ENCODER if "mel" in name else DECODER, f"{name} of the graph", size, sizes[name]
        )
    for file, names in TENSORS.items():
        graph = files.read(file, read_ir)
        missing = [name for name in names if not any(name in n.names for n in graph.nodes.values())]
        for name in missing:
            reason = f"no tensor is called {name}, by which the pipeline finds it"
            yield Setting.wrong(file, reason)
        yield from _attributes(file, graph)
        yield from _types(file, graph)
        yield from _unread(files, file, graph)
    yield from _beams(files.read(DECODER, read_ir))
    yield from _assigned(files.read(DECODER, read_ir))
    for _, node in files.read(ENCODER, read_ir).of_type("Parameter"):
        if "input_features" in node.names and len(node.sizes[0]) == 3 and node.sizes[0][2] > 0:
            yield Setting(ENCODER, "frames of input_features", node.sizes[0][2], dims.n_frames)


def _unread(files: Files, file: str, graph: IrGraph) -> Iterator[Setting]:
    """Yield the weights behind the last constant of a graph: exporters write none."""
    name = file.replace(".xml", ".bin")
    try:
        end = max((place.stop for _, place in places(graph, name)), default=0)
    except ProgramError:
        return  # the comparison of weights says what is damaged
    if files.has(name) and (size := (files.path / name).stat().st_size) > end:
        reason = f"it has {size:,} bytes, of which {file} reads {end:,}: it is of another .xml"
        yield Setting.wrong(name, reason)


def _beams(graph: IrGraph) -> Iterator[Setting]:
    """Yield the states of self-attention that no Gather by `beam_idx` reads."""
    beams = {index for index, node in graph.nodes.items() if "beam_idx" in node.names}
    sources = {
        source[0]
        for _, node in graph.of_type("Gather")
        for source in node.inputs[:1]
        if any(beams & {index, *graph.before(index)} for index, _ in node.inputs[1:2])
    }
    own = {index for index, _ in graph.of_type(READ)} - audio_states(graph)
    for index in sorted(own - sources) if beams else ():
        name = graph.nodes[index].attributes.get("variable_id", "")[:80]
        reason = f"the state {name} is not ordered by beam_idx: beams read the cache of others"
        yield Setting.wrong(DECODER, reason)


def _assigned(graph: IrGraph) -> Iterator[Setting]:
    """Yield the states to which another state is assigned: it is moved, or joined with new values."""
    for index, node in graph.of_type("Assign"):
        waiting, read = [index], set[str]()
        while waiting:
            for source, _ in graph.nodes[waiting.pop()].inputs:
                before = graph.nodes[source]
                if before.type == READ:
                    read.add(before.attributes.get("variable_id", ""))
                elif before.type in MOVES:
                    waiting.append(source)
        state = node.attributes.get("variable_id", "")
        if read and state not in read:
            reason = f"the state {min(read)[:80]} is assigned to the state {state[:80]}"
            yield Setting.wrong(DECODER, reason)


def _types(file: str, graph: IrGraph) -> Iterator[Setting]:
    """Yield the inputs of a type that the pipeline does not give."""
    for _, node in graph.of_type("Parameter"):
        stated = node.attributes.get("element_type", "")
        for name in TYPES.keys() & set(node.names):
            if stated not in ("", TYPES[name]):
                reason = f"input {name} is {stated}; the app gives {TYPES[name]}"
                yield Setting.wrong(file, reason)


def _attributes(file: str, graph: IrGraph) -> Iterator[Setting]:
    """Yield the attributes of operators that are not those which this package writes."""
    # The decoder's own attention may be causal in place of a mask.
    types = ATTRIBUTES.keys() - ({ATTENTION} if file == DECODER else set())
    for _, node in graph.of_type(*types):
        for key, right in ATTRIBUTES[node.type].items():
            if not _is_same(node.attributes.get(key, right), right):
                yield _attribute(file, node, key, right)
    yield from _convolutions(file, graph)


def _convolutions(file: str, graph: IrGraph) -> Iterator[Setting]:
    """Yield the attributes of an encoder's two convolutions that are not Whisper's."""
    nodes = [node for _, node in graph.of_type("Convolution", "GroupConvolution")]
    over_one_axis = not any("," in node.attributes.get("strides", "") for node in nodes)
    for number, node in enumerate(nodes, 1) if len(nodes) == 2 and over_one_axis else ():
        layer = f"encoder.conv{number}, the "
        if node.type == "GroupConvolution":
            yield Setting.wrong(file, f"{layer}{node.type} `{node.name[-80:]}`, has groups")
        for key, right in {**CONVOLUTION, "strides": str(number)}.items():
            stated = node.attributes.get(key, right).lower()
            if key == "auto_pad" and (stated not in AUTOMATIC or (number, stated) in SAME):
                continue
            if stated != right:
                yield _attribute(file, node, key, right, layer)


def _attribute(file: str, node: IrNode, key: str, right: str, layer: str = "the ") -> Setting:
    stated = node.attributes[key][:40]
    reason = f"{key} of {layer}{node.type} `{node.name[-80:]}` is {stated}, not {right}"
    return Setting.wrong(file, reason)


def _is_same(stated: str, right: str) -> bool:
    """Return whether two attributes are the same text, or nearly the same number."""
    try:
        return math.isclose(float(stated), float(right), rel_tol=1e-3)
    except ValueError:
        return stated.lower() == right.lower()


# The tokenizer is a graph here, so that no version of `tokenizers` reads tokenizer.json.
RULES = (
    *(_with_graphs(rule) for rule in SETTINGS if rule is not merges),
    *checkpoint_rules(_settings),
    layer_names,
    mask,
    positions,
    states,
    stateful,
    frames,
    needed,
)


def _is_early(graph: IrGraph, tile: int) -> bool:
    """Return whether a Tile repeats positions in the form that every pipeline finds."""
    chain = position_chain(graph, tile, EARLY)
    ends = [graph.nodes[i].type for i, _ in graph.nodes[chain[-1]].inputs[:2]] if chain else []
    return ends == ["Gather", "Add"]


def _precisions(files: Files) -> list[str]:
    kinds = [
        node.attributes.get("element_type", "")
        for _, node in files.read(DECODER, read_ir).of_type("Const")
        if len(node.sizes[0] if node.sizes else ()) == 2
    ]
    if {"i8", "u8"} & set(kinds):
        return ["w8"]
    return ["fp16" if kinds.count("f16") > kinds.count("f32") else "fp32"]


def _arrays(files: Files, _precision: str) -> Iterator[StoredArray]:
    for name in (ENCODER, DECODER):
        stored = dict(constants(files.path / name))
        steps = {
            matrix: sources
            for matrix, sources in _steps(files.read(name, read_ir)).items()
            if matrix in stored and stored[matrix].dtype in (np.int8, np.uint8)
        }
        of_steps = {source for sources in steps.values() for source in sources}
        for node, values in stored.items():
            if node in of_steps:
                continue  # no weight is equal to it, but one of zeros is near
            scale, zero = (stored.get(source) for source in steps.get(node, ("", "")))
            if scale is None or values.ndim != 2:
                yield StoredArray(name, node, values)
                continue
            zero = np.array(0) if zero is None else zero
            multiplied, step = in_steps(values, scale, zero, axis=0)
            yield StoredArray(name, node, multiplied, step=step)


def _steps(graph: IrGraph) -> dict[str, tuple[str, str]]:
    """Return the name of each matrix that is multiplied by a step -> the names of its step and zero."""
    steps = {}
    for _, product in graph.of_type("Multiply"):
        if len(product.inputs) != 2:
            continue
        for matrix, scale in (product.inputs, product.inputs[::-1]):
            zero = ""
            if graph.nodes[matrix[0]].type == "Subtract":
                matrix, offset = graph.nodes[matrix[0]].inputs[:2]
                zero = _constant(graph, offset[0])
            if (source := _constant(graph, matrix[0])) and (step := _constant(graph, scale[0])):
                steps[source] = step, zero
    return steps


def _constant(graph: IrGraph, index: int) -> str:
    """Return the name of a constant, which may be converted or reshaped; empty: the node is none."""
    node = graph.nodes[index]
    while node.type in ("Convert", "Reshape") and node.inputs:
        node = graph.nodes[node.inputs[0][0]]
    return node.name if node.type == "Const" else ""


def _sizes(files: Files) -> Mapping[str, int]:
    sizes: dict[str, int] = {}
    for _, node in files.read(ENCODER, read_ir).of_type("Parameter"):
        if "input_features" in node.names and len(node.sizes[0]) == 3:
            sizes["num_mel_bins"] = node.sizes[0][1]
    for _, node in files.read(DECODER, read_ir).of_type("MatMul"):
        if "logits" in node.names and len(node.sizes[0]) == 3:
            sizes["vocab_size"] = node.sizes[0][2]
    return {name: size for name, size in sizes.items() if size > 0}


READER = Reader(
    lambda files: files.has(ENCODER) and files.has(DECODER), _precisions, _arrays, _sizes
)
