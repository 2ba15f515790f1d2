"""Two rules of every layout: what its files state is what the checkpoint has, of which they were made."""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whisperport.build.layouts.reading import Files
from whisperport.build.layouts.rules import LayoutRule
from whisperport.speech.audio import SAMPLE_RATE, mel_filters
from whisperport.speech.audio.mel import slaney_edges, triangles
from whisperport.speech.text.byte_level import to_byte_characters
from whisperport.verification.diagnosis.differences import weight_difference

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

COMPARED = "WP708"  # the rule that says which of two files that disagree is wrong
MOST = 5  # settings of a file that are named
LONGEST = 60  # characters of a value
HTK_MEL, HTK_HZ = 2595.0, 700.0  # of HTK's mel scale: 2595 mel for each factor of 10 above 700 Hz
SAME_BANK = 1e-3  # of the largest value: libraries compute filters in float32, and round the edges
FILTERS = 1e-6  # openai-whisper's file of filters differs from `mel_filters` by less
SAME_FORM = 0.9  # of the tokens that differ; parts of a character have no text

SIZES_TEXT = """
Found with `--checkpoint`. The app computes or prompts wrongly, or writes other words.

What to do: `whisperport convert CHECKPOINT --for APP`.
"""
DECODING_TEXT = """
Found with `--checkpoint`: suppressed tokens, heads of word timestamps, or the longest text.

What to do: `whisperport convert CHECKPOINT --for APP`.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a file states, and what the checkpoint has.

    Attributes:
        file: its path in the folder.
        name: of the setting.
        stated: in the file; None: it is not there.
        right: of the checkpoint.
        is_decoding: whether the app would decode with it, and only loses something.
        reason: how the two differ; empty: both are named.
    """

    file: str
    name: str
    stated: Any
    right: Any
    is_decoding: bool = False
    reason: str = ""

    @classmethod
    def wrong(cls, file: str, reason: str, *, is_decoding: bool = False) -> "Setting":
        """Return one that was compared: the two differ, for this reason."""
        return cls(file, "", 0, 1, is_decoding, reason)


def checkpoint_rules(
    settings: "Callable[[Files, Checkpoint], Iterator[Setting]]",
) -> tuple[LayoutRule, LayoutRule]:
    """Return the two rules of a layout, whose files state some settings."""
    return (
        LayoutRule(
            COMPARED,
            "A size, an id or a token is not the checkpoint's",
            inspect.cleandoc(SIZES_TEXT),
            partial(_differences, settings, is_decoding=False),
        ),
        LayoutRule(
            "WP709",
            "A setting of decoding is not the checkpoint's",
            inspect.cleandoc(DECODING_TEXT),
            partial(_differences, settings, is_decoding=True),
            is_warning=True,
        ),
    )


def settings_of(
    file: str,
    stated: Mapping[str, Any],
    right: Mapping[str, Any],
    keys: tuple[str, ...] = (),
    *,
    decoding: Collection[str] = (),
    unread: Collection[str] = (),
    may_lack: bool = True,
) -> Iterator[Setting]:
    """Yield the settings of a JSON file that the checkpoint has, too.

    Args:
        file: its path in the folder.
        stated: in it; empty: it is not there.
        right: what the layout's own writer writes for the checkpoint.
        keys: these only; empty: all of `right`.
        decoding: those with which the app would decode, and only lose something.
        unread: those that the app does not read.
        may_lack: whether one that is missing says nothing.
    """
    for key in keys or right:
        if key in unread:
            continue
        value, is_decoding = right.get(key), key in decoding
        if stated and not may_lack and value not in (None, [], {}) and stated.get(key) is None:
            reason = f"{key} is missing; the checkpoint has {_short(value)}"
            yield Setting.wrong(file, reason, is_decoding=True)
        else:
            yield Setting(file, key, stated.get(key), value, is_decoding)


def empty_files(files: Files, *names: str) -> Iterator[Setting]:
    """Yield the JSON files that are there, and state nothing."""
    for name in names:
        if files.has(name) and not files.json(name):
            yield Setting.wrong(name, "it states nothing: it is an empty object")


