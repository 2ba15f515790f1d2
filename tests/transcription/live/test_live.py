"""A stream gives the text of its file, each word within 2 s, in bounded memory; `live` returns it all."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import whisperport
from whisperport.errors import (
    AudioError,
    IncompleteError,
    Interrupted,
    MissingPackageError,
    UsageError,
)
from whisperport.program.bundle import Bundle
from whisperport.runtime import DecodeOptions, Thresholds
from whisperport.speech.audio import SAMPLE_RATE, load_audio
from whisperport.speech.text import Word
from whisperport.speech.text.normalize import normalize
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.transcription.live.agreement import Agreement, HypothesisWord, count_committed
from whisperport.transcription.live.live_options import LiveOptions
from whisperport.transcription.live.transcriber import LiveTranscriber, LiveUpdate
from whisperport.transcription.session import TruncatedPromptWarning
from whisperport.verification.clips import shipped_audio

from ...embedded import default_bundle

# `whisperport.live` returns the transcript when the audio ends, or carries it in what ended it early.


@dataclass(frozen=True)
class Spoken:
    """Audio, and its words with their times."""

    samples: np.ndarray
    words: tuple[Word, ...]


@dataclass
class Listened:
    """The results of a stream, and when they came, in seconds of audio."""

    live: LiveTranscriber
    updates: list[LiveUpdate] = field(default_factory=list)

    @property
    def committed(self) -> list[tuple[Word, float]]:
        return [(word, u.audio_s) for u in self.updates for word in u.committed]


@pytest.fixture(scope="session")
def embedded() -> Transcriber:
    return Transcriber(default_bundle(), run=RunOptions(threads=1))


@pytest.fixture(scope="session")
def spoken() -> dict[str, Spoken]:
    """By the number in the file's name."""
    return {r.path.name[:2]: Spoken(load_audio(r.path), r.words) for r in shipped_audio()}


def silence(seconds: float) -> np.ndarray:
    return np.zeros(round(SAMPLE_RATE * seconds), np.float32)


def in_a_row(*parts: Spoken, gap_s: float) -> Spoken:
    samples, words, at = [], [], 0.0
    for part in parts:
        words += [Word(w.word, at + w.start, at + w.end, 1.0) for w in part.words]
        samples += [part.samples, silence(gap_s)]
        at += part.samples.size / SAMPLE_RATE + gap_s
    return Spoken(np.concatenate(samples), tuple(words))


def listen(
    transcriber: Transcriber,
    samples: np.ndarray,
    piece_s: float = 0.1,
    options: LiveOptions | None = None,
) -> Listened:
    """Feed audio in pieces, in simulated time: each result is as late as the audio that it needs."""
    done = Listened(LiveTranscriber(transcriber, options))
    size = round(piece_s * SAMPLE_RATE)
    for start in range(0, samples.size, size):
        done.updates.append(done.live.feed(samples[start : start + size]))
    done.updates.append(done.live.finish())
    return done


def pieces(spoken: Spoken, error: BaseException | None = None) -> Iterator[np.ndarray]:
    """All audio in pieces of half a second, and then the error."""
    yield from np.split(spoken.samples, range(8000, spoken.samples.size, 8000))
    if error is not None:
        raise error


def test_live_a_sentence_of_a_grammar_is_certain_when_it_is_complete_and_others_are_refused(
    embedded: Transcriber, spoken: dict[str, Spoken]
) -> None:
    grammar = 'root ::= "Turn on the " ("heater" | "fan") (" in the office")? "."'
    audio = in_a_row(spoken["05"], spoken["09"], gap_s=2)
    options = LiveOptions(transcribe=TranscribeOptions(grammar=grammar), step_s=1)

    heard = listen(embedded, audio.samples[: -2 * SAMPLE_RATE], 0.5, options)

    inside, outside = heard.live.transcript().segments
    assert (
        inside.text.strip() == heard.live.transcript().text == "Turn on the heater in the office."
    )
    assert outside.text == ""
    assert [s.match and s.match.matched for s in (inside, outside)] == [True, False]
    (committed,) = [u.committed for u in heard.updates if u.committed]
    assert "".join(word.word for word in committed) == inside.text
    assert any(update.tentative for update in heard.updates)


