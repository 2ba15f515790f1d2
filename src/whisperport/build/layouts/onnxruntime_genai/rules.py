"""What ONNX Runtime GenAI demands of a folder.

Source: microsoft/onnxruntime-genai@a0c04eb, src/models/whisper.cpp, and runs of folders with one fault.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.build.layouts.checkpoint_rules import (
    Setting,
    checkpoint_rules,
    default_settings,
    settings_of,
)
from whisperport.build.layouts.huggingface_rules import settings
from whisperport.build.layouts.onnx_graph.header import (
    OnnxHeader,
    other_type,
    read_header,
    several_texts,
    wrong_convolutions,
)
from whisperport.build.layouts.onnx_graph.stored import stored_arrays, stored_precision
from whisperport.build.layouts.onnxruntime_genai.folder import (
    GRAPHS,
    audio_config,
    genai_config,
)
from whisperport.build.layouts.reading import Files, Reader
from whisperport.build.layouts.rules import layout_rule

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

CONFIG, SOUND = "genai_config.json", "audio_processor_config.json"
TOKENIZER = "tokenizer.json"
INTEGERS, FLOATS = ("int32", "int64"), ("float32", "float16")
N_AXES = 4  # of a cache
MOST_DEPTH = 8  # of objects in objects
STEP = re.compile(r"feature_extraction\.(sequence\[\d+\])\.operation\.(?:attrs\.)?(\w+)")
HEADS, WIDTH, SHARED = "num_attention_heads", "head_size", "past_present_share_buffer"
# What the app takes where `search` does not state it, of what changes the text of greedy decoding.
DEFAULTS = {"min_length": 0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
# Names of files and values are free; the others are not read, or are named by the steps' own types.
UNSURE = {
    *(f"model.{part}.filename" for part in GRAPHS),
    *("model.pad_token_id", "model.bos_token_id", f"search.{SHARED}"),
    *(f"name of sequence[{place}]" for place in range(3)),
    "model.encoder.num_key_value_heads",
}


@layout_rule("WP761", "The settings and the graphs state other sizes")
def sizes(files: Files) -> Iterator[tuple[str, str]]:
    """The app makes caches of the sizes in `genai_config.json`.

    What to do: `whisperport convert CHECKPOINT --for onnxruntime-genai`.
    """
    stated, file = _part(files, "decoder"), _file(files, "decoder")
    if not file:
        return
    caches = {
        name: axes
        for name, axes in files.read(file, read_header).inputs.items()
        if name.startswith(("past_key_self_", "past_key_cross_")) and len(axes) == 4
    }
    for side in ("self", "cross"):
        count = sum(name.startswith(f"past_key_{side}_") for name in caches)
        if stated.get("num_hidden_layers", count) != count:
            yield CONFIG, f"{str(stated['num_hidden_layers'])[:40]} layers; the decoder has {count}"
            return
    for name, axes in caches.items():
        for key, axis in ((HEADS, 1), (WIDTH, 3)):
            if isinstance(axes[axis], int) and stated.get(key, axes[axis]) != axes[axis]:
                yield CONFIG, f"{key} is {str(stated[key])[:40]}; `{name}` has {axes[axis]}"
                return
    search = files.json(CONFIG).get("search")
    shared = search.get(SHARED) if isinstance(search, dict) else None
    if shared not in (None, False) and _grows(files, file):
        yield (
            CONFIG,
            f"search.{SHARED} is {json.dumps(shared)[:40]}: the app keeps max_length tokens in one "
            f'buffer, but {file} has no input for how many are there: "computed output shape"',
        )


@layout_rule("WP762", "A file, an input or an output that the app looks for is missing")
def names(files: Files) -> Iterator[tuple[str, str]]:
    """`genai_config.json` names them; `%d` is a layer.

    What to do: correct the name, or `whisperport convert CHECKPOINT --for onnxruntime-genai`.
    """
    for name in (CONFIG, SOUND, TOKENIZER, "tokenizer_config.json"):
        if not files.has(name):
            yield name, "the file is missing"
    for part in GRAPHS:
        stated = _part(files, part)
        file = _file(files, part)
        if not file:
            name = str(stated.get("filename", GRAPHS[part]))[:40]
            yield CONFIG, f"model.{part}.filename is {name!r}: there is no such file"
            continue
        header = files.read(file, read_header)
        texts = (several_texts(name, axes) for name, axes in header.inputs.items())
        if reason := next(filter(None, texts), "") or other_type(header, _types(files, header)):
            yield file, reason
            return
        layers = _part(files, "decoder").get("num_hidden_layers")
        last = layers - 1 if isinstance(layers, int) else 0
        for side, values in (("inputs", header.inputs), ("outputs", header.outputs)):
            entries = stated.get(side)
            for key, name in entries.items() if isinstance(entries, dict) else ():
                expected = str(name).replace("%d", str(last))
                if expected not in values:
                    there = ", ".join(list(values)[:3])
                    what = f"model.{part}.{side}.{key} is {str(name)[:40]!r}"
                    yield CONFIG, f"{what}; {file} has no {expected[:40]}, but {there}, …"
                    return


def _ids(files: Files) -> str:
    """Return the name of the decoder's input for tokens."""
    stated = _part(files, "decoder").get("inputs")
    ids = stated.get("input_ids") if isinstance(stated, dict) else None
    return str(ids or "input_ids")


