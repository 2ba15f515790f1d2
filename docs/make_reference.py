"""Generate reference pages from the code: command line, rewrites, rules, limits, example of a target.

    python docs/make_reference.py

A test compares the pages with the output of this script.
"""

import importlib
import inspect
import re
from pathlib import Path

import click

from whisperport.cli.console import WIDTH
from whisperport.cli.main import cli
from whisperport.inspection.rules import RULES
from whisperport.inspection.rules.page import limit_text, rule_index, rule_page
from whisperport.rewrites import HOST_REWRITES, REWRITES
from whisperport.spec import TargetSpec
from whisperport.targets import TARGETS, Target
from whisperport.targets.options import NoOptions, describe
from whisperport.verification.project_evidence import evidence_rows, status_words

REFERENCE = Path(__file__).parent / "reference"
ADD_A_TARGET = Path(__file__).parent / "how-to" / "add-a-target.md"
EXAMPLE = Path(__file__).parents[1] / "tests" / "dummy_vendor"

CLI_HEAD = """\
# Command line

Results are printed to standard output; progress, warnings and errors to standard error. With `--json`
the result is one JSON document. If `NO_COLOR` is set, the output has no colors. If the output is not a
terminal, tables and help are at most 100 columns wide.

| Exit code | Meaning |
|---|---|
| 0 | the command succeeded, and every comparison passed |
| 1 | the command failed, or a comparison did not pass |
| 2 | the command line is wrong |
| 128 + N | the command was interrupted by signal N, such as 130 for Ctrl-C |
| 141 | the program that read standard output has ended |
"""

REWRITES_HEAD = """\
# Rewrites

A rewrite changes a graph into an equivalent one that a target supports better. The spec of a target lists
its rewrites in order. The manifest of a bundle and the report of `whisperport check
--fix` state what each rewrite changed and what it did not change, with the reason. An *exact* rewrite
computes the same function in real arithmetic. Every rewrite supports programs of openai-whisper and
transformers as `torch.export` writes them, and does not copy weights in memory.
"""

RULES_HEAD = """\
# Rules

`whisperport check` checks every node of a program against these rules. The meaning of a code never
changes. `whisperport explain CODE` prints the page of a rule.

| Codes | Subject |
|---|---|
| WP1 | operators |
| WP2 | ranks, dtypes and sizes |
| WP3 | forms of an operator that is otherwise supported |
| WP4 | the file of the program |
| WP5 | warnings: supported, but computed in another way than the program states |
| WP6 | warnings: work that a decoder repeats for every token |

| Rule | Title |
|---|---|
"""


def pages() -> dict[Path, str]:
    """Generate every page: path -> complete text."""
    made = {REFERENCE / "cli.md": cli_page(), REFERENCE / "rewrites.md": rewrites_page()}
    made[REFERENCE / "rules" / "README.md"] = RULES_HEAD + "".join(
        f"| [{code}]({code}.md) | {title} |\n" for code, title in rule_index()
    )
    for code, rule in RULES.items():
        made[REFERENCE / "rules" / f"{code}.md"] = rule_page(rule, [t.spec for t in TARGETS])
    for target in TARGETS:
        page = REFERENCE / "targets" / f"{target.spec.name}.md"
        made[page] = target_page(page.read_text(encoding="utf-8"), target)
    made[ADD_A_TARGET] = page_with_files(ADD_A_TARGET.read_text(encoding="utf-8"), EXAMPLE)
    return made


def cli_page() -> str:
    """Generate the page with the help of whisperport and of each verb."""
    parts = [CLI_HEAD, _help(cli, "whisperport")]
    for name, verb in cli.commands.items():
        parts += [f"## {name}\n", _help(verb, f"whisperport {name}")]
    return "\n".join(parts)


def _help(command: click.Command, name: str) -> str:
    settings = {**cli.context_settings, "terminal_width": WIDTH}
    context = click.Context(command, info_name=name, **settings)
    return f"```text\n{command.get_help(context)}\n```\n"


