"""Find the weights of a checkpoint among the arrays of an app's files, bit by bit and under any name.

Converters rename weights, transpose them, store them twice, split and round them. So each weight is looked
for among all stored arrays of its shape: first equal to the bit, then rounded to float16, then to integers
of 8 bits. An array of another shape may be some rows of a weight: a head, a part of the vocabulary, or the
positions of a short window.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whisperport.build.judge.eight_bits import (
    HALF_STEP,
    LEAST_OF_LINE,
    gaps_of,
    groups_are_near,
    groups_of,
    is_near_integers,
    is_near_steps,
    steps_of,
)
from whisperport.build.judge.operations import is_norm
from whisperport.build.layouts.arrays import is_half
from whisperport.build.layouts.arrays import weight as weight_of
from whisperport.build.layouts.reading import StoredArray
from whisperport.verification.diagnosis.differences import (
    LEAST_NEAR,
    LOW_RANK,
    MULTIPLIED,
    OTHER_VALUES,
    ROUNDED,
    doubt,
    half_error,
    listed,
    nearest_rows,
    weight_difference,
)

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

Array = NDArray[Any]
SCALES = (-0.5, -0.25)  # powers of a head's width, by which converters multiply queries and keys
SMALLEST = 2  # elements; a smaller array, such as a shape, is not a weight
SIMILAR = 0.5  # of a weight's standard deviation: an array farther away is another weight
MUCH = 1e6  # distance by which a weight that a name says is nearer
SAMPLE = 256  # elements, by which the nearest array is found
NAMED = 0.9  # of the weights: a file that names so many names all
PARTS = ("encoder", "decoder")
# Ends of the decoder's weights that exporters may put into the encoder's file.
OF_AUDIO_KEPT = tuple(f".cross_attn.{end}" for end in ("key.weight", "value.weight", "value.bias"))
FORMS = ("equal", "half", "eight_bits")  # the fields of an `Identity`, by falling precision
# Graphs of a short window, or of short texts, have some of their rows only.
POSITIONS = ("encoder.positional_embedding", "decoder.positional_embedding")


@dataclass(frozen=True, slots=True)
class ChangedWeight:
    """A weight of the checkpoint that no array equals, or of which one copy differs.

    Attributes:
        name: openai-whisper's; empty: the array is of no weight.
        stored: file and name of the array that is nearest; empty: none is near.
        reason: how it differs.
    """

    name: str
    stored: str = ""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.label}: {self.difference}"

    @property
    def label(self) -> str:
        """The weight; of an array that is of no weight, the array."""
        return self.name or self.stored

    @property
    def difference(self) -> str:
        """How far it is from what is stored, in words."""
        if not self.stored:
            return self.reason or "no array is near it"
        return f"{self.reason}, in {self.stored}" if self.name else self.reason


@dataclass(slots=True)
class Identity:
    """How the weights of a checkpoint were found again.

    Attributes:
        equal: names of those that are stored bit by bit.
        half: of those that are stored rounded to float16.
        eight_bits: of those that are stored within half a step of 8 bits.
        neutral: of those that no array is, and without which a graph computes the same: biases of 0, and
            scales of 1 of layer norms. Exporters leave such operators out.
        changed: the others.
        odd: names of square matrices whose axes have another order than most of their kind, or than most
            of all if their kind has no order.
        places: weight -> file and name of each array that it is as a whole; several weights may be the same
            array.
    """

    equal: list[str] = field(default_factory=list)
    half: list[str] = field(default_factory=list)
    eight_bits: list[str] = field(default_factory=list)
    neutral: list[str] = field(default_factory=list)
    changed: list[ChangedWeight] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    places: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether each weight was found, in the file of its part, and there is one."""
        return not (self.changed or self.exchanged_files) and bool(self.found)

    @property
    def is_exact(self) -> bool:
        """Whether no weight that was found is rounded."""
        return not self.half and not self.eight_bits

    @property
    def replaced(self) -> str:
        """In words, which part is another checkpoint's: all its matrices have other values; empty: none."""
        unlike = [weight for weight in self.changed if OTHER_VALUES in weight.reason]
        if len(unlike) < len(self.changed):
            return ""
        right = _matrices(self.found)
        wrong = [weight for weight in unlike if _matrices([weight.name])]
        files = {file for name in right for file, _ in self.places[f"{name}.weight"]}
        by_part = Counter(_part(weight.name) for weight in wrong), {_part(name) for name in right}
        by_file = Counter(weight.stored.partition(": ")[0] for weight in wrong), files
        for (counts, with_right), what in ((by_part, "of the "), (by_file, "in ")):
            places = [place for place, n in counts.items() if n > 1 and place not in with_right]
            if places:
                where = f"{what}{places[0]} " if len(places) == 1 and right else ""
                whose = "it is another checkpoint's, or all was changed"
                return f"no matrix {where}is the checkpoint's: {whose}"
        return ""

    @property
    def adapted(self) -> str:
        """In words, into which weights an adapter was merged; empty: into none, or one."""
        names = [weight.name for weight in self.changed if LOW_RANK in weight.reason]
        if len(names) < 2:
            return ""
        kinds = dict.fromkeys(map(kind_of_weight, names))
        return f"an adapter of low rank was merged into {len(names)} weights: {', '.join(kinds)}"

    @property
    def exchanged_files(self) -> str:
        """In words, which file named after a part holds the weights of the other only; empty: none."""
        held: dict[str, set[str]] = defaultdict(set)  # file -> its parts
        for name, places in self.places.items():
            for file, _ in places:
                # Keys and values of cross-attention may be in both.
                held[file].add("" if name.endswith(OF_AUDIO_KEPT) else _part(name))
        wrong = []
        for file, parts in held.items():
            named = [part for part in PARTS if part in file.rpartition("/")[2]]
            if len(named) == 1 and named[0] not in parts and (others := parts & {*PARTS}):
                wrong.append(f"{file} holds the weights of the {others.pop()}")
        if not wrong:
            return ""
        whose = "its name is another file's" if len(wrong) == 1 else "their names are exchanged"
        return f"{' and '.join(wrong)}: {whose}"

    @property
    def found(self) -> list[str]:
        """Names of the weights that are there."""
        return [*self.equal, *self.half, *self.eight_bits]

    def __str__(self) -> str:
        rounded = [
            f"{len(names)} rounded to {form}"
            for names, form in ((self.half, "float16"), (self.eight_bits, "8 bits"))
            if names
        ]
        n_same = len(self.found)
        counts = ", ".join([f"{len(self.equal)} equal to the bit", *rounded])
        left_out = (
            f"; {len(self.neutral)} more are biases of 0 or scales of 1, which graphs may leave out"
            if self.neutral
            else ""
        )
        return f"{n_same} of {n_same + len(self.changed)} weights are there ({counts}){left_out}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "equal": len(self.equal),
            "float16": len(self.half),
            "eight_bits": len(self.eight_bits),
            "left_out": len(self.neutral),
            "exchanged_files": self.exchanged_files or None,
            "changed": [
                {
                    "name": weight.name or None,
                    "stored": weight.stored or None,
                    "reason": weight.reason or None,
                }
                for weight in self.changed
            ],
        }


