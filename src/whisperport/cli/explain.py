"""`whisperport explain`"""

import click

from whisperport.cli.console import print_json, print_lines, print_next, print_table
from whisperport.cli.options import as_json
from whisperport.errors import UsageError
from whisperport.targets import TARGETS


@click.command(short_help="Explain a rule that `check` names.")
@click.argument("code", required=False)
@as_json
def explain(code: str | None, as_json: bool) -> None:
    """Print the page of a rule: what it means, what to do, which targets have it. Without CODE, list them.

    \b
    Example:
      $ whisperport explain WP301
    """
    from whisperport.inspection.rules import RULES
    from whisperport.inspection.rules.page import rule_index, rule_page

    if code is None:
        if as_json:
            print_json([{"rule": name, "title": title} for name, title in rule_index()])
        else:
            print_table(("rule", "says"), rule_index())
        print_next("explain", "WP301")
        return
    rule = RULES.get(code.upper())
    if rule is None:
        raise UsageError(
            f"no rule is called `{code}`", hint="`whisperport explain` lists the rules"
        )
    if as_json:
        print_json({"rule": rule.code, "title": rule.title, "text": rule.text})
    else:
        print_lines(*rule_page(rule, [target.spec for target in TARGETS]).rstrip().split("\n"))
    print_next("check", "PROGRAM", "--target", "TARGET")
