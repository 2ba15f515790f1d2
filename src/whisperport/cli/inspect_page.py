"""An HTML page of `inspect`: where each node ran, for how long, and why some are not delegated."""

from itertools import groupby
from typing import TYPE_CHECKING

from whisperport.cli.graph_page import MAX_GRAPH, STYLE, Drawn, graph, legend, run_strip
from whisperport.program.profiling import NodeProfile, Profile
from whisperport.system.page import bar, facts, html_page, percent, prose, table, text, verdict

if TYPE_CHECKING:  # torch may be missing at run time
    from whisperport.inspection.lowered import Inspected, Plan

MAX_ROWS = 12  # of the slowest nodes
MIN_SHARE = 0.01  # of the time: delegation of a node that takes less would gain nothing


def inspect_page(inspected: "Inspected", command: str) -> str:
    """Return the page: complete, without scripts and without other files.

    Args:
        inspected: the profiles.
        command: the suggested next command; empty: there is none.
    """
    profiles = inspected.profiles
    several = len(profiles) > 1
    body = _overview(profiles, command) if several else ""
    for one in profiles:
        body += f"<h2>{text(one.program)}</h2>\n" if several else ""
        body += _program(one, "" if several else command, len(profiles))
    body += "".join(map(_plan, inspected.plans))
    if inspected.skipped:
        body += f"<p>Not measured here: {text(', '.join(inspected.skipped))}</p>\n"
    names = ", ".join(one.program for one in profiles[:5]) or "no program that runs here"
    return html_page(f"Where the time goes: {names}", body, STYLE)


def in_ms(number: float) -> str:
    """Return milliseconds as a number with enough digits to compare them."""
    return f"{number:.1f}" if number >= 10 else f"{number:.3f}"


def takes_time(profile: Profile, node: NodeProfile) -> bool:
    """Return whether a node takes so much time that its delegation would gain something."""
    share = profile.time_share(node)
    return share is None or share >= MIN_SHARE  # None: not measured


def _overview(profiles: tuple[Profile, ...], command: str) -> str:
    total = sum(one.total_ms for one in profiles)
    rows = [
        (
            text(one.program),
            f"{in_ms(one.total_ms)} ms",
            bar(one.total_ms / total if total else 0.0),
            f"{len(one.undelegated)} of {len(one.nodes)}",
            _share_off(one),
        )
        for one in profiles
    ]
    off, nodes = sum(len(one.undelegated) for one in profiles), sum(len(p.nodes) for p in profiles)
    slowest = max(profiles, key=lambda one: one.total_ms)
    return verdict(
        f"{off} of {nodes} nodes are not delegated. The slowest of {len(profiles)} programs is "
        f"{slowest.program}: {in_ms(slowest.total_ms)} ms per run.",
        "bad" if off else "good",
        table(("program", ">per run", "", ">not delegated", ">of its time"), rows)
        + facts({"Next": f"<code>{text(command)}</code>" if command else ""}),
    )


def _share_off(profile: Profile) -> str:
    share = profile.undelegated_time_share
    return "not measured" if share is None else percent(share)


def _program(profile: Profile, command: str, n_programs: int) -> str:
    drawn = _drawn(profile)
    rows = [
        (
            text(node.name),
            text(node.where),
            "not measured" if node.ms is None else f"{in_ms(node.ms)} ms",
            bar(profile.time_share(node) or 0.0, "" if node.delegated else "bad"),
            percent(profile.time_share(node) or 0.0),
            prose(node.reason),
        )
        for node in profile.nodes[:MAX_ROWS]
    ]
    headings = (
        "node",
        "where",
        ">time",
        "",
        ">share",
        "why it is not delegated" if profile.undelegated else "",
    )
    shown = legend(
        f"delegated to {profile.target}; the nodes of one subgraph have one color", "not delegated"
    )
    nodes = (
        f"<h2>The slowest nodes, {len(rows)} of {len(profile.nodes)}</h2>\n{table(headings, rows)}"
        f"<h2>The run, node by node</h2>\n{shown}{graph(drawn, MAX_GRAPH // n_programs)}"
        + "".join(f"<p>{text(note)}.</p>\n" for note in profile.notes)
    )
    if n_programs > 1 and not profile.undelegated:
        nodes = f"<details><summary>Nodes of {text(profile.program)}</summary>\n{nodes}</details>\n"
    return _verdict(profile, drawn, command) + nodes


