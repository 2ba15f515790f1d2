"""Phrases that the decoding prefers: their list, their spellings, and shallow fusion with a tree of tokens.

A token that begins or continues a phrase gets the phrase's bonus. If another token follows before the
phrase is complete, the bonuses are given back: a text gets the bonuses of its complete phrases, and those
of the one that may still become complete.
Source: icefall's `ContextGraph`, after Kaldi's biasing (k2-fsa/icefall, icefall/context_graph.py); NeMo's
phrase boosting. Difference: a phrase that is part of a longer one is found without failure links, by a
search from each of the last tokens.
"""

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.errors import UsageError
from whisperport.runtime.engine.scores import Bonus
from whisperport.speech.text import Tokenizer
from whisperport.system.regular_file import read_short_text

DEFAULT_BONUS = 0.8  # benchmarks/words/phrases.py
MAX_BONUS = 20.0
MAX_PHRASES = 10_000
MAX_CHARACTERS = 200  # of a phrase
# Words of these are not separated by spaces.
_SCRIPTS_WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "MYANMAR", "KHMER")
ANYWHERE, AFTER_NO_LETTER = 0, 1  # the roots: where a spelling may begin
NOWHERE = -1  # no node
MAX_KNOWN = 500  # bonuses in memory: each has up to 80 kB

Phrase = tuple[str, float]
"""A phrase, and its bonus in nats per token."""


class PhraseList(tuple[Phrase, ...]):
    """Checked phrases. Options that are copied do not check thousands of them again."""

    __slots__ = ()


def checked_phrases(phrases: Iterable[str | tuple[str, float]]) -> PhraseList:
    """Return phrases with their bonuses; a phrase without one gets `DEFAULT_BONUS`.

    Raises:
        UsageError: a phrase is empty or too long, a bonus is out of its range, or there are too many.
    """
    if isinstance(phrases, PhraseList):
        return phrases
    if isinstance(phrases, str):
        raise UsageError("`phrases` is a text", hint=f"use a list of texts: [{phrases[:40]!r}]")
    return _checked((f"phrase {i}", entry) for i, entry in enumerate(phrases, start=1))


