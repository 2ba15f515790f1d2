"""The parts of a realtime session: settings, text, audio, events and secrets."""

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.apps.serving.keys import ClientSecrets
from whisperport.apps.serving.realtime.item import AppendOnlyText
from whisperport.program.generation import Generation
from whisperport.runtime.decoding.phrases import DEFAULT_BONUS
from whisperport.speech.audio import load_audio
from whisperport.speech.text import Segment, Word
from whisperport.transcription.live.transcriber import LiveUpdate
from whisperport.verification.clips import shipped_audio

pytest.importorskip("starlette")

from whisperport.apps.serving.api_error import ApiError
from whisperport.apps.serving.realtime import session as sessions
from whisperport.apps.serving.realtime.ear import MAX_APPEND, Began, Ear, Ended, audio_of
from whisperport.apps.serving.realtime.session import TENTATIVE as TENTATIVE_EVENT
from whisperport.apps.serving.realtime.session import Outbox
from whisperport.apps.serving.realtime.settings import (
    LOGPROBS,
    TENTATIVE,
    ServerVad,
    Settings,
    updated,
)

MODELS = ("tiny", "whisper-1")
UPDATED = [
    "type",
    "audio",
    "input",
    "format",
    "rate",
    "transcription",
    "model",
    "language",
    "languages",
]
UPDATED += [
    "keywords",
    "prompt",
    "delay",
    "turn_detection",
    "threshold",
    "prefix_padding_ms",
    "include",
]
SETTINGS = Settings("tiny")
ENGLISH = Generation(
    start_of_transcript=1, end_of_text=2, start_of_previous=3, no_speech=4, no_timestamps=5
)
TWO_LANGUAGES = replace(
    ENGLISH, languages={"en": 7, "de": 8}, tasks={"transcribe": 9, "translate": 10}
)


def session(**given_input: Any) -> dict[str, Any]:
    return {"type": "transcription", "audio": {"input": given_input}}


def test_an_update_changes_what_it_has_and_keeps_the_rest() -> None:
    first = session(
        format={"type": "audio/pcm", "rate": 48_000},
        transcription={"model": "whisper-1", "language": "German", "keywords": ["Anna"]},
        turn_detection={"type": "server_vad", "silence_duration_ms": 200},
    )
    second = session(transcription={"prompt": "Names", "delay": "low", "language": None})

    one = updated(SETTINGS, first, MODELS, TWO_LANGUAGES)
    two = updated(one, {**second, "include": [TENTATIVE]}, MODELS, TWO_LANGUAGES)
    three = updated(
        two, session(turn_detection=None, format={"type": "audio/pcmu"}), MODELS, ENGLISH
    )

    assert one == Settings(
        "whisper-1",
        rate=48_000,
        language="de",
        keywords=("Anna",),
        vad=ServerVad(silence_duration_ms=200),
    )
    assert not one.is_live
    assert two == replace(one, language=None, prompt="Names", delay="low", include=(TENTATIVE,))
    assert two.is_live
    assert two.live_options().step_s == 0.3
    assert two.live_options().transcribe.initial_prompt == "Names"
    assert two.live_options().transcribe.phrases == (("Anna", DEFAULT_BONUS),)
    assert three == replace(two, vad=None, kind="audio/pcmu", rate=8_000)


@given(
    st.recursive(
        st.sampled_from(
            [None, True, "", "auto", "x" * 9_000, -0.0, 1e308, 10**399, -(10**399), 0.5]
        )
        | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(UPDATED),
                inner,
            )
        ),
        max_leaves=20,
    )
)
def test_any_update_is_accepted_or_an_error_of_the_client(update: Any) -> None:
    for given_session in (update, session(transcription=update), session(turn_detection=update)):
        try:
            found = updated(SETTINGS, given_session, MODELS, TWO_LANGUAGES)
        except ApiError:  # any other exception is a fault
            pass
        else:
            assert found.live_options()
            assert json.dumps(found.document("sess_1"), allow_nan=False)


def test_an_empty_model_is_the_one_before_and_auto_is_no_language() -> None:
    for model in ("", None):
        found = updated(
            replace(SETTINGS, language="de"),
            session(transcription={"model": model, "language": "auto"}),
            MODELS,
            TWO_LANGUAGES,
        )
        assert (found.model, found.language) == ("tiny", None)


