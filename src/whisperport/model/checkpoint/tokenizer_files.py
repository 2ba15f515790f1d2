"""Read the tokenizer of a checkpoint folder, in any of its formats, as a `tokenizer.json`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from whisperport.errors import CheckpointError, TokenizerError
from whisperport.program.dims import KNOWN_VOCABULARIES, LARGEST
from whisperport.program.untrusted import quoted, read_json_object, shorten
from whisperport.speech.text.byte_level import first_unknown_merge
from whisperport.speech.text.vocabulary import openai_tokenizer

_MAX_BYTES = 64 << 20  # large-v3's tokenizer.json has less than 4 MB
_TIME = re.compile(r"<\|\d+\.\d\d\|>")
_HINT = (
    "copy the tokenizer files from the checkpoint that this one was fine-tuned from into its folder"
)


@dataclass(frozen=True, slots=True)
class StoredTokenizer:
    """A tokenizer read from a checkpoint."""

    json: bytes  # contents of a `tokenizer.json`
    ids: Mapping[str, int]  # text -> id of every token, special tokens included
    warnings: tuple[str, ...] = ()


def read_tokenizer(folder: Path, n_vocab: int) -> StoredTokenizer:
    """Read tokenizer.json; without it, vocab.json and merges.txt; without these, use OpenAI's tokenizer.

    Args:
        folder: the checkpoint folder.
        n_vocab: number of tokens of the model.

    Raises:
        TokenizerError: a file is damaged or is not a Whisper tokenizer, or there is no file and OpenAI
            has no tokenizer of this size.
    """
    complete = folder / "tokenizer.json"
    if complete.is_file():
        return _from_json(complete, n_vocab)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        tokenizer = _from_vocab_and_merges(folder)
        data = tokenizer.to_str().encode()
        ids = tokenizer.get_vocab(with_added_tokens=True)
        if _is_openais_text(ids, n_vocab):
            return default_tokenizer(n_vocab, where=str(folder), without="special tokens")
        return _checked(ids, data, where=str(folder / "vocab.json"), n_vocab=n_vocab)
    return default_tokenizer(n_vocab, where=str(folder))


def _is_openais_text(ids: Mapping[str, int], n_vocab: int) -> bool:
    """Return whether tokens are those of OpenAI's tokenizer of this size, without special ones."""
    if n_vocab not in KNOWN_VOCABULARIES or "<|startoftranscript|>" in ids:
        return False
    openai = openai_tokenizer(n_vocab).get_vocab(with_added_tokens=True)
    absent = openai.keys() - ids.keys()
    return ids.items() <= openai.items() and all(text.startswith("<|") for text in absent)


def default_tokenizer(
    n_vocab: int, *, where: str, without: str = "tokenizer files"
) -> StoredTokenizer:
    """Return OpenAI's tokenizer for a vocabulary size.

    Args:
        n_vocab: number of tokens.
        where: the checkpoint, for errors.
        without: what it lacks, for the warning.

    Raises:
        TokenizerError: OpenAI has no tokenizer of this size.
    """
    if n_vocab not in KNOWN_VOCABULARIES:
        sizes = ", ".join(str(size) for size in KNOWN_VOCABULARIES)
        raise TokenizerError(
            f"no tokenizer in `{where}`",
            why=f"its vocabulary has {n_vocab} tokens; OpenAI's tokenizers have {sizes}",
            hint=_HINT,
        )
    warning = f"there are no {without}: OpenAI's tokenizer of {n_vocab} tokens is assumed"
    tokenizer = openai_tokenizer(n_vocab)
    data = tokenizer.to_str().encode()
    ids = tokenizer.get_vocab(with_added_tokens=True)
    return _checked(ids, data, where=where, n_vocab=n_vocab, warnings=(warning,))


def _from_json(path: Path, n_vocab: int) -> StoredTokenizer:
    """Read the ids of a tokenizer.json. `text.Tokenizer` reads and checks the rest."""
    ids = _ids_in(_read_json(path), what=f"`{path.name}` in `{path.parent}` is not a tokenizer")
    return _checked(ids, path.read_bytes(), where=str(path), n_vocab=n_vocab)


def _ids_in(data: Mapping[str, Any], *, what: str) -> dict[str, int]:
    """Return text -> id of every token of a tokenizer.json.

    `tokenizers.Tokenizer.from_str` is not used: a hostile file makes it panic, and `except Exception`
    does not catch a panic.
    """
    model, added = data.get("model"), data.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict):
        raise TokenizerError(what, why="it has no `model.vocab`", hint=_HINT)
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise TokenizerError(what, why="its `added_tokens` is not a list of tokens", hint=_HINT)
    pairs = [*vocabulary.items(), *((token.get("content"), token.get("id")) for token in added)]
    for text, token_id in pairs:
        if not isinstance(text, str) or type(token_id) is not int or token_id < 0:
            why = f"token {quoted(text)} has the id {quoted(token_id)}"
            raise TokenizerError(what, why=why, hint=_HINT)
    return dict(pairs)


