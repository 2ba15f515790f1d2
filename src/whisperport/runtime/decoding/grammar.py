"""The tokens that may follow in a sentence of a grammar.

The rules become a machine that reads bytes: nodes, and calls of rules, whose returns are a linked list. A
state is the set of all nodes and returns that the bytes so far lead to. It is computed when it is first
needed, and then known by each byte. The tokens of a state are found among all tokens in alphabetical order.
Source: ggml-org/llama.cpp, src/llama-grammar.cpp. Difference: states are shared by all texts that lead to
them, and sets of tokens are kept with them.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import UsageError
from whisperport.runtime.decoding.gbnf import (
    ROOT,
    Chars,
    Choice,
    Item,
    Name,
    Repeat,
    Rules,
    Text,
    checked_rules,
    items_of,
)
from whisperport.speech.text import Tokenizer

MAX_NODES = 500_000  # of the machine
MAX_PLACES = 300_000  # that are visited to find the tokens of one state
MAX_STATES = 20_000  # in memory
RETURN = 0  # the node at the end of every rule
OUTSIDE = 0  # the returns of a text that is in no rule but the root
SPACE = ord(" ")
_UTF8_ENDS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)  # the last code points of 1 to 4 bytes

Place = tuple[int, int]
"""A node, and the index of its returns."""


@dataclass(frozen=True, slots=True, eq=False)
class Following:
    """What may follow in a sentence.

    Attributes:
        tokens: (n,) ids of text, in rising order.
        may_end: whether the sentence is complete.
    """

    tokens: NDArray[np.int64]
    may_end: bool


@dataclass(slots=True, eq=False)
class _State:
    """Where the bytes so far may have led."""

    places: dict[int, list[Place]]  # by the next byte
    may_end: bool
    after: dict[int, "_State | None"] = field(default_factory=dict)  # None: no such sentence
    following: Following | None = None  # once it was needed


class _Machine:
    """The nodes of all rules. Calls of rules are not copies of them.

    Most nodes have a byte only, so that nothing is stored of what a node has not.
    """

    def __init__(self, rules: Rules) -> None:
        self.bytes: dict[int, list[tuple[int, int, int]]] = {}  # first, last byte, node after it
        self.skips: dict[int, list[int]] = {}  # nodes that follow without a byte
        self.calls: dict[int, list[tuple[int, int]]] = {}  # first node of a rule, node after it
        self._last = RETURN
        self._first = {name: self._node() for name in rules}
        for name, rule in rules.items():
            self._skip(self._built(rule, self._first[name]), RETURN)
        self.start = self._first[ROOT]

    def is_last(self, node: int) -> bool:
        """Return whether nothing but the end of its rule follows."""
        return (
            self.skips.get(node) == [RETURN] and node not in self.bytes and node not in self.calls
        )

    def with_space(self) -> None:
        """Let each sentence begin with a space, too."""
        start, self.start = self.start, self._node()
        self._skip(self.start, start)
        self._read(self.start, SPACE, SPACE, start)

    def _node(self) -> int:
        if self._last >= MAX_NODES:
            raise UsageError(
                f"the grammar has more than {MAX_NODES:,} parts",
                why="each repetition of an item with a count counts as many times",
                hint="repeat fewer items, or use + or *",
            )
        self._last += 1
        return self._last

    def _built(self, item: Item, start: int) -> int:
        """Add the nodes of an item that begins at a node, and return the node after it."""
        if isinstance(item, Text) and item.characters:
            for byte in item.characters.encode():
                start = self._read(start, byte, byte, self._node())
            return start
        if isinstance(item, Repeat):
            return self._repeated(item, start)
        end = self._node()
        if isinstance(item, Name):
            self.calls.setdefault(start, []).append((self._first[item.rule], end))
        elif isinstance(item, Chars):
            for spans in (spans for each in item.ranges for spans in _utf8_spans(*each)):
                node = start
                for first, last in spans[:-1]:
                    node = self._read(node, first, last, self._node())
                self._read(node, *spans[-1], end)
        elif isinstance(item, Choice):
            for sequence in item.sequences:
                node = start
                for part in sequence:
                    node = self._built(part, node)
                self._skip(node, end)
        else:  # the empty text
            self._skip(start, end)
        return end

    def _repeated(self, item: Repeat, start: int) -> int:
        for _ in range(item.least):
            start = self._built(item.item, start)
        end = self._node()
        if item.most is None:
            loop = self._node()
            self._skip(start, loop)
            self._skip(loop, end)
            self._skip(self._built(item.item, loop), loop)
            return end
        self._skip(start, end)
        for _ in range(item.most - item.least):
            start = self._built(item.item, start)
            self._skip(start, end)
        return end

    def _read(self, node: int, first: int, last: int, target: int) -> int:
        self.bytes.setdefault(node, []).append((first, last, target))
        return target

    def _skip(self, node: int, target: int) -> None:
        self.skips.setdefault(node, []).append(target)


class Spellings:
    """The bytes of tokens.

    Args:
        tokens: by their ids.

    Attributes:
        by_id: the same.
        ordered: in alphabetical order, without empty ones.
        ids: of these.
    """

    def __init__(self, tokens: dict[int, bytes]) -> None:
        pairs = sorted((spelling, token) for token, spelling in tokens.items() if spelling)
        self.by_id = tokens
        self.ordered = [spelling for spelling, _ in pairs]
        self.ids = [token for _, token in pairs]


class Grammar:
    """The sentences of a grammar, as tokens. Any threads may use it.

    Args:
        rules: checked ones.
        tokens: all that may be decoded.

    Raises:
        UsageError: the grammar is too large, or no sentence can be spelled.
    """

    def __init__(self, rules: Rules, tokens: Spellings) -> None:
        self._bytes, self._spellings, self._ids = tokens.by_id, tokens.ordered, tokens.ids
        self._machine = _Machine(rules)
        self._lock = Lock()  # of what was computed
        self._start: _State
        self._forget()
        if not self._start.places:
            raise UsageError(
                "the grammar has no sentence", hint=f'write such as: {ROOT} ::= "Yes."'
            )
        if SPACE not in self._start.places:  # Whisper's texts begin with a space
            self._machine.with_space()
            self._forget()

    def after(self, tokens: Sequence[int]) -> Following:
        """Return what may follow in a sentence.

        Args:
            tokens: of the sentence so far.

        Raises:
            UsageError: there are too many ways to read it.
        """
        with self._lock:
            if len(self._states) > MAX_STATES or len(self._returns) > MAX_STATES:
                self._forget()
            self._visited = 0
            state: _State | None = self._start
            for byte in b"".join(self._bytes.get(token, b"\xff") for token in tokens):
                state = state and self._next(state, byte)
            if state is None:
                return NOTHING
            if state.following is None:
                ids = list[int]()
                self._collect(state, 0, len(self._ids), 0, ids)
                state.following = Following(np.array(sorted(ids), np.int64), state.may_end)
            return state.following

    def _forget(self) -> None:
        """Begin with one state."""
        self._visited = 0
        self._returns: list[Place] = [
            (RETURN, OUTSIDE)
        ]  # (node after the call, returns of its rule)
        self._index: dict[Place, int] = {}  # of returns
        self._states: dict[tuple[frozenset[Place], bool], _State] = {}
        self._start = self._state([(self._machine.start, OUTSIDE)])

    def _state(self, places: Iterable[Place]) -> _State:
        """Return the state of these places and of all that follow without a byte."""
        machine, seen, may_end = self._machine, set[Place](), False
        waiting = list(places)
        while waiting:
            place = waiting.pop()
            if place in seen:
                continue
            seen.add(place)
            node, returns = place
            if node == RETURN:
                if returns == OUTSIDE:
                    may_end = True
                else:
                    waiting.append(self._returns[returns])
                continue
            waiting += [(following, returns) for following in machine.skips.get(node, ())]
            for first, after in machine.calls.get(node, ()):
                back = returns if machine.is_last(after) else self._returning((after, returns))
                waiting.append((first, back))
        self._visited += len(seen)
        if self._visited > MAX_PLACES:
            raise UsageError(
                "the grammar is too ambiguous",
                why="a text can be read in too many ways",
                hint="write fewer alternatives that begin alike, and fewer repetitions in each other",
            )
        reading = frozenset(place for place in seen if place[0] in machine.bytes)
        key = reading, may_end
        if (state := self._states.get(key)) is None:
            by_byte: dict[int, list[Place]] = {}
            for node, returns in reading:
                for first, last, target in machine.bytes[node]:
                    for byte in range(first, last + 1):
                        by_byte.setdefault(byte, []).append((target, returns))
            state = self._states[key] = _State(dict(sorted(by_byte.items())), may_end)
        return state

    def _returning(self, place: Place) -> int:
        """Return the index of a place to return to."""
        if (index := self._index.get(place)) is None:
            self._returns.append(place)
            index = self._index[place] = len(self._returns) - 1
        return index

    def _next(self, state: _State, byte: int) -> _State | None:
        """Return the state after a byte; None: it does not follow."""
        if byte not in state.after:
            places = state.places.get(byte)
            state.after[byte] = None if places is None else self._state(places)
        return state.after[byte]

    def _collect(self, state: _State, low: int, high: int, depth: int, ids: list[int]) -> None:
        """Collect the ids of tokens that lead on from a state.

        Args:
            state: after the first `depth` bytes of the tokens from index `low` to `high`, which are equal.
            low: index of the first spelling that is longer.
            high: index behind the last one.
            depth: number of bytes.
            ids: appended to.
        """
        spellings = self._spellings
        prefix = spellings[low][:depth] if low < high else b""
        for byte in self._bytes_at(state, low, high, depth):
            start = bisect_left(spellings, prefix + bytes([byte]), low, high)
            end = (
                high
                if byte == 255
                else bisect_left(spellings, prefix + bytes([byte + 1]), start, high)
            )
            if start == end or (following := self._next(state, byte)) is None:
                continue
            while start < end and len(spellings[start]) == depth + 1:
                ids.append(self._ids[start])
                start += 1
            if start < end:
                self._collect(following, start, end, depth + 1, ids)

    def _bytes_at(self, state: _State, low: int, high: int, depth: int) -> Iterable[int]:
        """Return the bytes that may follow, or those of the tokens, if they are fewer."""
        if high - low > len(state.places):
            return state.places
        return dict.fromkeys(spelling[depth] for spelling in self._spellings[low:high])


NOTHING = Following(np.empty(0, np.int64), False)


def _utf8_spans(first: int, last: int) -> Iterator[list[tuple[int, int]]]:
    """Yield spans of bytes, for each byte one, that together are the characters of a range."""
    for limit in _UTF8_ENDS:
        if first <= limit < last:
            yield from _utf8_spans(first, limit)
            first = limit + 1
    low, high = chr(first).encode(), chr(last).encode()
    n_rest = len(low) - 1
    for shift in range(6 * n_rest, 0, -6):
        rest = (1 << shift) - 1
        if first >> shift != last >> shift:  # make the bytes behind this one cover all values
            if first & rest:
                yield from _utf8_spans(first, first | rest)
                yield from _utf8_spans((first | rest) + 1, last)
                return
            if last & rest != rest:
                yield from _utf8_spans(first, (last & ~rest) - 1)
                yield from _utf8_spans(last & ~rest, last)
                return
    yield list(zip(low, high, strict=True))


@lru_cache(4)  # of each window, file and request
def compiled_grammar(tokenizer: Tokenizer, text: str, suppressed: frozenset[int]) -> Grammar | None:
    """Return a grammar for the tokens of a tokenizer; None: there is none.

    Args:
        tokenizer: of the bundle.
        text: of a checked grammar.
        suppressed: token ids that are never decoded.

    Raises:
        UsageError: the grammar is too large, or a text in it cannot be spelled.
    """
    if not text:
        return None
    rules, tokens = checked_rules(text), _spellings(tokenizer, suppressed)
    _check_spelling(rules, tokens.by_id)
    return Grammar(rules, tokens)


@lru_cache(2)
def _spellings(tokenizer: Tokenizer, suppressed: frozenset[int]) -> Spellings:
    """Return the bytes of the text tokens that are not suppressed."""
    text = range(tokenizer.generation.end_of_text)
    return Spellings({i: tokenizer.bytes_at(i) for i in text if i not in suppressed})


def _check_spelling(rules: Rules, tokens: dict[int, bytes]) -> None:
    """Check that no text needs a byte that no token has beside its neighbours.

    Raises:
        UsageError: a text does.
    """
    spellable = {spelling[0] for spelling in tokens.values() if len(spelling) == 1}
    around: dict[
        int, set[tuple[bytes, bytes]]
    ] = {}  # a byte -> what tokens have before and behind it
    for spelling in tokens.values():
        for at, byte in enumerate(spelling):
            if byte not in spellable:
                pair = spelling[max(0, at - 1) : at], spelling[at + 1 : at + 2]
                around.setdefault(byte, set()).add(pair)

    def fits(text: bytes, at: int) -> bool:
        before, behind = text[max(0, at - 1) : at], text[at + 1 : at + 2]
        return text[at] in spellable or any(
            (not before or not first or first == before)
            and (not behind or not last or last == behind)
            for first, last in around.get(text[at], ())
        )

    for item in items_of(rules):
        if isinstance(item, Text):
            text = item.characters.encode()
            wrong = next((at for at in range(len(text)) if not fits(text, at)), None)
            if wrong is not None:
                character = text[: wrong + 1].decode("utf-8", "ignore")[-1:]
                raise UsageError(
                    f"the text {item.characters[:50]!r} in the grammar cannot be decoded",
                    why=f"it needs the token {character!r}, which `suppress_tokens` forbids",
                    hint='leave it out, or set `suppress_tokens` to "", which forbids no token',
                )
