"""Two mistakes with the input of an encoder, which are made and named together."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.audio import log_mel
from whisperport.diagnosis.causes import CauseCode
from whisperport.diagnosis.diagnosing import diagnose
from whisperport.diagnosis.expected import Alternative, Expected, ExpectedTensor
from whisperport.diagnosis.search import likely_pairs
from whisperport.diagnosis.wrong_inputs import InputMistake, input_mistakes, wrong_input
from whisperport.program.dims import Dims

from ..extent import core_or_all

DIMS = Dims(
    n_mels=80,
    n_audio_ctx=150,
    n_audio_state=32,
    n_audio_head=2,
    n_audio_layer=1,
    n_text_ctx=16,
    n_text_state=32,
    n_text_head=2,
    n_text_layer=1,
    n_vocab=100,
    n_audio_ffn=128,
    n_text_ffn=128,
)
CLIPS = ("first", "second")
MISTAKES = tuple(input_mistakes(DIMS))
_C = CauseCode


def audio(clip: str) -> Any:
    """Two seconds of tones that change every quarter of a second, another order for each clip."""
    random = np.random.default_rng(CLIPS.index(clip))
    t = np.arange(4000) / 16000
    parts = [np.sin(2 * np.pi * pitch * t) for pitch in random.uniform(150, 3000, 8)]
    noise = 0.01 * random.standard_normal(32000)
    return (0.3 * np.concatenate(parts) + noise).astype(np.float32)


def encoded(mel: Any) -> Any:
    """(1, T, 32): a small imagined encoder that reads two frames at a time."""
    weights = np.random.default_rng(7).standard_normal((160, 32)) / 13
    pairs = mel.T.reshape(DIMS.n_audio_ctx, 160)
    return np.tanh(pairs @ weights + np.roll(pairs, 1, axis=0) @ weights[::-1])[None].astype(
        np.float32
    )


def outputs(clip: str, *mistakes: InputMistake) -> Mapping[str, Any] | None:
    mel = wrong_input(audio(clip), DIMS, *mistakes)
    return None if mel is None else {"features": encoded(mel)}


@lru_cache
def alternatives() -> tuple[Alternative, ...]:
    found = [
        Alternative(_C.OTHER_CLIP, "It is another clip.", outputs("second") or {}, "", "second")
    ]
    for mistake in MISTAKES:
        if arrays := outputs("first", mistake):
            found.append(Alternative(mistake.cause, mistake.sentence, arrays, mistake=mistake))
    return tuple(found)


def both(first: Alternative, second: Alternative) -> Mapping[str, Any] | None:
    mistakes = (a.mistake for a in (first, second) if a.mistake)
    return outputs(first.clip or second.clip or "first", *mistakes)


def mistake(cause: CauseCode) -> InputMistake:
    return next(m for m in MISTAKES if m.cause is cause)


def test_an_input_without_a_mistake_is_the_right_spectrogram() -> None:
    right = log_mel(audio("first"), DIMS.n_mels, n_frames=DIMS.n_frames)

    assert np.array_equal(wrong_input(audio("first"), DIMS), right)


def test_every_mistake_changes_the_input() -> None:
    right = wrong_input(audio("first"), DIMS)

    wrong = [wrong_input(audio("first"), DIMS, one) for one in MISTAKES]

    assert all(mel.shape == right.shape for mel in wrong if mel is not None)
    assert not any(np.array_equal(mel, right) for mel in wrong if mel is not None)


def test_two_mistakes_in_one_step_have_no_input() -> None:
    windows = [one for one in MISTAKES if one.cause is _C.OTHER_WINDOW]

    assert wrong_input(audio("first"), DIMS, *windows[:2]) is None
    assert (
        wrong_input(audio("first"), DIMS, mistake(_C.NATURAL_LOG), mistake(_C.MEL_TRANSPOSED))
        is None
    )


def test_no_pair_is_tried_twice_and_none_excludes_itself() -> None:
    ranked = alternatives()

    pairs = list(likely_pairs(ranked))

    assert len({frozenset(map(id, pair)) for pair in pairs}) == len(pairs)
    assert not any(first.excludes(second) for first, second in pairs)


@pytest.mark.parametrize(
    ("clip", "causes"),
    [
        ("second", (_C.NATURAL_LOG,)),
        *core_or_all((), [("second", (_C.OTHER_WINDOW,))]),
        *core_or_all((), [("first", (_C.OTHER_WINDOW, _C.WRONG_MEL_BINS))]),
    ],
)
def test_two_mistakes_with_the_input_are_named(
    clip: str, causes: tuple[CauseCode, ...], tmp_path: Path
) -> None:
    # given
    made = outputs(clip, *map(mistake, causes))
    tensor = ExpectedTensor("features", (outputs("first") or {})["features"], 1)
    expected = Expected(
        "encoder", "first", (tensor,), make_alternatives=alternatives, make_both=both
    )
    path = tmp_path / "output.bin"
    path.write_bytes((made or {})["features"].tobytes())

    # when
    found = diagnose(expected, path)

    # then
    assert set(found.causes) == {*causes, *([_C.OTHER_CLIP] if clip == "second" else [])}
