"""Compare the graphs of the tokenizer with the checkpoint's tokens; nothing of them is run.

The package openvino-tokenizers stores a list of texts as three constants: where each begins, where it ends,
and the bytes of all. Source: openvinotoolkit/openvino_tokenizers, python/openvino_tokenizers.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from whisperport.build.layouts.checkpoint_rules import Setting, other_merges, token_setting
from whisperport.build.layouts.huggingface_files import text_tokens, tokenizer_json, tokens_by_id
from whisperport.build.layouts.reading import Files
from whisperport.errors import ProgramError
from whisperport.speech.text.byte_level import from_byte_characters
from whisperport.targets.cpu.openvino.ir import IrGraph, constants, read_ir

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

TOKENIZER, DETOKENIZER = "openvino_tokenizer.xml", "openvino_detokenizer.xml"
# Operator -> the first input of each list: tokens, both parts of each merge, and added tokens.
LISTS = {"VocabDecoder": (1,), "BPETokenizer": (5, 8, 11, 14)}
OPERATORS = {TOKENIZER: "BPETokenizer", DETOKENIZER: "VocabDecoder"}  # which each graph has
SKIPPED, ADDED_IDS = 4, 17  # inputs that have ids
END_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True)
class _Right:
    """What the checkpoint has.

    Attributes:
        tokens: id -> text, for all V ids.
        n_needed: how many of them each graph has: many tokenizers lack the timestamps.
        merges: both parts of each.
        special: token that is left out of a text -> its id.
        end: id of <|endoftext|>.
    """

    tokens: dict[int, str]
    n_needed: int
    merges: list[tuple[bytes, bytes]]
    special: dict[str, int]
    end: int

    @classmethod
    def of(cls, checkpoint: "Checkpoint") -> "_Right":
        stored = tokenizer_json(checkpoint)
        tokens = [token.encode() for token in tokens_by_id(checkpoint)]
        texts = text_tokens(checkpoint)
        tokens[: len(texts)] = texts
        parts = (merge.split(" ") for merge in stored["model"]["merges"])
        return cls(
            _by_id(tokens),
            checkpoint.generation.timestamp_begin,
            [(from_byte_characters(left), from_byte_characters(right)) for left, right in parts],
            {t["content"]: t["id"] for t in stored.get("added_tokens", ()) if t["special"]},
            checkpoint.generation.end_of_text,
        )


def tokenizer_graphs(files: Files, checkpoint: "Checkpoint") -> Iterator[Setting]:
    """Yield what in the tokenizer's graphs is not the checkpoint's."""
    lost = {TOKENIZER: "prompts and hotwords fail", DETOKENIZER: "no text is returned"}
    right = _Right.of(checkpoint)
    for file, loss in lost.items():
        if not files.has(file):
            if file == TOKENIZER:  # of the other, a rule says it
                yield Setting.wrong(file, f"the file is missing: {loss}", is_decoding=True)
            continue
        try:
            settings = list(_differences(files, file, right))
        except (ProgramError, ValueError) as error:
            why = f"{error.what}: {error.why}" if isinstance(error, ProgramError) else str(error)
            yield Setting.wrong(file, f"{why[:200]}: {loss}")
        else:
            yield from settings


def _differences(files: Files, file: str, right: _Right) -> Iterator[Setting]:
    graph = files.read(file, read_ir)
    stored = dict(constants(files.path / file))
    types = {node.type for _, node in graph.of_type(*LISTS)}
    if types and OPERATORS[file] not in types:
        reason = f"it has no operator {OPERATORS[file]}: it is a copy of the other of both graphs"
        yield Setting.wrong(file, reason)
        return
    for index, node in graph.of_type(*LISTS):
        tokens, *lists = [_texts(graph, index, place, stored) for place in LISTS[node.type]]
        if tokens and len(tokens) < right.n_needed:
            reason = f"it has {len(tokens):,} tokens; the checkpoint has {len(right.tokens):,}"
            yield Setting.wrong(file, reason)
        yield from token_setting(file, _by_id(tokens), right.tokens)
        if node.type == "VocabDecoder":
            yield from _shown(file, _array(graph, index, SKIPPED, stored), right)
            continue
        before, after, added = lists
        if before and list(zip(before, after, strict=False)) != right.merges:
            reason = other_merges(list(zip(before, after, strict=False)), right.merges)
            yield Setting.wrong(file, reason, is_decoding=True)
        ids = _array(graph, index, ADDED_IDS, stored)
        if ids is not None and ids.shape == (len(added),):
            texts = (text.decode("utf-8", "backslashreplace") for text in added)
            yield from token_setting(
                file, dict(zip(ids.tolist(), texts, strict=True)), right.tokens
            )
    text = (files.path / file).read_bytes()[graph.sections.get("rt_info", slice(0))]
    for key in END_IDS:
        if match := re.search(rb'<%b value="(\d{1,9})"' % key.encode(), text):
            yield Setting(file, key, int(match[1]), right.end, is_decoding=True)


def _shown(file: str, ids: NDArray[Any] | None, right: _Right) -> Iterator[Setting]:
    """Yield the special tokens that are not left out of the text."""
    skipped = set() if ids is None else set(ids.reshape(-1).tolist())
    if shown := [token for token, i in right.special.items() if i not in skipped]:
        reason = f"the text shows {len(shown):,} special tokens, such as {shown[0]}"
        yield Setting.wrong(file, reason, is_decoding=True)


def _texts(graph: IrGraph, index: int, place: int, stored: dict[str, NDArray[Any]]) -> list[bytes]:
    """Return a list of texts; none if it is stored in another form."""
    arrays = [_array(graph, index, place + i, stored) for i in range(3)]
    if any(array is None for array in arrays):
        return []
    begins, ends, data = (array.reshape(-1) for array in arrays if array is not None)
    if not {begins.dtype.kind, ends.dtype.kind} <= {"i", "u"}:
        raise ValueError("where a text begins or ends is not an integer")
    if len(begins) != len(ends) or (ends < begins).any() or (begins < 0).any():
        raise ValueError("a text ends before it begins")
    if (ends > len(data)).any() or (ends.astype("int64") - begins).sum() > len(data):
        raise ValueError("its texts are longer than their bytes")
    raw = data.tobytes()
    return [raw[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]


def _array(
    graph: IrGraph, index: int, place: int, stored: dict[str, NDArray[Any]]
) -> NDArray[Any] | None:
    source = graph.source(index, place)
    return None if source is None else stored.get(source.name)


def _by_id(tokens: list[bytes]) -> dict[int, str]:
    return {i: token.decode("utf-8", "backslashreplace") for i, token in enumerate(tokens) if token}
