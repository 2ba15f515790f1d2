"""Runners whose state and constants stay in a module's memory, on a device or on the CPU.

The host's arrays are authoritative. A module has one state, for whichever binding runs: an array is
copied to it only if it may differ. A module writes the rows of new tokens into its caches itself, and
returns them. If the host then stores the same rows, nothing is copied; so decoding copies no cache after
the first token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import ReferenceType, ref

import numpy as np

from whisperport.program.runner import Array, Binding, Part, Runner
from whisperport.program.spec import ProgramSpec

NOWHERE = -1  # position of a token that is written to no row of the cache

Block = tuple[tuple[int, int, int], ...]
"""A part of an array: start, stop and step of every axis."""


class Module(Protocol):
    """One loaded module with its state."""

    def write(self, name: str, array: Array) -> None:
        """Copy an array to the state `name`."""

    def run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        """Run once, with the inputs other than state; return the outputs other than state."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that the module wrote into the cache of row `row` of a batch, from `start` to `stop`."""

    row: int
    start: int
    stop: int
    values: Array


@dataclass(frozen=True, slots=True)
class _Held:
    """What the module's state `name` holds: an array, since this binding copied it."""

    array: "ReferenceType[Array]"
    binding: "ReferenceType[ResidentBinding]"


class ResidentRunner(Runner):
    """Runs a module with resident state; `Runner.run` copies all of the state for every call."""

    def __init__(self, spec: ProgramSpec, module: Module, *, stateful: bool = True) -> None:
        """
        Args:
            spec: the program's signature.
            module: the loaded module.
            stateful: the module keeps constants and state; False: they are inputs, as in the signature.
        """
        super().__init__(spec)
        self.module = module
        self.held: dict[str, _Held] = {}  # state of the module that equals an array
        self.owner: ReferenceType[ResidentBinding] | None = None  # whose caches the module holds
        names = [tensor.name for tensor in spec.inputs]
        self.resident = [name for name in names if stateful and self.roles[name] != "input"]
        self._passed = [index for index, name in enumerate(names) if name not in self.resident]
        self.state_names = [name for name in self.resident if self.roles[name] == "state"]
        self._batch = spec.kind.batch
        self._mask = names.index("mask") if self.resident else None

    def binding(self) -> Binding:
        return ResidentBinding(self) if self.resident else Binding(self)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        self.owner = None
        self.held.clear()
        for tensor, array in zip(self.spec.inputs, inputs, strict=True):
            if tensor.name in self.resident:
                self.module.write(tensor.name, array)
        return self.run_module(inputs)

    def run_module(self, inputs: Sequence[Array]) -> Sequence[Array]:
        """Run the module on its state and on the other inputs; returns arrays of the signature's shapes."""
        arguments = [inputs[index] for index in self._passed]
        if self._mask is not None:
            arguments.append(self.positions(inputs[self._mask]))
            if self._batch > 1:  # the host reorders its own caches
                arguments.append(np.arange(self._batch, dtype=np.int32))
        return self.module.run(arguments)

    def positions(self, mask: Array) -> Array:
        """Return the rows of the cache that get the new tokens, (B, P) int32: after the last visible row.

        The first token of a text comes from a prefill. A step that sees no token is of a row of the batch
        that is not in use, and writes nowhere.
        """
        batch, tokens, columns = mask.shape
        rows = columns - tokens
        visible = mask[:, 0, :rows] == 0
        first = np.where(visible.any(axis=1), rows - visible[:, ::-1].argmax(axis=1), 0)
        positions = first[:, None] + np.arange(tokens)
        unused = (positions >= rows) | ((first == 0)[:, None] & (tokens == 1))
        return np.where(unused, NOWHERE, positions).astype(np.int32).reshape(batch, tokens)


class ResidentBinding(Binding):
    """Copies to the module's state what differs from the bound arrays, and nothing else.

    A module writes a row for every token of a run. If the host does not store it, because the row of the
    batch was not in use, the cache differs from the host's array there. That does not matter while the
    mask hides it.
    """

    def __init__(self, runner: ResidentRunner) -> None:
        super().__init__(runner)
        self._resident = runner
        self._stale: set[str] = set()  # states whose arrays have changed
        self._written: dict[str, dict[Block, _Rows]] = {}  # by the module, and not by the host yet

    def changed(self, name: str, part: Part) -> None:
        array = self._feed[self._index[name]]
        block = _block(part, array.shape)
        rows = self._written.get(name, {})
        if block in rows and np.array_equal(array[part], rows[block].values):
            del rows[block]
        else:
            self._stale.add(name)

    def _bind(self, name: str, array: Array) -> None:
        self._stale.add(name)
        held = self._resident.held.get(name)
        if held and held.binding() is self:  # the same array may have other contents
            with self._resident.run_lock:
                self._resident.held.pop(name, None)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        runner, mask = self._resident, inputs[self._index["mask"]]
        self._update(inputs, mask)
        outputs = runner.run_module(inputs)
        runner.owner = ref(self)
        names = [tensor.name for tensor in runner.spec.outputs]
        self._note_rows(runner.positions(mask), dict(zip(names, outputs, strict=False)))
        return outputs

    def _update(self, inputs: Sequence[Array], mask: Array) -> None:
        """Copy the arrays that the module's state may differ from."""
        runner = self._resident
        own = runner.owner is not None and runner.owner() is self
        runner.owner = None  # a run that fails may have changed the state
        for name in runner.resident:
            array = inputs[self._index[name]]
            if runner.roles[name] == "state":
                equal = own and name not in self._stale and not self._differs(name, mask)
            else:
                equal = self._is_held(name, array)
            if not equal:
                runner.module.write(name, array)
                runner.held[name] = _Held(ref(array), ref(self))
                self._written.pop(name, None)
        self._stale.clear()

    def _differs(self, name: str, mask: Array) -> bool:
        """Whether the mask lets a token see a row that only the module wrote."""
        rows = self._written.get(name, {}).values()
        return any((mask[block.row, :, block.start : block.stop] == 0).any() for block in rows)

    def _is_held(self, name: str, array: Array) -> bool:
        """Whether the state holds this array, and it has been bound, so unchanged, since it was copied."""
        held = self._resident.held.get(name)
        if held is None or held.array() is not array:
            return False
        by = held.binding()
        return by is not None and by._feed[by._index[name]] is array

    def _note_rows(self, positions: Array, outputs: Mapping[str, Array]) -> None:
        """Note the rows that a run wrote into each cache."""
        used = [(row, at[at != NOWHERE]) for row, at in enumerate(positions)]
        for name in self._resident.state_names:
            new = outputs.get(f"new_{name.removeprefix('self_')}")
            if new is None:
                continue  # cross-attention K/V of a batch
            axis = 2 if name.startswith("self_k") else 1
            shape = self._feed[self._index[name]].shape
            heads = shape[0] // len(positions)
            noted = self._written.setdefault(name, {})
            for row, at in used:
                if len(at):
                    part = [slice(row * heads, (row + 1) * heads), slice(None), slice(None)]
                    part[axis] = slice(len(at))
                    values = new[tuple(part)]
                    start, stop = int(at[0]), int(at[-1]) + 1
                    part[axis] = slice(start, stop)
                    noted[_block(part, shape)] = _Rows(row, start, stop, values)


def _block(part: Sequence[slice], shape: Sequence[int]) -> Block:
    full = (*part, *(slice(None) for _ in shape[len(part) :]))
    return tuple(axis.indices(size) for axis, size in zip(full, shape, strict=True))
