"""`whisperport explain`"""

import click

from whisperport.apps.cli.console import print_json, print_lines, print_next, print_table
from whisperport.apps.cli.shared_options import as_json
from whisperport.apps.cli.verb import Verb
from whisperport.errors import UsageError
from whisperport.targets import TARGETS


@click.command(
    cls=Verb, short_help="Explain a rule that `whisperport check` reports, such as WP301."
)
@click.argument("code", required=False)
@as_json
def explain(code: str | None, as_json: bool) -> None:
    """Explain a rule that `whisperport check` reports: what it means, what to do, and its targets.

    CODE is a rule's code, such as WP301. Without CODE, all rules are listed.

    \b
    Examples:
      $ whisperport explain
      $ whisperport explain WP301
    """
    from whisperport.model.inspection.rules import RULES
    from whisperport.model.inspection.rules.page import rule_index, rule_section

    if code is None:
        if as_json:
            print_json([{"rule": name, "title": title} for name, title in rule_index()])
        else:
            print_table(("rule", "title"), rule_index())
        print_next("explain", "WP301")
        return
    rule = RULES.get(code.upper())
    if rule is None:
        words = code.lower()
        about = [
            f"{candidate.code} ({candidate.title})"
            for candidate in RULES.values()
            if words in " ".join(f"{candidate.title} {candidate.text}".lower().split())
        ]
        raise UsageError(
            f"there is no rule `{code}`",
            why=f"these rules mention it: {', '.join(about)}" if about else "",
            hint="`whisperport explain` lists the rules; docs/problems.md lists problems by their messages",
        )
    if as_json:
        print_json({"rule": rule.code, "title": rule.title, "text": rule.text})
    else:
        print_lines(*rule_section(rule, [target.spec for target in TARGETS]).rstrip().split("\n"))
    print_next("check", "PROGRAM", "--target", "TARGET")
