"""The tokenizer in a checkpoint folder, whichever way it is stored, as one `tokenizer.json`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from whisperport.checkpoint.json_file import read_json_object
from whisperport.checkpoint.sizes import quoted, shortened
from whisperport.dims import LARGEST
from whisperport.errors import CheckpointError, TokenizerError
from whisperport.text.merges import first_unknown_merge
from whisperport.text.vocabulary import openai_tokenizer

KNOWN_VOCABULARIES = (51864, 51865, 51866)  # .en; multilingual; with Cantonese, since large-v3

_LARGEST_BYTES = 64 << 20  # large-v3's tokenizer.json is under 4 MB
_TIME = re.compile(r"<\|\d+\.\d\d\|>")
_HINT = "copy the tokenizer files of the checkpoint this one was trained from into its folder"


@dataclass(frozen=True, slots=True)
class StoredTokenizer:
    """A tokenizer as found."""

    json: bytes
    ids: Mapping[str, int]  # every token, special ones included
    warnings: tuple[str, ...] = ()


def read_tokenizer(folder: Path, n_vocab: int) -> StoredTokenizer:
    """From tokenizer.json, else vocab.json with merges.txt, else OpenAI's own.

    Raises TokenizerError when a file is damaged, is not Whisper's, or is needed and missing.
    """
    whole = folder / "tokenizer.json"
    if whole.is_file():
        return _from_json(whole, n_vocab)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        tokenizer = _from_parts(folder)
        data = tokenizer.to_str().encode()
        ids = tokenizer.get_vocab(with_added_tokens=True)
        return _stored(ids, data, where=str(folder / "vocab.json"), n_vocab=n_vocab)
    return assumed_tokenizer(n_vocab, where=str(folder))


def assumed_tokenizer(n_vocab: int, *, where: str) -> StoredTokenizer:
    """OpenAI's tokenizer for a vocabulary of this size; TokenizerError when there is none."""
    if n_vocab not in KNOWN_VOCABULARIES:
        sizes = ", ".join(str(size) for size in KNOWN_VOCABULARIES)
        raise TokenizerError(
            f"no tokenizer in `{where}`",
            why=f"its vocabulary has {n_vocab} tokens; OpenAI's own have {sizes}",
            hint=_HINT,
        )
    warning = f"no tokenizer files: OpenAI's tokenizer of {n_vocab} tokens is assumed"
    tokenizer = openai_tokenizer(n_vocab)
    data = tokenizer.to_str().encode()
    ids = tokenizer.get_vocab(with_added_tokens=True)
    return _stored(ids, data, where=where, n_vocab=n_vocab, warnings=(warning,))


def _from_json(path: Path, n_vocab: int) -> StoredTokenizer:
    """Only the ids are read here; the text layer reads the rest, and checks it."""
    ids = _ids_in(_read_json(path), what=f"`{path.name}` in `{path.parent}` is not a tokenizer")
    return _stored(ids, path.read_bytes(), where=str(path), n_vocab=n_vocab)


def _ids_in(data: Mapping[str, Any], *, what: str) -> dict[str, int]:
    """Every token of a tokenizer.json and its id.

    Not by `tokenizers.Tokenizer.from_str`: a hostile file makes it panic, past any `except Exception`.
    """
    model, added = data.get("model"), data.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict):
        raise TokenizerError(what, why="it has no `model.vocab`", hint=_HINT)
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise TokenizerError(what, why="its `added_tokens` is no list of tokens", hint=_HINT)
    pairs = [*vocabulary.items(), *((token.get("content"), token.get("id")) for token in added)]
    for text, token_id in pairs:
        if not isinstance(text, str) or type(token_id) is not int or token_id < 0:
            why = f"token {quoted(text)} has the id {quoted(token_id)}"
            raise TokenizerError(what, why=why, hint=_HINT)
    return dict(pairs)


def _stored(
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
        warnings += (f"{beyond} tokens of the tokenizer are beyond the model's {n_vocab}",)
    return StoredTokenizer(data, ids, warnings)


def _from_parts(folder: Path) -> Tokenizer:
    """Byte-level pairs from vocab.json and merges.txt, as transformers reads them."""
    vocabulary = _read_json(folder / "vocab.json")
    what = f"cannot build the tokenizer in `{folder}`"
    wrong = next((token for token in vocabulary.items() if not _is_token(*token)), None)
    if wrong is not None:
        raise TokenizerError(what, why=f"vocab.json has the token {quoted(wrong)}", hint=_HINT)
    merges = _read_merges(folder / "merges.txt")
    if (unknown := first_unknown_merge(vocabulary, merges)) is not None:
        why = f"vocab.json and merges.txt do not fit: {quoted(unknown)} are not tokens that join to one"
        raise TokenizerError(what, why=why, hint=_HINT)
    try:
        tokenizer = Tokenizer(BPE(vocabulary, merges))
    except Exception as error:  # the library raises `Exception` itself
        why = f"vocab.json and merges.txt do not fit: {shortened(str(error))}"
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
                why=f"`{shortened(text)}` should be token {token_id}, and the ids before it do not "
                "reach that far",
                hint="save the tokenizer again as tokenizer.json",
            )
    return tokenizer


def _read_merges(path: Path) -> list[tuple[str, str]]:
    what = f"cannot read `{path.name}` in `{path.parent}`"
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise TokenizerError(what, why=f"it is longer than {_LARGEST_BYTES} bytes", hint=_HINT)
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
                what, why=f"line {number} is not two pieces and a space", hint=_HINT
            )
        merges.append((left, right))
    return merges


def _read_added(folder: Path, what: str) -> dict[str, int]:
    """Special tokens and their ids, from tokenizer_config.json and added_tokens.json together."""
    added: dict[Any, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        settings = _read_json(folder / "tokenizer_config.json")
        decoder = settings.get("added_tokens_decoder") or {}
        if not isinstance(decoder, dict) or not all(starmap(_is_id_and_token, decoder.items())):
            raise TokenizerError(
                what, why="`added_tokens_decoder` maps no ids to tokens", hint=_HINT
            )
        added.update({token.get("content"): int(number) for number, token in decoder.items()})
    if (folder / "added_tokens.json").is_file():
        added.update(_read_json(folder / "added_tokens.json"))
    for text, token_id in added.items():
        if not _is_token(text, token_id):
            raise TokenizerError(what, why="an added token has no text or no id", hint=_HINT)
    return added


def _is_token(text: Any, token_id: Any) -> bool:
    """Text that can be written as UTF-8, and an id that a checkpoint can have.

    The `tokenizers` library writes a line for each number up to the largest id.
    """
    if not isinstance(text, str) or type(token_id) is not int:
        return False
    has_surrogate = any("\ud800" <= letter <= "\udfff" for letter in text)
    return not has_surrogate and 0 <= token_id < LARGEST["n_vocab"]


def _is_id_and_token(number: str, token: Any) -> bool:
    """An entry of `added_tokens_decoder`. An id has at most 9 digits: Python reads no very long numbers."""
    is_id = number.isascii() and number.isdecimal() and len(number) <= 9
    return is_id and isinstance(token, dict) and isinstance(token.get("content"), str)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, largest_bytes=_LARGEST_BYTES)
    except CheckpointError as error:
        raise TokenizerError(error.what, why=error.why, hint=_HINT) from error
