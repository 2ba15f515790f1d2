"""The matrices of an adapter of PEFT, and programs that run with them; see `program/low_rank.py`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import final

import numpy as np

from whisperport.errors import CheckpointError, UsageError
from whisperport.program.adapter_settings import (
    A,
    Adapter,
    B,
    module_and_part,
    read_adapter,
    weight_file,
)
from whisperport.program.bundle import Manifest
from whisperport.program.dims import Dims
from whisperport.program.low_rank import (
    LORA_A,
    LORA_B,
    AdaptedLayer,
    LowRank,
    adapted_layers,
    is_adapter_input,
    without_adapter,
)
from whisperport.program.program_kind import CROSS_KV, ENCODER, STEP, kind_of
from whisperport.program.runner import Array, Binding, Part, Runner
from whisperport.program.untrusted import shorten
from whisperport.runtime.engine.scores import Floats
from whisperport.system.memory import Memory, room

MOST_LISTED = 4  # faults in a message
_EXPORT = "merge it: `whisperport export BASE --adapter FOLDER`"


@dataclass(frozen=True, eq=False)
class AdapterMatrices:
    """The matrices of an adapter, padded to the rank of a bundle's programs.

    Attributes:
        name: for messages.
        layers: layer -> A (1, in, R) and B (1, R, out), C-contiguous; B has the adapter's scale. Layers
            that the adapter does not change have zeros.
    """

    name: str
    layers: Mapping[str, tuple[Floats, Floats]]

    def inputs(self, program: str, dims: Dims, low_rank: LowRank) -> dict[str, Array]:
        """Return the arrays of a program's inputs `lora_a_i` and `lora_b_i`, by name."""
        layers = adapted_layers(kind_of(program), dims, low_rank)
        pairs = [self.layers[layer.name] for layer in layers]
        return {
            **{f"{LORA_A}_{i}": a for i, (a, _) in enumerate(pairs)},
            **{f"{LORA_B}_{i}": b for i, (_, b) in enumerate(pairs)},
        }


def all_layers(dims: Dims, low_rank: LowRank) -> tuple[AdaptedLayer, ...]:
    """Return the layers of all programs that an adapter may change."""
    kinds = (ENCODER, CROSS_KV, STEP)
    return tuple(layer for kind in kinds for layer in adapted_layers(kind_of(kind), dims, low_rank))


def padded_matrices(
    name: str,
    dims: Dims,
    low_rank: LowRank,
    known: Callable[[AdaptedLayer], tuple[Array, Array] | None],
) -> AdapterMatrices:
    """Return matrices for all layers, padded with zeros.

    Args:
        name: of the adapter.
        dims: sizes of the model.
        low_rank: what the bundle's programs take.
        known: A (in, r) and B (r, out) of a layer, r up to `low_rank.rank`; None: the layer is not adapted.
    """
    every, rank = all_layers(dims, low_rank), low_rank.rank
    shapes = {e.name: ((1, e.n_inputs, rank), (1, rank, e.n_outputs)) for e in every}
    pairs = {each.name: pair for each in every if (pair := known(each)) is not None}
    # One block: many small arrays, made while a file is read, would leave gaps.
    memory = Memory(sum(room(shape) for layer in pairs for shape in shapes[layer]))
    layers: dict[str, tuple[Floats, Floats]] = {}
    for layer, both in shapes.items():
        if layer not in pairs:
            layers[layer] = _zeros(both[0]), _zeros(both[1])
            continue
        a, b = map(memory.array, both)
        a[...], b[...] = 0, 0
        own = len(pairs[layer][1])
        a[0, :, :own], b[0, :own] = pairs[layer]
        layers[layer] = a, b
    return AdapterMatrices(name, layers)


@lru_cache(64)
def _zeros(shape: tuple[int, ...]) -> Floats:
    """Return zeros that all adapters share: nobody writes to them."""
    return np.zeros(shape, np.float32)


def no_adapter(dims: Dims, low_rank: LowRank) -> AdapterMatrices:
    """Return matrices of zeros, with which a program computes what its base does."""
    return padded_matrices("", dims, low_rank, lambda _: None)


def matrices_for(folder: Path, manifest: Manifest) -> AdapterMatrices:
    """Read an adapter of PEFT for a bundle whose programs take adapters; see `read_matrices`.

    Raises:
        UsageError: they take none.
        CheckpointError: the adapter is not for this bundle.
    """
    if manifest.adapters is None:
        raise UsageError(
            "the programs of this bundle take no adapter",
            why="it was exported without `--adapters-as-inputs`",
            hint=f"export it with `--adapters-as-inputs`, or {_EXPORT}",
        )
    base = str(manifest.source.get("name", ""))
    return read_matrices(folder, base, manifest.dims, manifest.adapters)