def test_pieces_of_audio_become_updates_and_one_transcript(
    embedded: Transcriber, spoken: dict[str, Spoken]
) -> None:
    # given
    audio, updates = spoken["16"], list[LiveUpdate]()

    # when
    transcript = whisperport.live(pieces(audio), embedded, updated=updates.append)

    # then
    assert transcript.text == "".join(word.word for word in audio.words).strip()
    committed = [word.word for update in updates for word in update.committed]
    assert "".join(committed).strip() == transcript.text
    assert updates[-1].audio_s == transcript.duration_s == audio.samples.size / 16_000


def test_a_file_is_played_with_a_bundle_that_is_loaded_first(spoken: dict[str, Spoken]) -> None:
    # given
    path = next(clip.path for clip in shipped_audio() if clip.path.name.startswith("16"))

    # when
    transcript = whisperport.live(path, default_bundle())

    # then
    assert transcript.text == "".join(word.word for word in spoken["16"].words).strip()


@pytest.mark.parametrize(
    ("error", "raised"),
    [(AudioError("the line went dead"), IncompleteError), (KeyboardInterrupt(), Interrupted)],
)
def test_what_was_transcribed_is_carried_by_what_ended_it_early(
    error: BaseException,
    raised: type[IncompleteError | Interrupted],
    embedded: Transcriber,
    spoken: dict[str, Spoken],
) -> None:
    # given
    audio = pieces(spoken["16"], error)

    # when
    with pytest.raises(raised) as caught:
        whisperport.live(audio, embedded)

    # then
    assert caught.value.transcript.duration_s == spoken["16"].samples.size / 16_000


def test_audio_that_fails_before_its_first_piece_is_the_audio_s_error(
    embedded: Transcriber,
) -> None:
    silent = Spoken(np.zeros(0, np.float32), ())

    with pytest.raises(AudioError, match="went dead"):
        whisperport.live(pieces(silent, AudioError("the line went dead")), embedded)


def test_a_missing_microphone_is_found_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # given
    monkeypatch.setitem(sys.modules, "sounddevice", None)  # importing it fails

    # then
    with pytest.raises(MissingPackageError, match="microphone"):
        whisperport.live(bundle="no such bundle")


# Words of a stream become certain once two hypotheses with their audio agree, and stay certain.


def hypothesis_of(text: str, *, each_s: float = 0.5) -> list[HypothesisWord]:
    """Words of half a second each, from 0 on."""
    return [
        HypothesisWord(Word(f" {word}", i * each_s, (i + 1) * each_s, 1.0), starts_segment=i == 0)
        for i, word in enumerate(text.split())
    ]


def text_of(words: tuple[HypothesisWord, ...]) -> str:
    return "".join(entry.word.word for entry in words).strip()


def test_one_hypothesis_makes_nothing_certain() -> None:
    agreement = Agreement()

    assert agreement.update(hypothesis_of("set a timer"), 1.5) == ()
    assert text_of(agreement.tentative) == "set a timer"


def test_what_two_in_a_row_begin_with_is_certain() -> None:
    agreement = Agreement()
    agreement.update(hypothesis_of("set a timer for ten"), 2.5)

    new = agreement.update(hypothesis_of("set a timer for twenty minutes"), 3.0)

    assert text_of(new) == "set a timer for"
    assert text_of(agreement.tentative) == "twenty minutes"


def test_a_word_beyond_the_audio_of_the_first_hypothesis_is_a_guess() -> None:
    """`lamp` ends at 1.5 s: the hypothesis at 1.2 s does not contain its audio."""
    agreement = Agreement()
    agreement.update(hypothesis_of("the office lamp"), 1.2)

    assert text_of(agreement.update(hypothesis_of("the office lamp"), 1.7)) == "the office"
    assert text_of(agreement.update(hypothesis_of("the office lamp"), 2.2)) == "lamp"


