"""What sherpa-onnx demands of its three files.

Source: k2-fsa/sherpa-onnx@634265c, csrc/offline-whisper-model.cc, and runs with files that lack one thing.
"""

import base64
import binascii
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.build.layouts.checkpoint_rules import Setting, checkpoint_rules, token_setting
from whisperport.build.layouts.onnx_graph.header import (
    OnnxHeader,
    change_model,
    other_type,
    read_header,
    wrong_convolutions,
)
from whisperport.build.layouts.onnx_graph.stored import stored_arrays, stored_precision
from whisperport.build.layouts.reading import Files, Reader
from whisperport.build.layouts.rules import Draft, layout_rule
from whisperport.build.layouts.sherpa_onnx.folder import ids as ids_of
from whisperport.build.layouts.sherpa_onnx.folder import metadata as metadata_of
from whisperport.build.layouts.sherpa_onnx.folder import text_tokens
from whisperport.program.dims import KNOWN_VOCABULARIES
from whisperport.speech.text.vocabulary import openai_generation

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

NUMBERS = (
    *("n_mels", "n_text_layer", "n_text_ctx", "n_text_state", "n_vocab", "sot", "eot"),
    *("blank_id", "translate", "transcribe", "is_multilingual", "no_timestamps", "no_speech"),
)
TASKS = ("transcribe", "translate")
LISTS = ("sot_sequence", "all_language_tokens", "all_language_codes")
ENCODER, DECODER, TOKENS = "encoder*.onnx", "decoder*.onnx", "tokens.txt"
BLANK = 220  # id of the token of a space in OpenAI's vocabularies
MAX_TOKENS_BYTES = 64 << 20
MOST_DIGITS = 10  # of an id
# Types of the inputs that the app gives, by their place.
FLOAT, INTEGER = ("float32",), ("int64",)
TYPES = {ENCODER: [FLOAT], DECODER: [INTEGER, *[FLOAT] * 4, INTEGER]}
EMPTY_HEADER = OnnxHeader({}, {}, {}, {})
EMPTY = "="  # the token without bytes in OpenAI's own files, which the app's script copies


def _write_metadata(draft: Draft) -> str:
    """Write what is missing or differs from the graphs; with the checkpoint, what differs from it as well.

    Missing ids are those of OpenAI's models if the size of the vocabulary and the ids that are there agree.
    """
    name, header = _encoder(draft.files)
    stored = header.metadata
    sizes = _graph_sizes(draft.files)
    values = dict(sizes)
    if draft.checkpoint is not None:
        values = {key: metadata_of(draft.checkpoint)[key] for key in (*NUMBERS, *LISTS)}
    elif (size := {**stored, **sizes}.get("n_vocab", "")) in map(str, KNOWN_VOCABULARIES):
        ids = ids_of(openai_generation(int(size)), BLANK)
        if all(stored.get(key, ids[key]) == ids[key] for key in ("sot", "eot", "no_timestamps")):
            values = {key: i for key, i in ids.items() if not _is_right(key, stored)} | sizes
    changed = {key: value for key, value in values.items() if stored.get(key) != value}

    def change(model: Any) -> None:
        kept = [entry for entry in model.metadata_props if entry.key not in changed]
        del model.metadata_props[:]
        model.metadata_props.extend(kept)
        for key, value in changed.items():
            model.metadata_props.add(key=key, value=value)

    if changed:
        change_model(draft.files.path / name, change)
    return f"{name}: {', '.join(changed)}" if changed else ""


def _write_padding(draft: Draft) -> str:
    """Append silence to any number of frames, and cut them to those that the graph takes."""
    from onnx import TensorProto, helper

    name, _ = _encoder(draft.files)

    def change(model: Any) -> None:
        stored = {tensor.name for tensor in model.graph.initializer}
        mel = next(value for value in model.graph.input if value.name not in stored)
        frames = mel.type.tensor_type.shape.dim[2].dim_value
        numbers = {"pads": [0, 0, 0, 0, 0, frames], "begin": [0], "end": [frames], "axis": [2]}
        fixed, padded = f"{mel.name}.fixed", f"{mel.name}.padded"
        for node in model.graph.node:
            node.input[:] = [fixed if source == mel.name else source for source in node.input]
        constants = {key: f"{mel.name}.{key}" for key in numbers}
        for key, values in numbers.items():
            shape = [len(values)]
            tensor = helper.make_tensor(constants[key], TensorProto.INT64, shape, values)
            model.graph.initializer.append(tensor)
        pads, *ends = constants.values()
        model.graph.node.insert(0, helper.make_node("Pad", [mel.name, pads], [padded]))
        model.graph.node.insert(1, helper.make_node("Slice", [padded, *ends], [fixed]))
        mel.type.tensor_type.shape.dim[2].dim_param = "frames"

    change_model(draft.files.path / name, change)
    return f"{name}: takes any number of frames"


def _write_text_tokens(draft: Draft) -> str:
    if draft.checkpoint is None:
        return ""
    name = _name(draft.files, TOKENS)
    (draft.files.path / name).write_text(text_tokens(draft.checkpoint), encoding="ascii")
    return f"{name} of the checkpoint"


