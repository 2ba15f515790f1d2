"""Compare what an app returned with what the checkpoint emits in eager torch, clip by clip."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile
from statistics import median

from whisperport.build.layouts.layout import App
from whisperport.build.layouts.reference import Emitted, TimedText
from whisperport.program.checks import Check
from whisperport.verification.clips import Clip
from whisperport.verification.error_rate import (
    TextErrors,
    increase_bounds,
    text_errors,
    unit_of,
)
from whisperport.verification.word_check import LOST, max_change

# Of an app that computes its own features: the worst that was seen differs by a word in thirty clips.
MAX_DIFFERENCE = 0.05
TIMESTAMP_S = 0.021  # one timestamp of 20 ms, and what binary fractions add
# Two positions of the encoder, by which rounding moves a word. Around a pause it may be more.
WORD_S, PART_OF_WORDS = 0.041, 0.9
SHOWN = 100  # characters of a text that differs, around its first difference
CLIPS_NEEDED = "give clips that it understands with `--verify-with`"


@dataclass(frozen=True, slots=True)
class WordCounts:
    """Errors in clips, against the transcripts, or against the checkpoint's text where there is none.

    Attributes:
        app: of the app.
        checkpoint: of the checkpoint.
        between: of the app against the checkpoint's text, in all clips.
        increase_bounds: see `error_rate.increase_bounds`; zeros: there are no words.
    """

    app: TextErrors
    checkpoint: TextErrors
    between: TextErrors
    increase_bounds: tuple[float, float]

    @classmethod
    def of(
        cls, clips: Sequence[Clip], expected: Sequence[Emitted], actual: Sequence[Emitted]
    ) -> "WordCounts":
        """Count the errors in what an app and a checkpoint emit for clips; at least one."""
        unit = unit_of(clips[0].language)
        nothing = TextErrors(unit=unit)
        triples = [
            (
                text_errors(b.text, clip.text or a.text, unit),
                text_errors(a.text, clip.text or a.text, unit),
                text_errors(b.text, a.text, unit),
            )
            for clip, a, b in zip(clips, expected, actual, strict=True)
        ]
        app, checkpoint, between = (sum(c, nothing) for c in zip(*triples, strict=True))
        pairs = [(a, b) for a, b, _ in triples]
        return cls(
            app, checkpoint, between, increase_bounds(pairs) if checkpoint.length else (0.0, 0.0)
        )


def doubt(language: str, texts: Iterable[tuple[str, str]]) -> str:
    """Return why results that equal the checkpoint's show little: most of its own words are wrong.

    A checkpoint whose text is nonsense, such as one of random weights, can still be written and compared.

    Args:
        language: of the clips, a code.
        texts: of each clip, what the checkpoint emits and the transcript; empty: not known.

    Returns:
        A warning; empty: most words are right, or no transcript is known.
    """
    unit = unit_of(language)
    known = (text_errors(text, right, unit) for text, right in texts if right)
    errors = sum(known, TextErrors(unit=unit))
    if not errors.length or errors.rate <= LOST:
        return ""
    return (
        f"the checkpoint itself has {errors.name} {errors.rate:.0%} on these clips: the app returns "
        "what it emits, but not what is spoken. Its tokenizer may have the ids of another one, or it was "
        f"not trained for such speech: {CLIPS_NEEDED}"
    )


def checks_of(
    app: App,
    precision: str,
    clips: Sequence[Clip],
    expected: Sequence[Emitted],
    actual: Sequence[Emitted],
    *,
    exact: bool,
    device: str = "",
) -> tuple[Check, ...]:
    """Compare the results of an app with those of the checkpoint.

    Args:
        app: says how much of a result is compared.
        precision: of the written weights.
        clips: at least one.
        expected: of the checkpoint in eager torch, under the app's decoding profile.
        actual: of the app.
        device: on which the app ran.
        exact: whether the written weights are those of the checkpoint. Rounded ones are judged by words.
    """
    name = f"{app.name}, {device}" if device else app.name
    if not exact or app.compared == "words":
        checks: tuple[Check, ...] = (
            _words(app, name, precision, clips, expected, actual, exact=exact),
        )
    else:
        compare = _tokens if app.compared == "tokens" else _timed
        results = zip(clips, expected, actual, strict=True)
        checks = tuple(compare(name, clip, *pair) for clip, *pair in results)
    if any(emitted.words for emitted in expected):
        checks = (*checks, _word_times(name, expected, actual))
    return checks


def _word_times(name: str, expected: Sequence[Emitted], actual: Sequence[Emitted]) -> Check:
    """Compare the start and the end of each word; words that only one of the texts has are left out."""
    pairs = [
        pair
        for emitted, returned in zip(expected, actual, strict=True)
        for pair in _same_words(emitted.words, returned.words)
    ]
    differences = [max(abs(a.start_s - b.start_s), abs(a.end_s - b.end_s)) for a, b in pairs]
    n_near = sum(difference <= WORD_S for difference in differences)
    reason = ""
    if not pairs:
        reason = f"{name} returned no word of the checkpoint's text with its time"
    elif n_near < PART_OF_WORDS * len(pairs):
        reason = f"{len(pairs) - n_near} of {len(pairs)} words do not"
    return Check(
        level="words",
        program=name,
        what="word timestamps",
        value={
            "words": len(pairs),
            "part_of_words": n_near / len(pairs),
            "median_s": median(differences),
            "largest_s": max(differences),
        }
        if pairs
        else {},
        rule=f"{PART_OF_WORDS:.0%} of the words begin and end within 40 ms of the checkpoint's times, "
        "computed in eager torch as openai-whisper does",
        passed=not reason,
        reason=reason,
    )


def _same_words(
    a: Sequence[TimedText], b: Sequence[TimedText]
) -> Iterator[tuple[TimedText, TimedText]]:
    """Yield the words that two texts have in common, in order."""
    texts, other_texts = ([word.text.strip() for word in words] for words in (a, b))
    matcher = SequenceMatcher(None, texts, other_texts, autojunk=False)
    for block in matcher.get_matching_blocks():
        yield from zip(a[block.a :][: block.size], b[block.b :], strict=False)


def _tokens(name: str, clip: Clip, expected: Emitted, actual: Emitted) -> Check:
    pairs = zip(expected.tokens, actual.tokens, strict=False)
    n_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    reason = ""
    if expected.tokens != actual.tokens:
        texts = _texts(name, clip, expected, actual)
        reason = f"token {n_same + 1} of {len(expected.tokens)} differs: {texts}"
    return Check(
        level="tokens",
        program=name,
        what=clip.name,
        value={"n_same": n_same, "tokens": len(expected.tokens)},
        rule="the checkpoint's tokens in eager torch, under the app's decoding profile",
        passed=not reason,
        reason=reason,
    )


def _timed(name: str, clip: Clip, expected: Emitted, actual: Emitted) -> Check:
    texts = [segment.text.split() for segment in expected.segments]
    reason = ""
    if expected.text.split() != actual.text.split():
        reason = _texts(name, clip, expected, actual)
    elif actual.tokens and actual.tokens != expected.text_tokens:
        reason = "the same text is made of other tokens"
    elif texts != [segment.text.split() for segment in actual.segments]:
        reason = f"{name} splits the text at other places"
    else:
        differences = [
            max(abs(a.start_s - b.start_s), abs(a.end_s - b.end_s))
            for a, b in zip(expected.segments, actual.segments, strict=True)
        ]
        if not all(difference <= TIMESTAMP_S for difference in differences):  # also if one is NaN
            reason = f"a timestamp differs by {max(differences):.2f} s"
    return Check(
        level="tokens",
        program=name,
        what=clip.name,
        value={"words": len(expected.text.split()), "segments": len(texts)},
        rule="the checkpoint's text and timestamps in eager torch, under the app's decoding profile; "
        "timestamps at most 20 ms apart",
        passed=not reason,
        reason=reason,
    )


def _texts(name: str, clip: Clip, expected: Emitted, actual: Emitted) -> str:
    """Say which two texts differ, and whether the checkpoint's is nonsense, which apps cut differently."""
    texts = [emitted.text.strip() for emitted in (expected, actual)]
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
    start = max(0, sum(1 for _ in pairs) - SHOWN // 2)
    own, returned = (
        f"{'...' * (start > 0)}{text[start:][:SHOWN]}{'...' * (len(text) > start + SHOWN)}"
        for text in texts
    )
    message = f"{name} returned {returned!r}, the checkpoint emits {own!r}"
    errors = text_errors(expected.text, clip.text, unit_of(clip.language))
    if errors.length and errors.rate > LOST:
        message += f", which has {errors.name} {errors.rate:.0%} itself: {CLIPS_NEEDED}"
    return message


def _words(
    app: App,
    name: str,
    precision: str,
    clips: Sequence[Clip],
    expected: Sequence[Emitted],
    actual: Sequence[Emitted],
    *,
    exact: bool,
) -> Check:
    """Count errors against the transcripts, or against the checkpoint's text where there is none."""
    counts = WordCounts.of(clips, expected, actual)
    tested, compared, between, unit = counts.app, counts.checkpoint, counts.between, counts.app.unit
    what = f"{unit.removesuffix('s')} error rate"
    if not compared.length:
        reason = "the clips have no words"
        return Check(
            level="words",
            program=name,
            what=what,
            value={},
            rule="",
            passed=False,
            reason=reason,
        )
    low, high = counts.increase_bounds
    # A set of words cannot show less than one error.
    limit = MAX_DIFFERENCE if app.compared == "words" else max_change(precision)
    allowed = max(limit, 1 / compared.length)
    change = tested.rate - compared.rate
    cause = f"{app.name} computes its own features" if exact else "weights or values were rounded"
    reason = ""
    if compared.rate > LOST:
        reason = (
            f"the checkpoint itself has {compared.name} {compared.rate:.0%} on these clips, so that they "
            f"show nothing: {CLIPS_NEEDED}"
        )
    elif change > allowed:
        reason = f"the {compared.name} is {change:.2%} above the checkpoint's in {compared.length} {unit}"
    return Check(
        level="words",
        program=name,
        what=what,
        value={
            unit: compared.length,
            "clips": len(clips),
            tested.name.lower(): tested.rate,
            f"reference_{tested.name.lower()}": compared.rate,
            "differ": between.errors,
            "change": change,
            "increase_at_least": low,
            "increase_at_most": high,
        },
        rule=f"{compared.name} at most {allowed:.1%} above the checkpoint's ({cause}); {between.errors} of "
        f"{between.length} {unit} differ; with 95%, the increase is at most {high:.1%}",
        passed=not reason,
        reason=reason,
    )
