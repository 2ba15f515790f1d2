"""Run an encoder and a decoder of any exporter: logits for known tokens, and the text that they emit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whisperport.build.layouts.arrays import Floats
from whisperport.build.layouts.graph_pair.forms import form_of
from whisperport.build.layouts.graph_pair.pair import Pair, Part, read_pair
from whisperport.build.layouts.onnx_graph.file import open_session
from whisperport.build.layouts.reading import Files
from whisperport.errors import ProgramError

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.inspection.graph import Value

Array = NDArray[Any]
Run = Callable[[Sequence[Array]], Sequence[Array]]
"""Takes the inputs of a graph in its order, and returns the outputs."""
MASKED = -100.0  # in a mask of real numbers, as the scripts write it; 1 in one of integers


def logits(
    path: Path,
    _precision: str,
    mel: Floats,
    tokens: Sequence[int],
    n_prompt: int,
    _caches: dict[str, Floats],
) -> Floats:
    """Return the logits (S, V) after each of S tokens.

    Args:
        path: of the folder, or of the only file.
        mel: (n_mels, 2T), of any T: what a shorter window does not take is cut.
        tokens: the prompt, and the text after it.
        n_prompt: how many a run decodes first, if a graph reads any number.
    """
    return Text(Opened(path), mel).logits(tokens, n_prompt)


def emitted(
    path: Path, mels: Sequence[Floats], prompt: Sequence[int], end: int, limit: int
) -> list[list[int]]:
    """Return the tokens that the graphs emit for each spectrogram, without the prompt and the end.

    Args:
        path: of the folder, or of the only file.
        mels: each (n_mels, 2T).
        prompt: the tokens that each text begins with.
        end: the token that ends a text.
        limit: the most tokens of a text, with its prompt; a graph may take fewer.
    """
    graphs = Opened(path)
    return [Text(graphs, mel).greedy(prompt, end, limit) for mel in mels]


class Opened:
    """The graphs of a pair, opened by the runtimes of their formats."""

    def __init__(self, path: Path) -> None:
        """Open them.

        Raises:
            ProgramError: the folder lacks something that the decoder needs.
        """
        pair = read_pair(Files(path))
        if pair is None:
            raise ProgramError(f"{path} has no encoder and decoder")
        self.pair, self.form = pair, form_of(pair)
        self.encode, self.decode = _opened(path, pair.encoder), _opened(path, pair.decoder)
        self.table = None if pair.of("tokens") else _embeddings(path, pair)


class Text:
    """One text of a pair: the arrays that the audio gives, and what the decoder has read."""

    def __init__(self, graphs: Opened, mel: Floats) -> None:
        """Run the encoder."""
        pair = self.pair = graphs.pair
        self.form, self._run, self._table = graphs.form, graphs.decode, graphs.table
        self._audio = _by_name(pair, graphs.encode([_window(pair, mel)]))
        self._caches = {value.name: _zeros(value) for value in pair.of("cache")}
        self._n_read = 0

    def logits(self, tokens: Sequence[int], n_prompt: int) -> Floats:
        """Return the logits (S, V) after each of S tokens, the first of this text."""
        if self._one_by_one:
            return np.concatenate([self._next([token]) for token in tokens])
        if not self.pair.of("cache"):
            return self._next(tokens)
        runs = [tokens[:n_prompt], *([token] for token in tokens[n_prompt:])]
        return np.concatenate([self._next(new) for new in runs])

    def greedy(self, prompt: Sequence[int], end: int, limit: int) -> list[int]:
        """Return the most probable tokens, one after the other, to the end of the text or its limit."""
        if self.form.rolls and self.pair.n_new:
            return self._rolling(prompt, end, limit)
        most = min(limit, self.pair.n_tokens or limit)
        tokens = list(prompt)
        row = self.logits(tokens, len(tokens))[-1]
        while len(tokens) < most and (best := int(row.argmax())) != end:
            tokens.append(best)
            row = self._next([best] if self._one_by_one or self._caches else tokens)[-1]
        return tokens[len(prompt) :]

    @property
    def _one_by_one(self) -> bool:
        return self.pair.n_new == 1

    def _rolling(self, prompt: Sequence[int], end: int, limit: int) -> list[int]:
        """Decode as a demo does whose decoder reads the last logits of a fixed number of tokens."""
        size, n_prompt = self.pair.n_new, len(prompt)
        window, place = list(prompt) * (size // n_prompt), size
        tokens: list[int] = []
        while len(tokens) < limit - n_prompt:
            best = int(self._next(window)[-1].argmax())
            if best == end:
                break
            tokens.append(best)
            place = max(n_prompt, place - 1)
            window = [*window[:place], *window[place + 1 :], best]
        return tokens

    def _next(self, tokens: Sequence[int]) -> Floats:
        """Run the decoder on tokens; return the logits (n, V) after each."""
        arrays = {**self._audio, **self._caches}
        for value in self.pair.decoder.graph.inputs:
            if value.name not in arrays:
                arrays[value.name] = self._input(value, tokens)
        inputs = self.pair.decoder.graph.inputs
        outputs = self._run([arrays[v.name].astype(_dtype(v), copy=False) for v in inputs])
        by_name = dict(zip((v.name for v in self.pair.decoder.graph.outputs), outputs, strict=True))
        for value, new in self.pair.caches:
            self._caches[value.name] = self._with(arrays[value.name], by_name[new.name])
        self._n_read += len(tokens)
        rows = [_rows(by_name[value.name], value) for value in self.pair.logits]
        return np.concatenate(rows, axis=1)[: len(tokens)].astype(np.float32)

    def _input(self, value: "Value", tokens: Sequence[int]) -> Array:
        role, shape = self.pair.roles[value.name], _sizes(value)
        if role in ("tokens", "embeddings"):
            ids = np.zeros((1, self.pair.n_new or len(tokens)), np.int64)
            ids[0, : len(tokens)] = tokens
            return ids if self._table is None else self._table[ids]
        if role == "position":
            return np.full(shape, self._n_read)
        if role == "mask":
            return self._mask(shape, is_integer="int" in value.dtype)
        raise ProgramError(
            f"the decoder's input {value.name} is not known here",
            why=f"it has the shape {list(shape)}",
        )

    def _mask(self, shape: Sequence[int], *, is_integer: bool) -> Array:
        """Return which of N cached tokens, and of the new one, are not seen.

        A graph that returns its whole cache has moved it by one: the newest token is the last one.
        """
        size, cached = shape[-1], self.pair.cached
        places = np.arange(size)
        if self.pair.moves_cache and size == cached + 1:
            seen = places >= size - 1 - self._n_read
        else:
            seen = (places < self._n_read) | (places == cached)
        return np.broadcast_to(np.where(seen, 0, 1 if is_integer else MASKED), shape)

    def _with(self, cache: Array, new: Array) -> Array:
        """Return a cache with what a run returned: the whole cache, or the rows of the new tokens."""
        if new.shape == cache.shape or 0 in cache.shape:
            return new
        axis = next(
            a for a, (n, m) in enumerate(zip(cache.shape, new.shape, strict=True)) if n != m
        )
        if not self.pair.cached:  # of any length: it grows
            return new
        cache = cache.copy()
        place = [slice(None)] * cache.ndim
        place[axis] = slice(self._n_read, self._n_read + new.shape[axis])
        cache[tuple(place)] = new
        return cache


def _opened(path: Path, part: Part) -> Run:
    file = path / part.file
    if part.suffix == ".onnx":
        session = open_session(file)
        names = [value.name for value in part.graph.inputs]
        return lambda arrays: session.run(None, dict(zip(names, arrays, strict=True)))
    if part.suffix == ".tflite":
        from whisperport.targets.tflite.runner import run_keeping

        return lambda arrays: run_keeping(file, arrays, {})[1]
    from whisperport.targets.cpu.xnnpack.runtime import load_program, start_runtime

    method = load_program(start_runtime(1), file).load_method(part.method)

    def run(arrays: Sequence[Array]) -> Sequence[Array]:
        from torch import from_numpy

        tensors = [from_numpy(np.ascontiguousarray(array)) for array in arrays]
        return [output.numpy().copy() for output in method.execute(tensors)]

    return run


def _window(pair: Pair, mel: Floats) -> Array:
    """Return the first window of a spectrogram (n_mels, 2T), with the axes that the encoder reads."""
    value = pair.encoder.graph.inputs[0]
    window = mel[:, : pair.n_frames or None]
    rank = len(value.shape or ())
    if pair.mel_axis == rank - 1:
        window = window.T
    shape = (1, *window.shape) if rank == 3 else (1, window.shape[0], 1, window.shape[1])
    if rank == 4 and pair.mel_axis == rank - 1:
        shape = (1, 1, *window.shape)
    return np.ascontiguousarray(window.reshape(shape)).astype(_dtype(value))


def _by_name(pair: Pair, outputs: Sequence[Array]) -> dict[str, Array]:
    """Return the decoder's inputs that the encoder returned: by their names, else in their order."""
    read = [*pair.of("features"), *pair.of("cross")]
    names = [value.name for value in pair.encoder.graph.outputs]
    returned = dict(zip(names, outputs, strict=True))
    if all(value.name in returned for value in read):
        return {value.name: returned[value.name] for value in read}
    return {value.name: array for value, array in zip(read, outputs, strict=False)}


def _embeddings(path: Path, pair: Pair) -> Array:
    """Return the table (V, d) of the host, which lies beside the graphs."""
    for name in pair.further_files:
        if name.endswith(".npy"):
            table: Array = np.load(path / name, allow_pickle=False)
            if table.ndim == 2 and len(table) == pair.n_vocab:
                return table
    raise ProgramError(
        "the decoder reads embeddings, and the folder has no table of them",
        why=f"an .npy file of {pair.n_vocab} rows is needed",
    )


def _rows(array: Array, value: "Value") -> Array:
    """Return logits (n, V) of an output, whatever the order of its axes."""
    axis = int(np.argmax(array.shape))
    return np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])


def _zeros(value: "Value") -> Array:
    return np.zeros(
        [size if isinstance(size, int) else 0 for size in value.shape or ()], _dtype(value)
    )


def _sizes(value: "Value") -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else 1 for size in value.shape or ())


def _dtype(value: "Value") -> str:
    # A quantized tensor of a .tflite file is given as real numbers.
    return "float32" if value.quantization is not None else value.dtype