def test_certain_words_are_not_repeated() -> None:
    agreement = Agreement()
    for until in (1.0, 1.5, 2.0):
        agreement.update(hypothesis_of("turn on"), until)

    agreement.update(hypothesis_of("turn on the light"), 2.5)
    assert text_of(agreement.update(hypothesis_of("turn on the light"), 3.0)) == "the light"


def test_a_certain_word_stays_when_later_hypotheses_hear_another() -> None:
    agreement = Agreement()
    for until in (1.0, 1.5):
        agreement.update(hypothesis_of("turn on"), until)

    for until in (3.0, 3.5):
        agreement.update(hypothesis_of("burn on the light"), until)

    assert text_of(agreement.committed) == "turn on the light"


def test_a_sentence_that_goes_on_loses_its_full_stop() -> None:
    agreement = Agreement()
    for until in (1.0, 1.5):
        agreement.update(hypothesis_of("open it."), until)

    agreement.update(hypothesis_of("open it, please."), 2.0)

    assert text_of(agreement.committed) == "open it,"


def test_the_last_hypothesis_is_taken_whole() -> None:
    agreement = Agreement()
    agreement.update(hypothesis_of("one two"), 1.0)

    assert (
        text_of(agreement.update(hypothesis_of("one three four"), 2.0, final=True))
        == "one three four"
    )
    assert agreement.tentative == ()


def test_removed_audio_is_not_decoded_again() -> None:
    agreement = Agreement()
    for until in (1.5, 2.0):
        agreement.update(hypothesis_of("one two three"), until)

    assert text_of(agreement.drop_before(1.0)) == "one two"
    assert text_of(agreement.committed) == "three"


def test_of_repeated_words_those_nearest_in_time_were_spoken() -> None:
    committed = hypothesis_of("no no")
    hypothesis = hypothesis_of("no no no")

    assert count_committed(committed, hypothesis) == 2


words = st.lists(st.sampled_from(["one", "two", "three", "four"]), max_size=6).map(" ".join)


@given(st.lists(words, max_size=8))
def test_certain_words_only_grow_and_were_decoded_twice(texts: list[str]) -> None:
    agreement, certain, before = Agreement(), "", ""
    for i, text in enumerate(texts):
        new = agreement.update(hypothesis_of(text), 3.0 + i)
        for entry in new:
            assert entry.key in before.split()
            assert entry.key in text.split()
        certain = f"{certain} {text_of(new)}".strip()
        assert text_of(agreement.committed) == certain
        before = text


MAX_CLIP_S = 2.0  # from the end of a word to its commit
EQUAL = 0.95  # of the words, between live and offline


def delays(done: Listened, spoken: Spoken) -> list[float]:
    """Return the seconds of audio from the true end of each correct word to its commit."""
    words_at: list[tuple[str, float]] = []
    for word, at in done.committed:
        if words_at and not word.word.startswith(" "):  # the "-four" of "twenty-four"
            words_at[-1] = (words_at[-1][0] + word.word, at)
        else:
            words_at.append((word.word, at))
    pairs = SequenceMatcher(
        None, [normalize(w.word) for w in spoken.words], [normalize(w) for w, _ in words_at], False
    )
    return [
        words_at[block.b + i][1] - spoken.words[block.a + i].end
        for block in pairs.get_matching_blocks()
        for i in range(block.size)
    ]


def equal_share(live: str, offline: str) -> float:
    pairs = SequenceMatcher(None, live.split(), offline.split(), autojunk=False)
    same = sum(block.size for block in pairs.get_matching_blocks())
    return same / max(len(live.split()), len(offline.split()))


@pytest.mark.parametrize(("number", "piece_s"), [("03", 0.1), ("10", 0.37), ("13", 0.5)])
def test_words_come_within_two_seconds_and_are_those_of_the_audio_file(
    number: str, piece_s: float, embedded: Transcriber, spoken: dict[str, Spoken]
) -> None:
    audio = spoken[number]

    done = listen(embedded, audio.samples, piece_s)

    late = delays(done, audio)
    assert len(late) >= EQUAL * len(audio.words)
    assert min(late) > 0  # no word is certain before it was spoken
    assert max(late) <= MAX_CLIP_S
    offline = embedded.transcribe(audio.samples).text
    assert equal_share(done.live.transcript().text, offline) >= EQUAL


