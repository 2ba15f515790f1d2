"""`whisperport.live` returns the transcript when the audio ends, or carries it in what ended it early."""

import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import whisperport
from whisperport.errors import AudioError, IncompleteError, Interrupted, MissingPackageError
from whisperport.speech.text import Word
from whisperport.transcription import Transcriber
from whisperport.transcription.live.agreement import Agreement, HypothesisWord, count_committed
from whisperport.transcription.live.transcriber import LiveUpdate
from whisperport.verification.clips import shipped_audio

from ...embedded import default_bundle
from .conftest import Spoken

# `whisperport.live` returns the transcript when the audio ends, or carries it in what ended it early.


def pieces(spoken: Spoken, error: BaseException | None = None) -> Iterator[np.ndarray]:
    """All audio in pieces of half a second, and then the error."""
    yield from np.split(spoken.samples, range(8000, spoken.samples.size, 8000))
    if error is not None:
        raise error


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
