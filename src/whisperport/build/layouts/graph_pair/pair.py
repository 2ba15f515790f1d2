"""An encoder and a decoder as graphs of any exporter: what each tensor is, found by shapes and types.

Names follow no app, so a tensor's role follows from what only this role can have: the encoder has one input
with as many rows as Whisper's spectrograms; what it returns, the decoder reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from whisperport.build.layouts.reading import Files, pte_methods

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.inspection.graph import Graph, Value

Role = Literal["tokens", "embeddings", "features", "cross", "cache", "mask", "position", "other"]
N_MELS = (80, 128)
MOST_GRAPHS = 16  # in a folder
LEAST_TOKENS = (
    1000  # of a vocabulary: no other axis of a decoder's outputs is as long as its longest
)


@dataclass(frozen=True, slots=True)
class Part:
    """One graph.

    Attributes:
        file: relative to the folder; empty: it is the only file.
        suffix: of the file.
        method: of a `.pte`; empty: other formats have no methods.
        graph: what it computes.
    """

    file: str
    suffix: str
    method: str
    graph: "Graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An encoder, the decoder that reads what it returns, and what their tensors are.

    Attributes:
        encoder: from a spectrogram to features, or to keys and values of the cross-attention.
        decoder: from tokens, or their embeddings, to logits.
        roles: input of the decoder -> its role.
        further_files: of the folder, those that hold neither.
    """

    encoder: Part
    decoder: Part
    roles: dict[str, Role]
    further_files: tuple[str, ...] = ()

    @property
    def mel_axis(self) -> int:
        """The axis of the encoder's input that counts mel bins."""
        return _mel_axis(self.encoder.graph.inputs[0]) or 0

    @property
    def n_mels(self) -> int:
        """Mel bins."""
        return int(_shape(self.encoder.graph.inputs[0])[self.mel_axis])

    @property
    def n_frames(self) -> int:
        """Frames of the encoder's window; 0: any."""
        shape = _shape(self.encoder.graph.inputs[0])
        axes = [size for axis, size in enumerate(shape) if axis not in (0, self.mel_axis)]
        sizes = [size for size in axes if isinstance(size, int) and size > 1]
        return max(sizes, default=0)

    @property
    def logits(self) -> "tuple[Value, ...]":
        """The outputs of the decoder that are logits: several, if each has a part of the vocabulary."""
        return _logits(self.decoder.graph)

    @property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        return sum(_longest(value) for value in self.logits)

    @property
    def n_new(self) -> int:
        """Tokens that one run of the decoder reads; 0: any number."""
        (value,) = self.of("tokens") or self.of("embeddings")[:1]
        shape = _shape(value)
        size = shape[-1] if self.of("tokens") else shape[-2]
        return size if isinstance(size, int) else 0

    @property
    def caches(self) -> "list[tuple[Value, Value]]":
        """The caches of self-attention: each input with the output that belongs to it."""
        logits = set(self.logits)
        returned = [value for value in self.decoder.graph.outputs if value not in logits]
        return list(zip(self.of("cache"), returned, strict=False))

    @property
    def moves_cache(self) -> bool:
        """Whether the decoder returns each cache as it reads it: moved by one, the newest token last."""
        return all(value.shape == new.shape for value, new in self.caches)

    @property
    def cached(self) -> int:
        """Tokens that a cache holds; 0: there is none, or it is inside of the graph."""
        masks = {_longest(mask) for mask in self.of("mask")}
        for value, new in self.caches:
            shape, returned = _shape(value), _shape(new)
            by_length = [a for a, b in zip(shape, returned, strict=False) if a != b]
            candidates = by_length or [
                a for a in shape if isinstance(a, int) and {a, a + 1} & masks
            ]
            if candidates and isinstance(candidates[0], int):
                return candidates[0]
        return 0

    @property
    def holds_state(self) -> bool:
        """Whether the decoder reads one token and its place, and keeps the cache inside."""
        return self.n_new == 1 and not self.of("cache") and bool(self.of("position"))

    @property
    def n_tokens(self) -> int:
        """The longest text, with its prompt; 0: no limit is known."""
        if self.of("cache"):
            return self.cached + 1 if self.cached else 0
        return 0 if self.holds_state else self.n_new

    def of(self, role: Role) -> "list[Value]":
        """Return the decoder's inputs of a role, in its order."""
        return [value for value in self.decoder.graph.inputs if self.roles[value.name] == role]


