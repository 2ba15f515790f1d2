"""HTML pages of `check`: what a target rejects in a program, and what `fix` changed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from whisperport.apps.cli.graph_page import MAX_GRAPH, STYLE, Drawn, Kind, graph, legend, run_strip
from whisperport.build.check import Checked, Partitioned
from whisperport.build.fix import Fixed, RewriteStep
from whisperport.program.spec import FindingKind
from whisperport.system.page import (
    bar,
    facts,
    html_page,
    percent,
    prose,
    table,
    text,
    verdict,
    within,
)

if TYPE_CHECKING:  # torch may be missing at run time
    from whisperport.model.inspection.rejections import CheckedProgram, FindingGroup, Occurrence

MAX_LISTED = 50  # nodes of one kind in a table
MAX_KINDS, MAX_FINDINGS = 100, 400_000  # kinds of findings of a program, and characters of all
MAX_UNCOUNTED = 0.2  # of the nodes: with more, the shares of the cost mean nothing
KINDS: dict[FindingKind, Kind] = {"rejected": "bad", "not seen": "mark", "warning": "hint"}
VERBS: dict[FindingKind, str] = {
    "rejected": "rejected",
    "not seen": "not seen in programs known to compile",
    "warning": "warning",
}
_STYLE = f"""{STYLE}
.finding {{ border-top: 1px solid var(--line); padding: .4rem 0 }}
.finding > summary {{ display: grid; grid-template-columns: 9rem minmax(0, 1fr) auto; gap: 1rem;
  align-items: center }} .finding > summary::after {{ content: "+"; font-weight: 700 }}
