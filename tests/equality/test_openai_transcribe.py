"""`transcribe` says what openai-whisper's `transcribe` says: token for token, segment for segment."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import whisper
from numpy.typing import NDArray

from whisperport.runtime import DecodeOptions, Decoder, Thresholds, decode_window
from whisperport.speech.audio import load_audio, log_mel
from whisperport.transcription import TranscribeOptions, Transcriber, Transcript
from whisperport.verification.clips import ShippedAudio, shipped_audio

from ..embedded import unpacked
from ..extent import core_or_all

# `transcribe` says what openai-whisper's `transcribe` says: token for token, segment for segment.

RECORDINGS = {recording.path.name: recording.path for recording in shipped_audio()}
SEVERAL = next(name for name in RECORDINGS if "commands" in name)

SPECIAL = re.compile(r"<\|.*?\|>")

Samples = NDArray[np.float32]
Original = Callable[[str, str], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """The same wish, in both languages."""

    ours: TranscribeOptions
    theirs: dict[str, Any] = field(default_factory=dict)


COLD = (0.0,)
CASES = {
    "greedy": Case(TranscribeOptions(temperatures=COLD), {"temperature": 0.0}),
    "without timestamps": Case(
        TranscribeOptions(temperatures=COLD, decode=DecodeOptions(without_timestamps=True)),
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
    # Within every clip: openai-whisper does not end if a clip timestamp is after the end of the audio.
    "clips": Case(
        TranscribeOptions(temperatures=COLD, clip_timestamps=(0.5, 3.0, 3.5)),
        {"temperature": 0.0, "clip_timestamps": [0.5, 3.0, 3.5]},
    ),
    "words": Case(
        TranscribeOptions(temperatures=COLD, word_timestamps=True),
        {"temperature": 0.0, "word_timestamps": True},
    ),
    "words, not conditioned on previous text": Case(
        TranscribeOptions(
            temperatures=COLD, word_timestamps=True, condition_on_previous_text=False
        ),
        {"temperature": 0.0, "word_timestamps": True, "condition_on_previous_text": False},
    ),
    "words, silence skipped": Case(
        TranscribeOptions(
            temperatures=COLD, word_timestamps=True, hallucination_silence_threshold=0.5
        ),
        {"temperature": 0.0, "word_timestamps": True, "hallucination_silence_threshold": 0.5},
    ),
    "words, no marks but the stop joined": Case(
        TranscribeOptions(
            temperatures=COLD,
            word_timestamps=True,
            prepend_punctuations="",
            append_punctuations=".",
        ),
        {
            "temperature": 0.0,
            "word_timestamps": True,
            "prepend_punctuations": "",
            "append_punctuations": ".",
        },
    ),
    "prefix": Case(
        TranscribeOptions(temperatures=COLD, prefix="Set the"),
        {"temperature": 0.0, "prefix": "Set the"},
    ),
    "prefix and a prompt, no timestamps": Case(
        TranscribeOptions(
            temperatures=COLD,
            prefix="Set the",
            initial_prompt="Good evening, Anna.",
            decode=DecodeOptions(without_timestamps=True),
        ),
        {
            "temperature": 0.0,
            "prefix": "Set the",
            "initial_prompt": "Good evening, Anna.",
            "without_timestamps": True,
        },
    ),
    "nothing suppressed": Case(
        TranscribeOptions(temperatures=COLD, decode=DecodeOptions(suppress_tokens=())),
        {"temperature": 0.0, "suppress_tokens": ""},
    ),
    "comma and stop suppressed": Case(
        TranscribeOptions(temperatures=COLD, decode=DecodeOptions(suppress_tokens=(11, 13))),
        {"temperature": 0.0, "suppress_tokens": [11, 13]},
    ),
    "blanks allowed, any first timestamp, 12 tokens a window": Case(
        TranscribeOptions(
            temperatures=COLD,
            decode=DecodeOptions(suppress_blank=False, max_initial_timestamp=None, max_tokens=12),
        ),
        {
            "temperature": 0.0,
            "suppress_blank": False,
            "max_initial_timestamp": None,
            "sample_len": 12,
        },
    ),
    "fallback to a second greedy pass": Case(
        TranscribeOptions(temperatures=(0.0, 0.0), thresholds=Thresholds(logprob_threshold=-1e-4)),
        {"temperature": (0.0, 0.0), "logprob_threshold": -1e-4},
    ),
}


def silence() -> Samples:
    return np.zeros(16_000 * 8, np.float32)


def noise() -> Samples:
    generator = np.random.default_rng(0)
    return (0.02 * generator.standard_normal(16_000 * 12)).astype(np.float32)


def with_gaps() -> Samples:
    """Three clips of different voices with 4 s of silence between: two windows."""
    parts = [load_audio(path) for path in list(RECORDINGS.values())[1:5]]
    gap = np.zeros(16_000 * 4, np.float32)
    return np.concatenate([piece for part in parts for piece in (gap, part)])


def dialogue() -> Samples:
    """Two voices taking turns, the second answering at once: they share windows and segments."""
    first, second = (load_audio(path) for path in list(RECORDINGS.values())[2:4])
    pause = np.zeros(16_000 // 5, np.float32)
    return np.concatenate([first, pause, second, pause, first, second])


def many_windows() -> Samples:
    """All clips with 1.5 s between, repeated to one minute or five."""
    parts = [load_audio(path) for path in RECORDINGS.values()]
    once = np.concatenate([np.pad(part, (0, 24_000)) for part in parts])
    return np.resize(once, core_or_all(45, 300) * 16_000)


MADE: dict[str, Callable[[], Samples]] = {
    "silence": silence,
    "noise": noise,
    "four voices with gaps": with_gaps,
    "two voices in turn": dialogue,
}
GAPS = "four voices with gaps"
CLIPS = core_or_all(
    [*(name for name in RECORDINGS if name[:2] in ("01", "05", "19")), *MADE],
    [*RECORDINGS, *MADE],
)

# Options act on the host, in the same way for every target: the core tests them on the embedded bundle.
TARGETS = core_or_all(["embedded"], ["onnxruntime", "xnnpack", "litert", "openvino"])
# Cases that act in every window in the same way begin with these words.
OF_ONE_WINDOW = (
    *("beam", "prefix", "initial", "without", "nothing", "comma", "blanks", "fallback"),
    "words, no marks",
)
# The core has greedy transcripts of clips, and many windows without conditioning, in tests of their own.
ELSEWHERE = ("greedy", "words, not conditioned on previous text")
OPTIONS = core_or_all(
    [
        ("embedded", SEVERAL if case.startswith(OF_ONE_WINDOW) else GAPS, case)
        for case in CASES
        if case not in ELSEWHERE
    ],
    [(target, clip, case) for target in TARGETS for clip in (SEVERAL, GAPS) for case in CASES],
)
ONE_TARGET = core_or_all(TARGETS[:1], TARGETS)


def audio(name: str) -> Samples:
    if name == "many windows":
        return many_windows()
    if name in MADE:
        return MADE[name]()
    return load_audio(RECORDINGS[name])[: core_or_all(40, 600) * 16_000]  # of one: two windows


@pytest.fixture(scope="session")
def originals(openai_model: whisper.Whisper) -> Original:
    """What the original says of a clip, by the names of clip and case; once for all targets."""

    @cache
    def original(clip: str, case: str) -> dict[str, Any]:
        return openai_model.transcribe(audio(clip), fp16=False, **CASES[case].theirs)

    return original


@pytest.mark.parametrize("clip", CLIPS)
def test_greedy_transcripts_are_openai_whispers(
    clip: str, transcriber: Transcriber, originals: Original
) -> None:
    check(clip, "greedy", transcriber, originals)


@pytest.mark.parametrize(("transcriber", "clip", "case"), OPTIONS, indirect=["transcriber"])
def test_options_mean_what_they_mean_there(
    clip: str, case: str, transcriber: Transcriber, originals: Original
) -> None:
    check(clip, case, transcriber, originals)


@pytest.mark.parametrize(
    "case",
    core_or_all(
        ["words, not conditioned on previous text"],
        ["greedy", "words, not conditioned on previous text"],
    ),
)
@pytest.mark.parametrize("transcriber", ONE_TARGET, indirect=True)
def test_many_windows_are_openai_whispers(
    case: str, transcriber: Transcriber, originals: Original
) -> None:
    check("many windows", case, transcriber, originals)


@pytest.mark.parametrize("case", core_or_all(["words"], ["words", "beam 5", "without timestamps"]))
@pytest.mark.parametrize("transcriber", ONE_TARGET, indirect=True)
def test_two_voices_are_openai_whispers(
    case: str, transcriber: Transcriber, originals: Original
) -> None:
    check("two voices in turn", case, transcriber, originals)


@pytest.mark.parametrize("transcriber", ONE_TARGET, indirect=True)
def test_sampled_tokens_equal_openai_whispers_with_equal_samples(
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
    samples = audio(SEVERAL)
    options = TranscribeOptions(temperatures=(0.4,), decode=DecodeOptions(best_of=3))

    theirs = openai_model.transcribe(samples, fp16=False, temperature=0.4, best_of=3)
    ours = transcriber.transcribe(samples, options, sampler=lambda rows: draw(rows, "ours"))

    assert places["ours"] == places["theirs"] > 0
    assert segments_of(ours) == openai_segments_of(theirs)


def check(clip: str, case: str, ours: Transcriber, originals: Original) -> None:
    check_equal(ours.transcribe(audio(clip), CASES[case].ours), originals(clip, case))


def check_equal(actual: Transcript, expected: dict[str, Any]) -> None:
    """Compare a transcript with the result of openai-whisper's `transcribe`."""
    assert segments_of(actual) == openai_segments_of(expected)
    # Where a window says a token that is no text, such as a language, the original's whole text names it,
    # and the texts of its segments do not.
    assert actual.text == SPECIAL.sub("", expected["text"]).strip()
    assert actual.language == expected["language"]
    for segment, other in zip(actual.segments, expected["segments"], strict=True):
        # Two float32 programs; 1e-4 is what encoder and logits are held to.
        assert segment.avg_logprob == pytest.approx(other["avg_logprob"], abs=1e-3)
        assert segment.no_speech_prob == pytest.approx(other["no_speech_prob"], abs=1e-3)
        assert segment.compression_ratio == other["compression_ratio"]
        assert (segment.words is None) == ("words" not in other)
        check_words(segment.words or (), other.get("words", []))


