"""Check a program against what a target's spec says, and say what each finding costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from whisperport.inspection.cost import Cost, NodeCost, cost_of
from whisperport.inspection.graph import Graph
from whisperport.inspection.rules import RULES, Finding
from whisperport.spec import FindingKind, Limit, Rejection, TargetSpec

FOLD_CONSTANTS = "fold-constants"  # does without whatever depends on no input
ORDER: tuple[FindingKind, ...] = ("rejected", "not seen", "warning")


@dataclass(frozen=True, slots=True)
class Place:
    """One node, input or output that breaks a limit; `cost` is None for what is no node."""

    name: str
    reason: str
    rewrite: str  # the suggested rewrite; empty: there is none
    cost: NodeCost | None


@dataclass(frozen=True, slots=True)
class Kind:
    """All findings in one program by the same rule, operator and limit; the costliest comes first."""

    rule: str
    operator: str
    source: str  # of the limit
    rewrite: str
    finding: FindingKind
    places: tuple[Place, ...]

    @property
    def flops(self) -> int:
        return sum(place.cost.flops for place in self.places if place.cost)

    @property
    def bytes(self) -> int:
        return sum(place.cost.bytes for place in self.places if place.cost)

    @property
    def nodes(self) -> int:
        return sum(place.cost is not None for place in self.places)


@dataclass(frozen=True, slots=True)
class CheckedProgram:
    """What a target makes of one program."""

    graph: Graph
    cost: Cost
    kinds: tuple[Kind, ...]  # rejections first, and of each kind the costliest first

    def of(self, finding: FindingKind) -> tuple[Kind, ...]:
        """The findings of one kind."""
        return tuple(kind for kind in self.kinds if kind.finding == finding)

    @property
    def rejected(self) -> tuple[Kind, ...]:
        """Without warnings, and without what was only not seen to compile."""
        return self.of("rejected")

    @property
    def rejected_nodes(self) -> int:
        return sum(kind.nodes for kind in self.rejected)

    @property
    def unseen_nodes(self) -> int:
        """Nodes that were not seen in programs known to compile; none of them is rejected."""
        return sum(kind.nodes for kind in self.of("not seen"))

    def share(self, kind: Kind) -> tuple[float, float]:
        """Of the program's operations and bytes, from 0 to 1."""
        return (
            kind.flops / self.cost.flops if self.cost.flops else 0.0,
            kind.bytes / self.cost.bytes if self.cost.bytes else 0.0,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "program": self.graph.name,
            "format": self.graph.format,
            "nodes": len(self.graph.nodes),
            "flops": self.cost.flops,
            "bytes": self.cost.bytes,
            "stored_bytes": self.cost.stored_bytes,
            "uncounted_nodes": self.cost.uncounted,
            "rejected_nodes": self.rejected_nodes,
            "unseen_nodes": self.unseen_nodes,
            "kinds": [self._kind_to_json(kind) for kind in self.kinds],
        }

    def _kind_to_json(self, kind: Kind) -> dict[str, Any]:
        flops, size = self.share(kind)
        return {
            "rule": kind.rule,
            "title": RULES[kind.rule].title,
            "finding": kind.finding,
            "operator": kind.operator,
            "source": kind.source,
            "rewrite": kind.rewrite or None,
            "flops_share": flops,
            "bytes_share": size,
            "places": [
                {
                    "name": place.name,
                    "reason": place.reason,
                    "flops": place.cost.flops if place.cost else None,
                    "bytes": place.cost.bytes if place.cost else None,
                }
                for place in kind.places
            ],
        }


def check_graph(graph: Graph, spec: TargetSpec) -> CheckedProgram:
    """Every finding of `spec` in `graph`; a node is counted once, by the first limit that it breaks."""
    cost = cost_of(graph)
    costs = {id(counted.node): counted for counted in cost.nodes}
    free = _free_of_inputs(graph)
    groups: dict[tuple[str, str, str], tuple[Limit, list[Place]]] = {}
    for limit, finding in _findings(graph, spec):
        operator = finding.node.op if finding.node else ""
        suggested = limit.rewrite or spec.suggested_rewrites.get(operator, "")
        rewrite = suggested if finding.fixable else ""
        if finding.node is not None and finding.node.name in free:
            rewrite = FOLD_CONSTANTS
        place = Place(finding.place, finding.reason, rewrite, costs.get(id(finding.node)))
        groups.setdefault((limit.rule, operator, rewrite), (limit, []))[1].append(place)
    kinds = [
        Kind(rule, operator, limit.source, rewrite, limit.kind, _costliest_first(places))
        for (rule, operator, rewrite), (limit, places) in groups.items()
    ]
    kinds.sort(key=lambda kind: (ORDER.index(kind.finding), -kind.flops, -kind.bytes, kind.rule))
    return CheckedProgram(graph, cost, tuple(kinds))


def rejections(graph: Graph, spec: TargetSpec) -> list[Rejection]:
    """What is rejected, as a plain list in the order of the program."""
    return [
        Rejection(finding.place, finding.reason, limit.rule)
        for limit, finding in _findings(graph, spec)
        if limit.kind == "rejected"
    ]


def limits_of(spec: TargetSpec) -> tuple[Limit, ...]:
    """All limits of a target in the order in which they are tried: what is known of rejections first."""
    sources = spec.sources
    unseen: list[Limit] = []
    implied = [
        Limit(rule="WP402", value=spec.formats, source=sources.get("formats", "")),
        Limit(rule="WP202", value=spec.dtypes, source=sources.get("dtypes", "")),
        Limit(rule="WP102", value=spec.domains, source=sources.get("domains", "")),
    ]
    if spec.static:
        implied.append(Limit(rule="WP204", source=sources.get("static", "")))
    if spec.operators is not None:
        listed = spec.operators | {
            name
            for limit in spec.limits
            if limit.rule in ("WP101", "WP103")
            for name in limit.operators
        }
        source = sources.get("operators", "")
        if spec.operators_observed:
            unseen.append(Limit(rule="WP104", value=listed, source=source, kind="not seen"))
        else:
            implied.append(Limit(rule="WP101", value=listed, source=source))
    implied.append(Limit(rule="WP201", value=spec.max_rank, source=sources.get("max_rank", "")))
    return (*implied, *spec.limits, *unseen)


def _findings(graph: Graph, spec: TargetSpec) -> Iterator[tuple[Limit, Finding]]:
    found: set[str] = set()
    for limit in limits_of(spec):
        if limit.formats and graph.format not in limit.formats:
            continue
        for finding in RULES[limit.rule].check(graph, limit):
            if finding.node is not None and limit.kind != "warning":
                if finding.node.name in found:
                    continue
                found.add(finding.node.name)
            yield limit, finding


def _costliest_first(places: Sequence[Place]) -> tuple[Place, ...]:
    def weight(place: Place) -> tuple[int, int]:
        return (-place.cost.flops, -place.cost.bytes) if place.cost else (0, 0)

    return tuple(sorted(places, key=weight))


def _free_of_inputs(graph: Graph) -> set[str]:
    """Names of the nodes that compute the same each time, such as masks and positions."""
    known: set[str] = set()  # tensors
    free: set[str] = set()
    for node in graph.nodes:
        if node.custom or "rand" in node.op:
            continue
        if all(value.constant or value.name in known for value in node.tensors):
            free.add(node.name)
            known.update(value.name for value in node.outputs)
    return free
