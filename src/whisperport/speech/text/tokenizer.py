"""Convert text to token ids and back, for any Whisper checkpoint.

Only the vocabulary, the merges and the special tokens are read from `tokenizer.json`. Text is split into
words by Whisper's own rule, which is the same for every checkpoint. Text is never encoded to special
tokens: "<|endoftext|>" in a text is thirteen characters, not the end of text.
"""

import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from threading import Lock
from typing import TYPE_CHECKING, Any

from whisperport.errors import TokenizerError
from whisperport.program.generation import Generation
from whisperport.speech.text.byte_level import (
    BYTE_OF_CHAR,
    first_unknown_merge,
    from_byte_characters,
)
from whisperport.speech.text.languages import WITHOUT_SPACES

if TYPE_CHECKING:
    import tokenizers

SECONDS_PER_TIMESTAMP = 0.02  # between two consecutive timestamp tokens
_MAX_ID = 2**24  # Whisper's ids end at 51,865
_SPECIAL = re.compile(r"<\|.*\|>", re.DOTALL)
_REPLACEMENT = "\ufffd"  # the result of decoding bytes that are not a character
_LONG_WORD = 256  # bytes: so far before an end of a text, a space is searched for
_BEFORE_SPACE = re.compile(r"\w(?= )")


class Tokenizer:
    """Byte-level BPE with Whisper's special tokens and timestamps.

    Ids from `generation.timestamp_begin` on are timestamps, 20 ms apart, even if the file does not list
    them (older files do not).

    Args:
        vocabulary: id by token, written as in `byte_level`.
        merges: pairs of tokens, in the order in which they are merged: ["a", "b"] or "a b". They are
            checked when a text is first encoded.
        added: id by content of each added token. A token written `<|...|>` is special.
        generation: special token ids; must agree with `added`.

    Raises:
        TokenizerError: the arguments contradict each other, or are not those of Whisper.
    """

    def __init__(
        self,
        vocabulary: dict[str, int],
        merges: Sequence[Any],
        added: dict[str, int],
        generation: Generation,
    ) -> None:
        self.generation = generation
        special = {token: i for token, i in added.items() if _SPECIAL.fullmatch(token)}
        _check_special(special, generation)
        self._special = frozenset(special.values())
        self._vocabulary, self._merges = vocabulary, merges
        self._added = {i: token for token, i in added.items()}
        self._tokens = {i: token for token, i in vocabulary.items()}
        _check_byte_level(vocabulary)
        self._encoding = (
            Lock()
        )  # no thread runs while `tokenizers` encodes: one text, then the others may

    def _checked_merges(self, name: str) -> list[tuple[str, str]]:
        """Return the merges as pairs, after a check that they fit the vocabulary."""
        try:
            merges = _pairs(self._merges)
        except ValueError as error:
            raise _foreign(name, error) from error
        if (unknown := first_unknown_merge(self._vocabulary, merges)) is not None:
            raise TokenizerError(
                "the vocabulary does not fit its merges",
                why=f"{str(unknown)[:80]} are merged, but one of the three tokens is not in the vocabulary",
                hint="use the tokenizer.json and generation_config.json of one checkpoint",
            )
        return merges

    @cached_property
    def _encoder(self) -> "tokenizers.Tokenizer":
        """The encoder of text. Most transcriptions encode none, and building it takes longest."""
        import tokenizers
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel

        merges = self._checked_merges("the tokenizer")
        try:
            model = BPE(vocab=self._vocabulary, merges=merges)
        except Exception as error:  # `tokenizers` raises a plain Exception
            raise TokenizerError(
                "the vocabulary does not fit its merges", why=str(error)
            ) from error
        encoder = tokenizers.Tokenizer(model)
        encoder.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
        return encoder

    @classmethod
    def from_json(
        cls,
        text: str | bytes,
        generation: Generation,
        *,
        name: str = "the tokenizer",
        check_merges: bool = True,
    ) -> "Tokenizer":
        """Read the text of a `tokenizer.json`.

        Args:
            text: of the file.
            generation: special token ids.
            name: of the file, for errors.
            check_merges: False checks the merges when a text is first encoded. Most transcriptions encode
                none, and this check takes 40 % of the time.
        """
        try:
            data = json.loads(text if isinstance(text, str) else text.decode("utf-8"))
            vocabulary, merges, added = _parts(data)
        except (ValueError, RecursionError) as error:
            raise _foreign(name, error) from error
        tokenizer = cls(vocabulary, merges, added, generation)
        if check_merges:
            tokenizer._checked_merges(name)
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens. A lone surrogate becomes U+FFFD."""
        with self._encoding:
            return list(self._encoder.encode(_safe(text), add_special_tokens=False).ids)

    def end_of(self, text: str, n_tokens: int) -> str:
        """Return an end of a text with at least as many tokens, or the text if it is short.

        Encoding takes a second per megabyte, in which no other thread of the process runs. Encode only the
        end of a text whose last tokens are used: they are the same as those of the complete text, if a word
        begins at least every 256 bytes. Whisper's rule splits before every space after a word.
        """
        n_bytes = n_tokens * self._longest + _LONG_WORD
        if len(text) * 4 <= n_bytes or len(data := _safe(text).encode()) <= n_bytes:
            return text
        end = data[-n_bytes:].decode(errors="ignore")
        word = _BEFORE_SPACE.search(end, 0, _LONG_WORD)
        return end[word.end() :] if word else end

    @cached_property
    def _longest(self) -> int:
        """Number of bytes of the longest token."""
        return max(map(len, self._vocabulary))

    def decode(self, ids: Iterable[int], *, timestamps: bool = False) -> str:
        """Return the text of token ids, without special tokens.

        Bytes that are not a character become U+FFFD, as in openai-whisper.

        Args:
            ids: token ids.
            timestamps: whether to include timestamps, written as "<|1.02|>", as openai-whisper's
                `decode_with_timestamps` does.

        Raises:
            TokenizerError: an id below the timestamps is not in the vocabulary.
        """
        begin = self.generation.timestamp_begin
        kept = (i for i in ids if (timestamps if i >= begin else i not in self._special))
        return self._decode_all(kept)

    def decode_with_special_tokens(self, ids: Iterable[int]) -> str:
        """Return the text with special tokens, without timestamps; for the compression ratio."""
        return self._decode_all(i for i in ids if i < self.generation.timestamp_begin)

    def split_to_word_tokens(
        self, ids: Sequence[int], language: str | None = None
    ) -> tuple[list[str], list[list[int]]]:
        """Split token ids into words.

        Words are split at spaces and punctuation; in languages without spaces, at every complete character.
        Each special token and timestamp is a word.

        Args:
            ids: token ids.
            language: language code.

        Returns:
            The words, and the ids of each word.

        Source: openai/whisper@c0d2f62, whisper/tokenizer.py:279-329.
        """
        if language in WITHOUT_SPACES:
            return self._split_at_characters(ids)
        words: list[str] = []
        word_ids: list[list[int]] = []
        for piece, piece_ids in zip(*self._split_at_characters(ids), strict=True):
            special = piece_ids[0] >= self.generation.end_of_text
            punctuation = piece.strip() in string.punctuation
            if special or piece.startswith(" ") or punctuation or not words:
                words.append(piece)
                word_ids.append(piece_ids)
            else:
                words[-1] += piece
                word_ids[-1].extend(piece_ids)
        return words, word_ids

    def _split_at_characters(self, ids: Sequence[int]) -> tuple[list[str], list[list[int]]]:
        """Split token ids where a complete character ends: texts, and the ids of each."""
        whole = self._decode_all(ids)
        words: list[str] = []
        word_ids: list[list[int]] = []
        waiting: list[int] = []
        offset = 0  # of the first waiting id in the complete text
        for i in ids:
            waiting.append(i)
            piece = self._decode_all(waiting)
            at = offset + piece.find(_REPLACEMENT)
            # A replacement character that is also in the complete text is not a part of a character.
            if _REPLACEMENT not in piece or whole[at : at + 1] in (_REPLACEMENT, ""):
                words.append(piece)
                word_ids.append(waiting)
                offset += len(piece)
                waiting = []
        if waiting:
            words.append(self._decode_all(waiting))
            word_ids.append(waiting)
        return words, word_ids

    def _decode_all(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, including special tokens and timestamps."""
        return b"".join(map(self.bytes_at, ids)).decode("utf-8", "replace")

    def bytes_at(self, i: int) -> bytes:
        """Return the bytes of one token id, which may be a part of a character.

        Raises:
            TokenizerError: the id is not in the vocabulary.
        """
        begin = self.generation.timestamp_begin
        if i >= begin:
            return f"<|{(i - begin) * SECONDS_PER_TIMESTAMP:.2f}|>".encode()
        if (added := self._added.get(i)) is not None:
            return added.encode("utf-8", "replace")
        if (token := self._tokens.get(i)) is not None:
            return _bytes_of(token)
        raise TokenizerError(
            f"token id {i} is not in the vocabulary",
            why=f"the vocabulary has {len(self._added.keys() | self._tokens.keys())} ids",
            hint="use the tokenizer of the same checkpoint",
        )


