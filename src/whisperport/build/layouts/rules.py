"""Rules for the files of apps, whoever wrote them: each has a permanent code, a title and a page."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from whisperport.build.layouts.reading import Files

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

Remedy = Literal["fix", "fix --checkpoint", "convert", "export", "another app"]
"""What makes the files right: a repair, a repair that needs the checkpoint, or writing them again."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What a rule says of one file.

    Attributes:
        code: of the rule.
        file: its path, relative to the folder.
        reason: what is there, and what the app needs.
        is_warning: whether the app transcribes anyway: it loses something, or only an old version
            of it fails.
        remedy: what makes the files right.
    """

    code: str
    file: str
    reason: str
    is_warning: bool = False
    remedy: Remedy = "convert"


@dataclass(frozen=True, slots=True)
class Draft:
    """A copy of files in which a repair writes.

    Attributes:
        files: those of the copy.
        sizes: that graphs or weights state, by their names in transformers' `config.json`.
        checkpoint: that the files were made of; None: it is not known.
    """

    files: Files
    sizes: Mapping[str, int]
    checkpoint: "Checkpoint | None" = None


Repair = Callable[[Draft], str]
"""Corrects a draft; returns what it changed, for lists; empty: it cannot, and changed nothing."""
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
    remedy: Remedy = "convert"
    repair: Repair | None = None  # of `whisperport fix`

    def problems(self, files: Files) -> Iterator[Problem]:
        """Yield what is wrong."""
        return (
            Problem(self.code, *problem, self.is_warning, self.remedy)
            for problem in self.check(files)
        )

    @property
    def what_to_do(self) -> str:
        """The advice in the last paragraph of `text`, on one line."""
        return " ".join(self.text.partition("What to do: ")[2].split())


def rule_section(rule: LayoutRule, apps: Sequence[str]) -> str:
    """Return the section of a rule as Markdown: code and title, explanation, and apps."""
    return f"## {rule.code}\n\n**{rule.title}.**\n\n{rule.text}\n\nApps: {', '.join(apps)}\n"


def layout_rule(
    code: str,
    title: str,
    *,
    is_warning: bool = False,
    remedy: Remedy = "convert",
    repair: Repair | None = None,
) -> Callable[[Check], LayoutRule]:
    """Make a rule of a check, whose docstring is the body of the rule's page; a repair is advised first."""

    def made_of(check: Check) -> LayoutRule:
        text = inspect.getdoc(check) or ""
        if repair is not None:
            advice = "What to do: "
            text = text.replace(advice, f"{advice}`whisperport {remedy}`. Else: ")
        return LayoutRule(code, title, text, check, is_warning, remedy, repair)

    return made_of