def identify(
    checkpoint: "Checkpoint", arrays: Iterable[StoredArray], *, has_graphs: bool = True
) -> Identity:
    """Look for each weight of a checkpoint among stored arrays.

    Args:
        checkpoint: its weights are compared one at a time.
        arrays: of the files, one at a time; those of a shape that no weight has are left out.
        has_graphs: whether graphs may multiply scores by less where queries or keys are multiplied.
    """
    search = _Search(checkpoint, has_graphs=has_graphs)
    result = Identity()
    for array in arrays:
        search.compare(array)
    search.join_rows()
    result.places = dict(search.places)
    for name in checkpoint.weights:
        if name in search.wrong:
            result.changed.append(search.exchanged(name) or search.unlike(name))
        elif name in search.equal:
            result.equal.append(name)
        elif name in search.half:
            result.half.append(name)
        elif name in search.eight_bits:
            result.eight_bits.append(name)
        elif name not in search.nearest and search.is_neutral(name):
            result.neutral.append(name)
        else:
            result.changed.append(
                search.nearest.get(name)
                or search.reordered(name)
                or ChangedWeight(name, reason=search.missing(name))
            )
    result.changed += search.further
    if not result.changed:  # else, what is of no weight is where those are that were not found
        of_none = "it is no weight of the checkpoint"
        result.changed = [ChangedWeight("", at, of_none) for at in search.unplaced.values()]
    result.odd = _odd(search.axes)
    return result


