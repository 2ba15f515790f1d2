"""Write the folder of CTranslate2.

`model.bin`, little endian: u32 version; the name of the specification; u32 revision; u32 number of
variables; of each: name, u8 number of axes, u32 sizes, u8 dtype, u32 bytes, data; u32 number of aliases; of
each: name, name of its variable. A name is a u16 length, the text and a zero byte, which the length counts.
Source: OpenNMT/CTranslate2@0d8bcd3, python/ctranslate2/specs/model_spec.py. The reader of this format,
`whisperport.model.checkpoint.ctranslate2`, has the names of the variables.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from whisperport.build.layouts.arrays import is_half_precision, quantized_rows, weight
from whisperport.build.layouts.huggingface_files import (
    alignment_heads,
    preprocessor_config,
    tokenizer_json,
    tokens_by_id,
    write_json,
)

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

VERSION, SPECIFICATION, REVISION = 6, "WhisperSpec", 3
DTYPES = tuple(map(np.dtype, ("float32", "int8", "int16", "int32", "float16")))
GELU = 3
# Switches of CTranslate2's decoder. -1: config.json names the layers of the alignment heads.
SWITCHES: dict[str, np.signedinteger[Any]] = {
    "activation": np.int8(GELU),
    "alibi": np.int8(0),
    "alibi_use_positive_positions": np.int8(0),
    "alignment_heads": np.int16(1),
    "alignment_layer": np.int16(-1),
    "pre_norm": np.int8(1),
    "scale_alibi": np.int8(0),
    "scale_embeddings": np.int8(0),
    "start_from_zero_embedding": np.int8(0),
}

Array = NDArray[Any]


def write(checkpoint: "Checkpoint", precision: str, folder: Path) -> None:
    """Write model.bin, config.json, vocabulary.json, tokenizer.json and preprocessor_config.json.

    Args:
        checkpoint: its weights are read one at a time.
        precision: fp32, fp16 or w8: rows of 8 bits, which CTranslate2's own converter calls int8. As there,
            what has no rows is stored in float16 if the checkpoint is.
        folder: an empty folder.
    """
    with (folder / "model.bin").open("wb") as file:
        _write_model(checkpoint, precision, file)
    write_json(folder / "config.json", config(checkpoint))
    write_json(folder / "vocabulary.json", tokens_by_id(checkpoint))
    write_json(folder / "tokenizer.json", tokenizer_json(checkpoint))
    write_json(folder / "preprocessor_config.json", preprocessor_config(checkpoint.dims))


def config(checkpoint: "Checkpoint") -> dict[str, Any]:
    generation = checkpoint.generation
    return {
        "alignment_heads": alignment_heads(checkpoint),
        "lang_ids": sorted(generation.languages.values()) or None,
        "suppress_ids": sorted(generation.suppressed),
        "suppress_ids_begin": sorted(generation.suppressed_at_start),
    }


def _write_model(checkpoint: "Checkpoint", precision: str, file: BinaryIO) -> None:
    from whisperport.model.checkpoint.ctranslate2 import EMBEDDING, PROJECTION

    sources = dict(_sources(checkpoint))
    is_8_bit = {name for name in sources if precision == "w8" and name.endswith("/weight")}
    is_half = precision == "fp16" or (precision == "w8" and is_half_precision(checkpoint))
    count = len(sources) + len(is_8_bit) + len(SWITCHES) + 2
    file.write(struct.pack("<I", VERSION) + _text(SPECIFICATION))
    file.write(struct.pack("<II", REVISION, count))
    for side, heads in (
        ("encoder", checkpoint.dims.n_audio_head),
        ("decoder", checkpoint.dims.n_text_head),
    ):
        _write_variable(file, f"{side}/num_heads", np.array(heads, np.int16))
    for name, number in SWITCHES.items():
        _write_variable(file, f"decoder/{name}", np.asarray(number))
    for name in sources:
        array = _joined(checkpoint, sources[name])
        if name in is_8_bit:
            array, scale = quantized_rows(array)
            _write_variable(file, f"{name}_scale", scale)
        elif is_half:
            array = array.astype(np.float16)
        _write_variable(file, name, array)
    aliases = {PROJECTION: EMBEDDING}
    if precision == "w8":
        aliases[f"{PROJECTION}_scale"] = f"{EMBEDDING}_scale"
    file.write(struct.pack("<I", len(aliases)))
    for alias, name in aliases.items():
        file.write(_text(alias) + _text(name))


def variable_shapes(checkpoint: "Checkpoint") -> dict[str, tuple[int, ...]]:
    """Return the name of each variable of weights -> its sizes."""
    shapes = {}
    for name, parts in _sources(checkpoint):
        known = [tuple(checkpoint.weights[p].shape) for p in parts if p in checkpoint.weights]
        shapes[name] = (len(parts) * known[0][0], *known[0][1:])
    return shapes


def _sources(checkpoint: "Checkpoint") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each variable's name, and the weights that are joined in it, in openai-whisper's names."""
    from whisperport.model.checkpoint.ctranslate2 import LINEARS, POSITIONS, TOP

    for side in ("encoder", "decoder"):
        yield f"{side}/{POSITIONS}", (f"{side}.positional_embedding",)
    for name, module in TOP.items():
        for kind, last in _kinds(name):
            if f"{module}.{kind}" in checkpoint.weights:
                yield f"{name}/{last}", (f"{module}.{kind}",)
    dims = checkpoint.dims
    for side, layers in (("encoder", dims.n_audio_layer), ("decoder", dims.n_text_layer)):
        for layer in range(layers):
            for name, modules in LINEARS.items():
                if side == "encoder" and name.startswith("attention/"):
                    continue  # cross-attention
                paths = [f"{side}.blocks.{layer}.{module}" for module in modules]
                for kind, last in _kinds(name):
                    yield f"{side}/layer_{layer}/{name}/{last}", tuple(f"{p}.{kind}" for p in paths)


def _kinds(name: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return ("weight", its name in CTranslate2), and the same for "bias"."""
    norm = name.endswith("layer_norm")
    return ("weight", "gamma" if norm else "weight"), ("bias", "beta" if norm else "bias")


def _joined(checkpoint: "Checkpoint", names: tuple[str, ...]) -> Array:
    """Return weights joined along their first axis. The bias of a key, which Whisper lacks, is zero."""
    arrays = [
        weight(checkpoint, name)
        if name in checkpoint.weights
        else np.zeros(checkpoint.dims.n_audio_state, np.float32)
        for name in names
    ]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _write_variable(file: BinaryIO, name: str, array: Array) -> None:
    file.write(_text(name) + struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape))
    file.write(struct.pack("<BI", DTYPES.index(array.dtype), array.nbytes))
    file.write(np.ascontiguousarray(array).data)


def _text(text: str) -> bytes:
    data = text.encode() + b"\0"
    return struct.pack("<H", len(data)) + data
