"""`transcribe` says what openai-whisper's `transcribe` says: token for token, segment for segment."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import whisper
from numpy.typing import NDArray

from whisperport.audio import load_audio
from whisperport.runtime import DecodeOptions, Thresholds
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.verification.clips import shipped_recordings

RECORDINGS = {recording.path.name: recording.path for recording in shipped_recordings()}
LONG = next(name for name in RECORDINGS if "long" in name)
SEVERAL = next(name for name in RECORDINGS if "commands" in name)
SHORT = next(iter(RECORDINGS))

Samples = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """The same wish, in both languages."""

    ours: TranscribeOptions
    theirs: dict[str, Any] = field(default_factory=dict)


COLD = (0.0,)
CASES = {
    "greedy": Case(TranscribeOptions(temperatures=COLD), {"temperature": 0.0}),
    "without timestamps": Case(
        TranscribeOptions(temperatures=COLD, decode=DecodeOptions(timestamps=False)),
        {"temperature": 0.0, "without_timestamps": True},
    ),
    "beam 5": Case(
        TranscribeOptions(temperatures=COLD, decode=DecodeOptions(beam_size=5)),
        {"temperature": 0.0, "beam_size": 5},
    ),
    "beam 3, patience 2, length penalty 0.6": Case(
        TranscribeOptions(
            temperatures=COLD,
            decode=DecodeOptions(beam_size=3, patience=2.0, length_penalty=0.6),
        ),
        {"temperature": 0.0, "beam_size": 3, "patience": 2.0, "length_penalty": 0.6},
    ),
    "initial prompt": Case(
        TranscribeOptions(temperatures=COLD, initial_prompt="Good evening, Anna."),
        {"temperature": 0.0, "initial_prompt": "Good evening, Anna."},
    ),
    "carried initial prompt": Case(
        TranscribeOptions(
            temperatures=COLD, initial_prompt="Good evening, Anna.", carry_initial_prompt=True
        ),
        {
            "temperature": 0.0,
            "initial_prompt": "Good evening, Anna.",
            "carry_initial_prompt": True,
        },
    ),
    "not conditioned on previous text": Case(
        TranscribeOptions(temperatures=COLD, condition_on_previous_text=False),
        {"temperature": 0.0, "condition_on_previous_text": False},
    ),
    # Within every recording: a clip that ends after its recording keeps the original going for ever.
    "clips": Case(
        TranscribeOptions(temperatures=COLD, clips=(0.5, 3.0, 3.5)),
        {"temperature": 0.0, "clip_timestamps": [0.5, 3.0, 3.5]},
    ),
    "words": Case(
        TranscribeOptions(temperatures=COLD, word_timestamps=True),
        {"temperature": 0.0, "word_timestamps": True},
    ),
    "words, silence skipped": Case(
        TranscribeOptions(
            temperatures=COLD, word_timestamps=True, hallucination_silence_threshold=0.5
        ),
        {"temperature": 0.0, "word_timestamps": True, "hallucination_silence_threshold": 0.5},
    ),
    "fallback to a second greedy pass": Case(
        TranscribeOptions(temperatures=(0.0, 0.0), thresholds=Thresholds(logprob=-1e-4)),
        {"temperature": (0.0, 0.0), "logprob_threshold": -1e-4},
    ),
}


def silence() -> Samples:
    return np.zeros(16_000 * 8, np.float32)


def noise() -> Samples:
    generator = np.random.default_rng(0)
    return (0.02 * generator.standard_normal(16_000 * 12)).astype(np.float32)


def with_gaps() -> Samples:
    """Three recordings of different voices with 4 s of silence between: two windows."""
    parts = [load_audio(path) for path in list(RECORDINGS.values())[1:5]]
    gap = np.zeros(16_000 * 4, np.float32)
    return np.concatenate([piece for part in parts for piece in (gap, part)])


MADE: dict[str, Callable[[], Samples]] = {
    "silence": silence,
    "noise": noise,
    "four voices with gaps": with_gaps,
}


def sound(name: str) -> Samples:
    return MADE[name]() if name in MADE else load_audio(RECORDINGS[name])


@pytest.mark.parametrize("clip", [*RECORDINGS, *MADE])
def test_greedy_transcripts_are_openai_whispers(
    clip: str, transcriber: Transcriber, openai_model: whisper.Whisper
) -> None:
    check(clip, CASES["greedy"], transcriber, openai_model)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("clip", [SHORT, SEVERAL, "four voices with gaps"])
def test_options_mean_what_they_mean_there(
    clip: str, case: str, transcriber: Transcriber, openai_model: whisper.Whisper
) -> None:
    check(clip, CASES[case], transcriber, openai_model)


def test_drawn_tokens_are_openai_whispers_when_the_draws_are(
    transcriber: Transcriber, openai_model: whisper.Whisper, monkeypatch: pytest.MonkeyPatch
) -> None:
    uniform = np.random.default_rng(0).random(4096)
    places = {"ours": 0, "theirs": 0}

    def draw(rows: NDArray[np.float32], side: str) -> list[int]:
        """By inverse distribution; both sides use up the same numbers."""
        tokens = []
        for row in rows.astype(np.float64):
            cumulative = np.exp(row - row.max()).cumsum()
            place = uniform[places[side]] * cumulative[-1]
            tokens.append(int(np.searchsorted(cumulative, place)))
            places[side] += 1
        return tokens

    def sample(self: torch.distributions.Categorical) -> torch.Tensor:
        return torch.tensor(draw(self.logits.numpy(), "theirs"))

    monkeypatch.setattr(torch.distributions.Categorical, "sample", sample)
    samples = sound(SEVERAL)
    options = TranscribeOptions(temperatures=(0.4,), decode=DecodeOptions(best_of=3))

    theirs = openai_model.transcribe(samples, fp16=False, temperature=0.4, best_of=3)
    ours = transcriber.transcribe(samples, options, draw=lambda rows: draw(rows, "ours"))

    assert places["ours"] == places["theirs"] > 0
    assert told(ours) == retold(theirs)


def check(clip: str, case: Case, ours: Transcriber, theirs: whisper.Whisper) -> None:
    samples = sound(clip)

    expected = theirs.transcribe(samples, fp16=False, **case.theirs)
    actual = ours.transcribe(samples, case.ours)

    assert told(actual) == retold(expected)
    assert actual.text == expected["text"].strip()
    assert actual.language == expected["language"]
    for segment, other in zip(actual.segments, expected["segments"], strict=True):
        # Two float32 programs; 1e-4 is what encoder and logits are held to.
        assert segment.avg_logprob == pytest.approx(other["avg_logprob"], abs=1e-3)
        assert segment.no_speech_prob == pytest.approx(other["no_speech_prob"], abs=1e-3)
        assert segment.compression_ratio == other["compression_ratio"]
        check_words(segment.words, other.get("words", []))


def check_words(actual: Any, expected: list[dict[str, Any]]) -> None:
    assert [word.word for word in actual] == [word["word"] for word in expected]
    for word, other in zip(actual, expected, strict=True):
        assert word.start == pytest.approx(other["start"], abs=0.0201)  # one position
        assert word.end == pytest.approx(other["end"], abs=0.0201)


def told(transcript: Any) -> list[tuple[Any, ...]]:
    return [
        (s.seek, round(float(s.start), 2), round(float(s.end), 2), s.text, s.tokens)
        for s in transcript.segments
    ]


def retold(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (
            s["seek"],
            round(float(s["start"]), 2),
            round(float(s["end"]), 2),
            s["text"],
            tuple(s["tokens"]),
        )
        for s in result["segments"]
    ]