def read_pair(files: Files) -> Pair | None:
    """Find an encoder and its decoder in a folder, or in a file that holds both; None: there are none.

    Raises:
        ProgramError: a graph is damaged.
        MissingPackageError: the reader of a format is not installed.
    """
    parts = list(islice(_parts(files), MOST_GRAPHS))
    encoders = [part for part in parts if _is_encoder(part.graph)]
    decoders = [part for part in parts if _is_decoder(part.graph)]
    pairs = [
        (sum(role in ("features", "cross") for role in roles.values()), encoder, decoder, roles)
        for encoder in encoders
        for decoder in decoders
        if (roles := _roles(encoder.graph, decoder.graph))
    ]
    if not pairs:
        return None
    _, encoder, decoder, roles = max(pairs, key=lambda pair: pair[0])
    names = _names(files)
    further_files = tuple(name for name in names if name not in (encoder.file, decoder.file))
    return Pair(encoder=encoder, decoder=decoder, roles=roles, further_files=further_files)


def _names(files: Files) -> list[str]:
    if files.path.is_file():
        return [""]
    paths = list(files.path.glob("*"))
    for folder in [path for path in paths if path.is_dir() and not path.is_symlink()]:
        paths += folder.glob("*")
    return sorted(path.relative_to(files.path).as_posix() for path in paths if path.is_file())


def _parts(files: Files) -> Iterator[Part]:
    graphs = [(name, (files.path / name).suffix) for name in _names(files)]
    graphs = [(name, suffix) for name, suffix in graphs if suffix in (*READERS, ".pte")]
    for name, suffix in graphs[:MOST_GRAPHS]:
        if suffix == ".pte":
            for method in files.read(name, pte_methods).values():
                yield Part(name, suffix, method.name, method.graph)
        else:
            yield Part(name, suffix, "", files.read(name, READERS[suffix]))


def _onnx(path: Path) -> "Graph":
    from whisperport.model.inspection.read_onnx import read_onnx

    return read_onnx(path)


def _tflite(path: Path) -> "Graph":
    from whisperport.model.inspection.read_tflite import read_tflite

    first, *_ = read_tflite(path)  # the interpreter runs it
    return first


READERS = {".onnx": _onnx, ".tflite": _tflite}


def _is_encoder(graph: "Graph") -> bool:
    if len(graph.inputs) != 1 or not graph.outputs:
        return False
    (value,) = graph.inputs
    return _mel_axis(value) is not None and not _is_integer(value)


def _is_decoder(graph: "Graph") -> bool:
    return len(graph.inputs) > 1 and any(_longest(v) >= LEAST_TOKENS for v in _logits(graph))


def _mel_axis(value: "Value") -> int | None:
    """Return the axis of mel bins; None: it is no spectrogram (1, n_mels, 2T) of rank 3 or 4."""
    shape = _shape(value)
    if len(shape) not in (3, 4):
        return None
    axes = [axis for axis, size in enumerate(shape) if axis and size in N_MELS]
    return axes[0] if axes else None


def _logits(graph: "Graph") -> "tuple[Value, ...]":
    """Return the output with the longest axis, and those that are as long up to one element."""
    longest = max(map(_longest, graph.outputs), default=0)
    return tuple(value for value in graph.outputs if _longest(value) >= longest - 1)


def _roles(encoder: "Graph", decoder: "Graph") -> dict[str, Role]:
    """Return the role of each input of a decoder; empty: it cannot be that of a decoder of Whisper."""
    if len({value.name for value in decoder.inputs}) < len(decoder.inputs):
        return {}
    ids = next((v for v in decoder.inputs if _is_integer(v) and len(_shape(v)) > 1), None)
    shapes = {_shape(value) for value in encoder.outputs}
    # Methods of a .pte number their values: equal names mean nothing there.
    returned = {(value.name, _shape(value)) for value in encoder.outputs}
    by_name = any((value.name, _shape(value)) in returned for value in decoder.inputs)
    roles: dict[str, Role] = {}
    reads_tokens = ids is not None
    for value in decoder.inputs:
        shape = _shape(value)
        is_read = (value.name, shape) in returned if by_name else shape in shapes
        if value is ids:
            roles[value.name] = "tokens"
        elif is_read:
            roles[value.name] = "features" if len(encoder.outputs) == 1 else "cross"
        elif all(size == 1 for size in shape):
            roles[value.name] = "position"
        elif all(size == 1 for size in shape[:-1]) and (_is_integer(value) or len(shape) != 3):
            roles[value.name] = "mask"
        elif _is_integer(value):
            roles[value.name] = "other"
        elif len(shape) == 3 and not reads_tokens:
            roles[value.name], reads_tokens = "embeddings", True
        else:
            roles[value.name] = "cache"
    return roles if reads_tokens else {}


def _is_integer(value: "Value") -> bool:
    return value.dtype in ("int32", "int64")


def _shape(value: "Value") -> tuple[int | str, ...]:
    return value.shape or ()


def _longest(value: "Value") -> int:
    return max((size for size in _shape(value) if isinstance(size, int)), default=0)
