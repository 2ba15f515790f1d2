"""Generate pages from the code and from measurements: rewrites, rules, targets, an example, and apps.

    python docs/make_reference.py

A test compares the pages with the output of this script.
"""

import importlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import Any

from whisperport.build.layouts import all_layouts, all_rules
from whisperport.build.layouts.rules import rule_section as section_of_app
from whisperport.model.inspection.rules import RULES
from whisperport.model.inspection.rules.page import limit_text, rule_index, rule_section
from whisperport.model.rewrites import HOST_REWRITES, REWRITES
from whisperport.program.spec import TargetSpec
from whisperport.targets import TARGETS, Target
from whisperport.targets.target_options import NoOptions, describe
from whisperport.verification.project_evidence import evidence_rows, status_words

ROOT = Path(__file__).parents[1]
REFERENCE = Path(__file__).parent / "reference"
ADD_A_TARGET = Path(__file__).parent / "how-to" / "add-a-target.md"
EXAMPLE = ROOT / "tests" / "dummy_vendor"
APPS = Path(__file__).parent / "how-to" / "convert-for-an-app.md"
MEASURED = ROOT / "benchmarks" / "results" / "apps.json"

COLUMNS = (
    "App",
    "Weights",
    "Equal",
    "WER",
    "MB",
    "usual MB",
    "CPU s",
    "memory",
    "tiny: s",
    "memory",
)

TOLD_ONCE = ("precision", "equal", "clips", "verified", "wer", "bytes")

Row = tuple[str, ...]
ALL = "all"

REWRITES_HEAD = """\
# Rewrites

A rewrite changes a graph into an equivalent one that a target supports better. The page of a target lists
its rewrites in order. The manifest of a bundle and the report of `whisperport fix` state what each
rewrite changed, and what it did not change and why. All are *exact*, unless noted: they compute the same
function in real arithmetic. Rewrites read programs as `torch.export` writes them from openai-whisper and
transformers, and copy no weights in memory. The [glossary](glossary.md) explains the letters of shapes.
"""

RULES_HEAD = """\
# Rules

`whisperport check` checks every node of a program against these rules. `whisperport explain CODE` prints
the section of one rule. The meaning of a code never changes.

WP1 is about operators; WP2 about ranks, dtypes and sizes; WP3 about forms of an operator that is otherwise
supported; WP4 about the file of the program. WP5 warns of nodes that are computed in another way than the
program states, WP6 of work that a decoder repeats for every token. WP7 is about the files of apps, which
`whisperport judge` checks.

Below each rule are the targets that it applies to: what they support, and the source. *Second-hand* marks
a source that is not the vendor's, *inferred* a value that no document states for this chip.
"""


def pages() -> dict[Path, str]:
    """Generate every page: path -> complete text."""
    made = {REFERENCE / "rewrites.md": rewrites_page(), REFERENCE / "rules.md": rules_page()}
    for name, targets in targets_by_page().items():
        page = REFERENCE / "targets" / f"{name}.md"
        made[page] = target_page(page, targets)
    made[APPS] = with_parts(APPS, {"measured": _measured()})
    made[ADD_A_TARGET] = page_with_files(ADD_A_TARGET.read_text(encoding="utf-8"), EXAMPLE)
    return made


def page_of(target: Target) -> str:
    """Return the name of a target's page, which is that of its module or folder."""
    return type(target).__module__.split(".")[3].replace("_", "-")


def targets_by_page() -> dict[str, list[Target]]:
    """Group the targets by the page that describes them."""
    found: dict[str, list[Target]] = {}
    for target in TARGETS:
        found.setdefault(page_of(target), []).append(target)
    return found


def rules_page() -> str:
    """Generate the page of rules, with what `whisperport explain` prints of each."""
    specs = [target.spec for target in TARGETS]
    sections = [rule_section(RULES[code], specs) for code, _ in rule_index()]
    sections += [section_of_app(*rule) for rule in all_rules().values()]
    return "\n".join([RULES_HEAD, *sections])


def rewrites_page() -> str:
    """Generate the page of rewrites, each with the docstring of its module."""
    parts = [REWRITES_HEAD]
    for name, rewrite in sorted(REWRITES.items()):
        notes = [] if rewrite.exact else ["Not exact."]
        if rewrite.number is not None:
            notes.append(f"`{name}=NUMBER` sets the number, {rewrite.number} by default.")
        parts.append(_rewrite(name, " ".join(notes), rewrite.apply.__module__))
    for name, move in sorted(HOST_REWRITES.items()):
        note = "Moves steps to the host; applied by `fix` and `lower` only."
        parts.append(_rewrite(name, note, move.__module__))
    return "\n".join(parts)


