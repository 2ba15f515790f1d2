"""Windows of a spectrogram are parts of the spectrogram of the complete file, whether it is kept or not."""

from typing import Any

import numpy as np
import pytest

from whisperport.speech.audio import AudioStream, MelWindows, log_mel, mel_windows

WINDOW = 3000
SECOND = 16_000


@pytest.mark.parametrize("kept", [0, mel_windows.LARGEST_KEPT])
@pytest.mark.parametrize(
    "n_samples", [160, 201, 30 * SECOND - 1, 30 * SECOND, 30 * SECOND + 200, 62 * SECOND + 37]
)
def test_every_frame_is_that_of_the_complete_file_and_silence(n_samples: int, kept: int) -> None:
    noise = np.random.default_rng(n_samples).uniform(-0.5, 0.5, n_samples).astype(np.float32)
    complete = log_mel(np.pad(noise, (0, 2 * WINDOW * 160)), 80)
    windows, n_audio = MelWindows(noise, 80, WINDOW, largest_kept=kept), n_samples // 160
    # At the end of the audio, the frames around it contain some of its samples.
    for start in sorted({0, 137, WINDOW - 1, WINDOW, n_audio - 1, n_audio, n_audio + 2}):
        if start <= n_audio + 2:
            found, with_audio = windows.window(start)
            # Rounding of float32: a product of matrices depends on the place of a frame in it.
            np.testing.assert_allclose(found, complete[:, start : start + WINDOW], atol=1e-6)
            assert with_audio == min(max(n_audio - start, 0), WINDOW)
    assert windows.duration_s == n_samples / SECOND


def test_a_short_file_is_read_once_and_a_long_one_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[AudioStream] = []

    class Counted(AudioStream):
        def __init__(self, *given: Any, **named: Any) -> None:
            opened.append(self)
            super().__init__(*given, **named)

    monkeypatch.setattr(mel_windows, "AudioStream", Counted)
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 40 * SECOND).astype(np.float32)
    MelWindows(noise, 80, WINDOW).window(0)
    assert len(opened) == 1
    MelWindows(noise, 80, WINDOW, largest_kept=4 * 80 * 3999).window(0)
    assert len(opened) == 3


def test_frames_have_the_same_bits_whether_they_are_kept_or_not() -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 100 * SECOND).astype(np.float32)
    kept, computed = (MelWindows(noise, 80, WINDOW, largest_kept=n) for n in (2**30, 0))

    for start, n_frames in ((0, WINDOW), (137, 500), (2900, WINDOW), (8000, WINDOW), (9999, 200)):
        found, n_audio = computed.window(start, n_frames)
        expected, n_expected = kept.window(start, n_frames)
        assert n_audio == n_expected
        assert found.tobytes() == expected.tobytes()