@layout_rule("WP721", "The encoder lacks metadata", remedy="fix", repair=_write_metadata)
def metadata(files: Files) -> Iterator[tuple[str, str]]:
    """The encoder's file holds 16 texts: sizes, ids, and for a multilingual model its languages. If one is
    missing, such as 'blank_id', the process of the app ends: it "does not exist in the metadata".

    What to do: `whisperport convert CHECKPOINT --for sherpa-onnx` writes them.
    """
    name, header = _encoder(files)
    for key in (*NUMBERS, *LISTS):
        if _is_right(key, header.metadata):
            continue
        if key in header.metadata:
            yield name, f"'{key}' is {header.metadata[key][:40]!r}; expected a number"
        else:
            yield name, f"'{key}' does not exist in the metadata"
        return


@layout_rule(
    "WP722", "The metadata and the graph state other sizes", remedy="fix", repair=_write_metadata
)
def sizes(files: Files) -> Iterator[tuple[str, str]]:
    """The app makes its arrays from the sizes in the metadata. They must be those of the graph.

    What to do: `whisperport convert CHECKPOINT --for sherpa-onnx`.
    """
    name, header = _encoder(files)
    for key, size in _graph_sizes(files).items():
        stated = header.metadata.get(key, "")
        if stated.isdecimal() and stated != size:
            yield name, f"'{key}' is {stated}; the graph has {size}"
            return


@layout_rule(
    "WP723", "The encoder takes a fixed number of frames", remedy="fix", repair=_write_padding
)
def dynamic(files: Files) -> Iterator[tuple[str, str]]:
    """The app gives it as many frames as the audio has, and 10 s more. One that takes 3000 only returns an
    **empty text without an error**.

    What to do: `whisperport convert CHECKPOINT --for sherpa-onnx` writes an encoder for any length. Or set
    `tail_paddings=3000` in the app.
    """
    name, header = _encoder(files)
    inputs = list(header.inputs.values())
    if inputs and len(inputs[0]) == 3 and isinstance(inputs[0][2], int):
        yield name, f"its input has {inputs[0][2]} frames"


@layout_rule(
    "WP724",
    "tokens.txt lacks a token, or does not fit the metadata",
    remedy="fix --checkpoint",
    repair=_write_text_tokens,
)
def tokens(files: Files) -> Iterator[tuple[str, str]]:
    """`tokens.txt` has a line for each token of text, its bytes in base64 and its id; ids begin at 0, and
    the first that is missing is `eot`. If the file is another model's, the text is nonsense.

    What to do: take all files from the same checkpoint.
    """
    file = _name(files, TOKENS)
    _, header = _encoder(files)
    end = header.metadata.get("eot", "")
    lines = list(_tokens_of(files))
    cut_off = "it is cut off: " if file and not files.read(file, _ends_with_a_line) else ""
    for number, (text, place) in enumerate(lines, 1):
        if reason := _unlike_a_line(text, place):
            yield file, f"{cut_off if number == len(lines) else ''}line {number} {reason}"
            return
    if not file:
        return
    ids = Counter(int(place) for _, place in lines)
    twice = next((place for place, count in ids.items() if count > 1), None)
    if _is_id(end) and len(ids) < int(end):
        first = next(place for place in range(int(end)) if place not in ids)
        early = "it ends early: " if first == len(ids) else ""
        lacks = "" if early else f", and lacks id {first}"
        lacks += "" if twice is None else f"; id {twice} is in {ids[twice]} lines"
        yield file, f"{cut_off or early}it has {len(ids)} tokens{lacks}; 'eot' is {end}"
    elif twice is not None:
        yield file, f"id {twice} is in {ids[twice]} lines"


@layout_rule("WP725", "A file is missing, or its inputs and outputs are in another order")
def order(files: Files) -> Iterator[tuple[str, str]]:
    """The app gives and reads them by place: of the encoder mel, keys, values; of the decoder tokens, two
    caches, keys, values, offset; logits and caches.

    What to do: `whisperport convert CHECKPOINT --for sherpa-onnx`.
    """
    for end in (ENCODER, DECODER, TOKENS):
        if not _name(files, end):
            yield end.replace("*", ""), "the file is missing"
    for end, inputs, outputs in ((ENCODER, "3", "44"), (DECODER, "244441", "344")):
        if not (name := _name(files, end)):
            continue
        header = files.read(name, read_header)
        if reason := other_type(header, dict(zip(header.inputs, TYPES[end], strict=False))):
            yield name, reason
            return
        sides = ("input", header.inputs, inputs), ("output", header.outputs, outputs)
        for side, values, expected in sides:
            if side == "input" and len(values) > len(expected):
                yield name, f"an input {list(values)[len(expected)]}, which the app does not give"
                return
            axes = [str(len(sizes)) if sizes else "" for sizes in values.values()]
            for place, count in enumerate(expected):
                if place >= len(axes):
                    yield name, f"{len(axes)} {side}s; the app takes {len(expected)}"
                    return
                if axes[place] not in ("", count):
                    word = f"{side} {place + 1}, {list(values)[place]}, has {axes[place]} axes"
                    yield name, f"{word}; the app takes one of {count} axes there"
                    return


