"""Measure whether windows as short as the audio keep the words of the full window.

Each clip of the reference is decoded in the full window and in the shortest one that holds it, with
timestamps, as transcriptions are by default. The runtime trusts the text of a short window if it is more
probable than all others together, or if the mean log-probability of its tokens is not below a limit, which
belongs to the checkpoint: it follows from these clips. What it misses is counted on each clip with the
limit that follows from the others.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from whisperport.program.bundle import Bundle
from whisperport.program.checks import ALL_PROGRAMS, SHORT_WINDOWS, Check
from whisperport.program.dims import SECONDS_PER_POSITION
from whisperport.program.window import UNVERIFIED, ShortWindows
from whisperport.runtime import DecodeOptions, Decoder, decode_window, split_segments
from whisperport.runtime.decoding.fallback import is_probable, is_whole, text_logprob
from whisperport.speech.audio import HOP_LENGTH
from whisperport.speech.text import Tokenizer
from whisperport.verification.error_rate import TextErrors, Unit, increase_bounds, text_errors
from whisperport.verification.reference import ReferenceClip, reference_mel
from whisperport.verification.word_check import Transcribed

FEWEST_CLIPS = 4  # fewer tell nothing about the next one
MAX_CHANGE = 0.003  # of WER or CER, absolute
# Share of clips that are decoded again in full. A short window takes a third of the time.
MOST_AGAIN = 1 / 3
ABOVE_WRONG = 0.01  # from the log-probability of a text that differs to the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortText:
    """The text of a clip in the shortest window that holds it, and in the full one.

    Attributes:
        correct: transcript; the full window's text if there is none.
        full: text of the full window.
        short: text of the short window.
        positions: length of the short window, in encoder positions.
        avg_logprob: mean log-probability of the tokens of `short`.
        text_logprob: log-probability of `short` without its timestamps.
        is_whole: whether `short` ends with the audio, and repeats no sentence; no other text is trusted.
        unit: in which errors are counted.
    """

    correct: str
    full: str
    short: str
    positions: int
    avg_logprob: float
    text_logprob: float
    is_whole: bool
    unit: Unit

    def is_trusted(self, min_logprob: float) -> bool:
        """Return whether the runtime uses the text of the short window."""
        return self.is_whole and is_probable(self.avg_logprob, self.text_logprob, min_logprob)

    def errors(self, min_logprob: float) -> tuple[TextErrors, TextErrors]:
        """Return the errors of the text that the runtime uses, and those of the full window's."""
        used = self.short if self.is_trusted(min_logprob) else self.full
        return (
            text_errors(used, self.correct, self.unit),
            text_errors(self.full, self.correct, self.unit),
        )

    @property
    def differs(self) -> bool:
        """Whether the two windows have different words."""
        return text_errors(self.short, self.full, self.unit).errors > 0


