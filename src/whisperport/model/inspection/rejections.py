"""Check a program against the limits in a target's spec, and report the cost of each finding."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from whisperport.model.inspection.cost import Cost, NodeCost, cost_of
from whisperport.model.inspection.graph import Graph, SourceLine
from whisperport.model.inspection.partitions import Partitions, Parts, partitions_of
from whisperport.model.inspection.rules import RULES, Finding
from whisperport.program.spec import FindingKind, Limit, Rejection, TargetSpec

FOLD_CONSTANTS = "fold-constants"  # the rewrite that removes nodes that depend on no input
KIND_ORDER: tuple[FindingKind, ...] = ("rejected", "not seen", "warning")
# Warnings about the program itself, whatever its target is.
_EVERY_TARGET = tuple(
    Limit(rule=rule, source="the program's own graph", kind="warning")
    for rule in ("WP601", "WP602", "WP604")
)


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One node, input or output that breaks a limit."""

    name: str  # of the node, input or output; empty: the complete program
    reason: str
    rewrite: str  # the suggested rewrite; empty: there is none
    cost: NodeCost | None  # None: this is not a node

    @property
    def module(self) -> str:
        """Path of the module that the node is in; empty: the program itself, not stored, or not a node."""
        return self.cost.node.module if self.cost else ""

    @property
    def source(self) -> SourceLine | None:
        """The line of the model's code that made the node; None if the file does not state it."""
        return self.cost.node.source if self.cost else None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "name": self.name,
            "reason": self.reason,
            "module": self.module or None,
            "source": asdict(self.source) if self.source else None,
            "flops": self.cost.flops if self.cost else None,
            "bytes": self.cost.bytes if self.cost else None,
        }


@dataclass(frozen=True, slots=True)
class FindingGroup:
    """All findings in one program with the same rule, operator and suggested rewrite."""

    rule: str
    operator: str
    source: str  # where the limit was read or measured
    rewrite: str  # the suggested rewrite; empty: there is none
    kind: FindingKind
    occurrences: tuple[Occurrence, ...]  # the most expensive first

    @property
    def suggestion(self) -> str:
        """The suggested rewrite, or in a few words what to do; empty: only the rule's page says it."""
        return self.rewrite or RULES[self.rule].instead

    @property
    def flops(self) -> int:
        """Floating-point operations of these nodes."""
        return sum(occurrence.cost.flops for occurrence in self.occurrences if occurrence.cost)

    @property
    def bytes(self) -> int:
        """Bytes that these nodes read and write."""
        return sum(occurrence.cost.bytes for occurrence in self.occurrences if occurrence.cost)

    @property
    def nodes(self) -> int:
        """Number of occurrences that are nodes."""
        return sum(occurrence.cost is not None for occurrence in self.occurrences)


