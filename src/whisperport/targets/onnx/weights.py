"""Share the weights of several ONNX programs of a bundle in memory, for all of their sessions.

By default each session of ONNX Runtime has its own weights: converted from float16, and packed for its
matrix multiplications. `step`, every `prefill` and `align` use the weights of the same decoder, which
would be in memory once per program. This module reads the tensors into arrays that all sessions use
without packing, in blocks of columns. A matrix multiplication with one token, as in `step`, is as fast as
with packing; those of a prefill are slower, once per window.

`OwnWeights` are those of one program, which ONNX Runtime packs. A multiplication of several rows by shared
weights copies them in every run. That is once per window for a prompt, but once per token for `step_B`:
with packed weights it takes 0.65 of the time for tiny, base and small. So it has a packed copy, which is
made only if several texts are decoded together. Without packing, ONNX Runtime expands weights of 8 bits in
every run, so their programs have packed copies too, of a quarter of the bytes.
"""

import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import BundleError
from whisperport.program.bundle.onnx_graph import EXTERNAL, OnnxGraph, external_entries
from whisperport.program.spec import ProgramSpec
from whisperport.system.memory import Memory
from whisperport.targets.onnx.any_tokens import with_any_tokens
from whisperport.targets.onnx.attention import join_attention
from whisperport.targets.onnx.audio_length import free_audio
from whisperport.targets.onnx.blocks import Matrix, matrices, use_blocks
from whisperport.targets.onnx.graph import FLOAT, HALF, cache_axes, free_caches
from whisperport.targets.onnx.rounded_audio import Rounding, read_in_8_bits

PART = 2**16  # values that are read together
IN_PLACE = "session.use_external_initializer_file_buffers_directly"
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
MIN_SHARED = 0.5  # shared part of a program's weights; below it, packed copies are better


class _Location(NamedTuple):
    """Where a tensor is stored on disk."""

    file: Path  # a listed file, with links resolved
    offset: int
    length: int  # bytes
    half: bool  # float16, which the graph converts to float32

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float16 if self.half else np.float32)

    @property
    def values(self) -> int:
        """Number of values."""
        return self.length // self.dtype.itemsize


class OnnxWeights:
    """The weights of the programs that have most of their weights in common, read when first needed."""

    def __init__(self, graphs: Sequence[OnnxGraph], *, any_audio: bool = False) -> None:
        """Find the programs that share weights.

        Args:
            any_audio: whether programs without shared weights read audio of any length.

        Raises:
            BundleError: a graph cannot be read, or refers to a file that is not part of its program.
        """
        if len(graphs) < 2:  # there is nothing to share
            graphs = []
        used = {graph: locations for graph in graphs if (locations := _locations(graph))}
        users = Counter(
            location for locations in used.values() for location in set(locations.values())
        )
        self._arrays: dict[_Location, NDArray[np.float32]] = {}
        self._sharing: dict[OnnxGraph, Mapping[str, _Location]] = {}
        for graph, locations in used.items():
            common = sum(location.length for location in locations.values() if users[location] > 1)
            if common > MIN_SHARED * sum(location.length for location in locations.values()):
                self._sharing[graph] = locations
        self._blocked = _blocked(self._sharing)
        self._memory = Memory()
        self._any_audio = any_audio
        self._free_axes: dict[OnnxGraph, Mapping[str, int]] = {}

    def __contains__(self, graph: OnnxGraph) -> bool:
        """Whether the program shares its weights with others."""
        return graph in self._sharing

    def free_axes(self, graph: OnnxGraph) -> Mapping[str, int]:
        """Return the free axes of the model that `session_model` returned for a graph: name -> axis."""
        return self._free_axes[graph]

    def session_model(self, graph: OnnxGraph, settings: Any) -> bytes | str:
        """Return what a session loads: the graph as it is faster on a CPU, or the path of its file.

        If the program shares its weights, the session uses the memory of this object, which must live as
        long as the session.

        Args:
            settings: an `onnxruntime.SessionOptions`, which is changed.

        Raises:
            ValueError, OSError: a file of weights is missing or too short.
        """
        model = graph.detach()
        changed = join_attention(model) | free_caches(model)
        self._free_axes[graph] = cache_axes(model)
        if self._any_audio and graph not in self and (axes := free_audio(model)):
            self._free_axes[graph], changed = axes, True
        if graph in self:
            self._share(model, self._sharing[graph], settings)
        elif changed:
            settings.add_session_config_entry(WEIGHTS_FOLDER, os.fspath(graph.path.parent))
        else:
            return os.fspath(graph.path)
        serialized: bytes = model.SerializeToString()
        return serialized

    def _share(self, model: Any, locations: Mapping[str, _Location], settings: Any) -> None:
        """Make a graph use the arrays of this object, and put these into the session's settings."""
        widened = _widened(model)
        files, blocked = {}, {}
        for tensor in model.graph.initializer:
            if tensor.name not in locations:
                continue
            location = locations[tensor.name]
            array = self._array(location).reshape(-1).view(np.uint8)
            file = f"{location.offset} of {location.file.name}"  # for the session, each tensor is a file
            files[file] = array
            del tensor.external_data[:]
            tensor.external_data.add(key="location", value=file)
            tensor.external_data.add(key="length", value=str(array.nbytes))
            tensor.data_type, tensor.name = FLOAT, widened.get(tensor.name, tensor.name)
            if location in self._blocked:
                blocked[tensor.name] = self._blocked[location]
                tensor.dims[:] = self._array(location).shape
        nodes = [node for node in model.graph.node if not widened.keys() & set(node.input)]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        use_blocks(model, blocked)
        settings.add_session_config_entry("session.disable_prepacking", "1")
        settings.add_session_config_entry(IN_PLACE, "1")
        settings.add_external_initializers_from_files_in_memory(
            list(files), list(files.values()), [array.nbytes for array in files.values()]
        )

    def _array(self, location: _Location) -> NDArray[np.float32]:
        if location not in self._arrays:
            if location.offset + location.length > location.file.stat().st_size:
                raise ValueError(f"{location.file.name} is truncated")
            matrix = self._blocked.get(location)
            array = self._memory.array(matrix.in_blocks_shape if matrix else (location.values,))
            _read(location, matrix, array)
            self._arrays[location] = array
        return self._arrays[location]


