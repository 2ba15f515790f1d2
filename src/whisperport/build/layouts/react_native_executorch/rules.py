"""What react-native-executorch demands of a .pte file and its tokenizer.

Source: react-native-executorch 0.10.2 (npm), src/extensions/speech/tasks/whisperSpeechToText.ts,
src/core/schema.ts, cpp/core/model.cpp.
"""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from whisperport.build.layouts.checkpoint_rules import Setting, checkpoint_rules
from whisperport.build.layouts.huggingface_rules import settings, stored_ids
from whisperport.build.layouts.react_native_executorch.folder import (
    DECODE,
    ENCODE,
    SCHEMA,
    TOKENIZER,
)
from whisperport.build.layouts.reading import Files, Reader, pte_methods
from whisperport.build.layouts.rules import layout_rule

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint
    from whisperport.model.inspection.graph import Value
    from whisperport.model.inspection.read_pte import Method


@layout_rule(
    "WP781", "A method does not have the inputs or the output that the app gives and takes"
)
def signatures(files: Files) -> Iterator[tuple[str, str]]:
    """The app calls `encode(waveform)` and `decode(token, position, what encode returned)`.

    What to do: `whisperport convert CHECKPOINT --for react-native-executorch`.
    """
    file, methods = _file(files), _methods(files)
    if reason := _other(methods[ENCODE], [("float32", 1)], 3):
        yield file, f"{ENCODE}: {reason}"
    elif reason := _other(methods[DECODE], [("int64", 2), ("int64", 1), ("float32", 3)], 3):
        yield file, f"{DECODE}: {reason}"
    else:
        (packed,), inputs = methods[ENCODE].graph.outputs, methods[DECODE].graph.inputs
        sizes = [value.shape for value in inputs]
        if sizes != [(1, 1), (1,), packed.shape]:
            given = f"[1, 1], [1], {_text(packed)}"
            yield file, f"{DECODE} reads {', '.join(map(_text, inputs))}; the app gives {given}"


@layout_rule("WP782", "The file does not say that the waveform has any length")
def schema(files: Files) -> Iterator[tuple[str, str]]:
    """A method `get_model_schema` must return the sizes as JSON: else the app takes the longest waveform
    for the only one, and rejects the model: SCHEMA_MISMATCH.

    What to do: `whisperport convert CHECKPOINT --for react-native-executorch`.
    """
    file, methods = _file(files), _methods(files)
    if SCHEMA not in methods:
        yield file, f"there is no method {SCHEMA}"
        return
    try:
        stated = json.loads(methods[SCHEMA].texts[0])
        kinds = [size["kind"] for size in stated[ENCODE]["inputs"][0]["shape"]]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        yield file, f"{SCHEMA} returns no JSON with the inputs of {ENCODE}"
        return
    if kinds not in (["range"], ["enum"]):
        yield file, f"{SCHEMA} states a waveform of {', '.join(map(str, kinds))[:40]} length"


@layout_rule("WP783", "The tokenizer has another number of tokens than the logits")
def vocabulary(files: Files) -> Iterator[tuple[str, str]]:
    """The app makes room for as many logits as `tokenizer.json` has tokens, with the added ones.

    What to do: `whisperport convert CHECKPOINT --for react-native-executorch`.
    """
    if not files.has(TOKENIZER):
        yield TOKENIZER, "the file is missing"
        return
    n_tokens = len({*stored_ids(files.json(TOKENIZER)).values()})
    n_logits = _n_logits(_methods(files))
    if n_tokens != n_logits:
        yield TOKENIZER, f"{n_tokens} tokens; {_file(files)} returns {n_logits} logits"


@layout_rule(
    "WP784",
    "Each token projects the audio to keys and values of the cross-attention",
    is_warning=True,
)
def projections(files: Files) -> Iterator[tuple[str, str]]:
    """`decode` projects all positions of the audio for every token: the largest part of its work.

    What to do: `whisperport convert CHECKPOINT --for react-native-executorch`.
    """
    graph = _methods(files)[DECODE].graph
    audio = graph.inputs[-1].shape or ()
    if len(audio) != 3:
        return
    count = sum(
        node.op == "linear" and bool(node.tensors) and audio[1] in (node.output.shape or ())[-2:-1]
        for node in graph.nodes
    )
    if count:
        yield _file(files), f"{count} linear layers of {DECODE} read all {audio[1]} positions"


def _other(method: "Method", inputs: list[tuple[str, int]], rank: int) -> str:
    """Return how a method differs from the types and the numbers of axes that are right; empty: it fits."""
    stated = [(v.dtype, len(v.shape or ())) if v else ("no tensor", 0) for v in method.inputs]
    if stated != inputs:
        right = ", ".join(f"{dtype} of {n} axes" for dtype, n in inputs)
        return (
            f"its inputs are {', '.join(f'{d} of {n} axes' for d, n in stated)[:200]}; not {right}"
        )
    outputs = method.graph.outputs
    if len(outputs) != 1 or len(outputs[0].shape or ()) != rank or outputs[0].dtype != "float32":
        return f"it returns {', '.join(map(_text, outputs))[:200]}; not one float32 tensor of {rank} axes"
    return ""


def _text(value: "Value") -> str:
    return f"[{', '.join(map(str, value.shape or ()))}]"


def _n_logits(methods: "Mapping[str, Method]") -> int:
    outputs = methods[DECODE].graph.outputs
    sizes = [size for size in (outputs[0].shape or () if outputs else ()) if isinstance(size, int)]
    return sizes[-1] if sizes else 0


def _file(files: Files) -> str:
    """Return the file with both methods; empty: there is none, or it is the only file."""
    names = sorted(path.name for path in files.path.glob("*.pte"))
    return next((n for n in names if {ENCODE, DECODE} <= files.read(n, pte_methods).keys()), "")


def _methods(files: Files) -> "Mapping[str, Method]":
    return files.read(_file(files), pte_methods)


def _recognize(files: Files) -> bool:
    if files.path.is_file():
        return files.path.suffix == ".pte" and {ENCODE, DECODE} <= _methods(files).keys()
    return bool(_file(files))


def _precisions(files: Files) -> list[str]:
    nodes = [node for method in _methods(files).values() for node in method.graph.nodes]
    types = {value.dtype for node in nodes for value in node.tensors if value.constant}
    return ["w8" if "int8" in types else "fp32"]


def _sizes(files: Files) -> Mapping[str, int]:
    return {"vocab_size": _n_logits(_methods(files))}


def _settings(files: Files, checkpoint: "Checkpoint") -> Iterator[Setting]:
    n_logits = _n_logits(_methods(files))
    yield Setting(_file(files), "number of logits", n_logits, checkpoint.dims.n_vocab)
    yield from settings(files, checkpoint)


RULES = (signatures, schema, vocabulary, projections, *checkpoint_rules(_settings))
READER = Reader(_recognize, _precisions, sizes=_sizes)
