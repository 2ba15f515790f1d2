"""Transcribe one growing sound. There is no clock here: what is fed decides what comes out.

    buffer   |<- at most one window ------------------------------->|
             certain words          agreed now    tentative
             └─ cut away at pauses, and at ends of segments once the buffer is half full

Each pass decodes the whole buffer; what was cut away is its prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.audio import FRAMES_PER_SECOND, SAMPLE_RATE
from whisperport.errors import AudioError
from whisperport.live.buffer import Buffer, Floats
from whisperport.live.options import LiveOptions
from whisperport.live.recognition import Hypothesis, recognize
from whisperport.runtime.agreement import Agreement, HypothesisWord
from whisperport.runtime.decode import prompt_room
from whisperport.text import Segment, Word, language_code
from whisperport.transcription import Transcriber, Transcript
from whisperport.transcription.session import warn_if_truncated

LEAD_S = 1.5  # kept of sound without words: one may have begun in it


@dataclass(frozen=True, slots=True)
class LiveUpdate:
    """What is known after some more sound."""

    committed: tuple[Word, ...]  # became certain now; but for punctuation they change no more
    closed: tuple[Segment, ...]  # segments that ended now
    open: tuple[Word, ...]  # the certain words after them
    tentative: str  # what may follow; the next pass may say otherwise
    audio_s: float  # seconds of sound fed so far


class LiveTranscriber:
    """One stream: feed it audio as it arrives, then `finish`.

    It holds the state of its stream, so use it from one thread at a time. Any number of them, in any
    threads, share one `Transcriber`; each takes one of its concurrent calls while it decodes.

    No sound is dropped. Much sound at once takes no more passes than it fills windows, so one who
    fell behind catches up as fast as a recording is transcribed.

    Warns:
        TruncatedPromptWarning: the initial prompt is longer than the decoder takes.

    Raises:
        UsageError: there is no such language.
    """

    def __init__(self, transcriber: Transcriber, options: LiveOptions | None = None) -> None:
        self._transcriber = transcriber
        self._live = options or LiveOptions()
        engine = transcriber.engine
        self._window_s = engine.audio_frames / FRAMES_PER_SECOND
        self._buffer = Buffer(engine.dims.n_mels, engine.dims.n_frames, engine.audio_frames)
        self._waiting = 0  # samples since the last pass
        self._agreement = Agreement()
        self._initial = self._initial_prompt()
        asked = self._live.transcribe.decode.language
        self._language = asked and language_code(asked, engine.generation.languages)
        self._said: list[int] = []  # tokens of the words that were cut away
        self._segments: list[Segment] = []
        self._open: list[Word] = []  # certain words of the segment that has not ended
        self._last: Hypothesis | None = None  # the last that made a word certain
        self._truncated: list[float] = []

    def feed(self, samples: NDArray[Any]) -> LiveUpdate:
        """Take the next sound, as much as there is of it.

        Args:
            samples: (n,) floats, mono, 16 kHz, within [-1, 1]; n may be 0.

        Raises:
            AudioError: not that; what was fed before stays.
            UsageError: the checkpoint has no such language or task.
        """
        samples, n_closed = _checked(samples), len(self._segments)
        committed: list[Word] = []
        while samples.size:
            taken, samples = np.split(samples, [self._buffer.room])
            self._buffer.add(taken)
            self._waiting += taken.size
            full = self._buffer.room == 0
            if full or (not samples.size and self._waiting >= self._live.step_s * SAMPLE_RATE):
                committed += self._pass(full=full)
        return self._update(committed, n_closed)

    def finish(self) -> LiveUpdate:
        """The sound has ended: what is left is decoded once more, and committed."""
        n_closed = len(self._segments)
        heard = self._recognize(self._live.transcribe.temperatures)
        committed = [] if heard is None else self._commit(heard, heard.words, final=True)
        self._close()
        self._cut(self._buffer.end_s)
        return self._update(committed, n_closed)

    def transcript(self) -> Transcript:
        """All that is certain so far; after `finish`, all that was said."""
        segments = (*self._segments, *([self._segment()] if self._open else []))
        return Transcript(
            text="".join(segment.text for segment in segments).strip(),
            segments=segments,
            language=self._language or "en",
            duration_s=self._buffer.end_s,
            truncated=tuple(self._truncated),
        )

    def _pass(self, *, full: bool) -> list[Word]:
        """Hear the buffer, commit what is certain, and cut away what need not be heard again."""
        self._waiting = 0
        temperatures = self._live.transcribe.temperatures
        heard = self._recognize(temperatures if full else temperatures[:1])
        if heard is None:
            if full or not self._agreement.committed:
                self._cut(self._buffer.end_s - LEAD_S)
            return []
        if not full and self._repeats(heard):
            return []
        committed = self._commit(heard, heard.words)
        silent_s = self._buffer.end_s - heard.words[-1].word.end
        if not self._agreement.tentative and silent_s >= self._live.pause_s:
            self._close()
            self._cut(self._buffer.end_s - self._live.pause_s / 2)
        elif self._buffer.end_s - self._buffer.start_s > self._window_s / 2:
            self._cut(self._segment_end())
        if self._buffer.room == 0:
            committed += self._make_room(heard)
        return committed

    def _recognize(self, temperatures: tuple[float, ...]) -> Hypothesis | None:
        options = self._live.transcribe
        decode = replace(options.decode, language=self._language)
        certain = self._agreement.committed
        with self._transcriber.turns.turn():
            return recognize(
                self._transcriber,
                self._buffer,
                replace(options, decode=decode, temperatures=temperatures),
                self._prompt(),
                last_speech=certain[-1].word.end if certain else 0.0,
            )

    def _repeats(self, heard: Hypothesis) -> bool:
        """Whether the text goes round in circles; the sound that follows may put it right."""
        limit = self._live.transcribe.thresholds.compression_ratio_threshold
        return limit is not None and heard.ratio > limit

    def _prompt(self) -> tuple[int, ...]:
        options, engine = self._live.transcribe, self._transcriber.engine
        recent = self._said if options.uses_previous_text(engine.window) else []
        if options.carry_initial_prompt:
            room = prompt_room(engine.dims) - len(self._initial)
            recent = recent[max(len(recent) - room, 0) :]
        return (*self._initial, *recent)

    def _initial_prompt(self) -> list[int]:
        text, tokenizer = self._live.transcribe.initial_prompt.strip(), self._transcriber.tokenizer
        tokens = tokenizer.encode(f" {text}") if text else []
        room = prompt_room(self._transcriber.engine.dims)
        warn_if_truncated(tokenizer, "the initial prompt", tokens, room)
        return tokens

    def _commit(
        self, heard: Hypothesis, words: Sequence[HypothesisWord], *, final: bool = False
    ) -> list[Word]:
        """Take the words that are certain; one that begins a segment closes that before it."""
        committed = self._agreement.update(words, self._buffer.end_s, final=final)
        before = self._agreement.committed[: len(self._agreement.committed) - len(committed)]
        if self._open and before:
            self._open[-1] = before[-1].word  # its punctuation may be new
        if committed:
            self._language, self._last = heard.decoded.language, heard
        for new in committed:
            if new.starts_segment:
                self._close()
            self._open.append(new.word)
        return [new.word for new in committed]

    def _make_room(self, heard: Hypothesis) -> list[Word]:
        """Cut after the last certain word; where there are few of those, decide as offline does."""
        committed: list[Word] = []
        certain = self._agreement.committed
        until = certain[-1].word.end if certain else 0.0
        if until - self._buffer.start_s < self._window_s / 2:
            words = heard.words[: heard.complete or None]
            committed = self._commit(heard, words, final=True)
            until = words[-1].word.end
            if not heard.decoded.ended:
                self._truncated.append(self._buffer.start_s)
        # A window whose words all stand at its beginning is over, or it would never end.
        enough = until - self._buffer.start_s >= self._live.step_s
        self._cut(until if enough else self._buffer.end_s)
        return committed

    def _close(self) -> None:
        if self._open:
            self._segments.append(self._segment())
            self._open = []

    def _segment(self) -> Segment:
        """Of the open words."""
        assert self._last is not None, "words came from a hypothesis"
        text, decoded = "".join(word.word for word in self._open), self._last.decoded
        return Segment(
            start=self._open[0].start,
            end=max(self._open[0].start, self._open[-1].end),
            text=text,
            tokens=tuple(self._transcriber.tokenizer.encode(text)),
            avg_logprob=decoded.avg_logprob,
            no_speech_prob=decoded.no_speech_prob,
            temperature=decoded.temperature,
            compression_ratio=self._last.ratio,
            seek=self._buffer.start,
            words=tuple(self._open),
        )

    def _segment_end(self) -> float:
        """Seconds between the last certain segment and the one after it, or the buffer's start."""
        words = [*self._agreement.committed, *self._agreement.tentative[:1]]
        between = [
            (before.word.end + after.word.start) / 2
            for before, after in pairwise(words)
            if after.starts_segment
        ]
        return between[-1] if between else self._buffer.start_s

    def _cut(self, before_s: float) -> None:
        """The buffer now begins at `before_s`; words before it become the prompt."""
        self._buffer.cut(before_s)
        gone = self._agreement.drop_before(self._buffer.start_s)
        said = self._transcriber.tokenizer.encode("".join(heard.word.word for heard in gone))
        self._said = [*self._said, *said][-self._transcriber.engine.dims.n_text_ctx :]

    def _update(self, committed: Sequence[Word], n_closed: int) -> LiveUpdate:
        return LiveUpdate(
            tuple(committed),
            tuple(self._segments[n_closed:]),
            tuple(self._open),
            "".join(heard.word.word for heard in self._agreement.tentative),
            self._buffer.end_s,
        )


def _checked(samples: NDArray[Any]) -> Floats:
    samples = np.asarray(samples)
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise AudioError(
            f"cannot hear {samples.dtype} samples of shape {samples.shape}",
            why="expected (n,) floats: mono, 16 kHz, within [-1, 1]",
            hint="for 16-bit integers: `samples.astype('float32') / 32768`",
        )
    if not np.isfinite(samples).all():
        raise AudioError(
            "the samples hold a NaN or an infinity",
            why="that is no sound",
            hint="find where they come from: `numpy.isfinite(samples)` tells which",
        )
    return samples.astype(np.float32, copy=False)
