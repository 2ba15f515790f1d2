"""A list of phrases that the decoding prefers: checked, read from a file, and spelled as tokens."""

import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from whisperport.errors import UsageError
from whisperport.speech.text.tokenizer import Tokenizer
from whisperport.system.regular_file import read_short_text

DEFAULT_BONUS = 1.0  # benchmarks/words/phrases.py
MAX_BONUS = 20.0
MAX_PHRASES = 10_000
MAX_CHARACTERS = 200  # of a phrase
# Words of these are not separated by spaces.
_SCRIPTS_WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "MYANMAR", "KHMER")

Phrase = tuple[str, float]
"""A phrase, and its bonus in nats per token."""


def checked_phrases(phrases: Iterable[str | tuple[str, float]]) -> tuple[Phrase, ...]:
    """Return phrases with their bonuses; a phrase without one gets `DEFAULT_BONUS`.

    Raises:
        UsageError: a phrase is empty or too long, a bonus is out of its range, or there are too many.
    """
    if isinstance(phrases, str):
        raise UsageError("`phrases` is a text", hint=f"use a list of texts: [{phrases[:40]!r}]")
    checked: dict[str, float] = {}
    for number, entry in enumerate(phrases, start=1):
        text, bonus = (entry, DEFAULT_BONUS) if isinstance(entry, str) else _pair(entry, number)
        text = " ".join(text.split())
        _check(f"phrase {number}", text, bonus)
        checked[text] = max(bonus, checked.get(text, 0.0))
        if len(checked) > MAX_PHRASES:
            raise UsageError(
                f"there are more than {MAX_PHRASES:,} phrases",
                why="each adds tokens that are preferred everywhere",
                hint="list the phrases that this audio may contain",
            )
    return tuple(checked.items())


def read_phrases(path: Path) -> tuple[Phrase, ...]:
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
    entries = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not entries:
        raise UsageError(f"`{path}` has no phrases", hint="write one phrase per line")
    try:
        return checked_phrases(_of_line(line, number) for number, line in entries)
    except UsageError as error:
        raise UsageError(f"{error.what} in `{path}`", why=error.why, hint=error.hint) from error


def with_commas(text: str) -> list[str]:
    """Return the phrases of a text that has commas between them."""
    return [phrase.strip() for phrase in text.split(",") if phrase.strip()]


def _of_line(line: str, number: int) -> Phrase:
    text, tab, bonus = line.strip("\r\n").rpartition("\t")
    if not tab:
        return line, DEFAULT_BONUS
    return _pair((text, bonus), number)


def _pair(entry: object, number: int) -> Phrase:
    """Return a pair of a text and a number."""
    try:
        if isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[0], str):
            return entry[0], float(entry[1])
    except (TypeError, ValueError, OverflowError):
        pass
    raise UsageError(
        f"phrase {number} is {str(entry)[:50]!r}",
        why="expected a text, or a text and its bonus as a number",
        hint="in a file, write the bonus behind a tab",
    )


def _check(name: str, text: str, bonus: float) -> None:
    if not text or not any(map(str.isalnum, text)):
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