def check_short_windows(
    bundle: Bundle,
    decoder: Decoder,
    features_of: Callable[[ReferenceClip], np.ndarray],
    texts: Sequence[Transcribed],
    max_tokens: int,
) -> tuple[ShortWindows | None, Check]:
    """Decode clips in windows as short as they are, and decide whether the runtime may use such windows.

    A clip whose reference does not end shows nothing: its text would be decoded in full.

    Args:
        bundle: the bundle.
        decoder: of its engine, whose programs read windows of any length.
        features_of: returns the features (T, d) of the full window of a clip.
        texts: the clips.
        max_tokens: largest number of tokens per clip.

    Returns:
        The windows that may be used, None if none may; and the check.

    Raises:
        NumericalError: a program returned a NaN or an infinity.
    """
    generation = bundle.manifest.generation
    tokenizer = Tokenizer.from_json(bundle.tokenizer_json(), generation)
    short = []
    for text in texts:
        clip = text.clip
        n_frames = min(len(clip.samples) // HOP_LENGTH, decoder.engine.dims.n_frames)
        positions = decoder.engine.positions_for(n_frames)
        ends = clip.tokens[-1:] == (generation.end_of_text,)
        if not ends or positions == decoder.engine.dims.n_audio_ctx:
            continue
        options = DecodeOptions(language=clip.language(generation), max_tokens=max_tokens)
        full = decode_window(decoder, features_of(clip), options)
        mel = reference_mel(decoder.engine.dims, clip)[:, : 2 * positions]
        mel[:, n_frames:] = 0  # as in a transcription
        decoded = decode_window(decoder, decoder.engine.encode(mel), options)
        split = split_segments(decoded.tokens, generation.timestamp_begin, n_frames)
        short.append(
            ShortText(
                correct=clip.text or tokenizer.decode(full.tokens),
                full=tokenizer.decode(full.tokens),
                short=tokenizer.decode(decoded.tokens),
                positions=positions,
                avg_logprob=decoded.avg_logprob,
                text_logprob=text_logprob(decoded, generation.timestamp_begin),
                is_whole=split.closed and is_whole(decoded, generation.timestamp_begin),
                unit=text.unit,
            )
        )
    windows = decoder.engine.short_windows
    assert windows is not None  # the caller found them
    return short_window_check(short, bundle.manifest.short_windows, windows.positions)


def short_window_check(
    texts: Sequence[ShortText],
    stated: ShortWindows | None = None,
    lengths: Sequence[int] = UNVERIFIED.positions,
) -> tuple[ShortWindows | None, Check]:
    """Decide whether the runtime may use short windows, and which texts it trusts.

    Args:
        texts: of the clips.
        stated: what the bundle states; the check fails if that loses words. None: nothing yet; then the
            check says why there are windows or none, and passes, since the full window is always there.
        lengths: of the windows that the programs read, in encoder positions.

    Returns:
        The windows that may be used, None if none may; and the check.
    """
    value: dict[str, float] = {"clips": len(texts)}
    if len(texts) < FEWEST_CLIPS:
        return stated, _check(value, f"not decided: fewer than {FEWEST_CLIPS} clips fit in one")
    limit = lowest_trusted(texts) if stated is None else stated.min_logprob
    limits = [
        limit if stated is not None else lowest_trusted([*texts[:i], *texts[i + 1 :]])
        for i in range(len(texts))
    ]
    pairs = [text.errors(own) for text, own in zip(texts, limits, strict=True)]
    again = sum(not text.is_trusted(own) for text, own in zip(texts, limits, strict=True))
    extra = sum(used.errors - full.errors for used, full in pairs)
    length = sum(full.length for _, full in pairs)
    unit = texts[0].unit
    value |= {
        unit: length,
        "texts_differ": sum(text.differs for text in texts),
        "decoded_again": again,
        "extra_errors": extra,
        "min_logprob": limit,
    }
    if not length:
        return stated, _check(value, "not decided: the clips have no words")
    _, high = increase_bounds(pairs)
    value["increase_bound"] = high
    lost = f"{extra} more errors in {length} {unit}" if extra > MAX_CHANGE * length else ""
    rule = f"at most {MAX_CHANGE:.1%} more errors than in the full window; with 95%, at most {high:+.1%}"
    if stated is not None:
        return stated, _check(value, rule, lost)
    if again > MOST_AGAIN * len(texts):
        return None, _check(value, f"not used: {again} of {len(texts)} clips need the full window")
    if lost:
        return None, _check(value, f"not used: {lost}")
    shortest = min(text.positions for text in texts)
    windows = ShortWindows(
        positions=tuple(count for count in lengths if count >= shortest),
        min_logprob=limit,
    )
    seconds = ", ".join(f"{count * SECONDS_PER_POSITION:g}" for count in windows.positions)
    return windows, _check(value, f"used, of {seconds} s: {rule}")


def lowest_trusted(texts: Sequence[ShortText]) -> float:
    """Return the mean log-probability from which on the text of a short window is trusted.

    It is 0, so that no mean is enough, if all right texts are more probable than all others together.
    Otherwise it is twice as far below the lowest of them as that is below their median: with six clips, at
    most 4 of 100 texts of the same kind are decoded again by three checkpoints, and with the distance
    itself 12 by the embedded model. And it is above each that differs from the full window's.
    """
    right = [text for text in texts if text.is_whole and not text.differs]
    if all(text.is_trusted(0.0) for text in right):
        return 0.0
    means = [text.avg_logprob for text in right]
    lowest = 3 * min(means) - 2 * statistics.median(means)
    wrong = [text.avg_logprob for text in texts if text.is_whole and text.differs]
    return min(0.0, round(max([lowest, *(mean + ABOVE_WRONG for mean in wrong)]), 3))


def _check(value: dict[str, float], rule: str, reason: str = "") -> Check:
    return Check(
        level="words",
        program=ALL_PROGRAMS,
        what=SHORT_WINDOWS,
        value=value,
        rule=rule,
        passed=not reason,
        reason=reason,
    )