def _types(files: Files, header: OnnxHeader) -> dict[str, tuple[str, ...]]:
    """Return the types that tokens and caches may have: the app gives what the graph states."""
    caches = (name for name, axes in header.inputs.items() if len(axes) == N_AXES)
    return {_ids(files): INTEGERS, **dict.fromkeys(caches, FLOATS)}


def _grows(files: Files, decoder: str) -> bool:
    """Return whether a decoder's caches grow with each token: no number tells it the tokens in a buffer."""
    header, ids = files.read(decoder, read_header), _ids(files)
    numbers = [n for n, dtype in header.dtypes.items() if dtype.startswith("int")]
    return not [name for name in numbers if name != ids]


def _settings(files: Files, checkpoint: "Checkpoint") -> Iterator[Setting]:
    sides = (CONFIG, genai_config(checkpoint)), (SOUND, audio_config(checkpoint.dims))
    for file, content in sides:
        stated, right = _named(files.json(file)), _named(content)
        yield from settings_of(file, stated, {k: v for k, v in right.items() if k not in UNSURE})
        for key, value in right.items() if files.has(file) else ():
            if key not in stated and key not in UNSURE:
                reason = f"{key} is missing; the checkpoint has {value!r}"
                yield Setting.wrong(file, reason)
    search = {f"search.{key}": value for key, value in DEFAULTS.items()}
    yield from default_settings(CONFIG, _named(files.json(CONFIG)), search)
    yield from settings(files, checkpoint)
    if file := _file(files, "encoder"):
        for reason in wrong_convolutions(files.read(file, read_header)):
            yield Setting.wrong(file, reason)


def _model(files: Files) -> Mapping[str, Any]:
    model = files.json(CONFIG).get("model")
    return model if isinstance(model, dict) else {}


def _part(files: Files, name: str) -> Mapping[str, Any]:
    part = _model(files).get(name)
    return part if isinstance(part, dict) else {}


def _file(files: Files, part: str) -> str:
    """Return the file of a graph that the settings name, in the folder; empty: it is not there."""
    name = _part(files, part).get("filename", GRAPHS[part])
    return name if isinstance(name, str) and Path(name).name == name and files.has(name) else ""


def _graphs(files: Files) -> list[str]:
    return list(filter(None, (_file(files, part) for part in GRAPHS)))


def _named(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what `_flat` does, with short names of the steps' settings: "n_fft of sequence[1]"."""
    return {STEP.sub(r"\2 of \1", path): value for path, value in _flat(settings).items()}


def _flat(value: Any, prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """Return the numbers and texts in an object, each under its path: {"model.decoder.head_size": 64}."""
    if depth < MOST_DEPTH and isinstance(value, dict):
        members = [(f"{prefix}.{key}" if prefix else str(key), v) for key, v in value.items()]
    elif depth < MOST_DEPTH and isinstance(value, list):
        members = [(f"{prefix}[{place}]", v) for place, v in enumerate(value)]
    else:
        return {prefix: value}
    return {k: v for name, part in members for k, v in _flat(part, name, depth + 1).items()}


# Sizes first: with too many layers, names of the further ones are missing, too.
RULES = (sizes, names, *checkpoint_rules(_settings))

READER = Reader(
    lambda files: files.has(CONFIG) or (files.has(SOUND) and all(map(files.has, GRAPHS.values()))),
    lambda files: [stored_precision(files, _graphs(files))],
    lambda files, _precision: stored_arrays(files, _graphs(files)),
)
