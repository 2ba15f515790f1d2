"""OpenAI's three vocabularies, for checkpoints without a tokenizer (OpenAI's .pt files).

    n_vocab   ranks          languages   checkpoints
    51,864    gpt2           99 (unused) tiny.en to medium.en
    51,865    multilingual   99          tiny to large-v2
    51,866    multilingual   100         large-v3, turbo

The rank files in `ranks/` come from openai-whisper; see the NOTICE in that folder.
"""

import base64
import lzma
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING

from whisperport.errors import TokenizerError
from whisperport.program.generation import Generation
from whisperport.speech.text.byte_level import to_byte_characters
from whisperport.speech.text.languages import LANGUAGES
from whisperport.speech.text.tokenizer import SECONDS_PER_TIMESTAMP, Tokenizer

if TYPE_CHECKING:
    import tokenizers

N_TIMESTAMPS = 1501  # <|0.00|> to <|30.00|>


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    ranks: str  # name of the rank file
    n_languages: int
    multilingual: bool


_VOCABULARIES = {
    51_864: _Vocabulary("gpt2", 99, False),
    51_865: _Vocabulary("multilingual", 99, True),
    51_866: _Vocabulary("multilingual", 100, True),
}


@lru_cache(maxsize=3)
def openai_tokenizer(n_vocab: int) -> "tokenizers.Tokenizer":
    """Return the tokenizer of OpenAI's checkpoints with `n_vocab` ids; `.to_str()` is a tokenizer.json.

    Ids, special tokens and their order equal openai-whisper's `get_tokenizer`. The call takes about a
    second.

    Raises:
        TokenizerError: no OpenAI checkpoint has `n_vocab` ids.
    """
    import tokenizers
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    known = _known(n_vocab)
    vocabulary, merges = openai_bpe(n_vocab)
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken(token, special=True, normalized=False)
            for token in _special_tokens(known)
        ]
    )
    return tokenizer


@lru_cache(maxsize=3)
def openai_generation(n_vocab: int) -> Generation:
    """Return openai-whisper's decoding settings: special token ids and suppressed tokens.

    `alignment_heads` is empty, because it depends on the checkpoint, not on the vocabulary.

    Raises:
        TokenizerError: no OpenAI checkpoint has `n_vocab` ids.

    Source: openai/whisper@c0d2f62, whisper/tokenizer.py and whisper/decoding.py:615-642.
    """
    known = _known(n_vocab)
    first = len(_ranks(known.ranks))
    ids = {token: first + i for i, token in enumerate(_special_tokens(known))}
    tasks = {task: ids[f"<|{task}|>"] for task in ("translate", "transcribe")}
    generation = Generation(
        start_of_transcript=ids["<|startoftranscript|>"],
        end_of_text=ids["<|endoftext|>"],
        start_of_previous=ids["<|startofprev|>"],
        no_speech=ids["<|nospeech|>"],
        no_timestamps=ids["<|notimestamps|>"],
        languages=(
            {code: ids[f"<|{code}|>"] for code in list(LANGUAGES)[: known.n_languages]}
            if known.multilingual
            else {}
        ),
        tasks=tasks if known.multilingual else {},
    )
    tokenizer = Tokenizer.from_json(openai_tokenizer(n_vocab).to_str(), generation)
    never = {
        *tasks.values(),
        ids["<|startoftranscript|>"],
        ids["<|startofprev|>"],
        ids["<|startoflm|>"],
        ids["<|nospeech|>"],
    }
    return replace(
        generation,
        suppressed=tuple(sorted(_non_speech(tokenizer) | never)),
        suppressed_at_start=(tokenizer.encode(" ")[0], generation.end_of_text),
    )


@lru_cache(maxsize=3)
def openai_bpe(n_vocab: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the text tokens with their ids, and the merges, as a tokenizer.json spells them.

    Raises:
        TokenizerError: no OpenAI checkpoint has `n_vocab` ids.
    """
    ranks = _ranks(_known(n_vocab).ranks)
    merges = _merges(ranks)
    return (
        {to_byte_characters(token): rank for token, rank in ranks.items()},
        [(to_byte_characters(left), to_byte_characters(right)) for left, right in merges],
    )


def openai_text_tokens(n_vocab: int) -> list[bytes]:
    """Return the bytes of the tokens before <|endoftext|>, in the order of their ids.

    Raises:
        TokenizerError: no OpenAI checkpoint has `n_vocab` ids.
    """
    return list(_ranks(_known(n_vocab).ranks))


def _known(n_vocab: int) -> _Vocabulary:
    if n_vocab not in _VOCABULARIES:
        sizes = ", ".join(map(str, _VOCABULARIES))
        raise TokenizerError(
            f"no OpenAI checkpoint has {n_vocab} token ids",
            why=f"the vocabularies of OpenAI have {sizes} ids",
            hint="use the tokenizer.json of the checkpoint",
        )
    return _VOCABULARIES[n_vocab]


def _special_tokens(known: _Vocabulary) -> list[str]:
    """Return the special tokens in the order of their ids. English-only models have unused languages."""
    return [
        "<|endoftext|>",
        "<|startoftranscript|>",
        *(f"<|{code}|>" for code in list(LANGUAGES)[: known.n_languages]),
        "<|translate|>",
        "<|transcribe|>",
        "<|startoflm|>",
        "<|startofprev|>",
        "<|nospeech|>",
        "<|notimestamps|>",
        *(f"<|{i * SECONDS_PER_TIMESTAMP:.2f}|>" for i in range(N_TIMESTAMPS)),
    ]


@lru_cache(maxsize=2)
def _ranks(name: str) -> dict[bytes, int]:
    """Return the id of each token, by its bytes. Tokens with lower ids are merged first."""
    packed = (files("whisperport.speech.text") / "ranks" / f"{name}.txt.xz").read_bytes()
    tokens = lzma.decompress(packed).splitlines()
    return {base64.b64decode(token): rank for rank, token in enumerate(tokens)}


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pair from which each token is merged, in the order of the ids.

    The pair are the two parts that remain after merging with all lower ids.
    """
    merges = []
    for token, rank in ranks.items():  # in the order of the ranks, as in the file
        if len(token) < 2:
            continue
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            at = min(range(len(pairs)), key=pairs.__getitem__)
            assert pairs[at] < rank, f"{token!r} cannot be merged from tokens with lower ids"
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        merges.append((parts[0], parts[1]))
    return merges


# Symbols of annotations, which are not speech: ♪♪♪, ( LAUGHS ), [DAVID], and dashes before speakers.
_SYMBOLS = [
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *[
        "<<",
        ">>",
        "<<<",
        ">>>",
        "--",
        "---",
        "-(",
        "-[",
        "('",
        '("',
        "((",
        "))",
        "(((",
        ")))",
        "[[",
        "]]",
        "{{",
        "}}",
        "♪♪",
        "♪♪♪",
    ],
]
# Each is one token or several, depending on the vocabulary. The first of several may be suppressed:
# U+2640 to U+267F share their first two bytes, and all of them are miscellaneous symbols.
_MUSIC = set("♩♪♫♬♭♮♯")


def _non_speech(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of symbols that are not speech, without common punctuation."""
    # A hyphen or an apostrophe is allowed between letters, not at the beginning of a word.
    symbol_ids = {tokenizer.encode(" -")[0], tokenizer.encode(" '")[0]}
    for symbol in [*_SYMBOLS, *_MUSIC]:
        for ids in (tokenizer.encode(symbol), tokenizer.encode(" " + symbol)):
            if len(ids) == 1 or symbol in _MUSIC:
                symbol_ids.add(ids[0])
    return symbol_ids