def _read(location: _Location, matrix: Matrix | None, read: NDArray[np.float32]) -> None:
    """Read a tensor to an array as float32, and in blocks if it is a matrix.

    It is read in small parts, so that there is no second large array, whose memory the process would keep.
    """
    columns = matrix.columns if matrix else 1
    rows, step = location.values // columns, max(1, PART // columns)
    with location.file.open("rb") as file:
        file.seek(location.offset)
        for row in range(0, rows, step):
            part = np.fromfile(file, location.dtype, min(step, rows - row) * columns)
            if matrix:
                read[:, row : row + step] = matrix.in_blocks(part)
            else:
                read[row : row + step] = part


def _blocked(used: Mapping[OnnxGraph, Mapping[str, _Location]]) -> dict[_Location, Matrix]:
    """Return the weights that every one of these graphs can use in blocks."""
    blocked: dict[_Location, Matrix | None] = {}
    for graph, locations in used.items():
        model = graph.read()
        widened = _widened(model)
        names = {widened.get(name, name): location for name, location in locations.items()}
        usable = matrices(model, {name: location.values for name, location in names.items()})
        for name, location in names.items():
            matrix = usable.get(name)
            if blocked.setdefault(location, matrix) != matrix:
                blocked[location] = None
    return {location: matrix for location, matrix in blocked.items() if matrix}


def _locations(graph: OnnxGraph) -> dict[str, _Location]:
    """Return name -> location of all tensors in other files.

    Empty if one of them is not an initializer or is not used as float32.
    """
    model = graph.read()
    widened = _widened(model)
    locations = {}
    stored = list(_stored_outside(model))
    if len(stored) < len(graph.external_tensors()):
        return {}
    for tensor in stored:
        entries = external_entries(tensor)
        length = entries.get("length", "")
        if not length or not (tensor.data_type == FLOAT or tensor.name in widened):
            return {}
        locations[tensor.name] = _Location(
            graph.external_file(entries["location"]),
            int(entries.get("offset", "0")),
            int(length),
            tensor.name in widened,
        )
    return locations


def _widened(model: Any) -> dict[str, str]:
    """Return the float16 tensors that only a Cast to float32 uses: name -> name of the Cast's output."""
    uses = Counter(name for node in model.graph.node for name in node.input)
    half = {t.name for t in _stored_outside(model) if t.data_type == HALF and uses[t.name] == 1}
    casts = (node for node in model.graph.node if node.op_type == "Cast")
    return {
        node.input[0]: node.output[0]
        for node in casts
        if len(node.input) == len(node.output) == 1
        and half.issuperset(node.input)
        and [a.i for a in node.attribute] == [FLOAT]
    }