def _safe(text: str) -> str:
    """Return a text whose lone surrogates are U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _foreign(name: str, error: Exception) -> TokenizerError:
    """Return the error of a file that is no tokenizer of Whisper."""
    return TokenizerError(
        f"{name} is not a Whisper tokenizer",
        why=str(error) or type(error).__name__,
        hint="use the `tokenizer.json` of the checkpoint",
    )


def _parts(data: Any) -> tuple[dict[str, int], list[Any], dict[str, int]]:
    """Return vocabulary, merges (see `_pairs`) and added tokens of a `tokenizer.json`.

    Raises:
        ValueError: the data has another form; the message says which part.
    """
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        raise ValueError("it has no `model` of type BPE")
    pre_tokenizer = data.get("pre_tokenizer")
    cut = pre_tokenizer.get("type") if isinstance(pre_tokenizer, dict) else pre_tokenizer
    if cut != "ByteLevel" or data.get("normalizer"):
        raise ValueError(
            f"its `pre_tokenizer` is {str(cut)[:40]}; expected ByteLevel, and no `normalizer`"
        )
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocabulary, dict) or not vocabulary or not isinstance(merges, list):
        raise ValueError("`model.vocab` or `model.merges` is missing")
    added: dict[str, int] = {}
    entries = data.get("added_tokens") or []
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise ValueError(f"an added token has no `content`: {str(entry)[:80]}")
        added[entry["content"]] = _id_of(entry["content"], entry.get("id"))
    _check_ids(vocabulary)
    if len(set(vocabulary.values())) < len(vocabulary) or len(set(added.values())) < len(added):
        raise ValueError("two tokens have the same id")
    return vocabulary, merges, added


def _check_ids(vocabulary: Mapping[str, Any]) -> None:
    """Raise ValueError if a token's id is not valid. All are checked together first, which is faster."""
    ids = vocabulary.values()
    if {*map(type, ids)} != {int} or min(ids) < 0 or max(ids) >= _MAX_ID:
        for token, i in vocabulary.items():
            _id_of(token, i)