def test_several_utterances_with_gaps_come_one_by_one(
    embedded: Transcriber, spoken: dict[str, Spoken]
) -> None:
    audio = in_a_row(spoken["05"], spoken["16"], gap_s=2.5)

    done = listen(embedded, audio.samples)

    assert max(delays(done, audio)) <= MAX_CLIP_S
    segments = done.live.transcript().segments
    assert len(segments) == 2
    offline = embedded.transcribe(audio.samples).text
    assert equal_share(done.live.transcript().text, offline) >= EQUAL
    # The first was over before the second began.
    closed = [update.audio_s for update in done.updates if update.closed]
    assert closed[0] < segments[1].start


def test_a_buffer_is_cut_while_speech_goes_on(
    embedded: Transcriber, spoken: dict[str, Spoken]
) -> None:
    """Longer than half a window. A pass a second: a word waits for the second pass after it."""
    words = tuple(word for word in spoken["19"].words if word.end < 22)
    audio = Spoken(spoken["19"].samples[: 22 * 16_000], words)

    done = listen(embedded, audio.samples, 0.5, LiveOptions(step_s=1.0))

    transcript = done.live.transcript()
    assert equal_share(transcript.text, embedded.transcribe(audio.samples).text) >= EQUAL
    assert max(delays(done, audio)) <= MAX_CLIP_S + 1.0
    assert transcript.text == " ".join(s.text.strip() for s in transcript.segments)


def test_what_is_committed_is_the_transcript(
    embedded: Transcriber, spoken: dict[str, Spoken]
) -> None:
    done = listen(embedded, spoken["07"].samples)

    words = "".join(word.word for word, _ in done.committed)
    transcript = done.live.transcript()
    assert normalize(words) == normalize(transcript.text)
    closed = [segment for update in done.updates for segment in update.closed]
    assert transcript.segments == tuple(closed)
    ends = [word.end for segment in transcript.segments for word in segment.words]
    assert ends == sorted(ends)
    assert transcript.duration_s == pytest.approx(spoken["07"].samples.size / 16_000)


def test_a_stream_that_stops_in_the_middle_of_a_word_keeps_the_text(
    embedded: Transcriber, spoken: dict[str, Spoken]
) -> None:
    done = listen(embedded, spoken["03"].samples[: 16_000 * 2 - 7])

    assert done.live.transcript().text.startswith("Set the hallway temperature to")


