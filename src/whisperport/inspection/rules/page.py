"""Write the page of a rule, which `whisperport explain` prints and `docs/reference/rules` contains."""

from collections.abc import Iterable, Sequence

from whisperport.inspection.check import limits_of
from whisperport.inspection.rules.base import RULES, Rule
from whisperport.spec import Limit, TargetSpec


def rule_page(rule: Rule, specs: Iterable[TargetSpec]) -> str:
    """Return the page as Markdown: code and title, explanation, and the limit of each target.

    Args:
        specs: of the targets whose limits are listed.
    """
    rows = [
        f"| {spec.name} | {_operators(limit)} | {limit_text(limit)} | {_rewrites(limit, spec)} "
        f"| {limit.source} |\n"
        for spec in specs
        for limit in limits_of(spec)
        if limit.rule == rule.code
    ]
    table = (
        "| Target | Operators | Limit | Suggested rewrite | Source of the limit |\n|---|---|---|---|---|\n"
        + "".join(rows)
        if rows
        else "No target in this version has this limit.\n"
    )
    return f"# {rule.code}: {rule.title}\n\n{rule.text}\n\n## Limits\n\n{table}"


def rule_index() -> list[tuple[str, str]]:
    """Return the code and title of every rule, sorted by code."""
    return [(code, RULES[code].title) for code in sorted(RULES)]


def limit_text(limit: Limit) -> str:
    """Return a limit's value as text."""
    value = limit.value
    if limit.rule in ("WP101", "WP104") and value:
        return "the list on the target's page"
    if isinstance(value, tuple):
        name, supported = value
        return f"{name} {_listed(supported)}"
    if isinstance(value, frozenset):
        return _listed(value)
    return str(value) if value is not None else "-"


def _listed(values: Iterable[object]) -> str:
    texts: Sequence[str] = sorted(map(str, values))
    return ", ".join(texts) or "none"


def _operators(limit: Limit) -> str:
    return _listed(limit.operators) if limit.operators else "all"


def _rewrites(limit: Limit, spec: TargetSpec) -> str:
    if limit.rule not in ("WP101", "WP104"):
        return limit.rewrite or "-"
    relevant = [
        f"{op}: {rewrite}"
        for op, rewrite in sorted(spec.suggested_rewrites.items())
        if not limit.operators or op in limit.operators
    ]
    return ", ".join(relevant) or "-"
