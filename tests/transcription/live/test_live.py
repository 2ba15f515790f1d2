"""`whisperport.live` returns the transcript when the audio ends, or carries it in what ended it early."""

import sys
from collections.abc import Iterator

import numpy as np
import pytest

import whisperport
from whisperport.errors import AudioError, IncompleteError, Interrupted, MissingPackageError
from whisperport.transcription import Transcriber
from whisperport.transcription.live.transcriber import LiveUpdate
from whisperport.verification.clips import shipped_audio

from ...embedded import default_bundle
from .conftest import Spoken


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
