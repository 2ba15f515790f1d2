"""Read a grammar in GBNF: its rules as a tree, checked so that each leads to texts that end.

GBNF is the format of llama.cpp. A rule is ``name ::= alternatives``; its parts are texts in
quotes, characters in brackets, any character (a dot), names of rules, parentheses, and repetitions; a
comment begins with #. Sentences are those of the rule ``root``.
Source: ggml-org/llama.cpp, grammars/README.md. Difference: a line may also begin with `|`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from whisperport.errors import UsageError
from whisperport.system.regular_file import read_short_text

ROOT = "root"
MAX_CHARACTERS = 500_000
MAX_NESTING = 100
SURROGATES, LAST_CHARACTER = (0xD800, 0xDFFF), 0x10FFFF  # code points; surrogates are no characters
_TOKEN = re.compile(
    r"(?P<space>\s+|#[^\n]*)"
    r"|(?P<rule>[\w-]+)[ \t]*::="
    r"|(?P<name>[\w-]+)"
    r'|"(?P<text>(?:[^"\\\n]|\\.)*)"'
    r"|\[(?P<chars>(?:[^\]\\\n]|\\.)*)\]"
    r"|(?P<repeat>[*+?]|\{[ \t]*\d*[ \t]*(?:,[ \t]*\d*[ \t]*)?\})"
    r"|(?P<sign>[()|.])"
)
_CHARACTER = re.compile(
    r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\([nrt\"\\\[\]\-^])|([^\\])"
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@dataclass(frozen=True, slots=True)
class Text:
    """Characters as they are written."""

    characters: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One of several characters: (first, last) code points."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Name:
    """What another rule says."""

    rule: str
    line: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """An item several times in a row."""

    item: "Item"
    least: int
    most: int | None  # None: without a limit


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several sequences."""

    sequences: tuple[tuple["Item", ...], ...]


Item = Text | Chars | Name | Repeat | Choice
Rules = dict[str, Choice]
ANY = Chars(((0, SURROGATES[0] - 1), (SURROGATES[1] + 1, LAST_CHARACTER)))


def read_grammar(path: Path) -> str:
    """Return the text of a grammar in a file, checked.

    Raises:
        UsageError: the file cannot be read, or a rule is wrong; the message names its line.
    """
    try:
        text = read_short_text(path, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the grammar in `{path}`",
            why=getattr(error, "strerror", None) or str(error),
            hint="use a text file in UTF-8 with rules in GBNF",
        ) from error
    checked_rules(text, f"`{path}`")
    return text


@lru_cache(8)  # options that are copied do not check it again
def checked_rules(text: str, name: str = "the grammar") -> Rules:
    """Return the rules of a grammar by their names.

    Args:
        text: of the grammar.
        name: of it, for errors.

    Raises:
        UsageError: it is too long, no GBNF, has no `root`, or a rule is not defined, begins with itself, or
            leads to no text that ends.
    """
    if not isinstance(text, str) or len(text) > MAX_CHARACTERS:
        length = f"has {len(text):,} characters" if isinstance(text, str) else "is not a text"
        raise UsageError(
            f"{name} {length}",
            why=f"expected a text of at most {MAX_CHARACTERS:,} characters",
            hint="leave out sentences, or share their parts in rules",
        )
    rules = _Parser(text, name).rules()
    if ROOT not in rules:
        raise UsageError(
            f"{name} has no rule `{ROOT}`",
            why="it says which sentences are possible",
            hint=f'write a line such as: {ROOT} ::= "Turn " ("on" | "off") " the light."',
        )
    for item in items_of(rules):
        if isinstance(item, Name) and item.rule not in rules:
            raise UsageError(
                f"line {item.line} of {name} uses the rule `{item.rule}`, which is not defined",
                hint=f'write the rule, or put quotes around it if it is a text: "{item.rule}"',
            )
    _check_ends(rules, name)
    _check_beginnings(rules, name)
    return rules


