"""What the words of an app lose against the checkpoint's: an ending, or times; or that they loop."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

from whisperport.build.layouts.checks import WordCounts
from whisperport.build.layouts.reference import Emitted
from whisperport.program.json_records import to_json
from whisperport.speech.text import normalize
from whisperport.verification.clips import Clip
from whisperport.verification.error_rate import Unit
from whisperport.verification.report import ClipText

Kind = Literal["no text", "early stop", "lost ending", "loop", "lost timestamps"]
EARLY = 0.5  # of the words; if fewer are missing at the end, the ending alone is lost
LONGEST_PHRASE = 12  # words that a loop repeats
LEAST_REPEATS = 4  # of a phrase in a row: people say a word three times


@dataclass(frozen=True, slots=True)
class LostText:
    """What is lost in one clip.

    Attributes:
        clip: its name.
        kind: of the loss.
        reason: how much, in words.
    """

    clip: str
    kind: Kind
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedWords:
    """The words of an app, compared with those of the checkpoint.

    Attributes:
        texts: of each clip.
        losses: what is lost, clip by clip.
        counts: the errors in all clips.
    """

    texts: tuple[ClipText, ...]
    losses: tuple[LostText, ...]
    counts: WordCounts

    def __bool__(self) -> bool:
        """Whether the timestamps are there; how many words may differ depends on the weights."""
        return not any(loss.kind == "lost timestamps" for loss in self.losses)

    def __str__(self) -> str:
        counts, (_, high) = self.counts, self.counts.increase_bounds
        between, own, reference = counts.between, counts.app, counts.checkpoint
        text = f"{between.errors} differences in {between.length} {own.unit}"
        if own.rate > reference.rate:
            text += f"; {own.name} {own.rate:.1%}, the checkpoint's {reference.rate:.1%}"
        return f"{text}; with 95%, the {own.name} is at most {high:.1%} above the checkpoint's"

    def by_kind(self) -> dict[str, list[LostText]]:
        """Return kind -> the losses of that kind."""
        kinds = dict.fromkeys(loss.kind for loss in self.losses)
        return {kind: [loss for loss in self.losses if loss.kind == kind] for kind in kinds}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        counts = self.counts
        return {
            "unit": counts.app.unit,
            "length": counts.between.length,
            "differ": counts.between.errors,
            "error_rate": counts.app.rate,
            "reference_error_rate": counts.checkpoint.rate,
            "increase_at_least": counts.increase_bounds[0],
            "increase_at_most": counts.increase_bounds[1],
            "losses": to_json(self.losses),
            "texts": [{"clip": x.clip, "text": x.text, "expected": x.expected} for x in self.texts],
        }


def compare_words(
    clips: Sequence[Clip], expected: Sequence[Emitted], actual: Sequence[Emitted], *, timed: bool
) -> ComparedWords:
    """Compare what an app returned with what the checkpoint emits.

    Args:
        clips: at least one.
        expected: of the checkpoint, under the app's decoding profile.
        actual: of the app.
        timed: whether the app was asked for segments with timestamps.
    """
    counts = WordCounts.of(clips, expected, actual)
    unit = counts.app.unit
    results = list(zip(clips, expected, actual, strict=True))
    texts = tuple(
        ClipText(clip=c.name, text=b.text, expected=a.text, correct=c.text, unit=unit)
        for c, a, b in results
    )
    losses = tuple(
        LostText(clip.name, *loss)
        for clip, a, b in results
        for loss in _losses(a, b, unit, timed=timed)
    )
    return ComparedWords(texts=texts, losses=losses, counts=counts)


def _losses(
    expected: Emitted, actual: Emitted, unit: Unit, *, timed: bool
) -> Iterator[tuple[Kind, str]]:
    """Yield what an app lost in one clip, and how much of it."""
    by_letters = unit == "characters"
    words, own = (
        normalize(emitted.text, split_letters=by_letters).split() for emitted in (expected, actual)
    )
    if not words:
        return
    if not own:
        yield "no text", f"the checkpoint emits {len(words)} {unit}"
        return
    phrase, repeats = longest_loop(own)
    if repeats >= LEAST_REPEATS and repeats > longest_loop(words)[1]:
        shown = ("" if by_letters else " ").join(phrase)
        yield "loop", f"`{shown}` {repeats} times in a row"
    missing = _missing_at_end(words, own)
    if missing >= EARLY * len(words):
        yield "early stop", f"after {len(own)} of {len(words)} {unit}"
    elif missing:
        yield "lost ending", f"the last {missing} of {len(words)} {unit} are missing"
    n_timed = sum(segment.end_s > segment.start_s for segment in actual.segments)
    if timed and not n_timed and any(s.end_s > s.start_s for s in expected.segments):
        yield "lost timestamps", f"none of {len(actual.segments)} segments has a start and an end"
    if expected.words and not any(word.end_s > word.start_s for word in actual.words):
        yield "lost timestamps", f"none of {len(own)} {unit} has a start and an end"


def longest_loop(words: Sequence[str]) -> tuple[Sequence[str], int]:
    """Return the phrase that is repeated most often in a row, and how often it is there."""
    best: tuple[Sequence[str], int] = (), 0
    for size in range(1, min(LONGEST_PHRASE, len(words)) + 1):
        run = 0  # words in a row that equal the one a phrase before
        for place in range(size, len(words) + 1):
            if place < len(words) and words[place] == words[place - size]:
                run += 1
                continue
            if run // size + 1 > best[1]:
                best = words[place - run - size : place - run], run // size + 1
            run = 0
    return best


def _missing_at_end(words: Sequence[str], own: Sequence[str]) -> int:
    """Return how many words are missing after the last one that both have in common."""
    blocks = SequenceMatcher(None, words, own, autojunk=False).get_matching_blocks()
    common = [block for block in blocks if block.size] or blocks[:1]
    end, own_end = common[-1].a + common[-1].size, common[-1].b + common[-1].size
    return max(0, (len(words) - end) - (len(own) - own_end))
