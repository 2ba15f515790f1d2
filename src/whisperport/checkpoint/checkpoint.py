"""A checkpoint in memory: what every later step is built from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from whisperport.dims import Dims
from whisperport.generation import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a checkpoint came from, for the bundle's manifest and its reports."""

    kind: Literal["huggingface", "openai"]  # the form it is stored in
    name: str  # as given: a name, a hub id, or a path
    revision: str = ""  # the hub's commit, where there is one
    sha256: Mapping[str, str]  # weight file name -> digest in hexadecimal
    licence: str = "unknown"  # weight files do not state one

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "name": self.name,
            "revision": self.revision,
            "sha256": dict(self.sha256),
            "licence": self.licence,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """Sizes, weights, tokenizer and decoding settings, in one form whatever they were stored in.

    Weights carry openai-whisper's names (`encoder.blocks.0.attn.query.weight`) and the dtype they
    were stored in: float32, float16 or bfloat16. They are views of the file where its format can be
    mapped: read them, do not write to them.
    """

    dims: Dims
    generation: Generation
    weights: Mapping[str, Tensor]
    tokenizer_json: bytes  # the contents of a `tokenizer.json`
    source: Source
    warnings: tuple[str, ...] = ()  # what was assumed or left out, one sentence each