def _part(name: str) -> str:
    return name.partition(".")[0]


def _matrices(names: Iterable[str]) -> list[str]:
    """Return those of weights that are matrices or kernels, and not norms or tables."""
    layers = (name.removesuffix(".weight") for name in names if name.endswith(".weight"))
    return [layer for layer in layers if not is_norm(layer)]


def kind_of_weight(name: str) -> str:
    """Return a weight's name with N in place of the number of its block."""
    return re.sub(r"\.\d+\.", ".N.", name, count=1)


def _odd(axes: Mapping[bool, Sequence[str]]) -> list[str]:
    """Return the weights that `Identity.odd` describes, of those found straight and transposed."""
    counts = {way: Counter(name.split(".")[-2] for name in axes[way]) for way in axes}
    odd = [
        name
        for way, names in axes.items()
        for name in names
        if (counts[way][kind := name.split(".")[-2]], len(names))
        < (counts[not way][kind], len(axes[not way]))
    ]
    return list(dict.fromkeys(odd))  # a weight may be stored twice


def weight_hashes(checkpoint: "Checkpoint") -> dict[str, list[str]]:
    """Return the hash of each form in which converters store a weight -> the names of such weights."""
    search = _Search(checkpoint)
    hashes: dict[str, list[str]] = defaultdict(list)
    for name, tensor in checkpoint.weights.items():
        axes = (False, True) if sum(size != 1 for size in tensor.shape) == 2 else (False,)
        digests = {
            search.digest(name, swapped, form, power)
            for swapped in axes
            for form in ("float32", "float16", "rounded to float32")
            for power in _powers(name)
        }
        for digest in digests:
            hashes[digest.hex()].append(name)
    return hashes


def array_hash(values: Array) -> str:
    """Return the hash of a stored array, by which `weight_hashes` finds its weight."""
    form = np.float16 if values.dtype == np.float16 else np.float32
    return _digest(values.reshape(_squeezed(values.shape)).astype(form, copy=False)).hex()


