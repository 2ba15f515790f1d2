"""Usual mistakes with the input of an encoder."""

from dataclasses import replace

import numpy as np

from whisperport.speech.audio import log_mel
from whisperport.verification.diagnosis.wrong_inputs import input_mistakes

from ..micro import DIMS


def test_every_mistake_makes_another_input_of_the_right_shape() -> None:
    # given two seconds of noise, and a window of three
    audio = np.random.default_rng(0).standard_normal(32000).astype(np.float32) / 10
    dims = replace(DIMS, n_mels=80, n_audio_ctx=150)
    right = log_mel(audio, dims.n_mels, n_frames=dims.n_frames)

    # when
    made = [mistake.spectrogram(audio, dims) for mistake in input_mistakes(dims)]

    # then
    wrong = [mel for mel in made if mel is not None]  # the others begin after the audio
    assert len(wrong) > 20
    assert all(mel.shape == right.shape for mel in wrong)
    assert not any(np.array_equal(mel, right) for mel in wrong)