def _verdict(profile: Profile, drawn: list[Drawn], command: str) -> str:
    """Return what is not delegated, how much time it takes, why, and what to do next."""
    off, share = profile.undelegated, profile.undelegated_time_share
    ms = f"{in_ms(profile.total_ms)} ms per run, median of {profile.runs}, {profile.runtime}"
    worst = profile.nodes[0] if not off else max(off, key=lambda node: node.ms or 0.0)
    if off:
        sentence = f"{len(off)} of {len(profile.nodes)} nodes are not delegated"
        if share is not None:
            sentence = (
                f"{percent(share)} of the time is spent in nodes that are not delegated: "
                f"{percent(profile.time_share(worst) or 0.0)} in one {_short(worst.operator)}"
            )
    else:
        sentence = f"All {len(profile.nodes)} nodes run on {profile.target}"
    amount = f"{in_ms(worst.ms)} ms, {percent(profile.time_share(worst) or 0)}" if worst.ms else ""
    gain = worst.estimated_gain_ms
    shown = facts(
        {
            "What": f"<code>{text(worst.name)}</code> {text(worst.where)}",
            "How much": text(f"{amount} of {ms}" if amount else ms),
            "Why": prose(f"{worst.reason}{f' ({worst.rule})' if worst.rule else ''}"),
            "Gain": text(f"about {in_ms(gain)} ms, if it were delegated") if gain else "",
            "Next": f"<code>{text(command)}</code>" if command else "",
        }
    )
    about = f"{len(off)} of {len(profile.nodes)} nodes are not delegated, {_share_off(profile)}"
    measured = "time" if share is not None else "number of nodes"
    note = f'<p class="dim">The run from left to right; the length of a part is its {measured}.</p>'
    return verdict(
        f"{sentence}.",
        "bad" if off else "good",
        run_strip(drawn, about, "between nodes") + note + shown,
    )


def _short(operator: str) -> str:
    """Return an operator without the library's prefix and the overload: "mm" of "aten::mm.out"."""
    return operator.rpartition("::")[2].partition(".")[0]


def _drawn(profile: Profile) -> list[Drawn]:
    """Return the nodes in the order in which they ran."""
    drawn = list[Drawn]()
    nodes = sorted(profile.nodes, key=lambda node: node.place)
    for subgraph, (where, group) in enumerate(groupby(nodes, lambda node: node.where)):
        for node in group:
            share = profile.time_share(node)
            reason = {
                "Time": text(f"{in_ms(node.ms)} ms") if node.ms else "",
                "Why": prose(
                    f"{node.reason or 'not known'}{f' ({node.rule})' if node.rule else ''}"
                ),
            }
            drawn.append(
                Drawn(
                    operator=_short(node.operator) or node.name,
                    name=node.name,
                    module=where,
                    share=1 / len(nodes) if share is None else share,
                    kind="" if node.delegated else "bad",
                    subgraph=subgraph,
                    amount="" if share is None else percent(share),
                    reason={} if node.delegated else reason,
                )
            )
    return drawn


def _plan(plan: "Plan") -> str:
    rows = [(text(engine), str(number)) for engine, number in plan.engines.items()]
    return (
        f"<h2>{text(plan.program)}: as its compiler planned, not measured</h2>\n"
        + table(("engine", ">parts"), rows)
        + "".join(f"<p>{text(note)}</p>\n" for note in plan.notes)
    )