class _Search:
    """Compares arrays with the weights of the same shape, or of its transpose."""

    def __init__(self, checkpoint: "Checkpoint", *, has_graphs: bool = True) -> None:
        self.checkpoint, self.has_graphs = checkpoint, has_graphs
        self.equal: set[str] = set()
        self.half: set[str] = set()
        self.eight_bits: set[str] = set()
        self.wrong: dict[str, ChangedWeight] = {}
        self.axes: dict[bool, list[str]] = {False: [], True: []}
        self.nearest: dict[str, ChangedWeight] = {}
        self.further: list[ChangedWeight] = []  # arrays for which the model has no place
        self.held: dict[str, str] = {}  # weight -> that which is in its place
        self.labels: set[str] = set()  # weights that the names of arrays or nodes say
        self.places: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self.unplaced: dict[bytes, str] = {}  # digest of sorted values -> the array
        self.by_shape: Mapping[tuple[int, ...], list[str]] = defaultdict(list)
        self.digests: dict[tuple[str, bool, str, float], bytes] = {}
        self.halves: dict[str, bool] = {}
        self.scales: dict[str, Array] = {}  # weight -> the steps of its rows, in 8 bits
        # Weight -> how each of its rows was found: the place in FORMS; not found: a larger number.
        self.rows: dict[str, NDArray[np.int8]] = {}
        self.head_width = checkpoint.dims.text_head_width
        for name, tensor in checkpoint.weights.items():
            self.by_shape[_squeezed(tuple(tensor.shape))].append(name)

    def compare(self, array: StoredArray) -> None:
        """Compare an array with every weight that it may be."""
        from whisperport.model.checkpoint.names import KEY_BIAS

        shape = _squeezed(array.values.shape)
        candidates = [(name, False) for name in self.by_shape.get(shape, ())]
        # An array that is called as openai-whisper calls the weight has its axes, too.
        if len(shape) == 2 and array.name not in self.checkpoint.weights:
            candidates += [(name, True) for name in self.by_shape.get(shape[::-1], ())]
        if array.values.size < SMALLEST:
            return
        values = np.ascontiguousarray(array.values).reshape(shape)
        if array.step is not None and len(shape) < 2:  # of a column or a row: it has one axis here
            step = np.broadcast_to(array.step, array.values.shape).reshape(shape)
            array = replace(array, step=step)
        if not candidates:
            self._compare_rows(array, values)
            self._note_size(array, values)
            return
        label = self._label(array)
        self.labels.add(label)
        candidates.sort(key=lambda candidate: candidate[0] != label)
        if values.dtype.kind in "iu":
            names = self._near_integers(values, candidates)
        elif array.step is not None:
            names = self._near_steps(values, array.step, candidates)
        else:
            names = self._equal(values, candidates) or self._rounded(values, candidates)
        for name in names:
            self.places[name].append((array.file, array.name))
        if array.name.endswith(KEY_BIAS) and values.any():
            whose = f": it is {names[0]}" if names else ""
            reason = f"it is not 0, and keys have no bias{whose}"
            self.further.append(ChangedWeight("", f"{array.file}: {array.name}", reason))
        if label and names and label not in names:
            self._note(label, array, f"its place holds {names[0]}")
            self.held.setdefault(label, names[0])
        elif not names and values.dtype.kind == "f":
            self._note_nearest(array, values.astype(np.float32), label, candidates)

    def _note_size(self, array: StoredArray, values: Array) -> None:
        """Note that an array of a weight's name has another shape, and whether it only has more rows."""
        if values.dtype.kind != "f" or not (label := self._label(array)):
            return
        right = self._weight(label, False)
        n, shape = len(right), " × ".join(f"{size:,}" for size in values.shape)
        reason = f"its size is {shape}, not {' × '.join(f'{size:,}' for size in right.shape)}"
        if values.shape[1:] == right.shape[1:] and len(values) > n:
            near = np.abs(values[:n] - right) <= half_error(right)
            if near.mean() >= LEAST_NEAR:
                reason += f": its first {n:,} rows are right, and it has {len(values) - n:,} more"
        self._note(label, array, reason, is_sure=False)

    def join_rows(self) -> None:
        """Note the weights whose rows were all found; of positions, some are enough."""
        for name, rows in self.rows.items():
            matched = rows < len(FORMS)
            if matched.all() or name in POSITIONS:
                getattr(self, FORMS[rows[matched].max()]).add(name)

    def exchanged(self, name: str) -> ChangedWeight | None:
        """Return a wrong weight that is exchanged with another; None: it is not."""
        other = self.held.get(name, "")
        if self.held.get(other) != name:
            return None
        reason = f"its place holds {other}: the two are exchanged"
        return replace(self.wrong[name], reason=reason)

    def unlike(self, name: str) -> ChangedWeight:
        """Return a wrong weight, and in words whether another array is right."""
        from whisperport.model.checkpoint.names import KEY_BIAS

        wrong = self.wrong[name]
        if any(name in right for right in (self.equal, self.half, self.eight_bits)):
            if at := next((own for _, own in self.places[name] if own.endswith(KEY_BIAS)), ""):
                reason = f"it is at the place of {at}, which keys do not have: {wrong.reason}"
                return replace(wrong, reason=reason)
            return replace(wrong, reason=f"of two copies, one is right: {wrong.reason}")
        return wrong

    def missing(self, name: str) -> str:
        """Return in words what is missing of a weight to which no array is near; empty: all."""
        rows = self.rows.get(name)
        if rows is not None:
            lines = np.flatnonzero(rows == len(FORMS))
            return (
                f"{len(lines):,} of {len(rows):,} rows are not there, such as {listed(lines[:2])}"
            )
        if other := self._stored_more_often(name):
            return f"its place holds {other}, which is stored {len(self.places[other])} times"
        if name not in self.labels and len(self.labels) > NAMED * len(self.checkpoint.weights):
            return "it is missing: no array has its name, and none is near it"
        return ""

    def _stored_more_often(self, name: str) -> str:
        """Return the weight of a shape that is stored more often than most; empty: none, or several."""
        shape = _squeezed(tuple(self.checkpoint.weights[name].shape))
        owners = Counter(place for places in self.places.values() for place in places)
        counts = {
            other: sum(owners[place] == 1 for place in self.places[other])
            for other in self.by_shape[shape]
            if other in self.places
        }
        usual = Counter(counts.values()).most_common(1)[0][0] if counts else 0
        more = [other for other, count in counts.items() if count > max(usual, 1)]
        alike = [other for other in more if kind_of_weight(other) == kind_of_weight(name)] or more
        return alike[0] if len(alike) == 1 else ""

    def _compare_rows(self, array: StoredArray, values: Array) -> None:
        """Note the rows of weights that an array (n, …) is, or (…, n) if it is transposed."""
        if values.dtype.kind != "f" or values.ndim not in (1, 2):
            return
        arrays = [(values, array.step)]
        if values.ndim == 2:
            step = None if array.step is None else array.step.T
            arrays.append((np.ascontiguousarray(values.T), step))
        for part, step in arrays:
            for shape, names in self.by_shape.items():
                if shape[1:] == part.shape[1:] and len(shape) == part.ndim and len(part) < shape[0]:
                    for name in names:
                        self._note_rows(part, step, name)

    def _note_rows(self, part: Array, step: Array | None, name: str) -> None:
        """Note where in a weight an array's rows are: in parts of its length, the last at the end."""
        weight, n = self._weight(name, False), len(part)
        half_step = 0 if step is None else HALF_STEP * float(np.abs(step).max())
        starts = np.array([*dict.fromkeys((*range(0, len(weight) - n + 1, n), len(weight) - n))])
        for power in self._powers(name):
            factor = np.float32(self.head_width**power)
            # The first row of the part, which rules out most starts.
            first = weight[starts] * factor
            is_far = np.abs(part[0] - first) > half_error(first) + half_step
            for start in starts[~is_far.reshape(len(starts), -1).any(axis=1)]:
                scaled = weight[start : start + n] * factor
                if part.dtype == np.float32 and np.array_equal(part, scaled):
                    form = 0
                elif np.array_equal(part.astype(np.float16), scaled.astype(np.float16)):
                    form = int(not self._is_half(name) or part.dtype == np.float32)
                elif (
                    step is not None
                    and np.mean(np.abs(part - scaled) <= HALF_STEP * step) >= LEAST_NEAR
                ):
                    form = 2
                else:
                    continue
                rows = self.rows.setdefault(name, np.full(len(weight), len(FORMS), np.int8))
                np.minimum(rows[start : start + n], form, out=rows[start : start + n])

    def is_neutral(self, name: str) -> bool:
        """Return whether a weight is a bias of 0, or the scale of a layer norm and 1."""
        if name.endswith(".bias"):
            return not self._weight(name, False).any()
        is_scale = is_norm(name.removesuffix(".weight"))
        return is_scale and bool((self._weight(name, False) == 1).all())

    def reordered(self, name: str) -> ChangedWeight | None:
        """Return the array that has a weight's values in another order; None: there is none."""
        stored = self.unplaced.get(_digest(np.sort(self._weight(name, False), axis=None)))
        return (
            ChangedWeight(name, stored, "its values are in another order or axis")
            if stored
            else None
        )

    def _label(self, array: StoredArray) -> str:
        """Return the weight that an array's name, or its node's, says; empty: none."""
        from whisperport.model.checkpoint.names import from_exported

        if array.name in self.checkpoint.weights:
            return array.name
        side = "encoder" if "encoder" in array.file else "decoder"
        for text in (array.name, array.user):
            label = from_exported(text, side) or ""
            if label in self.checkpoint.weights:
                return label
        return ""

    def _note(self, name: str, array: StoredArray, reason: str, *, is_sure: bool = True) -> None:
        """Keep that an array differs from a weight; one that is not sure counts if nothing equals it."""
        kept = self.wrong if is_sure else self.nearest
        kept.setdefault(name, ChangedWeight(name, f"{array.file}: {array.name}", reason))

    def _equal(self, values: Array, candidates: list[tuple[str, bool]]) -> list[str]:
        """Note and return what an array equals: exactly, else scaled, else rounded to float16."""
        form = "float16" if values.dtype == np.float16 else "float32"
        digest = _digest(values.astype(form, copy=False))
        exact = [c for c in candidates if form == "float32" or self._is_half(c[0])]
        pairs = [pair for pair in exact if self.digest(*pair, form) == digest]
        equal = [name for name, _ in pairs]
        for name, swapped in pairs:
            if values.ndim == 2 and len(values) == len(values[0]):
                self.axes[swapped].append(name)
        equal = equal or [
            name
            for name, swapped in exact
            if any(self.digest(name, swapped, form, p) == digest for p in self._powers(name)[1:])
        ]
        self.equal.update(equal)
        if equal:
            return equal
        rounded = "rounded to " + form
        half = [
            name for name, swapped in candidates if self.digest(name, swapped, rounded) == digest
        ]
        self.half.update(half)
        return half

    def _near_integers(self, values: Array, candidates: list[tuple[str, bool]]) -> list[str]:
        """Note and return the weight that integers hold, whose step is not known."""
        integers = values.astype(np.float32)
        for name, transposed in candidates:
            if is_near_integers(integers, self._weight(name, transposed)):
                self.eight_bits.add(name)
                return [name]
        return []

    def _near_steps(
        self, values: Array, step: Array, candidates: list[tuple[str, bool]]
    ) -> list[str]:
        """Note and return the weight from which no value is farther than its step allows."""
        for name, transposed in candidates:
            if is_near_steps(values, self._weight(name, transposed), step):
                self.eight_bits.add(name)
                return [name]
        return []

    def _rounded(self, values: Array, candidates: list[tuple[str, bool]]) -> list[str]:
        """Note and return what an array holds as integers of 8 bits, already multiplied by their step."""
        for groups in groups_of(values):
            for name, transposed in candidates:
                weight = self._weight(name, transposed).reshape(groups.shape)
                if groups_are_near(groups, weight):
                    self.eight_bits.add(name)
                    return [name]
        return []

    @np.errstate(invalid="ignore", over="ignore")  # what is stored may be anything
    def _note_nearest(
        self,
        array: StoredArray,
        values: Array,
        label: str,
        candidates: list[tuple[str, bool]],
    ) -> None:
        """Note the weight that an array is near to, or that its name or node says."""
        places = np.linspace(0, values.size - 1, min(SAMPLE, values.size)).astype(np.intp)
        sample, near = values.reshape(-1)[places], list[tuple[float, str, bool]]()
        for name, transposed in candidates:
            weight_sample = self._weight(name, transposed).reshape(-1)[places]
            deviation = float(weight_sample.std()) or 1.0
            distance = float(np.median(np.abs(sample - weight_sample))) / deviation
            if name == label or distance < SIMILAR:
                near.append((distance - (MUCH if name == label else 0), name, transposed))
        if near:
            *_, name, transposed = min(near, key=lambda entry: entry[0])
            # A square weight may be nearer with its axes swapped; what is wrong has a form in one of both.
            ways = [transposed, *(way for _, n, way in near if n == name and way != transposed)]
            if any(self._is_rounded(values, name, way) for way in ways):
                self.half.add(name)
                self.places[name].append((array.file, array.name))
                return
            reasons = [self._difference(array, values, name, way) for way in ways]
            reason = min(reasons, key=doubt)
            self._note(name, array, reason, is_sure=bool(label) or values.ndim > 1)
        elif values.ndim > 1:
            self.unplaced[_digest(np.sort(values, axis=None))] = f"{array.file}: {array.name}"

    def _is_rounded(self, values: Array, name: str, transposed: bool) -> bool:
        """Return whether values are a weight in float16, rounded by a rule of the converter's own."""
        weight = self._weight(name, transposed)
        near = np.abs(values - weight) <= half_error(weight)
        return bool(near.all() and np.array_equal(values.astype(np.float16), values))

    def _difference(self, array: StoredArray, values: Array, name: str, transposed: bool) -> str:
        """Return in words how the values of an array differ from a weight."""
        weight = self._weight(name, transposed)
        allowed = half_error(weight)
        turned = array.values.byteswap().astype(np.float32).reshape(values.shape)
        if np.mean(np.abs(turned - weight) <= allowed) >= LEAST_NEAR:
            return "the bytes of each value are in reversed order: big-endian"
        step = None if array.step is None else np.broadcast_to(array.step, values.shape)
        for groups in groups_of(values) if step is None else ():
            step = np.broadcast_to(steps_of(groups), groups.shape).reshape(values.shape)
        if step is None and (gaps := gaps_of(values)) is not None:
            step = np.broadcast_to(gaps, values.shape)
        if step is not None:
            allowed = allowed + HALF_STEP * step
        if transposed:
            values, weight, allowed = (np.ascontiguousarray(a.T) for a in (values, weight, allowed))
            step = None if step is None else np.ascontiguousarray(step.T)
        reason = weight_difference(values, weight, allowed, self.head_width, step)
        if MULTIPLIED in reason and step is not None and (other := self._with_scales(name, step)):
            return reason.replace(MULTIPLIED, f"those of {other}: {MULTIPLIED}")
        if OTHER_VALUES in reason and values.ndim == 2:
            room = HALF_STEP * step if step is not None else 0
            return (
                self._rows_of_another(name, values, np.abs(values - weight) > allowed, room)
                or reason
            )
        return reason

    def _rows_of_another(
        self, name: str, values: Array, differs: Array, room: Array | float
    ) -> str:
        """Return in words which rows of another weight the wrong rows are; empty: they are of none.

        Args:
            name: of the weight.
            values: (n, k) of the array.
            differs: (n, k) which of them are wrong.
            room: how far a value may be from the weight's, because of its form alone.
        """
        rows = np.flatnonzero(differs.any(axis=1))
        if not 0 < len(rows) < len(values):
            return ""
        probes = np.unique(rows[[0, len(rows) // 2, -1]])
        room = np.broadcast_to(room, values.shape)[probes]
        for other in self.by_shape[values.shape]:
            right = self._weight(other, False)
            held = nearest_rows(values[probes], right)
            allowed = room + half_error(right[held])
            near = np.abs(values[probes] - right[held]) <= allowed
            steps = np.unique(held - probes)
            if other != name and len(steps) == 1 and near.mean() >= LEAST_NEAR:
                return f"rows {listed(rows)} are rows {listed(rows + steps[0])} of {other}"
        return ""

    def _with_scales(self, name: str, step: Array) -> str:
        """Return the other weight of which the scales of rows are; empty: they are of none."""
        scales = step.max(axis=1)
        for other in self.checkpoint.weights:
            right = self._scales(other)
            if other != name and right.shape == scales.shape:
                is_near = np.abs(scales - right) <= ROUNDED * right
                if is_near.mean() >= LEAST_OF_LINE:
                    return other
        return ""

    def _scales(self, name: str) -> Array:
        """Return the steps (n) of a matrix's rows; none of what has other axes."""
        if name not in self.scales:
            weight = self._weight(name, False)
            self.scales[name] = steps_of(weight)[:, 0] if weight.ndim == 2 else np.empty(0)
        return self.scales[name]

    def _weight(self, name: str, transposed: bool) -> Array:
        array: Array = weight_of(self.checkpoint, name)
        array = array.reshape(_squeezed(array.shape))
        return np.ascontiguousarray(array.T) if transposed else array

    def digest(self, name: str, transposed: bool, form: str, power: float = 0.0) -> bytes:
        """Return the digest of a weight as converters store it; `power` is of a head's width."""
        key = name, transposed, form, power
        if key not in self.digests:
            weight = self._weight(name, transposed)
            if power:
                weight = weight * np.float32(self.head_width**power)
            if form != "float32":  # rounded to float16, and perhaps stored in float32
                weight = weight.astype(np.float16)
            self.digests[key] = _digest(weight.astype(form.removeprefix("rounded to "), copy=False))
        return self.digests[key]

    def _powers(self, name: str) -> tuple[float, ...]:
        """Return by which powers of a head's width a weight may be multiplied; the first is 0."""
        return _powers(name) if self.has_graphs else (0.0,)

    def _is_half(self, name: str) -> bool:
        if name not in self.halves:
            self.halves[name] = is_half(self.checkpoint, name)
        return self.halves[name]


def _powers(name: str) -> tuple[float, ...]:
    """Return by which powers of a head's width a weight may be multiplied; the first is 0."""
    return (0.0, *SCALES) if ".query." in name or ".key." in name else (0.0,)


def _squeezed(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _digest(values: Array) -> bytes:
    return blake2b(np.ascontiguousarray(values).data, digest_size=16).digest()
