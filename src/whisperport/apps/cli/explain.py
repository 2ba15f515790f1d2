"""`whisperport explain`"""

import re
from typing import TYPE_CHECKING

import click

from whisperport.apps.cli.console import print_json, print_lines, print_next, print_table
from whisperport.apps.cli.shared_options import as_json
from whisperport.apps.cli.verb import Verb
from whisperport.errors import UsageError
from whisperport.targets import TARGETS

if TYPE_CHECKING:
    from whisperport.build.layouts import LayoutRule
    from whisperport.model.inspection.rules import Rule

QUOTED = re.compile(r'"([^"]*)"')
SHORTEST = 9  # characters of a message in a rule's text


@click.command(
    cls=Verb,
    short_help="Explain a rule that `whisperport check` or `judge` reports, such as WP301.",
)
@click.argument("code", required=False)
@as_json
def explain(code: str | None, as_json: bool) -> None:
    """Explain a rule that `whisperport check` or `whisperport judge` reports: meaning, and what to do.

    CODE is a rule's code, such as WP301, or the message with which an app fails. Without CODE, all rules
    are listed.

    \b
    Examples:
      $ whisperport explain
      $ whisperport explain WP301
      $ whisperport explain "invalid unordered_map key"
    """
    from whisperport.build.layouts import all_rules
    from whisperport.build.layouts.rules import rule_section as section_of_app
    from whisperport.model.inspection.rules import RULES
    from whisperport.model.inspection.rules.page import rule_section

    of_apps, every = all_rules(), _every_rule()
    if code is None:
        titles = [(name, every[name].title) for name in sorted(every)]
        if as_json:
            print_json([{"rule": name, "title": title} for name, title in titles])
        else:
            print_table(("rule", "title"), titles)
        print_next("explain", "WP301")
        return
    rule = every.get(code.upper())
    if rule is None:
        about = rules_about(code)
        if len(about) != 1:
            names = ", ".join(f"{candidate.code} ({candidate.title})" for candidate in about)
            raise UsageError(
                f"there is no rule `{code}`",
                why=f"these rules mention it: {names}" if about else "",
                hint="`whisperport judge PATH` finds what is wrong with the files of an app; `whisperport "
                "explain` lists the rules; docs/problems.md lists problems by their messages",
            )
        (rule,) = about
    if as_json:
        print_json({"rule": rule.code, "title": rule.title, "text": rule.text})
    elif rule.code in of_apps:
        print_lines(*section_of_app(*of_apps[rule.code]).rstrip().split("\n"))
    else:
        specs = [target.spec for target in TARGETS]
        print_lines(*rule_section(RULES[rule.code], specs).rstrip().split("\n"))
    if rule.code in of_apps:
        print_next("judge", "PATH")
    else:
        print_next("check", "PROGRAM", "--target", "TARGET")


def _every_rule() -> "dict[str, Rule | LayoutRule]":
    from whisperport.build.layouts import all_rules
    from whisperport.model.inspection.rules import RULES

    return {**RULES, **{name: rule for name, (rule, _) in all_rules().items()}}


def rules_about(message: str) -> "list[Rule | LayoutRule]":
    """Return the rules that mention a message; if none does, those that quote most of it.

    Of those that quote as much, those that quote the fewest other messages.
    """
    rules, words = list(_every_rule().values()), _plain(message)
    mentioned = [rule for rule in rules if words in _plain(f"{rule.title} {rule.text}")]
    if mentioned:
        return mentioned
    quoted = {}
    for rule in rules:
        parts = {_plain(part) for part in QUOTED.findall(rule.text)}
        lengths = [len(part) for part in parts if part in words]
        quoted[rule.code] = (sum(lengths), len(lengths) - len(parts))
    most = max(quoted.values())
    return [rule for rule in rules if quoted[rule.code] == most and most[0] >= SHORTEST]


def _plain(text: str) -> str:
    """Return a text without what differs between two messages of the same kind.

    Numbers, quotes, C++ types in angle brackets, and how often a character is repeated.
    """
    text = re.sub(r"[\"'`*]|<[\w, ]+>", "", " ".join(text.lower().split()))
    return re.sub(r"\b\d+", "0", re.sub(r"([^\w\s])\1{3,}", r"\1" * 4, text))
