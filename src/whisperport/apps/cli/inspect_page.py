"""An HTML page of `inspect`: where each node ran, for how long, and why some are not delegated."""

from itertools import groupby
from typing import TYPE_CHECKING

from whisperport.apps.cli.graph_page import (
    MAX_GRAPH,
    STYLE,
    Drawn,
    graph,
    legend,
    run_strip,
)
from whisperport.program.profiling import VOCABULARY, NodeProfile, Profile, block_of
from whisperport.system.page import bar, facts, html_page, percent, prose, table, text, verdict

if TYPE_CHECKING:  # torch may be missing at run time
    from whisperport.model.inspection.lowered import Inspected, Plan

_STYLE = f"{STYLE}\ntd:first-child {{ min-width: min(14rem, 40vw) }}\n"
MAX_ROWS = 12  # of the slowest nodes
MOST = 0.2  # of the time: a node that takes less is not named in the verdict
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
    for profile in profiles:
        body += f"<h2>{text(profile.program)}</h2>\n" if several else ""
        body += _program(profile, "" if several else command, len(profiles))
    body += "".join(map(_plan, inspected.plans))
    if inspected.skipped:
        body += f"<p>Not measured here: {text(', '.join(inspected.skipped))}</p>\n"
    names = ", ".join(profile.program for profile in profiles[:5]) or "no program that runs here"
    return html_page(f"Where the time goes: {names}", body, _STYLE)


def in_ms(number: float) -> str:
    """Return milliseconds as a number with enough digits to compare them."""
    return f"{number:.1f}" if number >= 10 else f"{number:.3f}"


def takes_time(profile: Profile, node: NodeProfile) -> bool:
    """Return whether a node takes so much time that its delegation would gain something."""
    share = profile.time_share(node)
    return share is None or share >= MIN_SHARE  # None: not measured


def _overview(profiles: tuple[Profile, ...], command: str) -> str:
    total = sum(profile.total_ms for profile in profiles)
    rows = [
        (
            text(profile.program),
            f"{in_ms(profile.total_ms)} ms",
            bar(profile.total_ms / total if total else 0.0),
            f"{len(profile.nodes)} on the CPU"
            if profile.on_cpu
            else f"{len(profile.undelegated)} of {len(profile.nodes)} not delegated",
            "" if profile.on_cpu else _share_off(profile),
            _most(profile, profile.nodes[0]) if profile.nodes else "",
        )
        for profile in profiles
    ]
    off = sum(len(profile.undelegated) for profile in profiles)
    nodes = sum(len(profile.nodes) for profile in profiles)
    on_cpu = all(profile.on_cpu for profile in profiles)
    headings = ("program", ">per run", "", ">nodes", "" if on_cpu else ">of its time", "most time")
    what = (
        f"All {nodes} nodes run on the CPU"
        if on_cpu
        else f"{off} of {nodes} nodes are not delegated"
    )
    slowest = max(profiles, key=lambda profile: profile.total_ms)
    return verdict(
        f"{what}. The slowest of {len(profiles)} programs is "
        f"{slowest.program}: {in_ms(slowest.total_ms)} ms per run.",
        "bad" if off else "good",
        table(headings, rows) + facts({"Next": f"<code>{text(command)}</code>" if command else ""}),
    )


def _share_off(profile: Profile) -> str:
    share = profile.undelegated_time_share
    return "not measured" if share is None else percent(share)


def _program(profile: Profile, command: str, n_programs: int) -> str:
    drawn = _drawn(profile)
    rows = [
        (
            f"{text(node.name)}<br><span class=dim>{text(node.module)}</span>"
            if node.module
            else text(node.name),
            bar(profile.time_share(node) or 0.0, "" if node.delegated else "bad"),
            percent(profile.time_share(node) or 0.0),
            "not measured" if node.ms is None else f"{in_ms(node.ms)} ms",
            text(node.where),
            prose(node.reason),
        )
        for node in profile.nodes[:MAX_ROWS]
    ]
    headings = (
        "node",
        "",
        ">share",
        ">time",
        "where",
        "why it is not delegated" if profile.undelegated else "",
    )
    shown = legend(
        f"runs on the CPU ({profile.target}); the nodes of one block have one color"
        if profile.on_cpu
        else f"delegated to {profile.target}; the nodes of one subgraph have one color",
        "not delegated" if profile.undelegated else "",
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
                f"{_most(profile, worst)}"
            )
    else:
        where = "the CPU" if profile.on_cpu else profile.target
        sentence = f"All {len(profile.nodes)} nodes run on {where}{_most_time(profile, worst)}"
    amount = f"{in_ms(worst.ms)} ms, {percent(profile.time_share(worst) or 0)}" if worst.ms else ""
    gain = worst.estimated_gain_ms
    shown = facts(
        {
            "What": f"<code>{text(worst.name)}</code> {text(_place(worst))}",
            "How much": text(f"{amount} of {ms}" if amount else ms),
            "Why": prose(f"{worst.reason}{f' ({worst.rule})' if worst.rule else ''}"),
            "Gain": text(f"about {in_ms(gain)} ms, if it were delegated") if gain else "",
            "Next": f"<code>{text(command)}</code>" if command else "",
        }
    )
    about = f"{len(off)} of {len(profile.nodes)} nodes are not delegated, {_share_off(profile)}"
    if profile.on_cpu:
        about = f"{sentence}, part by part"
    measured = "time" if share is not None else "number of nodes"
    note = f'<p class="dim">The run from left to right; the length of a part is its {measured}.</p>'
    return verdict(
        f"{sentence}.",
        "bad" if off else "good",
        run_strip(drawn, about, "between nodes") + note + shown,
    )


def _most(profile: Profile, node: NodeProfile) -> str:
    """Return the share of a node with its module, such as "76.0% in the vocabulary projection (mm)"."""
    operator, share = _short(node.operator) or node.name, profile.time_share(node)
    in_ = f"one {operator}"
    if node.module:
        in_ = f"{'the ' if node.module == VOCABULARY else ''}{node.module} ({operator})"
    return f"{'' if share is None else f'{percent(share)} '}in {in_}"


def _most_time(profile: Profile, node: NodeProfile) -> str:
    return f": {_most(profile, node)}" if (profile.time_share(node) or 0.0) >= MOST else ""


def _place(node: NodeProfile) -> str:
    return ", ".join(filter(None, (node.module, node.where)))


def _short(operator: str) -> str:
    """Return an operator without the library's prefix and the overload: "mm" of "aten::mm.out"."""
    return operator.rpartition("::")[2].partition(".")[0]


def _drawn(profile: Profile) -> list[Drawn]:
    """Return the nodes in the order in which they ran."""
    drawn = list[Drawn]()
    nodes = sorted(profile.nodes, key=lambda node: node.place)
    has_modules = any(node.module for node in nodes)
    colored = groupby(
        nodes, lambda node: block_of(node.module) if profile.on_cpu else node.where
    )  # by block, where all is one subgraph
    for subgraph, (_, group) in enumerate(colored):
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
                    module=node.module if has_modules else node.where,
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