def read_matrices(folder: Path, base: str, dims: Dims, low_rank: LowRank) -> AdapterMatrices:
    """Read an adapter of PEFT as inputs of programs.

    Args:
        folder: the adapter's.
        base: name of the checkpoint that the programs are of.
        dims: its sizes.
        low_rank: the adapters that the programs take.

    Raises:
        CheckpointError: the adapter is damaged, was trained on another base, or changes what is no input of
            the bundle's programs. None of it is ignored.
    """
    settings = read_adapter(folder)
    settings.check_base(base)
    if settings.is_dora:
        raise CheckpointError(
            f"the adapter in `{folder}` cannot be an input of programs",
            why="it was trained with `use_dora`, which scales the rows of the merged weights",
            hint=_EXPORT,
        )
    parts, unknown = _parts(read_arrays(weight_file(folder)), all_layers(dims, low_rank))
    faults = [*unknown, *_faults(settings, parts, dims, low_rank)]
    if faults or not parts:
        more = f", and {len(faults) - MOST_LISTED} more" if len(faults) > MOST_LISTED else ""
        raise CheckpointError(
            f"the adapter in `{folder}` does not fit the programs of {base!r}",
            why=", ".join(faults[:MOST_LISTED]) + more or "it has no matrices",
            hint=f"check that it was trained on this base, or {_EXPORT}",
        )

    def known(layer: AdaptedLayer) -> tuple[Array, Array] | None:
        if layer.name not in parts:
            return None
        pair = parts[layer.name]
        return pair[A].T, pair[B].T * np.float32(settings.scale(layer.name))

    return padded_matrices(str(folder), dims, low_rank, known)


def read_arrays(path: Path) -> dict[str, Array]:
    """Return the arrays of a .safetensors file by name, in float32.

    Raises:
        CheckpointError: the file is of another kind, or damaged.
    """
    from safetensors import SafetensorError, safe_open

    what = f"cannot read `{path.name}` in `{path.parent}`"
    if path.suffix == ".bin":
        raise CheckpointError(
            what,
            why="it is a pickle, which is read where torch is installed",
            hint="save the adapter as adapter_model.safetensors, with PEFT's `save_pretrained`",
        )
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            what,
            why=shorten(str(error)),
            hint="save it again with PEFT's `save_pretrained`, in float32 or float16",
        ) from error


def _parts(
    arrays: Mapping[str, Array], layers: Sequence[AdaptedLayer]
) -> tuple[dict[str, dict[str, Array]], list[str]]:
    """Return layer -> part -> array, and what is wrong with the tensors that are of no layer."""
    names = {layer.name for layer in layers}
    parts: dict[str, dict[str, Array]] = {}
    unknown: list[str] = []
    for name, array in arrays.items():
        module, part = module_and_part(name)
        own = module if module.startswith("model.") else f"model.{module}"
        if own in names and part in (A, B) and part not in parts.get(own, {}):
            parts.setdefault(own, {})[part] = array
        else:
            unknown.append(f"{shorten(name)} is no input of the programs")
    return parts, unknown


def _faults(
    settings: Adapter, parts: Mapping[str, Mapping[str, Array]], dims: Dims, low_rank: LowRank
) -> Iterator[str]:
    """Yield each matrix that is missing, of another shape, of too high a rank, or not finite."""
    for layer in all_layers(dims, low_rank):
        if layer.name not in parts:
            continue
        rank, pair = settings.rank(layer.name), parts[layer.name]
        if rank > low_rank.rank:
            yield f"{layer.name} has rank {rank}; the programs take up to {low_rank.rank}"
            continue
        for part, shape in ((A, (rank, layer.n_inputs)), (B, (layer.n_outputs, rank))):
            array = pair.get(part)
            if array is None or array.shape != shape:
                shown = "none" if array is None else array.shape
                yield f"{layer.name}.{part} (expected {shape}, found {shown})"
            elif not np.isfinite(array).all():
                yield f"{layer.name}.{part} has a NaN or an infinity"


@final
class AdaptedRunner(Runner):
    """A program with the matrices of an adapter as its last inputs, run as one without them."""

    def __init__(self, inner: Runner, dims: Dims, low_rank: LowRank, adapter: AdapterMatrices):
        inner.check_process()  # `_run` does not
        super().__init__(without_adapter(inner.spec), inner.run_lock)
        self.inner, self._dims, self._low_rank = inner, dims, low_rank
        self.free_axes, self.writes_in_place = inner.free_axes, inner.writes_in_place
        self.matrices = adapter.inputs(inner.spec.name, dims, low_rank)
        self._last = [self.matrices[t.name] for t in inner.spec.inputs if is_adapter_input(t.name)]

    def adapted(self, adapter: AdapterMatrices) -> "AdaptedRunner":
        """Return the program with another adapter."""
        return AdaptedRunner(self.inner, self._dims, self._low_rank, adapter)

    def binding(self) -> Binding:
        return _AdaptedBinding(self)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        return self.inner._run([*inputs, *self._last])

    def _run_into(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        self.inner._run_into([*inputs, *self._last], outputs)

    def run_bound(self, binding: Binding, inputs: Sequence[Array]) -> Sequence[Array]:
        """Run a binding of the inner program, to which the matrices are bound."""
        return binding._run([*inputs, *self._last])


@final
class _AdaptedBinding(Binding):
    """A binding that binds its arrays, and the adapter's matrices, to the inner program."""

    def __init__(self, runner: AdaptedRunner) -> None:
        super().__init__(runner)
        self._adapted, self._inner = runner, runner.inner.binding()
        for name, array in runner.matrices.items():
            self._inner.bind(name, array)

    @property
    def copies(self) -> bool:
        return self._inner.copies

    def changed(self, name: str, part: Part) -> None:
        self._inner.changed(name, part)

    def _bind(self, name: str, array: Array) -> None:
        self._inner.bind(name, array)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        return self._adapted.run_bound(self._inner, inputs)