def _settings(files: Files, checkpoint: "Checkpoint") -> Iterator[Setting]:
    name, header = _encoder(files)
    for reason in wrong_convolutions(header):
        yield Setting.wrong(name, reason)
    for key, right in metadata_of(checkpoint).items():
        if key not in (*NUMBERS, *LISTS[:1]) or not (stated := header.metadata.get(key)):
            continue
        if key in TASKS and key not in checkpoint.generation.tasks:
            continue  # the app needs some id
        yield Setting(name, f"'{key}'", stated, right)
    languages, right_languages = _languages(header.metadata), _languages(metadata_of(checkpoint))
    if languages and right_languages:
        yield Setting(
            name, " of ".join(f"'{key}'" for key in LISTS[1:]), languages, right_languages
        )
    lines = {int(place): _decoded(text) for text, place in _tokens_of(files) if _is_id(place)}
    expected = (line.rpartition(" ") for line in text_tokens(checkpoint).splitlines())
    right_lines = {int(place): _decoded(text) for text, _, place in expected}
    yield from token_setting(_name(files, TOKENS), lines, right_lines)


RULES = (metadata, sizes, order, dynamic, tokens, *checkpoint_rules(_settings))


def _languages(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the code of each language -> the id that the app pairs with it, by its place."""
    ids, codes = (metadata.get(key, "").split(",") for key in LISTS[1:])
    return {code: i for code, i in zip_longest(codes, ids, fillvalue="") if code}


def _is_right(key: str, metadata: Mapping[str, str]) -> bool:
    """Return whether a text of the metadata is there, and a number if it must be one."""
    if key in LISTS[1:] and metadata.get("is_multilingual") == "0":
        return True
    return key in metadata and (key in LISTS or metadata[key].lstrip("-").isdecimal())


def _graph_sizes(files: Files) -> dict[str, str]:
    """Return the sizes that encoder and decoder state, under their names in the metadata."""
    encoder, name = _encoder(files)[1], _name(files, DECODER)
    decoder = files.read(name, read_header) if name else EMPTY_HEADER
    places = {
        "n_mels": (encoder.inputs, 0, 3, 1),
        "n_text_layer": (encoder.outputs, 0, 4, 0),
        "n_text_state": (encoder.outputs, 0, 4, 3),
        "n_text_ctx": (decoder.inputs, 1, 4, 2),
        "n_vocab": (decoder.outputs, 0, 3, 2),
    }
    sizes = {}
    for key, (values, place, n_axes, axis) in places.items():
        axes = list(values.values())[place] if len(values) > place else []
        if len(axes) == n_axes and isinstance(axes[axis], int) and int(axes[axis]) > 0:
            sizes[key] = str(axes[axis])
    return sizes


def _name(files: Files, end: str) -> str:
    """Return the name of the file that ends so, such as `tiny-encoder.int8.onnx`; empty: there is none."""
    names = sorted(path.name for path in files.path.glob(f"*{end}")) if files.path.is_dir() else []
    return names[0] if names else ""


def _encoder(files: Files) -> tuple[str, OnnxHeader]:
    name = _name(files, ENCODER)
    return name, files.read(name, read_header)


def _token_lines(path: Path) -> list[str]:
    with path.open("rb") as file:
        raw = file.read(MAX_TOKENS_BYTES)
    return raw.decode("ascii", "replace").splitlines()


def _ends_with_a_line(path: Path) -> bool:
    """Return whether the last line of a file has an end."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read() in (b"", b"\n")


def _unlike_a_line(text: str, place: str) -> str:
    """Return in words what a line of `tokens.txt` lacks; empty: nothing."""
    if not _is_id(place):
        return "has no id"
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return "is not base64"
    return ""


def _tokens_of(files: Files) -> Iterator[tuple[str, str]]:
    """Yield the bytes in base64, and the id, that each line of `tokens.txt` states."""
    name = _name(files, TOKENS)
    for line in files.read(name, _token_lines) if name else ():
        text, _, place = line.rpartition(" ")
        yield "" if text == EMPTY else text, place


def _decoded(text: str) -> str:
    """Return the text of a token in base64; what is none, as it is."""
    try:
        return base64.b64decode(text, validate=True).decode("utf-8", "backslashreplace")
    except (binascii.Error, ValueError):
        return text


def _is_id(text: str) -> bool:
    return text.isdecimal() and len(text) < MOST_DIGITS


def _recognize(files: Files) -> bool:
    if all(_name(files, end) for end in (ENCODER, DECODER, TOKENS)):
        return True
    name = _name(files, ENCODER)  # with its metadata, one of the others may be missing
    return bool(name) and "sot_sequence" in files.read(name, read_header).metadata


def _graphs(files: Files) -> list[str]:
    return list(filter(None, (_name(files, ENCODER), _name(files, DECODER))))


READER = Reader(
    _recognize,
    lambda files: [stored_precision(files, _graphs(files))],
    lambda files, _precision: stored_arrays(files, _graphs(files)),
)
