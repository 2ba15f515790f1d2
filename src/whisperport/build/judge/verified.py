"""Checkpoints whose weights this user verified: by their hashes, files are named without the checkpoint.

    $XDG_CACHE_HOME/whisperport/weights/NAME.json

`make test-official` keeps a file for each name of OpenAI's that it tests; no hashes come with whisperport.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.export.bundle_cache import cache_folder
from whisperport.build.judge.identity import array_hash, weight_hashes
from whisperport.build.layouts.reading import StoredArray
from whisperport.errors import WhisperportError
from whisperport.program.json_records import from_json, to_json
from whisperport.program.strict_json import parse
from whisperport.system.atomic import write_atomic

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

MOST_BYTES = 8 << 20  # large-v3's file has 1 MB
LEAST = 0.2  # of the weights: norms and biases, which stay as they are where matrices have 8 bits


@dataclass(frozen=True, slots=True)
class VerifiedWeights:
    """The weights of a checkpoint that was verified.

    Attributes:
        name: of the checkpoint, such as "tiny.en".
        hashes: of each form in which converters store a weight -> the names of such weights.
    """

    name: str
    hashes: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """How many weights of a verified checkpoint are in files.

    Attributes:
        name: of the checkpoint.
        n_equal: weights that are there, exactly or rounded to float16.
        n_weights: of the checkpoint.
    """

    name: str
    n_equal: int
    n_weights: int

    def __str__(self) -> str:
        if self.n_equal == self.n_weights:
            return f"the weights are those of {self.name}: all {self.n_weights} hashes are known"
        return (
            f"{self.n_equal} of {self.n_weights} weights are those of {self.name}, by their hashes; the "
            "others are changed, or rounded to 8 bits"
        )


def keep_hashes(name: str, checkpoint: "Checkpoint") -> Path:
    """Keep the hashes of a verified checkpoint in the user's cache, and return their file."""
    path = cache_folder() / "weights" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    hashes = {digest: tuple(names) for digest, names in weight_hashes(checkpoint).items()}
    write_atomic(path, json.dumps(to_json(VerifiedWeights(name, hashes))).encode())
    return path


def name_of(arrays: Iterable[StoredArray]) -> NamedWeights | None:
    """Return the verified checkpoint that has most of the stored arrays; None: none has them."""
    known = list(_kept())
    if not known:
        return None
    stored = {array_hash(array.values) for array in arrays if array.values.dtype.kind == "f"}
    counts = []
    for checkpoint in known:
        names = {name for entry in checkpoint.hashes.values() for name in entry}
        equal = {name for digest in stored for name in checkpoint.hashes.get(digest, ())}
        counts.append(NamedWeights(checkpoint.name, len(equal), len(names)))
    nearest = max(counts, key=lambda count: count.n_equal / (count.n_weights or 1))
    return nearest if nearest.n_equal >= LEAST * nearest.n_weights > 0 else None


def _kept() -> Iterator[VerifiedWeights]:
    """Yield what was kept; a file that cannot be read is left out, as if it were not there."""
    with suppress(WhisperportError):
        for path in sorted((cache_folder() / "weights").glob("*.json")):
            with suppress(WhisperportError, OSError):
                if path.is_file() and path.stat().st_size <= MOST_BYTES:  # a pipe could block
                    yield from_json(VerifiedWeights, parse(path.read_bytes(), path.name))