def _stored_outside(model: Any) -> Iterator[Any]:
    return (tensor for tensor in model.graph.initializer if tensor.data_location == EXTERNAL)


# Bytes of weights for which a copy is made; Whisper small has 0.6 GB in float32, 0.16 GB in 8 bits.
LARGEST = 2**30


class OwnWeights:
    """A program's graph, the files of its weights, and its session.

    A session that is made when the bundle is loaded maps each tensor while it packs it. For one that is
    made when it is first used, the files are mapped now, so that a bundle which is replaced meanwhile does
    not matter.
    """

    def __init__(
        self,
        graph: OnnxGraph,
        spec: ProgramSpec,
        *,
        later: bool = True,
        rounding: Rounding | None = None,
        any_audio: bool = False,
    ) -> None:
        """Read the graph.

        Args:
            spec: signature of the program.
            later: whether its session is made when it is first used.
            rounding: reads keys and values of the audio in 8 bits, if the graph allows it; None: they stay
                in float32.
            any_audio: whether the program reads audio of any length, if the graph allows it.

        Raises:
            BundleError: it or a file of weights cannot be read, or is not part of its program.
        """
        self.later, self._folder = later, os.fspath(graph.path.parent)
        self._files: dict[str, mmap.mmap] = {}
        self.packed_bytes = 0  # of all weights as the session has them
        for tensor in graph.external_tensors():
            entries = external_entries(tensor)
            widening = 2 if tensor.data_type == HALF else 1
            self.packed_bytes += widening * int(entries.get("length", "0"))
            if later and entries["location"] not in self._files:
                self._files[entries["location"]] = _mapped(graph, entries["location"])
        model = self._changed(graph, spec)
        self._free_axes = (free_audio(model) if any_audio else {}) or cache_axes(model)
        self.rounding = rounding
        self.rounded = read_in_8_bits(model, spec) if rounding else ()  # names of inputs
        self._model: bytes = model.SerializeToString()
        self._lock = Lock()  # held while the session is made
        self._made: Any = None

    def _changed(self, graph: OnnxGraph, spec: ProgramSpec) -> Any:
        """Return the parsed graph as it is faster on a CPU."""
        model = graph.detach()
        join_attention(model)
        free_caches(model)
        return model

    def session(self, load: Callable[[], Any]) -> Any:
        """Return the session, which `load` makes of these weights in the first call."""
        with self._lock:
            if self._made is None:
                self._made = load()
                self._model = b""
                for file in self._files.values() if hasattr(mmap, "MADV_DONTNEED") else ():
                    file.madvise(mmap.MADV_DONTNEED)  # most weights have packed copies now
            return self._made

    def free_axes(self, _graph: OnnxGraph) -> Mapping[str, int]:
        """Return the free axes of the model that `session_model` returns: name -> axis."""
        return self._free_axes

    def session_model(self, _graph: OnnxGraph, settings: Any) -> bytes:
        """Return what a session loads.

        Args:
            settings: an `onnxruntime.SessionOptions`, which is changed.
        """
        settings.add_session_config_entry(WEIGHTS_FOLDER, self._folder)
        if self._files:
            arrays = [np.frombuffer(file, np.uint8) for file in self._files.values()]
            settings.add_session_config_entry(IN_PLACE, "1")
            settings.add_external_initializers_from_files_in_memory(
                list(self._files), arrays, [array.nbytes for array in arrays]
            )
        return self._model


class JoinedWeights(OwnWeights):
    """The weights of `step` and every `prefill_P`, which one session runs; see `any_tokens`.

    The graph is that of the program with the most tokens, one of those that are `same_but_for_tokens`.
    """

    def _changed(self, graph: OnnxGraph, spec: ProgramSpec) -> Any:
        return with_any_tokens(graph, spec)


def _mapped(graph: OnnxGraph, location: str) -> mmap.mmap:
    """Map a file of weights to memory.

    Raises:
        BundleError: it cannot be read, or is empty.
    """
    try:
        with graph.external_file(location).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file is a ValueError
        raise BundleError(
            f"cannot read the weights of {graph.name}",
            why=str(error),
            hint="export the bundle again",
        ) from error
