"""What sherpa-onnx demands of its three files.

Source: k2-fsa/sherpa-onnx@634265c, csrc/offline-whisper-model.cc, and runs with files that lack one thing.
"""

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path

from whisperport.build.layouts.onnx_graph.header import OnnxHeader, read_header
from whisperport.build.layouts.onnx_graph.stored import stored_arrays
from whisperport.build.layouts.reading import Files, Reader, StoredArray
from whisperport.build.layouts.rules import layout_rule

NUMBERS = (
    *("n_mels", "n_text_layer", "n_text_ctx", "n_text_state", "n_vocab", "sot", "eot"),
    *("blank_id", "translate", "transcribe", "is_multilingual", "no_timestamps", "no_speech"),
)
LISTS = ("sot_sequence", "all_language_tokens", "all_language_codes")
ENCODER, DECODER, TOKENS = "encoder*.onnx", "decoder*.onnx", "tokens.txt"
MAX_TOKENS_BYTES = 64 << 20


@layout_rule("WP721", "The encoder lacks metadata")
def metadata(files: Files) -> Iterator[tuple[str, str]]:
    """The encoder's file holds 16 texts: sizes, ids, and for a multilingual model its languages. If one is
    missing, the process of the app ends, with one line such as "'blank_id' does not exist in the metadata".

    What to do: `whisperport convert CHECKPOINT --for sherpa-onnx` writes them.
    """
    name, header = _encoder(files)
    for key in (*NUMBERS, *LISTS):
        if key in LISTS[1:] and header.metadata.get("is_multilingual") == "0":
            continue
        if key not in header.metadata:
            yield name, f"'{key}' does not exist in the metadata"
            return
        if key in NUMBERS and not header.metadata[key].lstrip("-").isdecimal():
            yield name, f"'{key}' is {header.metadata[key][:40]!r}; expected a number"
            return


@layout_rule("WP722", "The metadata and the graph state other sizes")
def sizes(files: Files) -> Iterator[tuple[str, str]]:
    """The app makes its arrays from the sizes in the metadata. They must be those of the graph.

    What to do: `whisperport convert CHECKPOINT --for sherpa-onnx`.
    """
    name, header = _encoder(files)
    inputs, outputs = list(header.inputs.values()), list(header.outputs.values())
    in_graph: dict[str, int | str] = {}
    if inputs and len(inputs[0]) == 3:
        in_graph["n_mels"] = inputs[0][1]
    if outputs and len(outputs[0]) == 4:
        in_graph |= {"n_text_layer": outputs[0][0], "n_text_state": outputs[0][3]}
    for key, size in in_graph.items():
        stated = header.metadata.get(key, "")
        if isinstance(size, int) and stated.isdecimal() and int(stated) != size:
            yield name, f"'{key}' is {stated}; the graph has {size}"
            return


@layout_rule("WP723", "The encoder takes a fixed number of frames")
def dynamic(files: Files) -> Iterator[tuple[str, str]]:
    """The app gives the encoder as many frames as the audio has, and 10 s more. An encoder that takes 3000
    frames only returns an **empty text without an error**, unless the caller sets `tail_paddings=3000`.

    What to do: `whisperport convert CHECKPOINT --for sherpa-onnx` writes an encoder for any length. Or set
    `tail_paddings=3000` in the app.
    """
    name, header = _encoder(files)
    inputs = list(header.inputs.values())
    if inputs and len(inputs[0]) == 3 and isinstance(inputs[0][2], int):
        yield name, f"its input has {inputs[0][2]} frames"


@layout_rule("WP724", "An id in the metadata is not that of a token")
def tokens(files: Files) -> Iterator[tuple[str, str]]:
    """`tokens.txt` has a line for each token of text, its bytes in base64 and its id; ids begin at 0, and
    the first that is missing is `eot`. If the file is another model's, the text is nonsense.

    What to do: take all files from the same checkpoint.
    """
    file = _name(files, TOKENS)
    lines = files.read(file, _token_lines)
    _, header = _encoder(files)
    end = header.metadata.get("eot", "")
    for number, line in enumerate(lines):
        text, _, place = line.rpartition(" ")
        if not place.isdecimal():
            yield file, f"line {number + 1} has no id"
            return
        try:
            base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            yield file, f"line {number + 1} is not base64"
            return
    count = len({line.rpartition(" ")[2] for line in lines})
    if end.isdecimal() and count < int(end):
        yield file, f"it has {count} tokens; 'eot' is {end}"


RULES = (metadata, sizes, dynamic, tokens)


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


def _recognize(files: Files) -> bool:
    return all(_name(files, end) for end in (ENCODER, DECODER, TOKENS))


def _precisions(files: Files) -> list[str]:
    return ["w8" if "int8" in _name(files, ENCODER) else "fp32"]


def _arrays(files: Files, _precision: str) -> Iterator[StoredArray]:
    return stored_arrays(files, (_name(files, ENCODER), _name(files, DECODER)))


READER = Reader(_recognize, _precisions, _arrays)
