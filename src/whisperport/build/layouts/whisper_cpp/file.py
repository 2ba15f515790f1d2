"""Write a ggml file. Its reader, `whisperport.model.checkpoint.ggml`, describes the format."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from whisperport.build.layouts.arrays import Floats, weight
from whisperport.build.layouts.huggingface_files import text_tokens
from whisperport.program.dims import KNOWN_VOCABULARIES
from whisperport.speech.audio import mel_filters

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

MAGIC = 0x67676D6C
FILE_TYPES = {"fp16": 1, "w8": 7}
F32, F16, Q8_0 = 0, 1, 8  # types of tensors
BLOCK = 32  # values that share one scale in Q8_0
ENGLISH_ONLY = 51864
END_OF_TEXT = 50256  # of an English-only vocabulary; one more in the others
# The converter adds an axis to these, for an addition to (d, T).
CONV_BIASES = ("encoder.conv1.bias", "encoder.conv2.bias")


def unsupported(checkpoint: "Checkpoint", precision: str) -> str:
    """Return why whisper.cpp would read the file wrongly; empty: it reads it."""
    dims, end = checkpoint.dims, checkpoint.generation.end_of_text
    if dims.n_vocab not in KNOWN_VOCABULARIES:
        return (
            f"the vocabulary has {dims.n_vocab} tokens, and whisper.cpp computes the ids of special tokens "
            f"from this number: it knows {', '.join(map(str, KNOWN_VOCABULARIES))}"
        )
    expected = END_OF_TEXT + (dims.n_vocab != ENGLISH_ONLY)
    if end != expected:
        return f"<|endoftext|> is {end}; whisper.cpp takes {expected} for it"
    if dims.n_audio_ffn != 4 * dims.n_audio_state or dims.n_text_ffn != 4 * dims.n_text_state:
        return "a feed-forward block is not 4 times as wide as the model, as whisper.cpp expects"
    return ""


def write(checkpoint: "Checkpoint", precision: str, path: Path) -> None:
    """Write the file.

    Args:
        checkpoint: its weights are read one at a time.
        precision: fp16, or w8: matrices in blocks of 8 bits, which whisper.cpp calls q8_0. A file whose
            weights are all float32 ends whisper.cpp's process at the first convolution.
        path: of the file.
    """
    dims = checkpoint.dims
    filters, tokens = mel_filters(dims.n_mels), text_tokens(checkpoint)
    with path.open("wb") as file:
        file.write(
            struct.pack(
                "<I11i",
                MAGIC,
                *(dims.n_vocab, dims.n_audio_ctx, dims.n_audio_state, dims.n_audio_head),
                *(dims.n_audio_layer, dims.n_text_ctx, dims.n_text_state, dims.n_text_head),
                *(dims.n_text_layer, dims.n_mels, FILE_TYPES[precision]),
            )
        )
        file.write(struct.pack("<2i", *filters.shape) + filters.tobytes())
        file.write(struct.pack("<i", len(tokens)))
        for token in tokens:
            file.write(struct.pack("<I", len(token)) + token)
        for name in checkpoint.weights:
            _write_tensor(file, name, weight(checkpoint, name), precision)


def _write_tensor(file: BinaryIO, name: str, array: Floats, precision: str) -> None:
    if name in CONV_BIASES:
        array = array.reshape(-1, 1)
    kind, values = _stored(name, array, precision)
    file.write(struct.pack("<3i", array.ndim, len(name), kind))
    file.write(struct.pack(f"<{array.ndim}i", *reversed(array.shape)) + name.encode())
    file.write(np.ascontiguousarray(values).data)


def _stored(name: str, array: Floats, precision: str) -> tuple[int, NDArray[Any]]:
    """Return the type and the values of a tensor."""
    kind = tensor_type(name, array.shape, Q8_0 if precision == "w8" else F16)
    if kind == Q8_0:
        return kind, _blocks(array)
    return kind, array.astype(np.float16) if kind == F16 else array


def tensor_type(name: str, shape: Sequence[int], of_matrices: int) -> int:
    """Return the type of a tensor, as whisper.cpp's own tools choose it.

    Args:
        name: of the weight.
        shape: of the weight.
        of_matrices: type of those whose rows fill blocks.
    """
    if len(shape) < 2 or name in CONV_BIASES or name.endswith("positional_embedding"):
        return F32
    return of_matrices if len(shape) == 2 and shape[-1] % BLOCK == 0 else F16


def _blocks(array: Floats) -> NDArray[np.int8]:
    """Round blocks of 32 values to 8 bits: (n, 34), a float16 scale before each block.

    Source: ggml-org/whisper.cpp@233fe1f, ggml/src/ggml-quants.c, quantize_row_q8_0_ref.
    """
    blocks = array.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    rounded = np.rint(blocks / np.where(scale == 0, 1, scale)).astype(np.int8)
    return np.concatenate([scale.astype(np.float16).view(np.int8).reshape(-1, 2), rounded], axis=1)
