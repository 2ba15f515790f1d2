"""Transcribe audio while it arrives. The result depends on the audio only, not on the time.

    buffer   |<- at most one window ------------------------------->|
             certain words          agreed now    tentative
             └─ removed at pauses, and at ends of segments once the buffer is half full

Each pass decodes the complete buffer. The text that was removed from it is the prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import AudioError
from whisperport.runtime import Decoder, Steps, complete
from whisperport.runtime.decoding.decode import prompt_room
from whisperport.speech.audio import FRAMES_PER_SECOND, SAMPLE_RATE
from whisperport.speech.audio.pcm import check_finite
from whisperport.speech.text import Segment, Word, language_code
from whisperport.transcription import Transcriber, Transcript
from whisperport.transcription.live.agreement import Agreement, HypothesisWord
from whisperport.transcription.live.live_options import LiveOptions
from whisperport.transcription.live.recognition import (
    Buffer,
    DecodingRunner,
    Floats,
    Hypothesis,
    recognize,
)
from whisperport.transcription.session import usable_tokens, with_words

T = TypeVar("T")

LEAD_S = 1.5  # seconds of audio without words that are kept: a word may have begun in them


@dataclass(frozen=True, slots=True)
class LiveUpdate:
    """The change of the transcript after more audio.

    Attributes:
        committed: words that became certain. Only their punctuation may still change.
        closed: segments that ended.
        open: certain words of the segment that has not ended.
        tentative: text after the certain words. The next pass may change it.
        audio_s: duration of the audio so far, in seconds.
    """

    committed: tuple[Word, ...]
    closed: tuple[Segment, ...]
    open: tuple[Word, ...]
    tentative: str
    audio_s: float


class LiveTranscriber:
    """Transcribes one stream of audio: call `feed` as audio arrives, then `finish`.

    A `LiveTranscriber` has the state of its stream, so use it from one thread at a time. Any number of
    `LiveTranscriber` objects, in any threads, may share one `Transcriber`.

    No audio is dropped. A long piece of audio needs one pass per window, so a transcription that is behind
    catches up as fast as a file is transcribed.

    Args:
        transcriber: the loaded bundle.
        options: live options; None: defaults.
        run: runs each decoding; None: on the caller's thread, as one of the concurrent calls of the
            `Transcriber`.

    Warns:
        TruncatedPromptWarning: the initial prompt has more tokens than the decoder can use.

    Raises:
        UsageError: there is no such language, or a phrase cannot be decoded.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        options: LiveOptions | None = None,
        *,
        run: DecodingRunner | None = None,
    ) -> None:
        self._transcriber, self._run = transcriber, run or self._in_turn
        self._live = options or LiveOptions()
        engine = transcriber.engine
        self._window_s = engine.audio_frames / FRAMES_PER_SECOND
        self._buffer = Buffer(engine.dims.n_mels, engine.dims.n_frames, engine.audio_frames)
        self._waiting = 0  # samples since the last pass
        self._agreement = Agreement()
        self._initial = self._initial_prompt()
        self._decode = with_words(self._live.transcribe, engine, transcriber.tokenizer)
        language = self._live.transcribe.decode.language
        self._language = language and language_code(language, engine.generation.languages)
        self._previous: list[int] = []  # of the words that were removed from the buffer
        self._segments: list[Segment] = []
        self._open: list[Word] = []  # certain words of the segment that has not ended
        self._last: Hypothesis | None = None  # the last one that made a word certain
        self._truncated: list[float] = []
        self._keys: list[str] = []  # words of the last pass, if there is a grammar

    def feed(self, samples: NDArray[Any]) -> LiveUpdate:
        """Add audio, and decode if `step_s` of new audio has arrived or the buffer is full.

        Args:
            samples: (n,) floats, mono, 16 kHz, within [-1, 1]; n may be 0.

        Raises:
            AudioError: the samples have another form. The audio fed before is kept.
            UsageError: the checkpoint has no such language or task.
        """
        samples, n_closed = _checked(samples), len(self._segments)
        committed: list[Word] = []
        while samples.size:
            piece, samples = np.split(samples, [self._buffer.room])
            self._buffer.add(piece)
            self._waiting += piece.size
            full = self._buffer.room == 0
            if full or (not samples.size and self._waiting >= self._live.step_s * SAMPLE_RATE):
                committed += self._pass(full=full)
        return self._update(committed, n_closed)

    def finish(self) -> LiveUpdate:
        """Decode the rest after the end of the audio, and commit all words."""
        n_closed = len(self._segments)
        hypothesis = self._recognize(self._live.transcribe.tried_temperatures)
        committed: list[Word] = []
        if hypothesis is not None and self._decode.grammar is not None:
            committed = self._judge(hypothesis)
        elif hypothesis is not None:
            committed = self._commit(hypothesis, hypothesis.words, final=True)
        self._close()
        self._cut(self._buffer.end_s)
        return self._update(committed, n_closed)

    def transcript(self) -> Transcript:
        """Return the certain text so far; after `finish`, the complete transcript."""
        segments = (*self._segments, *([self._segment()] if self._open else []))
        return Transcript(
            text="".join(segment.text for segment in segments).strip(),
            segments=segments,
            language=self._language or "en",
            duration_s=self._buffer.end_s,
            truncated=tuple(self._truncated),
        )

    def _pass(self, *, full: bool) -> list[Word]:
        """Decode the buffer, commit certain words, and remove audio that need not be decoded again."""
        self._waiting = 0
        temperatures = self._live.transcribe.tried_temperatures
        hypothesis = self._recognize(temperatures if full else temperatures[:1])
        if hypothesis is None:
            if full or not self._agreement.committed:
                self._cut(self._buffer.end_s - LEAD_S)
            return []
        if self._decode.grammar is not None:
            return self._judge_ended(hypothesis)
        if not full and self._repeats(hypothesis):
            return []
        committed = self._commit(hypothesis, hypothesis.words)
        silent_s = self._buffer.end_s - hypothesis.words[-1].word.end
        if not self._agreement.tentative and silent_s >= self._live.pause_s:
            self._close()
            self._cut(self._buffer.end_s - self._live.pause_s / 2)
        elif self._buffer.end_s - self._buffer.start_s > self._window_s / 2:
            self._cut(self._segment_end())
        if self._buffer.room == 0:
            committed += self._make_room(hypothesis)
        return committed

    def _recognize(self, temperatures: tuple[float, ...]) -> Hypothesis | None:
        """Decode the buffer."""
        options = self._live.transcribe
        decode = replace(self._decode, language=self._language)
        certain = self._agreement.committed
        return recognize(
            self._run,
            self._transcriber,
            self._buffer,
            replace(options, decode=decode, temperatures=temperatures),
            self._prompt(),
            last_speech=certain[-1].word.end if certain else 0.0,
        )

    def _in_turn(self, start: Callable[[Decoder], Steps[T]]) -> T:
        """Run a decoding as one of the transcriber's concurrent calls."""
        with self._transcriber.turns.turn(), self._transcriber.idle.lend() as decoder:
            return complete(decoder, start(decoder))

    def _repeats(self, hypothesis: Hypothesis) -> bool:
        """Return whether the text is repetitive. More audio may correct it, so it is not committed."""
        limit = self._live.transcribe.thresholds.compression_ratio_threshold
        return limit is not None and hypothesis.ratio > limit

    def _prompt(self) -> tuple[int, ...]:
        """Return the initial prompt and the previous text, as token ids."""
        options, engine = self._live.transcribe, self._transcriber.engine
        recent = self._previous if options.uses_previous_text(engine.window) else []
        if options.carry_initial_prompt:
            room = prompt_room(engine.dims) - len(self._initial)
            recent = recent[max(len(recent) - room, 0) :]
        return (*self._initial, *recent)

    def _initial_prompt(self) -> list[int]:
        """Return the token ids of the initial prompt, and warn if it is too long."""
        room = prompt_room(self._transcriber.engine.dims)
        text = self._live.transcribe.initial_prompt
        return usable_tokens(self._transcriber.tokenizer, "the initial prompt", text, room)

    def _commit(
        self, hypothesis: Hypothesis, words: Sequence[HypothesisWord], *, final: bool = False
    ) -> list[Word]:
        """Commit the words that are certain. A word that begins a segment ends the segment before."""
        committed = self._agreement.update(words, self._buffer.end_s, final=final)
        before = self._agreement.committed[: len(self._agreement.committed) - len(committed)]
        if self._open and before:
            self._open[-1] = before[-1].word  # its punctuation may have changed
        if committed:
            self._language, self._last = hypothesis.decoded.language, hypothesis
        for new in committed:
            if new.starts_segment:
                self._close()
            self._open.append(new.word)
        return [new.word for new in committed]

    def _judge_ended(self, hypothesis: Hypothesis) -> list[Word]:
        """Judge the sentences if a pause follows in two passes that agree, and remove their audio.

        A sentence is certain when it is complete, not word by word: its beginning may be that of another.
        """
        words, end_s = hypothesis.words, self._buffer.end_s
        keys, before = [word.key for word in words], self._keys
        self._keys = keys
        is_silent = end_s - words[-1].word.end >= self._live.pause_s
        if (is_silent and keys == before) or self._buffer.room == 0:
            committed = self._judge(hypothesis)
            self._cut(end_s - self._live.pause_s / 2)
            return committed
        known = [word for word in words if word.match is not None and word.match.matched]
        self._agreement.tentative = tuple(known)
        return []

    def _judge(self, hypothesis: Hypothesis) -> list[Word]:
        """Commit the sentences of the grammar, and keep the verdict about others without their words."""
        self._language, self._last = hypothesis.decoded.language, hypothesis
        self._agreement.tentative = ()
        committed = list[Word]()
        for words in hypothesis.sentences:
            self._open, match = [each.word for each in words], words[0].match
            segment = self._segment()
            self._open = []
            if match is not None and not match.matched:
                segment = replace(segment, text="", tokens=(), words=())
            self._segments.append(replace(segment, match=match))
            committed += segment.words or ()
        return committed

    def _make_room(self, hypothesis: Hypothesis) -> list[Word]:
        """Remove audio up to the last certain word of a full buffer.

        If there are few certain words, all words of ended segments are committed, as for a file.
        """
        committed: list[Word] = []
        certain = self._agreement.committed
        until = certain[-1].word.end if certain else 0.0
        if until - self._buffer.start_s < self._window_s / 2:
            words = hypothesis.words[: hypothesis.complete or None]
            committed = self._commit(hypothesis, words, final=True)
            until = words[-1].word.end
            if not hypothesis.decoded.ended:
                self._truncated.append(self._buffer.start_s)
        # If all words are at the beginning of the window, remove all of it: otherwise it would stay full.
        enough = until - self._buffer.start_s >= self._live.step_s
        self._cut(until if enough else self._buffer.end_s)
        return committed

    def _close(self) -> None:
        """End the open segment."""
        if self._open:
            self._segments.append(self._segment())
            self._open = []

    def _segment(self) -> Segment:
        """Return a segment of the open words."""
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
        """Return the time between the last certain segment and the next, or the start of the buffer."""
        words = [*self._agreement.committed, *self._agreement.tentative[:1]]
        between = [
            (before.word.end + after.word.start) / 2
            for before, after in pairwise(words)
            if after.starts_segment
        ]
        return between[-1] if between else self._buffer.start_s

    def _cut(self, before_s: float) -> None:
        """Remove the audio before `before_s` seconds; its words become part of the prompt."""
        self._buffer.cut(before_s)
        removed = self._agreement.drop_before(self._buffer.start_s)
        tokens = self._transcriber.tokenizer.encode("".join(entry.word.word for entry in removed))
        self._previous = [*self._previous, *tokens][-self._transcriber.engine.dims.n_text_ctx :]

    def _update(self, committed: Sequence[Word], n_closed: int) -> LiveUpdate:
        return LiveUpdate(
            tuple(committed),
            tuple(self._segments[n_closed:]),
            tuple(self._open),
            "".join(entry.word.word for entry in self._agreement.tentative),
            self._buffer.end_s,
        )


def _checked(samples: NDArray[Any]) -> Floats:
    """Return the samples as float32, or raise AudioError."""
    samples = np.asarray(samples)
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise AudioError(
            f"cannot transcribe {samples.dtype} samples of shape {samples.shape}",
            why="expected (n,) floats: mono, 16 kHz, within [-1, 1]",
            hint="convert 16-bit integers with `samples.astype('float32') / 32768`",
        )
    check_finite(samples)
    return samples.astype(np.float32, copy=False)