def test_the_document_has_the_complete_configuration_and_can_be_sent_back() -> None:
    settings = Settings("tiny", language="en", delay="high", prompt="P", include=(TENTATIVE,))

    document = settings.document("sess_1")

    assert document["id"] == "sess_1"
    assert document["audio"]["input"] == {
        "format": {"type": "audio/pcm", "rate": 24_000},
        "noise_reduction": None,
        "transcription": {
            "model": "tiny",
            "language": "en",
            "prompt": "P",
            "keywords": [],
            "delay": "high",
        },
        "turn_detection": {
            "type": "server_vad",
            "threshold": 0.5,
            "prefix_padding_ms": 300,
            "silence_duration_ms": 500,
        },
    }
    assert updated(SETTINGS, document, MODELS, ENGLISH) == settings


WRONG = {
    "session": [1],
    "session.type": {"type": "realtime"},
    "session.include": {"include": ["x"]},
    "session.audio": {"audio": 5},
    "session.audio.input.format.type": session(format={"type": "audio/mp3"}),
    "session.audio.input.format.rate": session(format={"rate": 1}),
    "session.audio.input.turn_detection.type": session(turn_detection={"type": "semantic_vad"}),
    "session.audio.input.turn_detection.threshold": session(turn_detection={"threshold": "x"}),
    "session.audio.input.turn_detection.silence_duration_ms": session(
        turn_detection={"silence_duration_ms": float("nan")}
    ),
    "session.audio.input.transcription.model": session(transcription={"model": "gpt-5"}),
    "session.audio.input.transcription.language": session(transcription={"language": "de"}),
    "session.audio.input.transcription.languages": session(
        transcription={"languages": ["en", "de"]}
    ),
    "session.audio.input.transcription.prompt": session(transcription={"prompt": "x" * 10_000}),
    "session.audio.input.transcription.keywords": session(transcription={"keywords": [1]}),
    "session.audio.input.transcription.delay": session(transcription={"delay": "none"}),
}


@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_value_is_named(path: str) -> None:
    with pytest.raises(ApiError) as found:
        updated(SETTINGS, WRONG[path], MODELS, ENGLISH)

    assert found.value.param == path


def test_log_probabilities_are_not_served_here() -> None:
    with pytest.raises(ApiError, match="log-probabilities") as found:
        updated(SETTINGS, {"include": [LOGPROBS]}, MODELS, ENGLISH)

    assert found.value.code == "unsupported_value"


def update(closed: list[str], open_: list[str]) -> LiveUpdate:
    def words(texts: list[str]) -> tuple[Word, ...]:
        return tuple(Word(text, 0.0, 0.0, 1.0) for text in texts)

    segments = (Segment(0.0, 1.0, "", words=words(closed)),) if closed else ()
    return LiveUpdate((), segments, words(open_), "", 0.0)


def test_punctuation_waits_for_the_next_word() -> None:
    text = AppendOnlyText()

    deltas = [
        text.update(update([], [" Set", " it."])),
        text.update(update([], [" Set", " it,"])),
        text.update(update([" Set", " it,", " now."], [])),
        text.update(update([], [" Go!"]), final=True),
    ]

    assert deltas == ["Set it", "", ", now", ". Go!"]
    assert text.text == "Set it, now. Go!"


def test_a_word_that_is_spelled_anew_is_not_sent_again() -> None:
    text = AppendOnlyText()

    deltas = [
        text.update(update([], [" seventy."])),
        text.update(update([], [" 70.", " Now."])),
        text.update(update([], [" 70.", " NOW!"]), final=True),
    ]

    assert deltas == ["seventy", " Now", "!"]


@given(st.lists(st.text("ab.,!  -", min_size=1, max_size=4), max_size=8), st.data())
def test_deltas_join_to_the_words(words: list[str], data: st.DataObject) -> None:
    text, cuts = AppendOnlyText(), sorted(data.draw(st.lists(st.integers(0, len(words)))))

    deltas = [text.update(update([], words[:cut])) for cut in cuts]
    deltas.append(text.update(update([], words), final=True))

    assert "".join(deltas) == text.text
    assert text.text.strip() == "".join(words).strip()


def clips(*gaps_s: float) -> np.ndarray:
    """Two clips with silence before, between and after, int16 at 16 kHz."""
    parts = [np.zeros(round(16_000 * gaps_s[0]), np.int16)]
    for clip, gap_s in zip(shipped_audio(), gaps_s[1:], strict=False):
        parts.append(np.round(load_audio(clip.path) * 32767).astype(np.int16))
        parts.append(np.zeros(round(16_000 * gap_s), np.int16))
    return np.concatenate(parts)