def default_settings(
    file: str, stated: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterator[Setting]:
    """Yield the settings of decoding that no checkpoint has, and that are not the app's default."""
    for key, value in defaults.items():
        if stated.get(key) is not None and stated[key] != value:
            reason = f"{key} is {_short(stated[key])}; without it, it is {_short(value)}"
            yield Setting.wrong(file, reason, is_decoding=True)


def token_setting(
    file: str, stated: Mapping[int, str], right: Mapping[int, str]
) -> Iterator[Setting]:
    """Yield how the tokens of a file differ from the checkpoint's; one that the file lacks is left out."""
    changed = [i for i, token in stated.items() if right.get(i, token) != token]
    if changed:
        first = changed[0]
        reason = (
            f"{len(changed):,} of {len(stated):,} tokens are not the checkpoint's, such as id {first}: "
            f"{_short(stated[first])}, not {_short(right[first])}"
        )
        pairs = [(stated[i], right[i]) for i in changed]
        if form := _other_form(pairs) or _shifted(changed, stated, right) or _reordered(pairs):
            reason += f": {form}"
        yield Setting.wrong(file, reason)


def _other_form(pairs: Sequence[tuple[str, str]]) -> str:
    """Return in words in which other form tokens are stored than the right ones; empty: in the same."""

    def most(change: Callable[[str], str]) -> bool:
        return sum(stated == change(right) for stated, right in pairs) > SAME_FORM * len(pairs)

    if most(lambda token: to_byte_characters(token.encode())):
        return "they are written in the byte-level characters of tokenizer.json, not in bytes"
    if most(lambda token: token.replace("Ġ", " ")):
        return "they are written with spaces, not in the byte-level characters of tokenizer.json"
    if most(str.strip):
        return "the spaces around them are lost"
    return ""


def _shifted(changed: Sequence[int], stated: Mapping[int, str], right: Mapping[int, str]) -> str:
    """Return in words by how much the ids of tokens are too high; empty: it is something else."""
    own = {token: i for i, token in right.items()}
    shifts = Counter(i - own[stated[i]] for i in changed if stated[i] in own)
    shift, count = shifts.most_common(1)[0] if shifts else (0, 0)
    if not shift or count < SAME_FORM * len(changed):
        return ""
    return f"their ids are {abs(shift)} too {'high' if shift > 0 else 'low'}"


def _reordered(pairs: Sequence[tuple[str, str]]) -> str:
    """Return in words that wrong tokens are those of other ids; empty: some are not."""
    stated, right = zip(*pairs, strict=True)
    if sorted(stated) != sorted(right):
        return ""
    order = ": they are sorted by their text" * (list(stated) == sorted(stated))
    return f"the same tokens are in another order{order}"


def missing_tokens(
    file: str, stated: Mapping[str, int], right: Mapping[str, int]
) -> Iterator[Setting]:
    """Yield the tokens of the checkpoint that a file lacks; token -> id."""
    missing = [token for token in right if token not in stated]
    if stated and missing:
        first = missing[0]
        reason = (
            f"{len(missing):,} of the checkpoint's {len(right):,} tokens are missing, such as "
            f"{_short(first)}, id {right[first]}"
        )
        yield Setting.wrong(file, reason)


def other_merges(stated: Sequence[Any], right: Sequence[Any]) -> str:
    """Return in words where the merges of a tokenizer differ from the right ones."""
    pairs = enumerate(zip(stated, right, strict=False))
    first = next((i for i, (own, other) in pairs if own != other), min(len(stated), len(right)))
    if first == len(stated):
        where = f"the last {len(right) - first:,} are missing"
    elif first == len(right):
        where = f"{len(stated) - first:,} more follow"
    else:
        where = f"merge {first:,} is {_short(stated[first])}, not {_short(right[first])}"
    return (
        f"its {len(stated):,} merges are not the checkpoint's {len(right):,}: {where}; prompts become "
        "other tokens"
    )


def other_filters(filters: NDArray[Any], n_mels: int) -> str:
    """Return in words how mel filters (bands, frequencies) differ from Whisper's; empty: no way."""
    right = mel_filters(n_mels)
    if filters.shape != right.shape:
        stated, expected = (
            " bands of {:,} frequencies".format(*a.shape[1:]) for a in (filters, right)
        )
        return f"they are {len(filters)}{stated}; the checkpoint has {len(right)}{expected}"
    if np.allclose(filters, right, rtol=0, atol=FILTERS):
        return ""
    for bank, values in _other_banks(len(right)):
        if np.allclose(filters, values, rtol=0, atol=SAME_BANK * values.max()):
            return f"they are {bank}; Whisper's are of Slaney's mel scale, each of the area 1"
    return weight_difference(filters, right, FILTERS + np.abs(right) * FILTERS)


def _other_banks(n_mels: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield other filters (bands, frequencies) that libraries compute for speech of 16 kHz."""
    top = HTK_MEL * np.log10(1 + SAMPLE_RATE / 2 / HTK_HZ)
    htk = HTK_HZ * (10 ** (np.linspace(0, top, n_mels + 2) / HTK_MEL) - 1)
    for scale, edges in (("HTK's mel scale", htk), ("Slaney's mel scale", slaney_edges(n_mels))):
        for form, is_normalized in (("with the peak 1", False), ("of the area 1", True)):
            yield (
                f"triangles of {scale}, each {form}",
                triangles(edges, is_normalized=is_normalized),
            )


def _differences(
    settings: "Callable[[Files, Checkpoint], Iterator[Setting]]", files: Files, *, is_decoding: bool
) -> Iterator[tuple[str, str]]:
    checkpoint = files.checkpoint
    if checkpoint is None:
        return
    named: Counter[str] = Counter()
    for setting in files.kept(settings, lambda: tuple(settings(files, checkpoint))):
        if setting.stated is None or setting.right is None:
            continue
        stated, right = _comparable(setting.stated), _comparable(setting.right)
        has_end = _suppresses(checkpoint.generation.end_of_text, setting)
        if (setting.is_decoding and not has_end) != is_decoding:
            continue
        if isinstance(right, dict) and isinstance(stated, dict):
            # Files of a model may name more languages than a checkpoint that was trained for one.
            stated = {key: stated.get(key) for key in right}
        if stated != right and named[setting.file] < MOST:
            named[setting.file] += 1
            yield (
                setting.file,
                setting.reason
                or _unlike(setting.name, stated, right)
                + (f": {checkpoint.generation.end_of_text} ends a text" if has_end else ""),
            )


def _suppresses(end_of_text: int, setting: Setting) -> bool:
    """Return whether a setting keeps an app from ending a text, as the checkpoint's does not."""
    lists = isinstance(setting.stated, list) and isinstance(setting.right, list)
    is_list = lists and "suppress" in setting.name
    return is_list and end_of_text in setting.stated and end_of_text not in setting.right


def _unlike(name: str, stated: Any, right: Any) -> str:
    """Return in words how a setting differs; of tables and long lists, the entries that do."""
    if isinstance(stated, dict) and isinstance(right, dict):
        changed = [key for key in right if stated.get(key) != right[key]]
        stated, right = ({key: side.get(key) for key in changed} for side in (stated, right))
    lists = isinstance(stated, list) and isinstance(right, list)
    if not lists or max(len(repr(stated)), len(repr(right))) <= LONGEST:
        return f"{name} is {_short(stated)}; the checkpoint has {_short(right)}"
    sides = {
        "has": [entry for entry in stated if entry not in right],
        "lacks": [entry for entry in right if entry not in stated],
    }
    words = [f"{verb} {_short(entries)}" for verb, entries in sides.items() if entries]
    return f"{name} {' and '.join(words)}, unlike the checkpoint's"


def _comparable(value: Any) -> Any:
    """Return a value as it is in JSON; of a list, the order of entries does not count."""
    if isinstance(value, list | tuple | set):
        entries = (list(e) if isinstance(e, list | tuple) else _comparable(e) for e in value)
        return sorted(entries, key=repr)
    if isinstance(value, Mapping):
        return {str(key): _comparable(entry) for key, entry in value.items()}
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"