def _checked(
    ids: Mapping[str, int],
    data: bytes,
    *,
    where: str,
    n_vocab: int,
    warnings: tuple[str, ...] = (),
) -> StoredTokenizer:
    if "<|endoftext|>" not in ids:
        raise TokenizerError(
            f"`{where}` is not a Whisper tokenizer",
            why=f"none of its {len(ids)} tokens is <|endoftext|>",
            hint=_HINT,
        )
    beyond = sum(token_id >= n_vocab for token_id in ids.values())
    if beyond:
        warnings += (
            f"{beyond} tokens of the tokenizer have ids that the model with its {n_vocab} tokens lacks",
        )
    return StoredTokenizer(data, ids, warnings)


def _from_vocab_and_merges(folder: Path) -> Tokenizer:
    """Build a byte-level BPE tokenizer from vocab.json and merges.txt, as transformers does."""
    vocabulary = _read_json(folder / "vocab.json")
    what = f"cannot build the tokenizer in `{folder}`"
    wrong = next((token for token in vocabulary.items() if not _is_token(*token)), None)
    if wrong is not None:
        raise TokenizerError(what, why=f"vocab.json has the token {quoted(wrong)}", hint=_HINT)
    merges = _read_merges(folder / "merges.txt")
    if (unknown := first_unknown_merge(vocabulary, merges)) is not None:
        why = f"merges.txt does not match vocab.json: the pair {quoted(unknown)} does not give a token"
        raise TokenizerError(what, why=why, hint=_HINT)
    try:
        tokenizer = Tokenizer(BPE(vocabulary, merges))
    except Exception as error:  # the library raises `Exception` itself
        why = f"merges.txt does not match vocab.json: {shorten(str(error))}"
        raise TokenizerError(what, why=why, hint=_HINT) from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = _read_added(folder, what)
    in_order = sorted(added, key=lambda text: added[text])
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=not _TIME.fullmatch(t)) for t in in_order]
    )
    for text, token_id in added.items():
        if tokenizer.token_to_id(text) != token_id:
            raise TokenizerError(
                what,
                why=f"`{shorten(text)}` should have the id {token_id}, but not all lower ids have a token",
                hint="save the tokenizer again as tokenizer.json",
            )
    return tokenizer


def _read_merges(path: Path) -> list[tuple[str, str]]:
    what = f"cannot read `{path.name}` in `{path.parent}`"
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise TokenizerError(what, why=f"it has more than {_MAX_BYTES} bytes", hint=_HINT)
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(what, why=str(error), hint=_HINT) from error
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if not left or not right or " " in right:
            raise TokenizerError(
                what, why=f"line {number} is not two texts separated by a space", hint=_HINT
            )
        merges.append((left, right))
    return merges


def _read_added(folder: Path, what: str) -> dict[str, int]:
    """Return text -> id of the added tokens in tokenizer_config.json and added_tokens.json."""
    added: dict[Any, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        settings = _read_json(folder / "tokenizer_config.json")
        decoder = settings.get("added_tokens_decoder") or {}
        if not isinstance(decoder, dict) or not all(starmap(_is_id_and_token, decoder.items())):
            raise TokenizerError(
                what, why="`added_tokens_decoder` does not map ids to tokens", hint=_HINT
            )
        added.update({token.get("content"): int(number) for number, token in decoder.items()})
    if (folder / "added_tokens.json").is_file():
        added.update(_read_json(folder / "added_tokens.json"))
    for text, token_id in added.items():
        if not _is_token(text, token_id):
            raise TokenizerError(what, why="an added token has no text or no id", hint=_HINT)
    return added


def _is_token(text: Any, token_id: Any) -> bool:
    """Return whether a text can be encoded as UTF-8 and an id is in a checkpoint's range.

    The range matters because the `tokenizers` library writes a line for each number up to the largest id.
    """
    if not isinstance(text, str) or type(token_id) is not int:
        return False
    has_surrogate = any("\ud800" <= letter <= "\udfff" for letter in text)
    return not has_surrogate and 0 <= token_id < LARGEST["n_vocab"]


def _is_id_and_token(number: str, token: Any) -> bool:
    """Return whether an entry of `added_tokens_decoder` is valid.

    An id has at most 9 digits, because Python does not convert very long numbers.
    """
    is_id = number.isascii() and number.isdecimal() and len(number) <= 9
    return is_id and isinstance(token, dict) and isinstance(token.get("content"), str)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, max_bytes=_MAX_BYTES)
    except CheckpointError as error:
        raise TokenizerError(error.what, why=error.why, hint=_HINT) from error
