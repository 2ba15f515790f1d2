"""Run one graph of an app on what the checkpoint computes, with or without tokens in the decoder's cache.

Which input takes what follows from its name or its shape. A decoder with a branch for its first run, or
with states, is run as a copy that has neither.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import ProgramError
from whisperport.system.locking import temporary_folder
from whisperport.system.progress import begin_stage
from whisperport.targets import PROFILERS
from whisperport.verification.diagnosis.recording import Recording, opened

if TYPE_CHECKING:  # torch may be missing at run time
    from whisperport.model.inspection.graph import Graph, Value

Array = NDArray[Any]
# Patterns in the name of a decoder's input -> which attention's cache it is, and which part.
CACHES = (("encoder|cross", "cross_attn"), ("past|self|decoder", "attn"))
NUMBERS = (
    "bool",
    "float16",
    "float32",
    "float64",
    *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)),
)
PARTS = (("key|(^|_)k(_|$)", "key"), ("value|(^|_)v(_|$)", "value"))


def recorded(
    path: Path, expected: Mapping[str, Array], n_cached: int, head_width: int
) -> tuple["Graph", Recording]:
    """Run a graph, and keep its values.

    Args:
        path: of the graph.
        expected: what eager torch computes.
        n_cached: tokens that the decoder finds in its cache; it reads those after them.
        head_width: of the decoder's heads.

    Returns:
        The graph that was read, and its values.

    Raises:
        ProgramError: the graph cannot be run, or has no cache.
    """
    with temporary_folder() as work:
        file = _one_run(path, work, has_cache=bool(n_cached))
        with opened(os.fspath(file)) as program:
            begin_stage(f"running {path.name}")
            graph = program.graph
            inputs = [
                _of_type(value, _input(value, expected, n_cached, head_width), path.name)
                for value in graph.inputs
            ]
            if n_cached and not any(map(cached_layer, (value.name for value in graph.inputs))):
                raise ProgramError(f"{path.name} has no cache")
            run = program.record(inputs)
            values = {name: _float32(array) for name, array in run.values.items()}
            return graph, Recording(values, tuple(map(_float32, run.outputs)))


def _input(value: "Value", expected: Mapping[str, Array], n_cached: int, head_width: int) -> Array:
    """Return an input of a graph: by its name or shape, else zeros; a cache of unknown length is empty."""
    name, shape = value.name, value.shape or ()
    if "encoder_hidden_states" in name:
        return expected["encoder.ln_post"]
    if cached := cached_layer(name):
        return cache_of(cached, shape, expected, n_cached, head_width)
    if shape == expected["encoder.ln_post"].shape:
        return expected["encoder.ln_post"]
    for mel in (expected["mel"][0], expected["mel"][0].T):
        if tuple(size for size in shape if size != 1) == mel.shape:
            return np.ascontiguousarray(mel).reshape([int(size) for size in shape])
    if value.dtype.startswith("float") and len(shape) == 3:  # its sizes may not be known
        return expected["mel"]
    if value.dtype.startswith("int") and len(shape) == 2:
        return expected["tokens"][:, n_cached:]
    if name == "cache_position":
        return np.arange(n_cached, expected["tokens"].shape[1])
    sizes = [size if isinstance(size, int) else int(place == 0) for place, size in enumerate(shape)]
    return np.full(sizes, n_cached if name == "offset" else 0)


def _of_type(value: "Value", array: Array, file: str) -> Array:
    """Return an array in the type of an input; a quantized one is given as real numbers.

    Raises:
        ProgramError: numpy has no such type.
    """
    if value.quantization is not None:
        return array
    dtype = value.dtype or "float32"
    if dtype not in NUMBERS:
        why = f"its input {value.name} is {dtype}, which numpy lacks"
        raise ProgramError(f"{file} is not run", why=why)
    return array.astype(dtype)


def _float32(array: Array) -> Array:
    """Return an array whose squares are not infinite."""
    return array.astype(np.float32) if array.dtype == np.float16 else array


def cached_layer(name: str) -> tuple[str, int | None] | None:
    """Return the layer whose output an input takes, and the block's number, or all; None: of no layer."""
    side = next((s for word, s in CACHES if re.search(word, name)), "")
    name = name.replace("key_values", "")
    part = next((p for word, p in PARTS if re.search(word, name)), "")
    if not (side and part):
        return None
    number = re.search(r"(?<!\d)\d{1,3}(?!\d)", name)
    return f"{side}.{part}", int(number[0]) if number else None


def cache_of(
    cached: tuple[str, int | None],
    shape: Sequence[int | str],
    expected: Mapping[str, Array],
    n_cached: int,
    head_width: int,
) -> Array:
    """Return the keys or values that an input of the decoder takes: (L, 1, n, d) or (1, H, n, D).

    Args:
        cached: what `cached_layer` returns.
        shape: of the input; self-attention's length may be a number, and is filled with zeros.
        expected: output of each layer.
        n_cached: tokens in the caches of self-attention.
        head_width: D.
    """
    layer, block = cached
    ends = [f"decoder.blocks.{block}.{layer}"] if block is not None else []
    ends = ends or [key for key in expected if key.endswith(f".{layer}") and key[:7] == "decoder"]
    rows = np.stack([expected[end][0] for end in ends if end in expected])
    if layer.startswith("attn."):
        rows = rows[:, :n_cached]
    if len(shape) == 4 and shape[-1] == head_width:
        n_heads = rows.shape[2] // head_width
        rows = rows.reshape(*rows.shape[:2], n_heads, head_width).transpose(0, 2, 1, 3)
    elif len(shape) == 4:
        rows = rows[:, None]
    length = shape[-2] if len(shape) > 1 else 0
    if isinstance(length, int) and length > rows.shape[-2]:
        room = [(0, 0)] * (rows.ndim - 2) + [(0, length - rows.shape[-2]), (0, 0)]
        rows = np.pad(rows, room)
    return np.ascontiguousarray(rows, np.float32)


def _one_run(path: Path, work: Path, *, has_cache: bool) -> Path:
    """Return a file, or a copy in which nothing decides whether there is a cache: no branch and no state.

    Args:
        path: of a graph.
        work: where the copy is written.
        has_cache: whether the graph is run with a cache.
    """
    own = next((profiler for profiler in PROFILERS if profiler.suffix == path.suffix), None)
    if own is not None and has_cache:
        return own.without_states(path, work)
    if path.suffix != ".onnx":
        return path
    branch = "then_branch" if has_cache else "else_branch"
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    if not any(node.op_type == "If" for node in graph.node):
        return path
    model = onnx.load(path)
    graph = model.graph
    choices = [node for node in graph.node if node.op_type == "If"]
    if len(choices) != 1:
        raise ProgramError(f"{path.name} has {len(choices)} nodes `If`")
    chosen = next(a.g for a in choices[0].attribute if a.name == branch)
    graph.node.remove(choices[0])
    graph.node.extend(chosen.node)
    graph.initializer.extend(chosen.initializer)
    for value, name in zip(chosen.output, choices[0].output, strict=True):
        graph.node.append(onnx.helper.make_node("Identity", [value.name], [name]))
    onnx.save(model, work / path.name)
    return work / path.name