class _Parser:
    """Reads the rules of one grammar.

    Args:
        text: of the grammar.
        name: of it, for errors.
    """

    def __init__(self, text: str, name: str) -> None:
        self._text, self._name = text, name
        self._line = 1

    def rules(self) -> Rules:
        """Return the rules.

        Raises:
            UsageError: this is no GBNF.
        """
        rules: Rules = {}
        rule, opened = "", [list[list[Item]]()]
        for kind, value in self._tokens():
            if kind == "rule":
                self._close(rules, rule, opened)
                rule, opened = value, [[[]]]
                if rule in rules:
                    raise self._error(f"defines the rule `{rule}` again", "write it once")
            elif not rule:
                raise self._error("is outside of a rule", 'begin with a rule: root ::= "Yes."')
            elif kind == "sign" and value == "(":
                opened.append([[]])
                if len(opened) > MAX_NESTING:
                    raise self._error(
                        f"has more than {MAX_NESTING} parentheses in each other",
                        "write rules of their own",
                    )
            elif kind == "sign" and value == ")":
                if len(opened) == 1:
                    raise self._error("closes a parenthesis that is not open", "leave it out")
                opened[-2][-1].append(_choice(opened.pop()))
            elif kind == "sign" and value == "|":
                opened[-1].append([])
            elif kind == "repeat":
                self._repeat(opened[-1][-1], value)
            else:
                opened[-1][-1].append(self._item(kind, value))
        self._close(rules, rule, opened)
        return rules

    def _close(self, rules: Rules, rule: str, opened: list[list[list[Item]]]) -> None:
        """Keep the rule that ends here."""
        if len(opened) > 1:
            raise self._error("comes before a parenthesis is closed", f"close it in `{rule}`")
        if rule:
            rules[rule] = _choice(opened[0])

    def _tokens(self) -> Iterator[tuple[str, str]]:
        """Yield (kind, text) of each token."""
        at = 0
        while at < len(self._text):
            token = _TOKEN.match(self._text, at)
            if token is None:
                raise self._error(
                    f"has {self._text[at : at + 20].splitlines()[0]!r}, which is no GBNF",
                    "put texts in quotes; close quotes and brackets on their line",
                )
            at = token.end()
            kind = str(token.lastgroup)
            if kind != "space":
                yield kind, token[kind]
            self._line += token[0].count("\n")

    def _item(self, kind: str, value: str) -> Item:
        if kind == "text":
            return Text("".join(chr(point) for point, _ in self._points(value)))
        if kind == "chars":
            return self._chars(value)
        return ANY if kind == "sign" else Name(value, self._line)

    def _points(self, written: str) -> list[tuple[int, bool]]:
        """Return the code points of characters, each with whether it was not escaped."""
        points, at = list[tuple[int, bool]](), 0
        while at < len(written):
            match = _CHARACTER.match(written, at)
            digits = match and (match[1] or match[2] or match[3])
            point = int(digits, 16) if digits else 0
            if match is None or not _is_character(point):
                raise self._error(
                    f"has {written[at : at + 10]!r}, which is no character",
                    r"escapes are \n \r \t \" \\ \[ \] \xHH \uHHHH \UHHHHHHHH",
                )
            if not digits:
                point = ord(match[5] or _ESCAPES.get(match[4], match[4]))
            points.append((point, match[5] is not None))
            at = match.end()
        return points

    def _chars(self, written: str) -> Chars:
        """Return the characters of a bracket, such as a-z or ^0-9."""
        negated = written.startswith("^")
        points = self._points(written[negated:])
        ranges, at = list[tuple[int, int]](), 0
        while at < len(points):
            is_range = points[at + 1 : at + 2] == [(ord("-"), True)] and at + 2 < len(points)
            last = at + 2 if is_range else at
            ranges.append((points[at][0], points[last][0]))
            at = last + 1
        if not ranges or any(first > last for first, last in ranges):
            raise self._error(f"has [{written[:20]}], which is empty", "write such as [a-z]")
        outside = _all_but(ranges)
        return Chars(outside if negated else _all_but(outside))  # twice: no surrogates

    def _repeat(self, sequence: list[Item], written: str) -> None:
        """Repeat the last item of a sequence."""
        if not sequence:
            raise self._error(f"repeats nothing with {written}", "put it behind a text or a rule")
        if isinstance(sequence[-1], Repeat):
            raise self._error(f"repeats a repetition with {written}", "put parentheses around it")
        if written in _COUNTS:
            least, most = _COUNTS[written]
        else:
            first, comma, second = (part.strip() for part in written[1:-1].partition(","))
            if not first and not second:
                raise self._error(f"has {written}", "write such as {2}, {2,} or {2,5}")
            numbers = [int(each[:9]) if each else None for each in (first, second)]
            least, most = numbers[0] or 0, numbers[1] if comma else numbers[0]
            if most is not None and most < least:
                raise self._error(
                    f"repeats an item {written} times", "write the smaller number first"
                )
        sequence[-1] = Repeat(sequence[-1], least, most)

    def _error(self, what: str, hint: str) -> UsageError:
        return UsageError(f"line {self._line} of {self._name} {what}", hint=hint)