def test_one_long_piece_is_decoded_in_one_pass(
    embedded: Transcriber, spoken: dict[str, Spoken], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transcription that is behind catches up: it skips partial passes, but no audio."""
    encoded: list[int] = []
    encode = embedded.engine.encode
    monkeypatch.setattr(embedded.engine, "encode", lambda mel: encoded.append(1) or encode(mel))

    done = listen(embedded, spoken["03"].samples, piece_s=30.0)

    assert len(encoded) == 2  # one for the audio, one for its end
    assert done.live.transcript().text == embedded.transcribe(spoken["03"].samples).text


def test_silence_is_silent(embedded: Transcriber) -> None:
    done = listen(embedded, silence(4.0), 0.5)

    assert done.live.transcript().text == ""
    assert done.live.transcript().duration_s == 4.0


def test_a_stream_without_audio_is_an_empty_transcript(embedded: Transcriber) -> None:
    live = LiveTranscriber(embedded)

    live.feed(np.empty(0, np.float32))
    update = live.finish()

    assert (update.committed, update.tentative, update.audio_s) == ((), "", 0.0)
    assert live.transcript().segments == ()


@pytest.mark.parametrize(
    "samples",
    [np.zeros((2, 10), np.float32), np.zeros(10, np.int16), np.full(10, np.nan)],
    ids=["stereo", "integers", "NaN"],
)
def test_samples_that_are_not_audio_are_rejected_and_earlier_audio_is_kept(
    samples: np.ndarray, embedded: Transcriber, spoken: dict[str, Spoken]
) -> None:
    live = LiveTranscriber(embedded)
    live.feed(spoken["16"].samples)

    with pytest.raises(AudioError):
        live.feed(samples)

    live.finish()
    assert live.transcript().text == "Turn the volume up to seventy-one."


@pytest.mark.parametrize(
    "options",
    [
        {"step_s": 0.0},
        {"pause_s": 11.0},
        {"transcribe": TranscribeOptions(clip_timestamps=(1.0, 2.0))},
        {
            "transcribe": TranscribeOptions(
                word_timestamps=True, hallucination_silence_threshold=1.0
            )
        },
        {"transcribe": TranscribeOptions(prefix="Turn")},
        {"transcribe": TranscribeOptions(decode=DecodeOptions(prefix=(5,)))},
    ],
    ids=[
        *("no step", "a long pause", "clips", "hallucination threshold"),
        *("prefix", "prefix in tokens"),
    ],
)
def test_options_that_cannot_be_live_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        LiveOptions(**options)


def test_a_language_that_the_checkpoint_lacks_is_rejected(embedded: Transcriber) -> None:
    options = TranscribeOptions(decode=DecodeOptions(language="xx"))

    with pytest.raises(UsageError, match="xx"):
        listen(embedded, silence(1.0), 0.5, LiveOptions(transcribe=options))


def test_a_language_may_be_named(embedded: Transcriber, spoken: dict[str, Spoken]) -> None:
    options = TranscribeOptions(decode=DecodeOptions(language="English"))

    listened = listen(embedded, spoken["07"].samples, 2.0, LiveOptions(transcribe=options))

    assert listened.live.transcript().text == "Turn right at the station, then go right."
    assert listened.live.transcript().language == "en"


def test_a_prompt_that_is_too_long_is_cut_with_a_warning(embedded: Transcriber) -> None:
    options = TranscribeOptions(
        initial_prompt="turn the lights on and " * 80, carry_initial_prompt=True
    )

    with pytest.warns(
        TruncatedPromptWarning, match="the initial prompt has 400 tokens, of which the last 223"
    ):
        live = LiveTranscriber(embedded, LiveOptions(transcribe=options))

    live._said = [1, 2, 3]
    assert live._prompt() == tuple(live._initial)


@pytest.mark.parametrize(("appended", "last"), [(",", [" right", "."]), (".", [" right."])])
def test_punctuation_is_joined_as_asked(
    embedded: Transcriber, spoken: dict[str, Spoken], appended: str, last: list[str]
) -> None:
    options = TranscribeOptions(append_punctuations=appended)

    listened = listen(embedded, spoken["07"].samples, 2.0, LiveOptions(transcribe=options))

    words = [word.word for word, _ in listened.committed]
    assert words[-len(last) :] == last


@pytest.fixture
def micro_transcriber(micro_bundle: Bundle) -> Transcriber:
    """Random weights that never stop talking, and windows of 0.2 s, which every step fills."""
    return Transcriber(micro_bundle, RunOptions(threads=1))


@given(sizes=st.lists(st.integers(0, 6_000), max_size=4), timestamps=st.booleans())
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
def test_no_audio_is_lost_for_any_pieces_and_any_tokens(
    micro_transcriber: Transcriber, sizes: list[int], timestamps: bool
) -> None:
    decode = DecodeOptions(language="en", without_timestamps=not timestamps, max_tokens=6)
    thresholds = Thresholds(
        compression_ratio_threshold=None, logprob_threshold=None, no_speech_threshold=None
    )
    options = TranscribeOptions(decode=decode, temperatures=(0.0,), thresholds=thresholds)
    live = LiveTranscriber(micro_transcriber, LiveOptions(transcribe=options, step_s=0.1))
    random = np.random.default_rng(len(sizes))

    fed = 0
    for size in sizes:
        fed += size
        update = live.feed((0.1 * random.standard_normal(size)).astype(np.float32))
        assert update.audio_s == pytest.approx(fed / 16_000)
    live.finish()

    transcript = live.transcript()
    assert transcript.duration_s == pytest.approx(fed / 16_000)
    assert all(0 <= s.start <= s.end for s in transcript.segments)
