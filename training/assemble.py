"""Assemble training windows: the input of the model and its target tokens.

A window is assembled from utterances in the mel domain, with gaps, noise, a room and a microphone. The
target tokens follow Whisper's format: with or without timestamps around every utterance, with or without
previous text as a prompt, and ``<|nospeech|>`` for silence. An utterance that is cut by the window's end
has only its start timestamp, as in Whisper's training data. openai-whisper then starts the next window at
the end of the last complete utterance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import mel_frames
from corpus import Corpus, Utterance
from mel_frames import FLOOR, whisper_input
from vocabulary import (
    EN,
    EOT,
    NO_SPEECH,
    NO_TIMESTAMPS,
    SOT,
    SOT_PREV,
    TIME_BEGIN,
    TRANSCRIBE,
    nothing_tokens,
)

Frames = NDArray[np.float32]
WINDOW = 3000  # mel frames of Whisper's window
STEP = 0.02  # seconds of one encoder position and of one timestamp
LATEST_FIRST_STAMP = 50  # the latest first timestamp that Whisper's decoding allows: 1.00 s
MAX_PROMPT = 223
TEXT_POSITIONS = 448
GAP_NEEDED = 0.03  # seconds before the window's end at which a word must end to be a target


@dataclass
class Placed:
    """An utterance in a window. Times are in seconds from the window's first frame."""

    utterance: Utterance
    start: float
    end: float
    spans: NDArray[np.float32]


@dataclass
class Script:
    """The tokens of a window.

    At position i, the decoder reads ``inputs[i]`` and predicts ``targets[i]`` (-1: not trained). The
    alignment heads are trained to attend to ``spans[i]`` (seconds in the window; negative: not trained).
    """

    inputs: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)

    def predict(
        self, token: int, span: tuple[float, float] = (-1.0, -1.0), *, trained: bool = True
    ) -> None:
        """Append a token, which the previous position predicts."""
        self.inputs.append(token)
        self.targets.append(token if trained else -1)
        self.spans.append(span)

    def finish(self) -> None:
        """Shift the targets by one, so that position i reads what position i - 1 predicts."""
        self.inputs, self.targets, self.spans = self.inputs[:-1], self.targets[1:], self.spans[1:]


@dataclass
class Window:
    """A training window.

    ``frames``: [n, 80] input of the model. ``offset``: encoder position of the first frame pair (0 in a
    full window). ``text_offset``: decoder position of the first token. ``words`` and ``phones``: [n / 2]
    labels of encoder positions: token id or 0, phone label or 0.
    """

    frames: Frames
    script: Script
    offset: int
    text_offset: int
    words: NDArray[np.int64]
    phones: NDArray[np.int64]


@dataclass(frozen=True)
class Mix:
    """Probabilities and limits for the windows of a phase. ``strength`` scales all augmentation."""

    strength: float = 1.0
    timestamps: float = 0.5
    prompts: float = 0.1
    long_prompts: float = 0.0
    no_speech: float = 0.04
    cut: float = 0.0
    min_utterances: int = 1
    max_utterances: int = 1
    long_lead: float = 0.0