def _choice(sequences: Sequence[Sequence[Item]]) -> Choice:
    return Choice(tuple(map(tuple, sequences)))


def _is_character(point: int) -> bool:
    return point < SURROGATES[0] or SURROGATES[1] < point <= LAST_CHARACTER


def _all_but(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of all characters outside of some ranges."""
    others, start = [], 0
    for first, last in sorted((*ranges, SURROGATES)):
        if start < first:
            others.append((start, first - 1))
        start = max(start, last + 1)
    if start <= LAST_CHARACTER:
        others.append((start, LAST_CHARACTER))
    return tuple(others)


def items_of(rules: Rules) -> Iterator[Item]:
    """Yield all items of all rules."""
    waiting: list[Item] = list(rules.values())
    while waiting:
        item = waiting.pop()
        yield item
        if isinstance(item, Repeat):
            waiting.append(item.item)
        elif isinstance(item, Choice):
            waiting += [part for sequence in item.sequences for part in sequence]


def _fixpoint(rules: Rules, holds: Callable[[Item, set[str]], bool]) -> set[str]:
    """Return the rules that have a property, which may depend on the rules that they use."""
    known, before = set[str](), -1
    order = _used_first(rules)
    while before != len(known):
        before = len(known)
        for name in order:
            if name not in known and holds(rules[name], known):
                known.add(name)
    return known


def _used_first(rules: Rules) -> list[str]:
    """Return all rules, those that a rule uses before it, except in a circle."""
    uses = {
        name: [item.rule for item in items_of({name: rule}) if isinstance(item, Name)]
        for name, rule in rules.items()
    }
    order = dict[str, None]()
    visited = set[str]()
    for first in rules:
        waiting = [first]
        while waiting:
            name = waiting[-1]
            unvisited = [] if name in visited else [u for u in uses[name] if u not in visited]
            visited.add(name)
            if unvisited:
                waiting += unvisited
            else:
                order.setdefault(waiting.pop())
    return list(order)


def _holds(item: Item, known: set[str], of_characters: Callable[[Text | Chars], bool]) -> bool:
    """Return whether one of an item's sequences has a property in all its parts.

    Args:
        item: of a rule.
        known: the rules that have the property.
        of_characters: whether an item without parts has it.
    """
    if isinstance(item, Name):
        return item.rule in known
    if isinstance(item, Repeat):
        return item.least == 0 or _holds(item.item, known, of_characters)
    if isinstance(item, Choice):
        return any(
            all(_holds(part, known, of_characters) for part in parts) for parts in item.sequences
        )
    return of_characters(item)


def _ends(item: Item, ending: set[str]) -> bool:
    """Return whether an item leads to a text that ends, by the rules that do."""
    return _holds(item, ending, lambda _: True)


def _is_empty(item: Item, empty: set[str]) -> bool:
    """Return whether an item may be the empty text, by the rules that may."""
    return _holds(item, empty, lambda leaf: isinstance(leaf, Text) and not leaf.characters)


def _check_ends(rules: Rules, name: str) -> None:
    """Check that each rule leads to a text that ends."""
    ending = _fixpoint(rules, _ends)
    endless = [rule for rule in rules if rule not in ending]
    if endless:
        raise UsageError(
            f"the rule `{endless[0]}` of {name} has no end",
            why="each of its texts goes on with another one of the same rule",
            hint=f'add an alternative without it: {endless[0]} ::= ... | ""',
        )


def _check_beginnings(rules: Rules, name: str) -> None:
    """Check that no rule begins with itself: such a rule can be written with a repetition."""
    empty = _fixpoint(rules, _is_empty)
    fit = _fixpoint(rules, lambda item, known: known.issuperset(_beginnings(item, empty)))
    rest = [rule for rule in rules if rule not in fit]
    if not rest:
        return
    rule, passed = rest[0], set[str]()
    while rule not in passed:  # each of the rest begins with another one of them
        passed.add(rule)
        rule = next(each for each in _beginnings(rules[rule], empty) if each not in fit)
    raise UsageError(
        f"the rule `{rule}` of {name} begins with itself",
        hint='write a repetition, such as: list ::= item (", " item)*',
    )


def _beginnings(item: Item, empty: set[str]) -> Iterator[str]:
    """Yield the rules with which an item may begin."""
    if isinstance(item, Name):
        yield item.rule
    elif isinstance(item, Repeat):
        yield from _beginnings(item.item, empty)
    elif isinstance(item, Choice):
        for sequence in item.sequences:
            for part in sequence:
                yield from _beginnings(part, empty)
                if not _is_empty(part, empty):
                    break
