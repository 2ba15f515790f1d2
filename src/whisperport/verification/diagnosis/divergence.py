"""Find the first value at which two programs diverge, and how the error grows from layer to layer.

A value diverges if its error is above the rounding of its dtype, and several times the error of the values
that it is computed from. What follows it only carries the error on.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from whisperport.program.json_records import members, to_json
from whisperport.verification.array_comparison import Comparison
from whisperport.verification.diagnosis.matching import (
    SAME,
    NamedValue,
    aligned,
    error_of,
    matched,
    reproduced,
)
from whisperport.verification.diagnosis.recording import Recording, dependent

if TYPE_CHECKING:  # torch may be missing at run time
    from whisperport.model.inspection.graph import Graph, Node

# Relative error that rounding causes in one program of a dtype: about 16 units in the last place.
ROUNDING = {"float16": 1e-2, "bfloat16": 8e-2}
ROUNDING_OF_FLOAT32 = 2e-6
JUMP = 4.0  # times the error of the values that a value is computed from
FAINT = 1e-4  # of the largest jump; a smaller one is rounding that the program magnifies
# A pair of values with an error above the first limit is mistaken if all that is computed from it has at
# most an error of the second.
LARGE, GONE = 1e-3, 1e-5
OUTPUT = "output"
DECIBELS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedValue:
    """One value of A and the value of B that was matched to it.

    Attributes:
        name: of the value in A.
        other: its name in B.
        operator: operator that computes it in A, by aten's name.
        other_operator: the same in B.
        module: path of its module; empty: no file states it.
        line: line of Python that made it, as PATH:LINE; empty: no file states it.
        error: ‖b − a‖ / ‖a‖; infinity if a value is NaN.
        before: largest error of the values that it is computed from.
        between: what only one program computes between these values and this one: A or B, operator and
            module of each node. Of files of two formats, only nodes of modules that the other lacks here.
        modules: those whose weights are used between these values and this one. If there are several, one
            of the programs computes them in one operator, and the fault is in one of them.
    """

    name: str
    other: str
    operator: str
    other_operator: str
    module: str
    line: str
    error: float
    before: float = 0.0
    between: tuple[tuple[str, str, str], ...] = ()
    modules: tuple[str, ...] = ()

    @property
    def layer(self) -> str:
        """Its module; without one, its name."""
        return self.module or self.name

    @property
    def fault(self) -> str:
        """The layer to look at if the programs diverge here: that of a node that only one of them has."""
        return next((module for _, _, module in self.between if module), self.layer)

    @property
    def sqnr_db(self) -> float:
        """The error in dB, Σ a² / Σ (b − a)²."""
        return decibels(self.error)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; a number that is not finite is a string."""
        return {"layer": self.layer, **members(self), "sqnr_db": to_json(self.sqnr_db)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPrograms:
    """The result of `compare`. It is true if every output of B is within the limits of A's.

    Attributes:
        a: the first program, as it was given.
        b: the second.
        values: the matched values, in the order of A.
        kept: number of values that were kept of A and of B.
        outputs: comparison of each output.
        first: place in `values` of the first that diverges; None: none does.
        worst: place of the value at which the error grows most; None: nowhere.
        notes: what was not compared.
    """

    a: str
    b: str
    values: tuple[ComparedValue, ...]
    kept: tuple[int, int]
    outputs: tuple[Comparison, ...]
    first: int | None
    worst: int | None
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return True if outputs were compared and all passed, and no matched value is NaN."""
        finite = all(math.isfinite(value.error) for value in self.values)
        return bool(self.outputs) and all(self.outputs) and bool(self.values) and finite

    @property
    def layers(self) -> tuple[ComparedValue, ...]:
        """The value of each layer with the largest error, in the order of A; `first` is always one."""
        first = None if self.first is None else self.values[self.first]
        largest = []
        for _, group in groupby(self.values, key=lambda value: value.layer):
            values = list(group)
            largest.append(first if first in values else max(values, key=lambda value: value.error))
        return tuple(value for value in largest if value)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "a": self.a,
            "b": self.b,
            "passed": bool(self),
            "matched": len(self.values),
            "kept": list(self.kept),
            "first": None if self.first is None else self.values[self.first].to_json(),
            "worst": None if self.worst is None else self.values[self.worst].to_json(),
            "values": to_json(self.values),
            "outputs": [
                {"output": comparison.output, "reason": comparison.reason, "rule": comparison.rule}
                for comparison in self.outputs
            ],
            "notes": list(self.notes),
        }


def decibels(error: float) -> float:
    """Return a relative error in dB."""
    return math.inf if error == 0 else -DECIBELS * math.log10(error)


def matched_values(
    a: tuple["Graph", Recording], b: tuple["Graph", Recording]
) -> tuple[ComparedValue, ...]:
    """Match the values of two runs, and return their errors in the order of A."""
    a, b = _with_outputs(*a), _with_outputs(*b)
    nodes = [_by_value(graph) for graph, _ in (a, b)]
    named = [
        [_named(name, array, of) for name, array in recording.values.items()]
        for (_, recording), of in zip((a, b), nodes, strict=True)
    ]
    layouts = a[0].format != b[0].format and "tflite" in (a[0].format, b[0].format)
    compared: dict[str, ComparedValue] = {}
    for i, j in matched(*named):
        x, y = named[0][i], named[1][j]
        fitted = aligned(x.array, y.array, layouts=layouts)
        error = math.inf if fitted is None else error_of(x.array, fitted)
        compared[x.name] = _compared(x, y, nodes, error)
    while mistaken := list(_mistaken(a[0], compared)):
        for name in mistaken:
            del compared[name]
    names_in_b = {value.other for value in compared.values()}
    between = [_between(a[0], set(compared)), _between(b[0], names_in_b)]
    by_operator = a[0].format == b[0].format
    for name, value in compared.items():
        own, counterpart = between[0][name], between[1][value.other]
        extra = tuple(_extra(own, counterpart, by_operator=by_operator)) or _joined(own)
        modules = dict.fromkeys(node.module for node in (*own, *counterpart) if _has_weights(node))
        compared[name] = replace(value, between=extra, modules=tuple(modules))
    if layouts and (lost := _lost(a[0], *named)):
        matched_nodes = (node for node in lost if any(out.name in compared for out in node.outputs))
        _put_first(a[0], compared, next(matched_nodes, lost[0]))
    values = with_errors_before(a[0], compared)
    return tuple(
        value for value in values if value.operator != OUTPUT or value.error > JUMP * value.before
    )


def _lost(graph: "Graph", a: Sequence[NamedValue], b: Sequence[NamedValue]) -> list["Node"]:
    """Return the nodes of A at which an error can begin, where B computes other values on the way.

    A converter decomposes and joins operators, so that B may lack a value of A without any fault. But what
    is computed from such a value is in B again. After a fault, nothing is: its values are not in B, nor is
    anything that is computed from them, and all that they are computed from is fine.
    """
    good = {a[place].name for place in reproduced(a, b)}
    if not good:
        return []
    kept = {value.name for value in a}
    nodes = list(dependent(graph))
    for node in reversed(nodes):
        if any(output.name in good for output in node.outputs):
            good.update(tensor.name for tensor in node.tensors)
    bad = {output.name for node in nodes for output in node.outputs} - good
    return [
        node
        for node in nodes
        if any(output.name in bad & kept for output in node.outputs)
        and not any(tensor.name in bad for tensor in node.tensors)
    ]


def _put_first(graph: "Graph", compared: dict[str, ComparedValue], lost: "Node") -> None:
    """Let the first matched value at or behind a node name this node, and forget large errors before it."""
    behind = {output.name for output in lost.outputs}
    for node in dependent(graph):
        if any(tensor.name in behind for tensor in node.tensors):
            behind.update(output.name for output in node.outputs)
    for name in [
        name for name, value in compared.items() if name not in behind and value.error > SAME
    ]:
        del compared[name]
    first = next(
        (name for name in compared if name in behind and compared[name].error > SAME), None
    )
    if first is not None:
        between = (
            ()
            if first in {output.name for output in lost.outputs}
            else (("A", lost.op, lost.module),)
        )
        compared[first] = replace(compared[first], between=between)


def _with_outputs(graph: "Graph", run: Recording) -> tuple["Graph", Recording]:
    """Return both with each output as one more value: what a program does to its last value shows there."""
    from whisperport.model.inspection.graph import Node, Value

    nodes, arrays = [], {}
    for place, (value, array) in enumerate(zip(graph.outputs, run.outputs, strict=False)):
        name = f"{OUTPUT} {place}"
        made_by = graph.producer(value)
        if array.dtype.kind == "f" and array.size and made_by:
            module = made_by.module
            nodes.append(Node(name, OUTPUT, OUTPUT, (value,), (Value(name),), module=module))
            arrays[name] = array
    return replace(graph, nodes=(*graph.nodes, *nodes)), replace(
        run, values={**run.values, **arrays}
    )


def _mistaken(graph: "Graph", compared: Mapping[str, ComparedValue]) -> Iterator[str]:
    """Yield the values whose large error is gone in everything that is computed from them."""
    for name, readers in _readers(graph, compared).items():
        if compared[name].error > LARGE and all(
            compared[reader].error <= GONE for reader in readers
        ):
            yield name


def _between(graph: "Graph", values: Collection[str]) -> dict[str, list["Node"]]:
    """Return for each matched value the nodes between it and the matched values it is computed from."""
    open_nodes: dict[str, dict[str, Node]] = {}  # value -> nodes since the nearest matched values
    for node in dependent(graph):
        before: dict[str, Node] = {}
        for tensor in node.tensors:
            if tensor.name not in values:
                before |= open_nodes.get(tensor.name, {})
        for output in node.outputs:
            open_nodes[output.name] = before | {node.name: node}
    return {name: list(nodes.values()) for name, nodes in open_nodes.items() if name in values}


def _extra(
    a: Sequence["Node"], b: Sequence["Node"], *, by_operator: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield the nodes that only one program has.

    Args:
        by_operator: whether a node of the same operator and module is another; else any of the same module.
    """
    modules = {node.module for node in a} & {node.module for node in b}
    of_a, of_b = ([(node.op, node.module) for node in nodes] for nodes in (a, b))
    for side, nodes_here, nodes_there in (("A", of_a, of_b), ("B", of_b, of_a)):
        for operator, module in (Counter(nodes_here) - Counter(nodes_there)).elements():
            if by_operator or (modules - {""} and module and module not in modules):
                yield side, operator, module


def _joined(nodes: Sequence["Node"]) -> tuple[tuple[str, str, str], ...]:
    """Return the last unmatched node of another module, before a node of A that has no weights itself."""
    *before, own = nodes
    foreign = [node for node in before if node.module not in ("", own.module)]
    if not foreign or _has_weights(own):
        return ()
    return (("A", foreign[-1].op, foreign[-1].module),)


def _has_weights(node: "Node") -> bool:
    return bool(node.module) and any(tensor.constant for tensor in node.tensors)


def with_errors_before(
    graph: "Graph", compared: Mapping[str, ComparedValue]
) -> tuple[ComparedValue, ...]:
    """Return the values with the largest error of what each is computed from."""
    before = dict.fromkeys(compared, 0.0)
    for name, readers in _readers(graph, compared).items():
        for reader in readers:
            before[reader] = max(before[reader], compared[name].error)
    return tuple(replace(value, before=before[name]) for name, value in compared.items())


def divergence(
    values: Sequence[ComparedValue], dtypes: Iterable[str]
) -> tuple[int | None, int | None]:
    """Return the places of the first value that diverges, and of that at which the error grows most.

    Args:
        values: the matched values, in the order of A.
        dtypes: those of both programs' values.
    """
    rounding = max((ROUNDING.get(dtype, ROUNDING_OF_FLOAT32) for dtype in dtypes), default=0.0)
    jumps = [
        place
        for place, value in enumerate(values)
        if value.error > rounding and value.error > JUMP * value.before
    ]
    largest = max((min(values[place].error, 1.0) for place in jumps), default=0.0)
    first = next((p for p in jumps if values[p].error >= FAINT * largest), None)
    grown = [min(value.error, 1e30) - min(value.before, 1e30) for value in values]
    worst = max(range(len(values)), key=grown.__getitem__, default=None)
    if worst is not None and values[worst].error <= rounding:
        worst = None
    return first, worst


def _by_value(graph: "Graph") -> dict[str, "Node"]:
    return {output.name: node for node in graph.nodes for output in node.outputs}


def _named(name: str, array: Any, nodes: Mapping[str, "Node"]) -> NamedValue:
    node = nodes[name]
    return NamedValue(name, array, node.op, node.module)


def _compared(
    x: NamedValue, y: NamedValue, nodes: Sequence[Mapping[str, "Node"]], error: float
) -> ComparedValue:
    a, b = nodes[0][x.name], nodes[1][y.name]
    source = a.source or b.source
    return ComparedValue(
        name=x.name,
        other=y.name,
        operator=a.op,
        other_operator=b.op,
        module=a.module or b.module,
        line=f"{source.package_path}:{source.line}" if source else "",
        error=error,
    )


def _readers(graph: "Graph", compared: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return for each matched value the next matched values that are computed from it."""
    sources: dict[
        str, set[str]
    ] = {}  # value -> the nearest matched values that it is computed from
    readers: dict[str, set[str]] = {}
    for node in dependent(graph):
        read = set().union(*(_nearest(tensor.name, sources, compared) for tensor in node.tensors))
        for output in node.outputs:
            sources[output.name] = read
            if output.name in compared:
                for name in read:
                    readers.setdefault(name, set()).add(output.name)
    return readers


def _nearest(
    name: str, sources: Mapping[str, set[str]], compared: Mapping[str, Any]
) -> Iterator[str]:
    return iter((name,)) if name in compared else iter(sources.get(name, ()))