@dataclass(frozen=True)  # without slots: a cached property is kept in the object
class CheckedProgram:
    """The findings of one target in one program."""

    graph: Graph
    cost: Cost
    findings: tuple[FindingGroup, ...]  # rejections first; within a kind, the most expensive first
    parts: Parts | None  # of rejected nodes; None: the operators of the target are not known

    @cached_property
    def predicted(self) -> Partitions | None:
        """The delegated subgraphs; None if the operators of the target are not known."""
        return None if self.parts is None else partitions_of(self.graph, self.parts)

    def of(self, kind: FindingKind) -> tuple[FindingGroup, ...]:
        """Return the findings of one kind."""
        return tuple(group for group in self.findings if group.kind == kind)

    @property
    def rejected(self) -> tuple[FindingGroup, ...]:
        """The rejections, without warnings and "not seen" findings."""
        return self.of("rejected")

    @property
    def rejected_nodes(self) -> int:
        """Number of nodes that the target rejects."""
        return sum(group.nodes for group in self.rejected)

    @property
    def not_seen_nodes(self) -> int:
        """Number of nodes not seen in programs known to compile; they do not count as rejected."""
        return sum(group.nodes for group in self.of("not seen"))

    def share(self, group: FindingGroup) -> tuple[float, float]:
        """Return the group's share of the program's FLOPs and of its bytes, each from 0 to 1."""
        return (
            group.flops / self.cost.flops if self.cost.flops else 0.0,
            group.bytes / self.cost.bytes if self.cost.bytes else 0.0,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the findings as JSON, as `whisperport check --json` prints them."""
        return {
            "program": self.graph.name,
            "format": self.graph.format,
            "nodes": len(self.graph.nodes),
            "flops": self.cost.flops,
            "bytes": self.cost.bytes,
            "stored_bytes": self.cost.stored_bytes,
            "uncounted_nodes": self.cost.uncounted,
            "rejected_nodes": self.rejected_nodes,
            "not_seen_nodes": self.not_seen_nodes,
            "predicted_partitions": self.predicted.to_json() if self.predicted else None,
            "findings": [self._group_to_json(group) for group in self.findings],
        }

    def _group_to_json(self, group: FindingGroup) -> dict[str, Any]:
        flops, size = self.share(group)
        return {
            "rule": group.rule,
            "title": RULES[group.rule].title,
            "kind": group.kind,
            "operator": group.operator,
            "limit_source": group.source,
            "what_to_do": RULES[group.rule].what_to_do,
            "suggested_rewrite": group.rewrite or None,
            "flops_share": flops,
            "bytes_share": size,
            "occurrences": [occurrence.to_json() for occurrence in group.occurrences],
        }


def check_graph(graph: Graph, spec: TargetSpec) -> CheckedProgram:
    """Check `graph` against every limit of `spec`.

    A node is counted once: for the first limit that it breaks, in the order of `limits_of`. Warnings are
    reported in addition.
    """
    graph = graph if spec.supports.folds_constants else graph.unfolded()
    cost = cost_of(graph)
    costs = {id(counted.node): counted for counted in cost.nodes}
    constant = _independent_of_inputs(graph)
    groups: dict[tuple[str, str, str], tuple[Limit, list[Occurrence]]] = {}
    parts: dict[str, tuple[bool, ...]] = {}
    for limit, finding in _findings(graph, spec):
        if finding.node is not None and limit.kind == "rejected":
            parts[finding.node.name] = limit.parts
        operator = finding.node.op if finding.node else ""
        suggested = limit.rewrite or spec.supports.suggested_rewrites.get(operator, "")
        rewrite = suggested if finding.fixable else ""
        if finding.node is not None and finding.node.name in constant:
            rewrite = FOLD_CONSTANTS
        occurrence = Occurrence(finding.name, finding.reason, rewrite, costs.get(id(finding.node)))
        groups.setdefault((limit.rule, operator, rewrite), (limit, []))[1].append(occurrence)
    findings = [
        FindingGroup(rule, operator, limit.source, rewrite, limit.kind, _by_cost(occurrences))
        for (rule, operator, rewrite), (limit, occurrences) in groups.items()
    ]
    findings.sort(key=lambda g: (KIND_ORDER.index(g.kind), -g.flops, -g.bytes, g.rule))
    known = any(limit.rule == "WP101" and _applies(limit, graph) for limit in limits_of(spec))
    return CheckedProgram(graph, cost, tuple(findings), parts if known else None)


def rejections(graph: Graph, spec: TargetSpec) -> list[Rejection]:
    """Return every rejection in `graph`, in the order in which the limits are checked."""
    return [
        Rejection(
            finding.name, finding.reason, limit.rule, finding.node.place if finding.node else ""
        )
        for limit, finding in _findings(graph, spec)
        if limit.kind == "rejected"
    ]


def limits_of(spec: TargetSpec) -> tuple[Limit, ...]:
    """Return all limits of a target in the order in which they are checked; "not seen" limits are last."""
    sources = spec.sources
    unseen: list[Limit] = []
    implied = [
        Limit(rule="WP402", value=spec.supports.formats, source=sources.get("formats", "")),
        Limit(rule="WP202", value=spec.supports.dtypes, source=sources.get("dtypes", "")),
        Limit(rule="WP102", value=spec.supports.domains, source=sources.get("domains", "")),
    ]
    shapes = Limit(rule="WP204", source=sources.get("static", ""))
    implied.append(shapes if spec.supports.static else replace(shapes, kind="warning"))
    if spec.supports.operators is not None:
        listed = spec.supports.operators | {
            name
            for limit in spec.supports.limits
            if limit.rule in ("WP101", "WP103")
            for name in limit.operators
        }
        source = sources.get("operators", "")
        if spec.supports.operators_observed:
            unseen.append(Limit(rule="WP104", value=listed, source=source, kind="not seen"))
        else:
            implied.append(Limit(rule="WP101", value=listed, source=source))
    implied.append(
        Limit(rule="WP201", value=spec.supports.max_rank, source=sources.get("max_rank", ""))
    )
    return (*implied, *spec.supports.limits, *unseen, *_EVERY_TARGET)


def _applies(limit: Limit, graph: Graph) -> bool:
    return not limit.formats or graph.format in limit.formats


def _findings(graph: Graph, spec: TargetSpec) -> Iterator[tuple[Limit, Finding]]:
    """Yield each finding with its limit; a node only for the first limit that it breaks."""
    names: set[str] = set()
    for limit in limits_of(spec):
        if not _applies(limit, graph):
            continue
        for finding in RULES[limit.rule].check(graph, limit):
            if finding.node is not None and limit.kind != "warning":
                if finding.node.name in names:
                    continue
                names.add(finding.node.name)
            yield limit, finding


def _by_cost(occurrences: Sequence[Occurrence]) -> tuple[Occurrence, ...]:
    """Sort occurrences, the most expensive first."""

    def key(occurrence: Occurrence) -> tuple[int, int]:
        return (-occurrence.cost.flops, -occurrence.cost.bytes) if occurrence.cost else (0, 0)

    return tuple(sorted(occurrences, key=key))


def _independent_of_inputs(graph: Graph) -> set[str]:
    """Return the names of nodes whose result does not depend on an input, such as masks and positions."""
    known: set[str] = set()  # names of tensors
    independent: set[str] = set()
    for node in graph.nodes:
        if node.custom or node.in_place or "rand" in node.op:
            continue
        if all(value.constant or value.name in known for value in node.tensors):
            independent.add(node.name)
            known.update(value.name for value in node.outputs)
    return independent