.finding[open] > summary::after {{ content: "−" }}
@media (max-width: 40rem) {{ .finding > summary {{ grid-template-columns: 4rem minmax(0, 1fr) auto }} }}
"""


def check_page(checked: Checked, command: str) -> str:
    """Return the page of a check: complete, without scripts and without other files.

    Args:
        checked: the findings.
        command: the suggested next command.
    """
    names = [program.graph.name for program in checked.programs]
    several = len(names) > 1
    body = "".join(
        (f"<h2>{text(program.graph.name)}</h2>\n" if several else "")
        + _verdict(program, checked.target, "" if several else command)
        + _findings(program)
        + f"<h2>The graph</h2>\n{_nodes(program, checked.target, len(names))}"
        for program in checked.programs
    )
    if several:
        body = _overview(checked, command) + body
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    body += "".join(map(_partitioned, checked.partitions))
    return html_page(f"{shown} on {checked.target}", body, _STYLE)


def fix_page(fixed: Fixed, command: str) -> str:
    """Return the page of a fix: the program before and after it.

    Args:
        fixed: the fixed program.
        command: the suggested next command.
    """
    before, after, target = fixed.before, fixed.after, fixed.target
    now = _of(after) if fixed.remaining else "no node"
    if fixed.lookups and not fixed.remaining:
        now = f"only {_count(len(fixed.lookups), 'token lookup')}, which the host can run"
    sentence = f"{target} rejected {_of(before)}. Of the fixed program, it rejects {now}."
    kept = sum(step.kept for step in fixed.steps)
    shown = facts(
        {
            "Verified": text(
                f"each of {kept} rewrites, on {', '.join(fixed.samples)}: {fixed.gate.rule}"
            ),
            "Next": f"<code>{text(command)}</code>",
        }
    )
    strips = f"<b>Before</b>{_strip(before)}<b>After</b>{_strip(after)}"
    headings = ("rewrite", ">changed", ">declined", ">max error", "result")
    body = (
        verdict(sentence, "good" if fixed else "bad", strips + shown)
        + "<h2>The rewrites</h2>\n"
        + table(headings, map(_step, fixed.steps))
        + _findings(after)
        + "<h2>The graph after the fix</h2>\n"
        + _nodes(after, target, 2)
        + "<details><summary><b>The graph before the fix</b></summary>\n"
        + _findings(before)
        + _nodes(before, target, 2)
        + "</details>\n"
    )
    return html_page(f"{fixed.program.name}, fixed for {target}", body, _STYLE)


def _overview(checked: Checked, command: str) -> str:
    rejected = sum(program.rejected_nodes for program in checked.programs)
    nodes = sum(len(program.graph.nodes) for program in checked.programs)
    shares = {program.graph.name: _share_of(program, "rejected") for program in checked.programs}
    rows = [
        (
            text(program.graph.name),
            f"{program.rejected_nodes} of {len(program.graph.nodes)}",
            bar(shares[program.graph.name], "bad"),
            percent(shares[program.graph.name]),
        )
        for program in checked.programs
    ]
    return verdict(
        f"{checked.target} rejects {rejected} of {nodes} nodes in {len(checked.programs)} programs.",
        "bad" if any(program.rejected for program in checked.programs) else "good",
        table(("program", ">rejected nodes", "", ">share"), rows)
        + facts({"Next": f"<code>{text(command)}</code>"}),
    )


def _verdict(checked: "CheckedProgram", target: str, command: str) -> str:
    """Return what is rejected, how much it is, why, and what to do next."""
    kinds = [*checked.rejected, *checked.of("not seen")]
    following = {"Next": f"<code>{text(command)}</code>" if command else ""}
    if not kinds:
        sentence = f"{target} rejects none of {_count(len(checked.graph.nodes), 'node')}."
        return verdict(sentence, "good", _strip(checked) + facts(following))
    worst, color = kinds[0], KINDS[kinds[0].kind]
    if color == "bad":
        sentence = f"{target} rejects {_of(checked)}"
        if worst.nodes and _is_counted(checked):
            share = percent(checked.share(worst)[0])
            sentence += f": {share} in {worst.nodes} {worst.operator}"
    else:
        sentence = f"{_count(checked.not_seen_nodes, 'node')} may not compile for {target}"
    first = worst.occurrences[0]
    shown = facts(
        {
            "What": f"<code>{text(first.name or checked.graph.name)}</code> {_place(first)}",
            "How much": _amount(checked, worst),
            "Why": prose(f"{first.reason} ({worst.rule})"),
            "What to do": prose(_advice(worst)),
            **following,
        }
    )
    return verdict(f"{sentence}.", color, _strip(checked) + shown)


def _of(checked: "CheckedProgram") -> str:
    """Return how many nodes are rejected, and their share of the operations."""
    number, nodes = checked.rejected_nodes, len(checked.graph.nodes)
    if not number:
        return f"the program, but none of its {nodes} nodes" if checked.rejected else "no node"
    share = f" and {percent(_share_of(checked, 'rejected'))} of the operations"
    return f"{number} of {nodes} nodes{share if _is_counted(checked) else ''}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _is_counted(checked: "CheckedProgram") -> bool:
    cost = checked.cost
    return bool(cost.flops) and cost.uncounted <= MAX_UNCOUNTED * len(cost.nodes)


def _share_of(checked: "CheckedProgram", kind: FindingKind) -> float:
    return sum(group.flops for group in checked.of(kind)) / max(1, checked.cost.flops)


def _amount(checked: "CheckedProgram", group: "FindingGroup") -> str:
    """Return the share of a group as HTML; empty if nothing of it is a node."""
    if not group.nodes:
        return ""
    flops, size = checked.share(group)
    gflop, moved = checked.cost.flops / 1e9, checked.cost.bytes / 1e6
    counted = f"{percent(flops)} of {gflop:.3g} GFLOP and {percent(size)} of {moved:.3g} MB moved, "
    return f"{counted if _is_counted(checked) else ''}in {_count(group.nodes, 'node')}"


def _place(occurrence: "Occurrence") -> str:
    """Return the module and the line of code of a node as HTML."""
    source = occurrence.source
    line = f"{source.package_path}:{source.line}" if source else ""
    code = f" <code>{text(source.code)}</code>" if source and source.code else ""
    return (
        text(", ".join(filter(None, (occurrence.module and f"in {occurrence.module}", line))))
        + code
    )


def _advice(group: "FindingGroup") -> str:
    from whisperport.model.inspection.rules import RULES

    advice = RULES[group.rule].what_to_do
    return f"rewrite `{group.rewrite}`: {advice}" if group.rewrite else advice


def _findings(checked: "CheckedProgram") -> str:
    if not checked.findings:
        return ""
    groups = checked.findings[:MAX_KINDS]
    shown, n_missing = within((_finding(checked, group) for group in groups), MAX_FINDINGS)
    n_missing += len(checked.findings) - len(groups)
    missing = (
        f"<p>{n_missing} more kinds of nodes are listed without a page.</p>\n" if n_missing else ""
    )
    return f"<h2>What was found, the costliest first</h2>\n{''.join(shown)}{missing}"


def _finding(checked: "CheckedProgram", group: "FindingGroup") -> str:
    from whisperport.model.inspection.rules import RULES

    share = checked.share(group)[0] if _is_counted(checked) else 0.0
    title = f"{group.nodes or len(group.occurrences)} × {group.operator or 'program'}"
    rows = [
        (f"<code>{text(occurrence.name)}</code>", _place(occurrence), prose(occurrence.reason))
        for occurrence in group.occurrences[:MAX_LISTED]
    ]
    remainder = len(group.occurrences) - len(rows)
    opened = " open" if group is checked.findings[0] else ""
    return (
        f'<details class="finding"{opened}><summary>{bar(share, KINDS[group.kind])}'
        f'<span><b>{text(title)}</b> <span class="dim">{f"{percent(share)}, " if share else ""}'
        f"{VERBS[group.kind]}: {text(RULES[group.rule].title)} ({group.rule})</span></span></summary>"
        + facts(
            {
                "How much": _amount(checked, group),
                "What to do": prose(_advice(group)),
                "Source": text(group.source),
            }
        )
        + table(("node", "place", "reason"), rows)
        + (f"<p>{remainder} more are listed with <code>--all</code>.</p>" if remainder else "")
        + "</details>\n"
    )


def _nodes(checked: "CheckedProgram", target: str, n_graphs: int) -> str:
    shown = legend(
        f"{target} supports it"
        + ("; nodes of one predicted subgraph have one color" if checked.predicted else ""),
        "rejected: click for the reason",
        VERBS["not seen"] if checked.not_seen_nodes else "",
        "warning" if checked.of("warning") else "",
    )
    return shown + graph(_drawn(checked), MAX_GRAPH // n_graphs)


def _strip(checked: "CheckedProgram") -> str:
    unit = "operations" if _is_counted(checked) else "nodes"
    return run_strip(_drawn(checked), f"{_of(checked)} are rejected") + (
        f'<p class="dim">The run from left to right; the length of a part is its share of the {unit}.</p>'
    )


def _drawn(checked: "CheckedProgram") -> list[Drawn]:
    """Return the nodes in the order in which they run, with what was found about each."""
    findings_by_cost: dict[int, tuple[FindingGroup, Occurrence]] = {}
    for group in checked.findings:  # rejections first
        for occurrence in group.occurrences:
            findings_by_cost.setdefault(id(occurrence.cost), (group, occurrence))
    counted, flops, drawn = _is_counted(checked), checked.cost.flops, list[Drawn]()
    subgraphs = checked.predicted.of_node if checked.predicted else {}
    for cost in checked.cost.nodes:
        share = cost.flops / flops if counted else 1 / len(checked.cost.nodes)
        kind: Kind = ""
        reason = dict[str, str]()
        if id(cost) in findings_by_cost:
            group, occurrence = findings_by_cost[id(cost)]
            kind = KINDS[group.kind]
            reason = {
                "Where": _place(occurrence),
                "Why": prose(f"{occurrence.reason} ({group.rule})"),
                "Rewrite": f"<code>{text(group.rewrite)}</code>" if group.rewrite else "",
            }
        node, amount = cost.node, percent(share) if counted else ""
        subgraph = subgraphs.get(node.name, 0)
        drawn.append(Drawn(node.op, node.name, node.module, share, kind, subgraph, amount, reason))
    return drawn


def _step(step: RewriteStep) -> tuple[str, ...]:
    equality = step.equality
    result = (
        "verified" if step.kept else "failed, not applied" if step.failed else "nothing to replace"
    )
    return (
        text(step.outcome.rewrite),
        str(len(step.outcome.changed)),
        str(len(step.outcome.rejected)),
        f"{equality.max_relative:.1e}" if equality.compared else "",
        text(f"not applied: {step.left_out}" if step.left_out else result),
    )


def _partitioned(answer: Partitioned) -> str:
    title = f"<h2>{text(answer.program)}: {text(answer.partitioner)}</h2>\n"
    partition = answer.partition
    if partition is None:
        return f"{title}<p>It was not asked: {text(answer.reason)}</p>\n"
    declined: Sequence[tuple[str, ...]] = [
        (text(operator.operator), text(operator.tensor), text(operator.reason))
        for operator in partition.declined
    ]
    return (
        f"{title}<p>It accepts {partition.accepted} of {partition.total} operators; it compiles "
        "nothing.</p>\n"
        + (table(("declined operator", "its output", "reason"), declined) if declined else "")
    )