def rewrites_page() -> str:
    """Generate the page of rewrites, each with the docstring of its module."""
    parts = [REWRITES_HEAD]
    for name, rewrite in sorted(REWRITES.items()):
        module = importlib.import_module(rewrite.apply.__module__)
        users = [
            t.spec.name for t in TARGETS if name in [r.partition("=")[0] for r in t.spec.rewrites]
        ]
        used_by = ", ".join(f"[{user}](targets/{user}.md)" for user in users) or "no target yet"
        exact = "Exact." if rewrite.exact else "Not exact."
        if rewrite.number is not None:
            exact += f" `{name}=NUMBER` sets the number; the default is {rewrite.number}."
        parts.append(f"## {name}\n\n{exact} Used by {used_by}.\n")
        parts.append(f"```text\n{inspect.getdoc(module)}\n```\n")
    for name, move in sorted(HOST_REWRITES.items()):
        module = importlib.import_module(move.__module__)
        users = [t.spec.name for t in TARGETS if name in t.spec.host_rewrites]
        used_by = ", ".join(f"[{user}](targets/{user}.md)" for user in users)
        moves = (
            "Moves steps to the host; applied by `whisperport check --fix` and `whisperport lower`."
        )
        parts.append(f"## {name}\n\nExact. {moves} Used by {used_by}.\n")
        parts.append(f"```text\n{inspect.getdoc(module)}\n```\n")
    return "\n".join(parts)


def target_page(text: str, target: Target) -> str:
    """Return a target's page with its marked parts generated from the spec and the options."""
    spec = target.spec
    parts = {
        "evidence": _evidence(spec),
        "limits": _limits(spec),
        "rewrites": _rewrites(spec),
        "options": _options(target),
    }
    for name, part in parts.items():
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, rf"\g<1>{part}\g<2>", text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"the page of {spec.name} has {count} marks for its {name}")
    return text


def page_with_files(text: str, folder: Path) -> str:
    """Return a page with its marked code blocks replaced by files of a folder."""

    def block(mark: re.Match[str]) -> str:
        code = (folder / mark[1]).read_text(encoding="utf-8")
        return f"<!-- file: {mark[1]} -->\n```python\n{code}```\n"

    return re.sub(r"<!-- file: (\S+) -->\n```python\n.*?```\n", block, text, flags=re.DOTALL)


def _evidence(spec: TargetSpec) -> str:
    """Generate the table of this project's evidence for a target."""
    rows = [f"| {' | '.join(row)} |\n" for row in evidence_rows(spec.name)]
    head = (
        f"Status in this project: *{status_words(spec.name)}*.\n\n"
        "| Evidence | Tool | Date | Machine |\n|---|---|---|---|\n"
    )
    return head + "".join(rows)


def _limits(spec: TargetSpec) -> str:
    limits = {
        "dtypes": ("inputs and outputs", ", ".join(sorted(spec.dtypes))),
        "max_rank": ("highest rank", str(spec.max_rank)),
        "operators": (
            "operators",
            ", ".join(f"`{name}`" for name in sorted(spec.operators))
            if spec.operators is not None
            else "the compiler decides",
        ),
    }
    rows = [
        f"| {words} | {value} | {spec.sources.get(field, 'not stated')} |\n"
        for field, (words, value) in limits.items()
    ]
    rows += [
        f"| [{limit.rule}](../rules/{limit.rule}.md)"
        f"{': ' if limit.operators else ''}{', '.join(sorted(limit.operators))} "
        f"| {limit_text(limit)} | {limit.source} |\n"
        for limit in spec.limits
    ]
    return f"| Limit | Value | Source |\n|---|---|---|\n{''.join(rows)}"


def _options(target: Target) -> str:
    """Generate the table of a target's options, with the commands that accept them."""
    classes = {
        "`export --option`": target.lower_options,
        "`compile --option`": target.compiler.options if target.compiler else NoOptions,
        "`import --option`": target.importer.options if target.importer else NoOptions,
        "`transcribe`, `verify` and `bench` `--run-option`": target.run_options,
    }
    rows = [
        f"| {verbs} | `{target.spec.name}.{one.name}` | {one.values} | {one.default or '-'} "
        f"| {one.help} |\n"
        for verbs, options in classes.items()
        for one in describe(options)
    ]
    head = "| Command | Option | Values | Default | Description |\n|---|---|---|---|---|\n"
    return head + "".join(rows) if rows else "None.\n"


def _rewrites(spec: TargetSpec) -> str:
    if not spec.rewrites:
        return "None.\n"
    names = (*spec.rewrites, *spec.host_rewrites)
    return "".join(
        f"{number}. [{name}](../rewrites.md#{name.partition('=')[0]})"
        f"{', applied only by `check --fix` and `lower`' if name in spec.host_rewrites else ''}\n"
        for number, name in enumerate(names, start=1)
    )


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(REFERENCE.parent.parent))
