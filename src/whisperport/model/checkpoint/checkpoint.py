"""A checkpoint in memory: sizes, weights, tokenizer and decoding settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from torch import Tensor

from whisperport.model.checkpoint.tokenizer_files import StoredTokenizer
from whisperport.program.dims import Dims
from whisperport.program.generation import Generation
from whisperport.program.json_records import Member
from whisperport.speech.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The origin of a checkpoint, recorded in the bundle's manifest and reports."""

    kind: Literal["huggingface", "openai", "ctranslate2", "ggml"]  # the format of its files
    name: str  # name, hub id or path that the user gave
    revision: str = ""  # commit on the Hugging Face hub; empty: none
    sha256: Mapping[str, str]  # weight file name -> SHA-256 digest in hexadecimal
    licence: str = "unknown"  # weight files do not state one
    # Types of integers that the weights were rounded to; empty: none.
    quantized: Annotated[str, Member(is_omitted=True)] = ""


def quantization_warning(types: str) -> str:
    """Return the warning for weights that were quantized to these types."""
    return (
        f"the weights were quantized to {types}: they are not those of the original checkpoint, and the "
        "text may differ from the original's"
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """Sizes, weights, tokenizer and decoding settings of a checkpoint, whatever its file format.

    The weights have openai-whisper's names (`encoder.blocks.0.attn.query.weight`) and the dtype of the
    file: float32, float16 or bfloat16. They may be views of a memory-mapped file: do not write to them.
    """

    dims: Dims
    generation: Generation
    weights: Mapping[str, Tensor]
    tokenizer_json: bytes  # contents of a `tokenizer.json`
    source: Source
    warnings: tuple[str, ...] = ()  # one sentence for each assumption or omission


def checkpoint_of_folder(
    folder: Path,
    dims: Dims,
    weights: dict[str, Tensor],
    tokenizer: StoredTokenizer,
    generation: Generation,
    source: Source,
    warnings: tuple[str, ...],
) -> Checkpoint:
    """Join the parts of a checkpoint, after a check that tokenizer and settings belong together.

    Raises:
        TokenizerError: they belong to different checkpoints.
    """
    Tokenizer.from_json(tokenizer.json.decode(), generation, name=f"the tokenizer in `{folder}`")
    return Checkpoint(
        dims=dims,
        generation=generation,
        weights=MappingProxyType(weights),
        tokenizer_json=tokenizer.json,
        source=source,
        warnings=tokenizer.warnings + warnings,
    )
