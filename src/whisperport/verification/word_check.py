"""Compare the words that a bundle decodes with those of its checkpoint in float32, clip by clip."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whisperport.program.checks import ALL_PROGRAMS, Check
from whisperport.verification.error_rate import (
    TextErrors,
    Unit,
    increase_bounds,
    text_errors,
)
from whisperport.verification.loss import Loss
from whisperport.verification.reference import ReferenceClip
from whisperport.verification.tokens import luck
from whisperport.verification.tolerances import BY_WORDS

# Largest increase of WER and CER over the reference's, absolute.
MAX_CHANGE = {"fp32": 0.001, "fp16": 0.001}
MAX_CHANGE_OF_OTHERS = 0.005
FIRST_TOKENS = 4  # a text whose first tokens are luck is luck; later ones follow from them
LOST = 0.5  # error rate of float32 above which a clip shows nothing


def max_change(precision: str) -> float:
    """Return the largest increase of WER and CER over the reference's in a precision, absolute."""
    return MAX_CHANGE.get(precision, MAX_CHANGE_OF_OTHERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcribed:
    """What a bundle texts in a clip."""

    clip: ReferenceClip
    tokens: Sequence[int]
    text: str
    expected: str  # what the checkpoint transcribes in float32
    unit: Unit

    def errors(self) -> tuple[TextErrors, TextErrors]:
        """Return the errors of the bundle and of float32: against the transcript, or float32's text."""
        right = self.clip.text or self.expected
        return text_errors(self.text, right, self.unit), text_errors(
            self.expected, right, self.unit
        )


def undecided(texts: Transcribed, precision: str, own: Loss | None) -> str:
    """Return why a clip decides nothing in a precision below float32; empty if it decides.

    Args:
        texts: the clip and its text.
        precision: precision of the programs.
        own: what torch loses of the logits in it; None: not known.
    """
    if precision == "fp32":
        return ""
    margin = min(texts.clip.margins[:FIRST_TOKENS], default=None)
    if margin is not None and margin < luck(own):
        return f"the margin of a first token is {margin:.2f} logits, and {luck(own):.2f} are luck"
    _, float32 = texts.errors()
    if texts.clip.text and float32.rate > LOST:
        return f"float32 itself has {float32.name} {float32.rate:.0%} on this clip"
    return ""


def no_evidence(texts: Sequence[Transcribed], reasons: Mapping[str, str]) -> Check:
    """Return the failed check of a bundle none of whose clips decides."""
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return Check(
        level="words",
        program=ALL_PROGRAMS,
        what="clips that decide",
        value={"clips": len(texts), "deciding": 0},
        rule="at least one clip whose text is not a matter of luck for this checkpoint",
        passed=False,
        reason=f"no clip decides ({listed}); export with `--verify-with` and audio files that the model "
        "understands"
        if texts
        else "the reference has no words",
    )


def word_check(texts: Sequence[Transcribed], unit: Unit, precision: str) -> Check:
    """Check that the bundle's error rate is not above the reference's, as far as the words can show it.

    Only clips with a transcript count; if there is none, float32's own text is the transcript.

    A set of words cannot show less than one error, so below float16 one more error is no failure, if the
    arrays are within their limits. The bounds of the increase, with a confidence of 95%, are reported.

    Args:
        texts: the clips that decide, all counted in `unit`.
        unit: words or characters.
        precision: precision of the programs.
    """
    limit = max_change(precision)
    with_text = [transcribed for transcribed in texts if transcribed.clip.text]
    pairs = [transcribed.errors() for transcribed in with_text or texts]
    tested = sum((pair[0] for pair in pairs), TextErrors(unit=unit))
    compared = sum((pair[1] for pair in pairs), TextErrors(unit=unit))
    name, length = compared.name, compared.length
    value: dict[str, float] = {unit: length, "clips": len(texts)}
    if not length:
        return _check(unit, value, "the reference has words", "the reference has no words")
    between = sum(
        (text_errors(transcribed.text, transcribed.expected, unit) for transcribed in texts),
        TextErrors(unit=unit),
    )
    extra, change = tested.errors - compared.errors, tested.rate - compared.rate
    low, high = increase_bounds(pairs)
    value |= {
        "change": change,
        "differ": between.errors,
        "increase_at_least": low,
        "increase_at_most": high,
        name.lower(): tested.rate,
        f"reference_{name.lower()}": compared.rate,
    }
    allowed = max(limit, 1 / length) if precision in BY_WORDS else limit
    rule = (
        f"{name} at most {limit:.1%} above the reference's"
        + (", or one error more" if allowed > limit else "")
        + f". {between.errors} of {between.length} {unit} differ from float32's; with 95%, the "
        f"increase is at most {high:.1%}"
    )
    reason = ""
    if change > allowed:
        reason = f"the {name} is {change:.2%} above the reference's: {extra} more errors in {length} {unit}"
    return _check(unit, value, rule, reason)


def _check(unit: Unit, value: Mapping[str, float], rule: str, reason: str) -> Check:
    return Check(
        level="words",
        program=ALL_PROGRAMS,
        what=f"{unit.removesuffix('s')} error rate",
        value=value,
        rule=rule,
        passed=not reason,
        reason=reason,
    )
