"""Write the section of a rule, which `whisperport explain` prints and `docs/reference/rules.md` has."""

from collections.abc import Iterable, Sequence

from whisperport.model.inspection.rejections import limits_of
from whisperport.model.inspection.rules.rule import RULES, Rule
from whisperport.program.spec import Limit, TargetSpec


def rule_section(rule: Rule, specs: Sequence[TargetSpec]) -> str:
    """Return the section as Markdown: code and title, explanation, and the limits of the targets.

    Args:
        specs: of the targets whose limits are listed. Targets with the same limit share a line.
    """
    targets: dict[str, list[str]] = {}
    for spec in specs:
        for limit in limits_of(spec):
            if limit.rule == rule.code:
                targets.setdefault(_limit_line(limit, spec), []).append(spec.name)
    lines = [
        f"- {'all targets' if len(names) == len(specs) else ', '.join(names)}{line}\n"
        for line, names in targets.items()
    ]
    limits = "Targets:\n\n" + "".join(lines)
    if not lines:
        limits = "No target in this version has this limit.\n"
    return f"## {rule.code}\n\n**{rule.title}.**\n\n{rule.text}\n\n{limits}"


def rule_index() -> list[tuple[str, str]]:
    """Return the code and title of every rule, sorted by code."""
    return [(code, RULES[code].title) for code in sorted(RULES)]


def limit_text(limit: Limit) -> str:
    """Return what a target supports as text; "" if the title of the rule says it."""
    value = limit.value
    seen = limit.rule in ("WP104", "WP404")
    if limit.rule in ("WP101", "WP104"):
        listed = "only the operators on the target's page in docs/reference/targets"
        return listed if value else "not seen" if seen else "not supported"
    if isinstance(value, str):
        return f"{value} are not delegated"
    if isinstance(value, tuple):
        name, supported = value
        return f"{name} {_listed(supported) or 'none'} only"
    if isinstance(value, frozenset):
        return f"{_listed(value)} {'seen' if seen else 'only'}" if value else "none supported"
    if value is None:
        return ""
    return f"{value} only" if limit.rule == "WP208" else f"at most {value:,}"


def _limit_line(limit: Limit, spec: TargetSpec) -> str:
    """Return what follows the names of the targets with this limit."""
    operators = f", for {_listed(limit.operators)}" if limit.operators else ""
    value, rewrites = limit_text(limit), _rewrites(limit, spec)
    text = operators + (f": {value}" if value else "")
    if rewrites:
        text += f". Suggested rewrite: {rewrites}"
    return f"{text}. Source: {limit.source}"


def _listed(values: Iterable[object]) -> str:
    texts: Sequence[str] = sorted(map(str, values))
    return ", ".join(texts)


def _rewrites(limit: Limit, spec: TargetSpec) -> str:
    if limit.rule not in ("WP101", "WP104"):
        return limit.rewrite
    relevant = [
        f"{rewrite} for {op}"
        for op, rewrite in sorted(spec.supports.suggested_rewrites.items())
        if not limit.operators or op in limit.operators
    ]
    return ", ".join(relevant)
