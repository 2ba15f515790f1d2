"""Load a ggml `.bin` file of whisper.cpp.

Layout, little endian: u32 magic; 11 i32: ten sizes and the type of most weights; mel filters: i32 bands,
i32 frequencies, float32; vocabulary: i32 count, for each token u32 length and bytes; then tensors to the
end of the file: i32 number of axes, length of the name, type; i32 sizes, last axis first; name; data.
Source: ggml-org/whisper.cpp@233fe1f, src/whisper.cpp and models/convert-pt-to-ggml.py.

The file keeps no merges, no decoding settings and no alignment heads. OpenAI's are used, after its tokens
were compared with OpenAI's.

`BlockType` has the sizes of a tensor type, and `dequantize` the values of a quantized one. A block of a
quantized row holds 32 values: float16 scale, for the types `_1` float16 minimum, for five bits the fifth
bits of all values (32 bits), then the lower four bits of values i and i + 16 in byte i, or one byte each.
Source: ggml-org/whisper.cpp@233fe1f, ggml/src/ggml-common.h and ggml-quants.c, dequantize_row_*.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whisperport.errors import CheckpointError, TokenizerError
from whisperport.model.checkpoint.binary_reader import HINT, BinaryReader
from whisperport.model.checkpoint.checkpoint import Checkpoint, Source, quantization_warning
from whisperport.model.checkpoint.openai_releases import alignment_heads_of_size
from whisperport.model.checkpoint.tensor_check import Shape, check_tensors, expected_shapes
from whisperport.model.checkpoint.tokenizer_files import default_tokenizer
from whisperport.program.bundle.folder import file_sha256
from whisperport.program.dims import Dims
from whisperport.program.untrusted import checked_dims, quoted, shorten
from whisperport.speech.audio.mel import mel_filters
from whisperport.speech.text.vocabulary import openai_generation, openai_text_tokens

_MAGIC = b"lmgg"  # 0x67676d6c
_SIZES = (
    "n_vocab",
    "n_audio_ctx",
    "n_audio_state",
    "n_audio_head",
    "n_audio_layer",
    "n_text_ctx",
    "n_text_state",
    "n_text_head",
    "n_text_layer",
    "n_mels",
)
HEADER_BYTES = len(_MAGIC) + 4 * (len(_SIZES) + 1)  # the last number tells the type of weights
FIRST_BLOCKS = 256
_MAX_AXES = 3  # of a convolution's weight
_FILTER_TOLERANCE = 1e-6  # openai-whisper's file of filters differs from `mel_filters` by less


def is_ggml(path: Path) -> bool:
    """Return whether a file begins as whisper.cpp's files do."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def load_ggml(path: Path, *, name: str) -> Checkpoint:
    """Load a file; `name` is the name that the user gave.

    Raises:
        CheckpointError, TokenizerError: see `load_checkpoint`.
    """
    try:
        with BinaryReader(path) as reader:
            dims = _dims(reader, path)
            _check_filters(reader, dims)
            _check_tokens(reader, dims.n_vocab)
            weights, quantized = _weights(reader, dims)
    except OSError as error:
        raise CheckpointError(f"cannot read `{path}`", why=str(error), hint=HINT) from error
    check_tensors(weights, dims, where=str(path))
    heads, whose = alignment_heads_of_size(
        n_layers=dims.n_text_layer, n_heads=dims.n_text_head, n_vocab=dims.n_vocab
    )
    warnings: tuple[str, ...] = (
        "a ggml file keeps no decoding settings and no alignment heads: OpenAI's settings are used, "
        f"and the alignment heads of {whose}",
    )
    if quantized:
        warnings = (*warnings, quantization_warning(quantized))
    return Checkpoint(
        dims=dims,
        generation=replace(openai_generation(dims.n_vocab), alignment_heads=heads),
        weights=MappingProxyType(weights),
        tokenizer_json=default_tokenizer(dims.n_vocab, where=str(path)).json,
        source=Source(
            kind="ggml",
            name=name,
            sha256=MappingProxyType({path.name: file_sha256(path)}),
            quantized=quantized,
        ),
        warnings=warnings,
    )


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Return the weights in a file, without a check of its filters and tokens.

    Raises:
        CheckpointError: the file is damaged, or is not Whisper's.
        OSError: it cannot be read.
    """
    with BinaryReader(path) as reader:
        weights, _ = _weights(reader, _before_tensors(reader, path))
    return weights


def read_sound_and_text(path: Path) -> tuple[Tensor, list[bytes]]:
    """Return the mel filters in a file, and the bytes of its tokens, without a check of either.

    Raises:
        CheckpointError: the file is damaged, or is not Whisper's.
        OSError: it cannot be read.
    """
    with BinaryReader(path) as reader:
        _dims(reader, path)
        filters = _filters(reader)
        count = reader.number("i", "the number of tokens")
        return filters, [bytes(_token(reader)) for _ in range(count)]


def read_types(path: Path) -> dict[str, int | None]:
    """Return each tensor of a model of the file's sizes -> its type in ggml; None: it is absent.

    Those in the file come first, in its order.

    Raises:
        CheckpointError: the file is damaged, or is not Whisper's.
        OSError: it cannot be read.
    """
    with BinaryReader(path) as reader:
        shapes = expected_shapes(_before_tensors(reader, path))
        types = {name: kind for name, kind, _ in _tensors(reader, shapes)}
        return types | dict.fromkeys(name for name in shapes if name not in types)


def read_blocks(path: Path) -> dict[str, NDArray[np.uint8]]:
    """Return each tensor of 8 bits -> its first blocks (n, 34), as many as `FIRST_BLOCKS` or all.

    Raises:
        CheckpointError: the file is damaged, or is not Whisper's.
        OSError: it cannot be read.
    """
    with BinaryReader(path) as reader:
        shapes = expected_shapes(_before_tensors(reader, path))
        return {
            name: stored[:FIRST_BLOCKS].numpy().copy()
            for name, kind, stored in _tensors(reader, shapes)
            if kind in BLOCK_TYPES and BLOCK_TYPES[kind].name == "Q8_0"
        }


def _before_tensors(reader: BinaryReader, path: Path) -> Dims:
    """Read what is before the tensors, without a check of filters and tokens; return the sizes."""
    dims = _dims(reader, path)
    _filters(reader)
    for _ in range(reader.number("i", "the number of tokens")):
        _token(reader)
    return dims


def _filters(reader: BinaryReader) -> Tensor:
    return reader.tensor(
        torch.float32, reader.numbers("2i", "the size of the mel filters"), "mel filters"
    )


def _dims(reader: BinaryReader, path: Path) -> Dims:
    reader.take(len(_MAGIC), "the magic number")
    numbers = reader.numbers("11i", "the sizes")
    sizes = dict(zip(_SIZES, numbers[:-1], strict=True))
    for side in ("audio", "text"):  # constant in whisper.cpp
        sizes[f"n_{side}_ffn"] = 4 * sizes[f"n_{side}_state"]
    return checked_dims(sizes, what=f"`{path}` states impossible sizes", keys={})


def _check_filters(reader: BinaryReader, dims: Dims) -> None:
    filters = _filters(reader).numpy()
    try:
        expected = mel_filters(dims.n_mels)
    except ValueError as error:
        raise reader.error(str(error)) from error
    if filters.shape != expected.shape or not np.allclose(
        filters, expected, rtol=0, atol=_FILTER_TOLERANCE
    ):
        raise reader.error(
            f"its mel filters {filters.shape} are not Whisper's for {dims.n_mels} bands",
            "a model that was trained with other mel filters is not supported",
        )


def _check_tokens(reader: BinaryReader, n_vocab: int) -> None:
    """Check that the file's tokens are OpenAI's. It may list special tokens, but need not.

    Raises:
        CheckpointError: the file is damaged.
        TokenizerError: a token differs, or OpenAI has no vocabulary of this size.
    """
    expected = openai_text_tokens(n_vocab)
    count = reader.number("i", "the number of tokens")
    if not len(expected) <= count <= n_vocab:
        raise reader.error(
            f"it lists {count} tokens; OpenAI's vocabulary has {len(expected)} for text"
        )
    for number in range(count):
        token = _token(reader)
        # The texts of special tokens differ between converters.
        if number < len(expected) and token != expected[number]:
            raise TokenizerError(
                reader.what,
                why=f"its token {number} is {quoted(bytes(token))}; OpenAI's is "
                f"{quoted(expected[number])}. The file keeps no merges to make a tokenizer of",
                hint="give the original checkpoint, with its tokenizer.json",
            )


def _token(reader: BinaryReader) -> bytearray:
    return reader.take(reader.number("I", "the length of a token"), "a token")


def _weights(reader: BinaryReader, dims: Dims) -> tuple[dict[str, Tensor], str]:
    """Return the weights, and the names of the types that they were quantized to; empty: none were."""
    weights: dict[str, Tensor] = {}
    quantized = set()
    shapes = expected_shapes(dims)
    for name, kind, stored in _tensors(reader, shapes):
        values = stored
        if form := BLOCK_TYPES.get(kind):
            quantized.add(form.name)
            values = dequantize(stored, form)
        weights[name] = values.reshape(shapes[name])
    return weights, ", ".join(sorted(quantized))


def _tensors(reader: BinaryReader, shapes: dict[str, Shape]) -> Iterator[tuple[str, int, Tensor]]:
    """Yield the name of each tensor, its type in ggml, and what is stored: values, or blocks of them."""
    names: list[str] = []
    while reader.remaining:
        n_axes, length, kind = reader.numbers("3i", "the header of a tensor")
        if not 0 <= n_axes <= _MAX_AXES:
            raise reader.error(f"a tensor has {n_axes} axes; expected at most {_MAX_AXES}")
        shape = tuple(reversed(reader.numbers(f"{n_axes}i", "a shape")))
        name = reader.text(length, "a name")
        if not length and not n_axes and not kind:
            raise reader.error(
                f"zeros follow the tensor `{(names or ['before the first'])[-1]}`, and not the "
                "next one: a download or a copy was cut off",
                "download or convert it again",
            )
        if name not in shapes:
            near = get_close_matches(name, shapes.keys() - names, n=1)
            similar = f"; one of a similar name is `{near[0]}`" if near else ""
            raise reader.error(
                f"a tensor is called `{shorten(name)}`, which Whisper does not have{similar}"
            )
        if name in names:
            raise reader.error(f"the tensor `{name}` occurs twice")
        expected = shapes[name]
        # The converter removes axes of size 1, and adds one to the biases of the convolutions.
        if [n for n in shape if n != 1] != [n for n in expected if n != 1]:
            raise reader.error(f"`{name}` has the shape {shape}; expected {expected}")
        names.append(name)
        yield name, kind, _stored(reader, kind, shape, name)


def _stored(reader: BinaryReader, kind: int, shape: Shape, name: str) -> Tensor:
    if kind in FLOATS:
        return reader.tensor(FLOATS[kind], shape, name)
    if kind not in BLOCK_TYPES:
        known = ", ".join(["F32, F16, BF16", *(known.name for known in BLOCK_TYPES.values())])
        raise reader.error(
            f"`{name}` is of ggml's type {kind}; the types that can be read are {known}",
            "give the file before it was quantized, or one of these types",
        )
    if not shape or shape[-1] % BLOCK:
        raise reader.error(f"`{name}` of shape {shape} is quantized in blocks of {BLOCK}")
    n_blocks = math.prod(shape) // BLOCK
    return reader.tensor(torch.uint8, (n_blocks, BLOCK_TYPES[kind].n_bytes), name)


BLOCK = 32  # values in a block


@dataclass(frozen=True, slots=True)
class BlockType:
    """A quantized type."""

    name: str
    bits: int
    has_minimum: bool

    @property
    def n_bytes(self) -> int:
        """Bytes of one block."""
        return 2 + 2 * self.has_minimum + self.bits * BLOCK // 8


FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
BLOCK_TYPES = {
    2: BlockType("Q4_0", 4, False),
    3: BlockType("Q4_1", 4, True),
    6: BlockType("Q5_0", 5, False),
    7: BlockType("Q5_1", 5, True),
    8: BlockType("Q8_0", 8, False),
}


def dequantize(blocks: Tensor, kind: BlockType) -> Tensor:
    """Compute the values of blocks, in float32 as ggml does.

    Args:
        blocks: (n, kind.n_bytes) uint8.
        kind: their type.

    Returns:
        (n, 32) float32.
    """
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    at = 2
    minimum = None
    if kind.has_minimum:
        minimum = blocks[:, 2:4].contiguous().view(torch.float16).float()
        at = 4
    if kind.bits == 8:
        return blocks[:, at:].contiguous().view(torch.int8).float().mul_(scale)
    fifth = None
    if kind.bits == 5:
        bits = torch.arange(8, dtype=torch.uint8)
        fifth = (blocks[:, at : at + 4, None] >> bits & 1).reshape(-1, BLOCK)
        at += 4
    low = torch.cat([blocks[:, at:] & 15, blocks[:, at:] >> 4], dim=1)
    whole = low if fifth is None else low + 16 * fifth
    if minimum is not None:
        return whole.float().mul_(scale).add_(minimum)
    return whole.float().sub_(1 << (kind.bits - 1)).mul_(scale)
