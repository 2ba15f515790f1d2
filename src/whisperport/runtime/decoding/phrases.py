"""Prefer the tokens of listed phrases: shallow fusion with a tree of their tokens.

A token that begins or continues a phrase gets the phrase's bonus. If another token follows before the
phrase is complete, the bonuses are given back: a text gets the bonuses of its complete phrases, and those
of the one that may still become complete.
Source: icefall's `ContextGraph`, after Kaldi's biasing (k2-fsa/icefall, icefall/context_graph.py); NeMo's
phrase boosting. Difference: a phrase that is part of a longer one is found without failure links, by a
search from each of the last tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from whisperport.errors import UsageError
from whisperport.runtime.engine.scores import Bonus
from whisperport.speech.text import Tokenizer
from whisperport.speech.text.phrase_list import Phrase, spellings

ANYWHERE, AFTER_NO_LETTER = 0, 1  # the roots: where a spelling may begin
NOWHERE = -1  # no node
MAX_KNOWN = 500  # bonuses in memory: each has up to 80 kB


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
        gains: dict[int, tuple[float, bool]] = {}
        for node in (*nodes, *roots):
            before = kept
            if node not in roots:  # the phrase that goes on may begin before the kept one ends
                before = self._complete(longest, self._depth[longest] - self._depth[node])
            for token, child in self._children[node].items():
                gain = before + self._total[child] - kept
                gains.setdefault(token, (gain, bool(self._children[child])))
        tokens = sorted(gains)
        return Bonus(
            np.array(tokens, np.int64),
            np.array([gains[token][0] for token in tokens], np.float32),
            np.array([gains[token][1] for token in tokens], np.bool_),
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
