"""Pictures of a program's graph in HTML: one strip of the complete run, and every node in its module."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from whisperport.program.profiling import block_of
from whisperport.system.page import (
    LABELLED,
    SUBGRAPH_COLORS,
    Part,
    bar,
    facts,
    percent,
    strip,
    text,
    within,
)

MAX_GRAPH = 1_500_000  # characters of all graphs of a page
MAX_BLOCK = 1000  # nodes of a block; a file may name no modules
TINY = 1 / 2000  # of a strip: half a pixel

STYLE = """
.block { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .8rem; margin: .5rem 0;
  break-inside: avoid }
.row { display: grid; grid-template-columns: 9rem minmax(0, 1fr) 9rem; gap: .8rem; padding: .2rem 0 }
.row > .dim { overflow-wrap: anywhere; font-size: 13px }
.nodes { display: flex; flex-wrap: wrap; gap: .2rem; font: 12px/1.5 ui-monospace, monospace; min-width: 0 }
.node { border-radius: .25rem; padding: 0 .4rem; max-width: 100%; overflow-wrap: anywhere }
.node.fill { font-weight: 700 } .node.hint { outline: 2px solid var(--mark); outline-offset: -2px }
.node > summary { list-style: none } .node > summary::-webkit-details-marker { display: none }
details.node[open] { flex-basis: 100%; padding: 0 0 .3rem; background: var(--card); color: inherit }
details.node[open] > summary { padding: .1rem .4rem }
details.node > dl { padding: 0 .6rem; font: 13px/1.5 system-ui, sans-serif }
details.node.bad[open] > summary { background: var(--bad); color: var(--on) }
details.node.mark[open] > summary { background: var(--mark); color: var(--on) }
.share { display: grid; grid-template-columns: 1fr 3.4rem; gap: .5rem; align-items: center;
  align-self: start; font-size: 13px }
.legend { display: flex; flex-wrap: wrap; gap: .4rem 1rem; font-size: 13px }
@media (max-width: 40rem) { .row { grid-template-columns: minmax(0, 1fr) 8rem }
  .nodes { grid-column: 1/-1; order: 3 } }
"""

Kind = Literal["", "hint", "mark", "bad"]
"""A node that runs on the target, one with a warning, one that may not run there, and one that does not."""

# The signs distinguish the kinds without colors.
SIGNS: Mapping[Kind, str] = {"": "", "hint": "! ", "mark": "? ", "bad": "✕ "}


@dataclass(frozen=True, slots=True)
class Drawn:
    """One node of a picture."""

    operator: str
    name: str
    module: str  # or another group of neighbours; nodes of one are drawn together
    share: float  # of the cost or time, 0 to 1
    kind: Kind
    subgraph: int  # number of the part that it is delegated in; nodes of one have one color
    amount: str  # its share in words
    reason: Mapping[str, str] = field(default_factory=dict)  # as of `facts`: shown on a click


def run_strip(nodes: Sequence[Drawn], about: str, rest: str = "") -> str:
    """Return a strip of a complete run: nodes that are not delegated or costly, and what is between them.

    Args:
        nodes: in the order in which they run.
        about: the same as a sentence, as text.
        rest: what remains of the strip, if the shares do not add up to 1.
    """
    parts, pending = list[Part](), 0.0
    for key, group in groupby(enumerate(nodes), lambda pair: _place_in_strip(*pair)):
        group_nodes = [node for _, node in group]
        share, first = pending + sum(node.share for node in group_nodes), group_nodes[0]
        pending = share if share < TINY else 0.0
        if pending:
            continue
        label = f"{len(group_nodes)} nodes\n{percent(share)}"
        if key[0]:
            label = f"{SIGNS[first.kind]}{first.operator}\n{first.amount}"
        parts.append(Part(share, label, _color(first)))
    remaining = 1 - sum(node.share for node in nodes)
    if rest and remaining > 0:
        parts.append(Part(remaining, f"{rest}\n{percent(remaining)}", "idle"))
    return strip(parts, about)


def _place_in_strip(index: int, node: Drawn) -> tuple[bool, int]:
    apart = node.kind in ("bad", "mark") or node.share >= LABELLED
    return (True, index) if apart else (False, node.subgraph)


def _color(node: Drawn) -> str:
    if node.kind in ("bad", "mark"):
        return f"{node.kind} fill"
    return f"{node.kind} s{node.subgraph % SUBGRAPH_COLORS}"


def legend(on: str, apart: str, maybe: str = "", hint: str = "") -> str:
    """Return what colors and signs mean; all arguments are text, and an empty one is left out."""
    entries = (
        ("s0", on),
        ("bad fill", f"{SIGNS['bad']}{apart}" if apart else ""),
        ("mark fill", f"{SIGNS['mark']}{maybe}" if maybe else ""),
        ("hint s0", f"{SIGNS['hint']}{hint}" if hint else ""),
    )
    shown = (
        f'<span class="node {kind}">{text(meaning)}</span>' for kind, meaning in entries if meaning
    )
    return f'<p class="legend">{"".join(shown)}</p>\n'


def graph(nodes: Sequence[Drawn], limit: int = MAX_GRAPH) -> str:
    """Return every node, in the order in which they run, grouped by block and module.

    A node that is not delegated opens on a click, or by keys, and tells why.

    Args:
        nodes: in this order.
        limit: characters; blocks that do not fit are left out.
    """
    blocks, n_missing = within(_blocks(nodes), limit)
    missing = f"<p>{n_missing} more blocks are not drawn.</p>\n" if n_missing else ""
    return "".join(blocks) + missing


def _blocks(nodes: Sequence[Drawn]) -> Iterator[str]:
    places = enumerate(nodes)
    for (block, _), group in groupby(places, lambda n: (block_of(n[1].module), n[0] // MAX_BLOCK)):
        parts = groupby((node for _, node in group), lambda node: _part_of(node.module))
        rows = (_row(name, list(members)) for name, members in parts)
        title = f"<h3>{text(block)}</h3>" if block else ""
        yield f'<section class="block">{title}{"".join(rows)}</section>\n'


def _part_of(module: str) -> str:
    """Return the part of a block that a module is in: "attn"; outside of a block, the module."""
    block = block_of(module)
    return module.removeprefix(f"{block}.").partition(".")[0] if block != module else ""


def _row(name: str, nodes: Sequence[Drawn]) -> str:
    share = sum(node.share for node in nodes)
    kind = max((node.kind for node in nodes), key=("", "hint", "mark", "bad").index)
    return (
        f'<div class="row"><div class="dim">{text(name)}</div>'
        f'<div class="nodes">{"".join(map(_node, nodes))}</div>'
        f'<div class="share">{bar(share, kind)}<span class="n">{percent(share)}</span></div></div>\n'
    )


def _node(node: Drawn) -> str:
    label = f"{SIGNS[node.kind]}{text(node.operator)}"
    about = ", ".join(filter(None, (node.name, node.module, node.amount)))
    title = f'title="{text(about)}"'
    if not node.reason:
        return f'<span class="node {_color(node)}" {title}>{label}</span>'
    return (
        f'<details class="node {_color(node)}" {title}><summary>{label}</summary>'
        f"{facts({'Node': text(node.name), **node.reason})}</details>"
    )