def _rewrite(name: str, note: str, module: str) -> str:
    text = inspect.getdoc(importlib.import_module(module))
    paragraphs = [f"## {name}", note, f"```text\n{text}\n```\n"]
    return "\n\n".join(filter(None, paragraphs))


def target_page(page: Path, targets: Sequence[Target]) -> str:
    """Return the page of targets with its marked parts generated from their specs and options."""
    specs = [target.spec for target in targets]
    parts = {
        "status": _status(specs),
        "limits": _limits(specs),
        "options": _options(targets),
        "rewrites": _rewrites(specs),
    }
    return with_parts(page, parts)


def with_parts(page: Path, parts: Mapping[str, str]) -> str:
    """Return a page with its marked parts replaced: name of a mark -> text."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        pattern = rf"(?<=<!-- generated: {name} -->\n).*?(?=<!-- end -->)"
        text, count = re.subn(pattern, part.replace("\\", r"\\"), text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{page.name} has {count} marks for its {name}")
    return text


def page_with_files(text: str, folder: Path) -> str:
    """Return a page with its marked code blocks replaced by files of a folder."""

    def block(mark: re.Match[str]) -> str:
        code = (folder / mark[1]).read_text(encoding="utf-8")
        return f"<!-- file: {mark[1]} -->\n```python\n{code}```\n"

    return re.sub(r"<!-- file: (\S+) -->\n```python\n.*?```\n", block, text, flags=re.DOTALL)


def _grouped(rows: Iterable[tuple[str, Row]], names: Sequence[str]) -> dict[Row, str]:
    """Join equal rows of several targets: row -> the targets' names, or ALL if these are `names`."""
    found: dict[Row, list[str]] = {}
    for name, row in rows:
        found.setdefault(row, []).append(name)
    return {row: ALL if len(had) == len(names) else ", ".join(had) for row, had in found.items()}


def _status(specs: Sequence[TargetSpec]) -> str:
    """Generate the status of each target, and the list of this project's evidence."""
    names = [spec.name for spec in specs]
    statuses = _grouped(((name, (status_words(name),)) for name in names), names)
    evidence = _grouped(((name, row) for name in names for row in evidence_rows(name)), names)
    lines = [
        f"Status in this project{'' if had == ALL else f' of {had}'}: *{status}*.\n"
        for (status,), had in statuses.items()
    ]
    rows = [
        f"- {kind}: {tool}; {date} on {machine}{'' if had == ALL else f' ({had})'}\n"
        for (kind, tool, date, machine), had in evidence.items()
    ]
    return "".join(lines) + "\n" + "".join(rows)


def _limits(specs: Sequence[TargetSpec]) -> str:
    """Generate the list of limits; a line has all targets with the same limit."""
    names = [spec.name for spec in specs]
    lines = _grouped(((spec.name, (line,)) for spec in specs for line in _limit_lines(spec)), names)
    listed = [f"- {line}{'' if had == ALL else f' ({had})'}\n" for (line,), had in lines.items()]
    listed.sort(key=lambda line: line.startswith("- ["))  # the rules last
    some = "In parentheses: some targets only.\n\n" if len(names) > 1 else ""
    return some + "".join(listed)


def _limit_lines(spec: TargetSpec) -> list[str]:
    """Return each limit of a target as words, with a link to its rule."""
    names = "the compiler decides"
    if spec.supports.operators is not None:
        names = ", ".join(f"`{name}`" for name in sorted(spec.supports.operators)) or "none"
        names += f" ({_rule_link('WP104' if spec.supports.operators_observed else 'WP101')})"
    lines = [
        f"Dtypes of inputs and outputs: {', '.join(sorted(spec.supports.dtypes))} ({_rule_link('WP202')})",
        f"Highest rank: {spec.supports.max_rank} ({_rule_link('WP201')})",
        f"Operators: {names}",
        f"Precisions, the default first: {', '.join(f'`{name}`' for name in spec.runs.precisions)}",
    ]
    for limit in spec.supports.limits:
        title, value = RULES[limit.rule].title, limit_text(limit)
        if value.startswith("not"):
            title, value = value, ""
        operators = f" for {', '.join(sorted(limit.operators))}" if limit.operators else ""
        lines.append(f"{_rule_link(limit.rule)}{operators}: {title}{value and f'; {value}'}")
    return lines


def _rule_link(code: str) -> str:
    return f"[{code}](../rules.md#{code.lower()})"