class Assembler:
    """Assembles random windows from a corpus."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.corpus = corpus
        self.rng = np.random.default_rng(seed)
        self.noises = mel_frames.noise_bank(seed=17)
        self.nothing = nothing_tokens()
        self.warps = [mel_frames.warp_matrix(factor) for factor in np.linspace(0.87, 1.15, 15)]

    # audio ---------------------------------------------------------------------------------------

    def _audio(self, utterance: Utterance, mix: Mix) -> tuple[Frames, float]:
        """Change tempo, vocal tract and microphone of an utterance.

        Returns its frames and the factor by which its times shrink.
        """
        rng, frames, factor = self.rng, utterance.frames.astype(np.float32), 1.0
        if rng.random() < 0.7 * mix.strength:
            factor = float(rng.uniform(1 - 0.14 * mix.strength, 1 + 0.16 * mix.strength))
            frames = mel_frames.change_tempo(frames, factor)
        factor = len(utterance.frames) / len(frames)
        if rng.random() < 0.6 * mix.strength:
            frames = frames @ self.warps[rng.integers(len(self.warps))]
        if rng.random() < 0.7 * mix.strength:
            frames = frames + mel_frames.microphone(rng, mix.strength)
        return frames, factor

    def _background(self, canvas: Frames, level: float, mix: Mix) -> Frames:
        """Add a room and noise. ``level`` is the log10 power of the speech."""
        rng = self.rng
        room, noise, faint = (
            rng.random() < 0.3 * mix.strength,
            rng.random() < 0.65 * mix.strength,
            rng.random() < 0.5,
        )
        if not (room or noise or faint):
            return canvas
        power = np.exp(canvas * mel_frames.LN10)
        if room:
            power = mel_frames.add_room(power, rng)
        if noise or faint:
            bank = self.noises[rng.integers(len(self.noises)) if noise else 0]
            start = int(rng.integers(0, len(bank) - len(canvas)))
            piece = bank[start : start + len(canvas)]
            shape = mel_frames.microphone(rng, 1.0)
            wanted = level - (rng.uniform(0.7, 4.0) if noise else rng.uniform(4.0, 7.0))
            piece = piece + shape
            power += np.exp(
                (piece + (wanted - np.log10(np.exp(piece * mel_frames.LN10).mean())))
                * mel_frames.LN10
            )
        return np.log10(np.maximum(power, 1e-10))

    def _finish_audio(self, canvas: Frames, mix: Mix, level: float, content: int) -> Frames:
        """Add background, change the gain and apply Whisper's scale.

        The audio ends after ``content`` frames. The rest is digital silence (padded samples, as in
        transformers) or zeros (padded frames, as in openai-whisper).
        """
        rng = self.rng
        canvas = self._background(canvas, level, mix)
        canvas[content:] = FLOOR
        canvas = np.maximum(canvas + np.float32(rng.uniform(-1.8, 0.4)), FLOOR)
        frames = whisper_input(canvas, rng.uniform(0, 0.7) if rng.random() < 0.3 else 0.0)
        if rng.random() < 0.6 * mix.strength:
            mel_frames.mask(frames, rng, mix.strength)
        if rng.random() < 0.35:
            frames[content:] = 0.0
        return frames

    def _content(self, speech_end: float, frames: int) -> int:
        """Return the frame at which the audio ends: the window's end, or up to 1.5 s after the speech."""
        if self.rng.random() < 0.35:
            return frames
        return min(frames, int((speech_end + self.rng.uniform(0.0, 1.5)) * 100) + 2)

    # layout --------------------------------------------------------------------------------------

    def _gap(self) -> float:
        """Return the seconds between two utterances: usually 0.2 to 4 s, one in twelve 3 to 9 s."""
        low, high = ((0.2, 0.7), (0.2, 0.7), (0.6, 2.0), (1.5, 4.0))[self.rng.integers(4)]
        return float(
            self.rng.uniform(3.0, 9.0) if self.rng.random() < 0.08 else self.rng.uniform(low, high)
        )

    def _lead(self, mix: Mix) -> float:
        if self.rng.random() < mix.long_lead:
            return float(self.rng.uniform(1.0, 7.0))
        return float(self.rng.uniform(0.0, 0.95))

    def _draw(self, count: int, one_voice: bool) -> list[Utterance]:
        """Choose random utterances, from the same part of the corpus (mostly one voice) or from all."""
        everything = self.corpus.utterances
        if one_voice:
            first = int(self.rng.integers(len(everything)))
            near = self.rng.integers(max(0, first - 150), min(len(everything), first + 150), count)
            return [everything[i] for i in near]
        return [everything[i] for i in self.rng.integers(len(everything), size=count)]

    def window(
        self, mix: Mix, *, frames: int = WINDOW, chosen: Sequence[Utterance] | None = None
    ) -> Window:
        """Assemble a window of ``frames`` mel frames.

        A window shorter than Whisper's is placed at a random position in it. ``chosen``: utterances to
        use; None: random ones.
        """
        rng = self.rng
        offset = int(rng.integers(0, (WINDOW - frames) // 2 + 1))
        canvas = mel_frames.silence(frames)
        if rng.random() < mix.no_speech:
            return self._no_speech(canvas, offset, mix)
        cut = rng.random() < mix.cut
        if chosen is None:
            count = 16 if cut else int(rng.integers(mix.min_utterances, mix.max_utterances + 1))
            chosen = self._draw(count, one_voice=rng.random() < 0.6)
            at = self._lead(mix)
        else:
            needed = sum(u.seconds for u in chosen) * 1.12
            at = float(rng.uniform(0, max(0.02, frames / 100 - needed)))
        if len(chosen) > 1 and rng.random() < 0.25:
            self._leave_tail(canvas, chosen[-1])
        placed, level = self._place(canvas, chosen, at, mix, cut)
        script = self._script(
            placed, frames / 100, offset, rng.random() < mix.timestamps, self._prompt(mix)
        )
        words, phones = self._labels(placed, frames // 2)
        content = self._content(placed[-1].end, frames)
        audio = self._finish_audio(canvas, mix, level, content)
        return Window(audio, script, offset, self._text_offset(script), words, phones)

    def _place(
        self, canvas: Frames, chosen: Sequence[Utterance], at: float, mix: Mix, cut: bool
    ) -> tuple[list[Placed], float]:
        """Put utterances into the canvas from ``at`` seconds on, until it is full.

        With ``cut``, the end of the canvas may cut the last one. Returns the placed utterances and the
        log10 power of their speech.
        """
        rng, frames = self.rng, len(canvas)
        placed: list[Placed] = []
        levels: list[float] = []
        for utterance in chosen:
            audio, factor = self._audio(utterance, mix)
            first = int(at * 100)
            if first + len(audio) > frames and not cut:
                if placed:
                    break
                first = max(0, frames - len(audio))
            if first >= frames - 20:
                break
            audio = audio + np.float32(rng.uniform(-0.5, 0.5) * mix.strength)
            levels.append(mel_frames.speech_level(audio))
            audio = audio[: frames - first]
            canvas[first : first + len(audio)] = audio
            begin = first / 100
            start, end = begin + utterance.start / factor, begin + utterance.end / factor
            placed.append(
                Placed(utterance, start, end, begin + utterance.spans / np.float32(factor))
            )
            at = begin + utterance.seconds / factor + self._gap()
        return placed, float(np.mean(levels))

    def _leave_tail(self, canvas: Frames, utterance: Utterance) -> None:
        """Put the last 10 to 80 ms of a sentence at the start, as the rest of a previous window."""
        length = min(int(self.rng.integers(1, 9)), len(canvas))
        canvas[:length] = utterance.frames[-2 - length : -2]

    def _no_speech(self, canvas: Frames, offset: int, mix: Mix) -> Window:
        script = Script()
        for token in self._prompt(mix):
            script.predict(token, trained=False)
        script.predict(SOT, trained=False)
        script.predict(NO_SPEECH if self.rng.random() < 0.97 else EN)
        script.predict(TRANSCRIBE, trained=False)
        if self.rng.random() < mix.timestamps:
            script.predict(TIME_BEGIN + offset)
        else:
            script.predict(NO_TIMESTAMPS, trained=False)
            if self.rng.random() < 0.4:
                script.predict(self._anything())
        script.predict(EOT)
        script.finish()
        script.inputs[script.inputs.index(SOT) + 1] = EN  # an input, but not a target
        level = float(self.rng.uniform(-3.0, 0.5))
        empty = np.zeros(len(canvas) // 2, np.int64)
        heavy = Mix(strength=1.0 if self.rng.random() < 0.7 else 0.0)
        content = self._content(float(self.rng.uniform(0, len(canvas) / 100)), len(canvas))
        audio = self._finish_audio(canvas, heavy, level, content)
        return Window(audio, script, offset, self._text_offset(script), empty, empty)

    def _anything(self) -> int:
        """Return a random target for silence where Whisper's decoding may not end immediately.

        It is punctuation or any word. Since no token is likely, the mean log probability is below -1, by
        which ``transcribe()`` recognizes silence.
        """
        if self.rng.random() < 0.5:
            return int(self.rng.choice(self.nothing))
        return int(self.rng.choice(self._draw(1, one_voice=False)[0].tokens))

    def _text_offset(self, script: Script) -> int:
        """Return the position of the first token: 0, or a position as after a prompt.

        All positions are trained in this way, without the cost of prompt tokens.
        """
        if script.inputs[0] == SOT_PREV or self.rng.random() < 0.5:
            return 0
        room = TEXT_POSITIONS - len(script.inputs)
        return int(self.rng.integers(0, min(MAX_PROMPT + 2, max(1, room))))

    # text ----------------------------------------------------------------------------------------

    def _prompt(self, mix: Mix) -> list[int]:
        """Return <|startofprev|> and previous sentences, usually with timestamps; or an empty list."""
        rng = self.rng
        if rng.random() >= mix.prompts:
            return []
        count = (
            int(rng.integers(1, 4))
            if rng.random() >= mix.long_prompts
            else int(rng.integers(4, 20))
        )
        stamped, time, tokens = rng.random() < 0.6, 0.0, []
        for utterance in self._draw(count, one_voice=False):
            start, time = time, time + utterance.seconds + self._gap()
            if time > 29:
                start, time = 0.0, utterance.seconds
            begin = TIME_BEGIN + round((start + rng.uniform(0, 0.2)) / STEP)
            sentence = list(utterance.tokens)
            tokens += (
                [begin, *sentence, TIME_BEGIN + round((start + utterance.end) / STEP)]
                if stamped
                else sentence
            )
        return [SOT_PREV, *tokens[-MAX_PROMPT:]]

    def _script(
        self, placed: list[Placed], seconds: float, offset: int, timestamps: bool, prompt: list[int]
    ) -> Script:
        script, shift = Script(), offset * STEP
        for token in prompt:
            script.predict(token, trained=False)
        script.predict(SOT, trained=False)
        script.predict(EN)
        script.predict(TRANSCRIBE, trained=False)
        if not timestamps:
            script.predict(NO_TIMESTAMPS, trained=False)
        last = 0.0
        for i, item in enumerate(placed):
            whole = item.end <= seconds - GAP_NEEDED
            if timestamps:
                stamp = round((item.start + shift) / STEP)
                if i == 0 and seconds >= 30:
                    stamp = min(stamp, LATEST_FIRST_STAMP)
                script.predict(TIME_BEGIN + min(stamp, 1500), (item.start - 0.06, item.start + 0.1))
                if not whole:
                    last = item.start
                    break
            inside = item.utterance.word_end & (item.spans[:, 1] <= seconds - GAP_NEEDED)
            count = int(np.flatnonzero(inside)[-1]) + 1 if inside.any() else 0
            for token, span in zip(item.utterance.tokens[:count], item.spans[:count], strict=True):
                script.predict(token, (float(span[0]), float(span[1])))
                last = float(span[1])
            if timestamps:
                stamp = min(round((item.end + shift) / STEP), 1500)
                script.predict(TIME_BEGIN + stamp, (item.end - 0.1, item.end + 0.06))
        after = min(last + 0.02, seconds - 0.1)
        script.predict(EOT, (after, min(after + 0.4, seconds)))
        script.finish()
        return script

    def _labels(
        self, placed: list[Placed], positions: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        words, phones = np.zeros(positions, np.int64), np.zeros(positions, np.int64)
        for item in placed:
            for token, (start, end) in zip(item.utterance.tokens, item.spans, strict=True):
                words[round(start / STEP) : round(end / STEP)] = token
            utterance = item.utterance
            factor = (utterance.end - utterance.start) / max(item.end - item.start, 1e-3)
            begin = round(item.start / STEP)
            for label, end in utterance.phones:
                stop = round((item.start + (end - utterance.start) / factor) / STEP)
                if stop > begin:
                    phones[begin:stop] = label
                    begin = stop
            phones[round(item.end / STEP) :] = 0
        return words, phones