def check_words(actual: Any, expected: list[dict[str, Any]]) -> None:
    assert [word.word for word in actual] == [word["word"] for word in expected]
    for word, other in zip(actual, expected, strict=True):
        assert word.start == pytest.approx(other["start"], abs=0.0201)  # one position
        assert word.end == pytest.approx(other["end"], abs=0.0201)


def segments_of(transcript: Any) -> list[tuple[Any, ...]]:
    return [
        (s.seek, round(float(s.start), 2), round(float(s.end), 2), s.text, s.tokens)
        for s in transcript.segments
    ]


def openai_segments_of(result: dict[str, Any]) -> list[tuple[Any, ...]]:
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


# Greedy tokens without timestamps are those of transformers' `generate`, for every clip.

ALL_RECORDINGS = shipped_audio()


@pytest.mark.parametrize(
    "recording", core_or_all(ALL_RECORDINGS[::4], ALL_RECORDINGS), ids=lambda r: r.path.name
)
def test_greedy_tokens_are_those_of_generate(
    recording: ShippedAudio,
    tmp_path: Path,
    transcriber: Transcriber,
    hf_model: transformers.WhisperForConditionalGeneration,
) -> None:
    samples = load_audio(recording.path)[: 30 * 16_000]
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(unpacked(tmp_path))
    theirs_in = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features
    engine = transcriber.engine

    with torch.no_grad():
        expected = hf_model.generate(
            theirs_in, language="en", task="transcribe", max_new_tokens=224, do_sample=False
        )[0].tolist()
    mel = log_mel(samples, engine.dims.n_mels, n_frames=engine.dims.n_frames)
    options = DecodeOptions(language="en", without_timestamps=True)
    decoded = decode_window(Decoder(engine), engine.encode(mel), options)

    end = engine.generation.end_of_text
    expected_text = [token for token in expected if token < end]
    assert [token for token in decoded.tokens if token < end] == expected_text