def read_phrases(path: Path) -> PhraseList:
    """Read a list of phrases: one per line, and after a tab its bonus, if it has one of its own.

    Raises:
        UsageError: the file cannot be read, or a line is wrong; the message names it.
    """
    try:
        lines = read_short_text(path, "utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the phrases in `{path}`",
            why=getattr(error, "strerror", None) or str(error),
            hint="use a text file in UTF-8 with one phrase per line",
        ) from error
    phrases = _checked(
        (f"line {number} of `{path}`", tuple(line.rsplit("\t", 1)) if "\t" in line else line)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    if not phrases:
        raise UsageError(f"`{path}` has no phrases", hint="write one phrase per line")
    return phrases


def with_commas(text: str) -> list[str]:
    """Return the phrases of a text that has commas between them."""
    return [phrase.strip() for phrase in text.split(",") if phrase.strip()]


def _checked(entries: Iterable[tuple[str, object]]) -> PhraseList:
    """Return checked phrases, each given with a name for errors. The larger bonus of equal ones counts."""
    phrases: dict[str, float] = {}
    for name, entry in entries:
        text, bonus = _checked_phrase(name, entry)
        phrases[text] = max(bonus, phrases.get(text, 0.0))
        if len(phrases) > MAX_PHRASES:
            raise UsageError(
                f"{name} is one of more than {MAX_PHRASES:,} phrases",
                hint="list the phrases that this audio may contain",
            )
    return PhraseList(phrases.items())


def _checked_phrase(name: str, entry: object) -> Phrase:
    """Return a phrase, without superfluous spaces, and its bonus."""
    pair: Any = (entry, DEFAULT_BONUS) if isinstance(entry, str) else entry
    try:
        written, number = pair
        text, bonus = " ".join(written.split()), float(number)
    except (TypeError, ValueError, OverflowError, AttributeError):
        raise UsageError(
            f"{name} is {str(entry)[:50]}",
            why="expected a text, or a text and its bonus as a number",
            hint="in a file, write the bonus behind a tab",
        ) from None
    if not any(map(str.isalnum, text)):
        raise UsageError(
            f"{name} is {text[:50]!r}",
            why="it has no letter and no digit",
            hint="write words, or leave it out",
        )
    if len(text) > MAX_CHARACTERS or not text.isprintable():
        raise UsageError(
            f"{name} is {text[:50]!r}",
            why=f"expected at most {MAX_CHARACTERS} printable characters",
            hint="shorten it: a name or a few words are enough",
        )
    if not 0 < bonus <= MAX_BONUS:  # False for a NaN
        raise UsageError(
            f"{name} ({text[:50]!r}) has the bonus {bonus:g}",
            why=f"expected more than 0, and at most {MAX_BONUS:g} nats per token",
            hint=f"the default is {DEFAULT_BONUS:g}",
        )
    return text, bonus


def spellings(tokenizer: Tokenizer, text: str) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield the ways in which a text may be written: its token ids, and whether it may begin anywhere.

    It is written as it is, and with a capital as its first letter; with a space before it and without one.
    Without a space, it begins after no letter, unless it is of a script that has no spaces.
    """
    script = unicodedata.name(text[0], "")
    alone = script.startswith(_SCRIPTS_WITHOUT_SPACES)
    for form in dict.fromkeys((text, text[0].upper() + text[1:])):
        yield tuple(tokenizer.encode(f" {form}")), True
        yield tuple(tokenizer.encode(form)), alone


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way to write a phrase."""

    tokens: tuple[int, ...]  # at least one
    bonus: float  # nats per token, above 0
    anywhere: bool  # False: not after a letter or a digit, where it would be a part of a word


class Phrases:
    """The spellings of all phrases, as a tree of tokens. It does not change, and any threads may use it.

    Args:
        spellings: of all phrases.
        ends_in_letter: returns whether the text of a token ends in a letter or a digit.
    """

    def __init__(
        self, spellings: Iterable[Spelling], ends_in_letter: Callable[[int], bool]
    ) -> None:
        self._ends_in_letter = ends_in_letter
        self._children: list[dict[int, int]] = [{}, {}]  # of each node; the first two are the roots
        self._parent = [ANYWHERE, AFTER_NO_LETTER]
        self._depth = [0, 0]  # tokens from the root
        self._is_end = [False, False]  # whether a phrase is complete there
        # Of the token that leads there: the largest bonus of the phrases that share it.
        bonuses = [0.0, 0.0]
        for spelling in spellings:
            node = ANYWHERE if spelling.anywhere else AFTER_NO_LETTER
            for token in spelling.tokens:
                child = self._children[node].get(token)
                if child is None:
                    child = self._children[node][token] = len(bonuses)
                    self._children.append({})
                    self._parent.append(node)
                    self._depth.append(self._depth[node] + 1)
                    self._is_end.append(False)
                    bonuses.append(0.0)
                node = child
                bonuses[node] = max(bonuses[node], spelling.bonus)
            self._is_end[node] = True
        self._total = bonuses  # from the root on; a parent comes before its children
        for node in range(2, len(bonuses)):
            bonuses[node] += bonuses[self._parent[node]]
        self._longest = max(self._depth)
        self._known: dict[tuple[tuple[int, ...], bool], Bonus] = {}

    def after(self, tokens: Sequence[int]) -> Bonus:
        """Return the bonuses of the next token.

        Args:
            tokens: the ids decoded so far, without the prompt.
        """
        after_letter = bool(tokens) and self._ends_in_letter(tokens[-1])
        key = tuple(self._open(tokens)), after_letter
        if (bonus := self._known.get(key)) is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            bonus = self._known[key] = self._bonus(*key)
        return bonus

    def _open(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield the nodes of all phrases that the last tokens begin, the longest beginning first."""
        n_tokens = len(tokens)
        for start in range(max(0, n_tokens - self._longest), n_tokens):
            for root in (ANYWHERE, AFTER_NO_LETTER):
                if tokens[start] not in self._children[root]:
                    continue
                if root == AFTER_NO_LETTER and start and self._ends_in_letter(tokens[start - 1]):
                    continue
                node = root
                for token in tokens[start:]:
                    node = self._children[node].get(token, NOWHERE)
                    if node == NOWHERE:
                        break
                else:
                    yield node

    def _bonus(self, nodes: tuple[int, ...], after_letter: bool) -> Bonus:
        """Return the bonuses of the next token after the beginnings of phrases that end at these nodes."""
        longest = nodes[0] if nodes else ANYWHERE
        granted = self._total[longest]
        kept = max((self._complete(node, self._depth[node]) for node in nodes), default=0.0)
        roots = (ANYWHERE,) if after_letter else (ANYWHERE, AFTER_NO_LETTER)
        gains: dict[int, tuple[float, int]] = {}  # and the node of the longest phrase
        complete: dict[int, float] = {}
        for node in (*nodes, *roots):
            before = kept
            if node not in roots:  # the phrase that goes on may begin before the kept one ends
                before = self._complete(longest, self._depth[longest] - self._depth[node])
            for token, child in self._children[node].items():
                gain = before + self._total[child] - kept
                gains.setdefault(token, (gain, child))
                behind = self._complete(child, self._depth[child])
                complete[token] = max(behind, complete.get(token, 0.0))
        tokens = sorted(gains)
        nodes_behind = [gains[token][1] for token in tokens]
        return Bonus(
            np.array(tokens, np.int64),
            np.array([gains[token][0] for token in tokens], np.float32),
            np.array([bool(self._children[node]) for node in nodes_behind], np.bool_),
            np.array([self._total[node] for node in nodes_behind], np.float32)
            - np.array([complete[token] for token in tokens], np.float32),
            granted - kept,
        )

    def _complete(self, node: int, n_tokens: int) -> float:
        """Return the bonuses of the longest phrase within the first tokens on the way to a node."""
        while node > AFTER_NO_LETTER and not (self._is_end[node] and self._depth[node] <= n_tokens):
            node = self._parent[node]
        return self._total[node]


@lru_cache(4)  # of each window, file and request
def compiled(
    tokenizer: Tokenizer, phrases: tuple[Phrase, ...], suppressed: frozenset[int]
) -> Phrases | None:
    """Return phrases as a tree of tokens; None: there are none.

    Args:
        tokenizer: of the bundle.
        phrases: checked ones.
        suppressed: token ids that are never decoded.

    Raises:
        UsageError: every spelling of a phrase has a suppressed token.
    """
    if not phrases:
        return None
    spelled: list[Spelling] = []
    for text, bonus in phrases:
        forms = [
            Spelling(tokens, bonus, anywhere)
            for tokens, anywhere in spellings(tokenizer, text)
            if suppressed.isdisjoint(tokens)
        ]
        if not forms:
            tokens, _ = next(spellings(tokenizer, text))
            token = next(token for token in tokens if token in suppressed)
            raise UsageError(
                f"the phrase {text[:50]!r} cannot be decoded",
                why=f"it needs the token {tokenizer.decode([token])!r}, which `suppress_tokens` forbids",
                hint='leave out its punctuation, or set `suppress_tokens` to "", which forbids no token',
            )
        spelled += forms
    end = tokenizer.generation.end_of_text

    def ends_in_letter(token: int) -> bool:
        if token >= end:
            return False
        return tokenizer.bytes_at(token).decode("utf-8", "ignore")[-1:].isalnum()

    return Phrases(spelled, ends_in_letter)