def _id_of(token: str, i: Any) -> int:
    """Return a token's id, or raise ValueError if it is not a valid id."""
    if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < _MAX_ID:
        raise ValueError(
            f"the id of {token[:40]!r} is {str(i)[:40]}; expected a number from 0 to {_MAX_ID - 1}"
        )
    return i


def with_merges_as_texts(tokenizer_json: bytes) -> bytes:
    """Return a `tokenizer.json` with merges "a b" in place of ["a", "b"], read in half of the time.

    Tokens with a space, which no byte-level tokenizer has, have no such form: the merges stay as they are.
    """
    data = json.loads(tokenizer_json)
    merges = data["model"]["merges"]
    if {*map(type, merges)} != {list} or any(" " in token for pair in merges for token in pair):
        return tokenizer_json
    data["model"]["merges"] = [" ".join(pair) for pair in merges]
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def _pairs(merges: Sequence[Any]) -> list[tuple[str, str]]:
    """Return the two tokens of each merge; see `_pair`. All are checked together first, which is faster."""
    parts = [merge.split(" ") for merge in merges] if {*map(type, merges)} == {str} else merges
    if (
        {*map(type, parts)} == {list}
        and {*map(len, parts)} == {2}
        and {*map(type, chain.from_iterable(parts))} == {str}
    ):
        return [(left, right) for left, right in parts]
    return [_pair(merge) for merge in merges]


def _pair(merge: Any) -> tuple[str, str]:
    """Return the two tokens of a merge, which is written "a b", or ["a", "b"] in newer files."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) for p in parts):
        raise ValueError(f"a merge is not a pair: {str(merge)[:80]}")
    return parts[0], parts[1]


def _check_byte_level(vocabulary: Iterable[str]) -> None:
    """Raise TokenizerError if a token is not written in byte-level characters, and is not special."""
    if not BYTE_OF_CHAR.keys() >= {*chain.from_iterable(vocabulary)}:
        for token in vocabulary:
            _bytes_of(token)


@lru_cache(4096)  # the text of a window is read three times
def _bytes_of(token: str) -> bytes:
    """Return the bytes of a token of the vocabulary."""
    if _SPECIAL.fullmatch(token):
        return token.encode("utf-8", "replace")
    try:
        return from_byte_characters(token)
    except KeyError as error:
        raise TokenizerError(
            "the vocabulary is not byte-level, as Whisper's is",
            why=f"{token[:40]!r} contains {error}",
        ) from error


def _check_special(special: dict[str, int], generation: Generation) -> None:
    """Raise TokenizerError if special tokens have other ids than in `generation`."""
    expected = {
        "<|endoftext|>": generation.end_of_text,
        "<|startoftranscript|>": generation.start_of_transcript,
        "<|startofprev|>": generation.start_of_previous,
        "<|notimestamps|>": generation.no_timestamps,
        "<|0.00|>": generation.timestamp_begin,
    }
    expected |= {f"<|{code}|>": i for code, i in generation.languages.items()}
    expected |= {f"<|{task}|>": i for task, i in generation.tasks.items()}
    for token, i in expected.items():
        if special.get(token, i) != i:
            raise TokenizerError(
                f"the tokenizer belongs to another checkpoint: {token} is {special[token]}",
                why=f"it is {i} in the generation settings",
                hint="use the tokenizer.json and generation_config.json of one checkpoint",
            )
    if "<|endoftext|>" not in special or "<|startoftranscript|>" not in special:
        raise TokenizerError(
            "this is not a Whisper tokenizer",
            why="<|endoftext|> or <|startoftranscript|> is missing",
        )