def _options(targets: Sequence[Target]) -> str:
    """Generate the lists of the targets' options, one for each command that accepts some."""
    names = [target.spec.name for target in targets]
    prefix = names[0] if len(names) == 1 else "TARGET"
    found: dict[str, list[tuple[str, Row]]] = {}
    for target in targets:
        for command, options in _option_classes(target).items():
            for one in describe(options):
                default = f"default: {one.default}" if one.default else ""
                values = one.values if one.values not in ("text", "a path") else ""
                known = "; ".join(filter(None, (values, default)))
                line = f"- `{prefix}.{one.name}`: {one.help}{known and f' [{known}]'}"
                found.setdefault(command, []).append((target.spec.name, (line,)))
    parts = []
    for command, rows in found.items():
        lines = _grouped(rows, names)
        listed = "".join(
            f"{line}{'' if had == ALL else f' ({had})'}\n" for (line,), had in lines.items()
        )
        parts.append(f"{command}:\n\n{listed}")
    return "\n".join(parts) or "None.\n"


def _option_classes(target: Target) -> dict[str, type[Any]]:
    return {
        "`export --option NAME=VALUE`": target.lower_options,
        "`compile --option NAME=VALUE`": target.compiler.options if target.compiler else NoOptions,
        "`import --option NAME=VALUE`": target.importer.options if target.importer else NoOptions,
        "`--run-option NAME=VALUE` of `transcribe`, `verify` and `bench`": target.run_options,
    }


def _rewrites(specs: Sequence[TargetSpec]) -> str:
    """Generate the list of rewrites, in the order in which they are applied."""
    names = [spec.name for spec in specs]
    lists = _grouped(((spec.name, (_list_of_rewrites(spec),)) for spec in specs), names)
    return "".join(
        f"{'' if had == ALL else f'For {had}: '}{text}\n" for (text,), had in lists.items()
    )


def _list_of_rewrites(spec: TargetSpec) -> str:
    def links(names: Sequence[str]) -> str:
        return ", ".join(f"[{name}](../rewrites.md#{name.partition('=')[0]})" for name in names)

    if not (spec.lowering.rewrites or spec.lowering.host_rewrites):
        return "None."
    text = f"In this order: {links(spec.lowering.rewrites)}."
    if spec.lowering.host_rewrites:
        text += f" Then, by `fix` and `lower` only: {links(spec.lowering.host_rewrites)}."
    return text


def _measured() -> str:
    """Generate the table of what each app returned, and of what its files cost."""
    results = json.loads(MEASURED.read_text(encoding="utf-8"))
    ours, usual = results["layouts"], results["usual"]["apps"]
    rows = {(row["app"], row["precision"]): row for row in ours["rows"]}
    lines, versions, words = [], dict[str, str](), dict[str, list[str]]()
    for layout in all_layouts():
        sizes = next((usual[app]["bytes"] for app in layout.apps if app in usual), {})
        shown = set[tuple[Any, ...]]()  # apps of one layout load the same files
        for app, precision in product(layout.apps.values(), layout.precisions):
            if row := rows.get((app.name, precision)):
                told = tuple(row[name] for name in TOLD_ONCE)
                if told not in shown:
                    lines.append(_measured_row(row, sizes.get(precision)))
                shown.add(told)
                versions |= row["versions"]
                if app.compared == "words":
                    equal = f"{1 - row['differ'] / row['emitted']:.1%} of {row['emitted']}"
                    words.setdefault(equal, []).append(f"{app.name} {precision}")
    tools = ", ".join(f"{name} {version}" for name, version in versions.items())
    dates = sorted(row["measured_on"] for row in ours["rows"])
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    processors = ", ".join(sorted({row["cpu"] for row in ours["rows"]}))
    notes = (
        "Words of the checkpoint that are returned: "
        + "; ".join(f"{equal} by {', '.join(names)}" for equal, names in words.items())
        + ".",
        f"{processors}, {when}, `{ours['command']}`; {tools} "
        f"([results](../../{MEASURED.relative_to(ROOT).as_posix()})).",
    )
    wrapped = (fill(note, 130, break_long_words=False, break_on_hyphens=False) for note in notes)
    table = f"|{'|'.join(COLUMNS)}|\n{'|---' * len(COLUMNS)}|\n{''.join(lines)}\n"
    return table + "\n\n".join(wrapped) + "\n\n"


def _measured_row(row: Mapping[str, Any], usual: int | None) -> str:
    def megabytes(n_bytes: int | None, digits: int = 0) -> str:
        return f"{n_bytes / 1e6:.{digits}f}" if n_bytes else "-"

    cells = [
        row["app"],
        row["precision"],
        f"{row['equal']} of {row['clips']}{'' if row['verified'] else ', not verified'}",
        f"{row['wer']:.1%} ({row['reference_wer']:.1%})",
        megabytes(row["bytes"], 1),
        megabytes(usual, 1),
    ]
    for cost in (row, row["tiny"]):
        cells += [f"{cost['cpu_s']:.1f}", megabytes(cost["peak_bytes"])]
    return f"|{'|'.join(cells)}|\n"


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(REFERENCE.parent.parent))
