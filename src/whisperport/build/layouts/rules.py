"""Rules for the files of apps, whoever wrote them: each has a permanent code, a title and a page."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from whisperport.build.layouts.reading import Files


@dataclass(frozen=True, slots=True)
class Problem:
    """What a rule says of one file.

    Attributes:
        code: of the rule.
        file: its path, relative to the folder.
        reason: what is there, and what the app needs.
        is_warning: whether the app transcribes anyway: it loses something, or only an old version
            of it fails.
    """

    code: str
    file: str
    reason: str
    is_warning: bool = False


Check = Callable[[Files], Iterator[tuple[str, str]]]
"""Yields the file and the reason of each problem."""


@dataclass(frozen=True, slots=True)
class LayoutRule:
    """One rule, such as WP731."""

    code: str  # permanent
    title: str  # a complete sentence without a full stop
    text: str  # the body of its page: meaning, cause, and a last paragraph "What to do: …"
    check: Check
    is_warning: bool = False

    def problems(self, files: Files) -> Iterator[Problem]:
        """Yield what is wrong."""
        return (Problem(self.code, *problem, self.is_warning) for problem in self.check(files))

    @property
    def what_to_do(self) -> str:
        """The advice in the last paragraph of `text`, on one line."""
        return " ".join(self.text.partition("What to do: ")[2].split())


def rule_section(rule: LayoutRule, apps: Sequence[str]) -> str:
    """Return the section of a rule as Markdown: code and title, explanation, and the apps it is about."""
    return f"## {rule.code}\n\n**{rule.title}.**\n\n{rule.text}\n\nApps: {', '.join(apps)}\n"


def layout_rule(
    code: str, title: str, *, is_warning: bool = False
) -> Callable[[Check], LayoutRule]:
    """Make a rule of a check, whose docstring is the body of the rule's page."""

    def made_of(check: Check) -> LayoutRule:
        return LayoutRule(code, title, inspect.getdoc(check) or "", check, is_warning)

    return made_of