def utterances(ear: Ear, audio: np.ndarray, size: int) -> list[tuple[int, np.ndarray, int | None]]:
    """Begin, samples and end of each utterance."""
    found: list[list[Any]] = []
    for at in range(0, audio.size, size):
        for heard in ear.push(audio[at : at + size].tobytes()):
            if isinstance(heard, Began):
                found.append([heard.at_ms, [], None])
            elif isinstance(heard, Ended):
                found[-1][2] = heard.at_ms
            else:
                found[-1][1].append(heard)
    return [(begin, np.concatenate(parts), end) for begin, parts, end in found]


def test_utterances_do_not_depend_on_the_pieces_and_are_cut_from_the_audio() -> None:
    audio, settings = clips(1.0, 1.5, 1.0), replace(SETTINGS, rate=16_000)

    ways = [utterances(Ear(settings), audio, size) for size in (audio.size, 1_000)]

    assert len(ways[0]) == 2
    for (begin, samples, end), (other_begin, other_samples, other_end) in zip(*ways, strict=True):
        assert (begin, end) == (other_begin, other_end)
        np.testing.assert_array_equal(samples, other_samples)
        assert end is not None
        np.testing.assert_array_equal(samples, audio[begin * 16 : end * 16])
    assert 1_000 <= ways[0][0][0] <= 1_500


def test_without_turn_detection_an_utterance_lasts_until_it_is_forgotten() -> None:
    audio, settings = clips(1.0, 1.5, 1.0), replace(SETTINGS, rate=16_000, vad=None)
    ear = Ear(settings, received_s=10.0)

    ((begin, samples, end),) = utterances(ear, audio, 5_000)
    ear.forget()
    silence = ear.push(bytes(32_000))

    assert 11_000 <= begin <= 11_500
    assert end is None
    assert samples[-1_000:].tolist() == audio[-1_000:].tolist()
    assert [each.size for each in silence if isinstance(each, np.ndarray)] == []
    assert ear.received_s == pytest.approx(11.0 + audio.size / 16_000)


@pytest.mark.parametrize(
    "text", [None, 5, "x", "é" * 4, "AAA=BBB=", "A" * (MAX_APPEND * 4 // 3 + 8)]
)
def test_audio_that_is_not_base64_or_too_long_is_rejected(text: Any) -> None:
    with pytest.raises(ApiError):
        audio_of(text)


def test_audio_is_base64() -> None:
    assert audio_of(base64.b64encode(b"\0\1\2\3").decode()) == b"\0\1\2\3"


def all_of(box: Outbox, after: str | None = None) -> list[dict[str, Any]]:
    """The events after one, once the box is closed."""

    async def read() -> list[dict[str, Any]]:
        position, found = box.position_after(after), []
        try:
            while True:
                position, text = await box.next(position)
                found += [json.loads(text)] if text else []
        except EOFError:
            return found

    return asyncio.run(read())


def test_events_are_read_on_after_the_last_one_that_arrived() -> None:
    box = Outbox()
    for number in range(5):
        box.put("n", number=number)
    box.close()

    events = all_of(box)

    assert [event["number"] for event in events] == [0, 1, 2, 3, 4]
    assert [event["number"] for event in all_of(box, events[2]["event_id"])] == [3, 4]
    assert all_of(box, "event_unknown") == all_of(box, "") == events


def test_the_oldest_events_are_dropped_and_tentative_words_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "MAX_CHARACTERS", 1_000)
    box = Outbox()
    for number in range(50):
        box.put("n", number=number)
        box.put(TENTATIVE_EVENT, text=str(number))
    box.close()

    events = all_of(box)

    assert events[-1]["text"] == "49"
    assert [event["number"] for event in events[:-1]] == list(range(51 - len(events), 50))
    assert 5 < len(events) < 20


def test_a_secret_expires() -> None:
    now = 1_000.0
    kept = ClientSecrets[str](lambda: now)

    secret, expires_at = kept.new("settings", 60)

    assert expires_at == 1_060
    assert kept.get(secret) == "settings"
    assert kept.get(secret + "x") is kept.get(None) is None
    now = 1_061
    assert kept.get(secret) is None
