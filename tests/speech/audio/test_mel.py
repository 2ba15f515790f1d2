"""The log-mel spectrogram, against openai-whisper and transformers."""

import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import whisper
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from whisperport.errors import AudioError
from whisperport.speech.audio import HOP_LENGTH, SAMPLE_RATE, log_mel, mel_filters

# The brief's bound. Measured: 7e-5 for a full-scale tone, where torch's own float32 transform is
# 5e-5 away from one in float64 and ours 2e-5; 1e-5 for noise.
ATOL = 1e-4


@cache
def signal(name: str) -> NDArray[np.float32]:
    rng = np.random.default_rng(7)
    n_samples = 30 * SAMPLE_RATE
    t = np.arange(n_samples) / SAMPLE_RATE
    made = {
        "noise": 0.1 * rng.standard_normal(n_samples),
        "tone": 0.9 * np.sin(2 * np.pi * 764 * t),
        "silence": np.zeros(n_samples),
        "hiss": 1e-5 * rng.standard_normal(n_samples),
        "burst": np.where(t < 0.3, 0.3 * rng.standard_normal(n_samples), 0.0),
    }
    return made[name].astype(np.float32)


SIGNALS = ["noise", "tone", "silence", "hiss", "burst"]


@pytest.mark.parametrize("n_mels", [80, 128])
def test_computed_filters_are_the_ones_openai_ships(n_mels: int) -> None:
    assets = Path(whisper.__file__).parent / "assets" / "mel_filters.npz"
    with np.load(assets, allow_pickle=False) as shipped:
        expected = shipped[f"mel_{n_mels}"]

    computed = mel_filters(n_mels)

    assert computed.dtype == np.float32
    np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-6)  # measured: 4e-9


@pytest.mark.parametrize("n_mels", [80, 128])
@pytest.mark.parametrize("name", SIGNALS)
def test_a_window_equals_openai_whisper(name: str, n_mels: int) -> None:
    samples = signal(name)

    mel = log_mel(samples, n_mels)

    expected = whisper.log_mel_spectrogram(samples, n_mels).numpy()
    assert mel.shape == (n_mels, 3000)
    assert mel.dtype == np.float32
    np.testing.assert_allclose(mel, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("n_mels", [80, 128])
@pytest.mark.parametrize("name", SIGNALS)
def test_a_window_padded_to_30_s_equals_transformers(name: str, n_mels: int) -> None:
    samples = signal(name)[: 7 * SAMPLE_RATE + 13]

    mel = log_mel(samples, n_mels, n_frames=3000)

    extractor = WhisperFeatureExtractor(feature_size=n_mels)
    expected = extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="np").input_features[0]
    np.testing.assert_allclose(mel, expected, rtol=0, atol=ATOL)


def test_a_audio_file_with_30_s_of_zeros_equals_what_openai_transcribes() -> None:
    samples = np.concatenate([signal("burst"), signal("hiss")[:12345]])

    mel = log_mel(np.pad(samples, (0, 30 * SAMPLE_RATE)), 80)

    expected = whisper.log_mel_spectrogram(samples, 80, padding=30 * SAMPLE_RATE).numpy()
    np.testing.assert_allclose(mel, expected, rtol=0, atol=ATOL)


def test_the_floor_is_set_by_the_array_given_so_cutting_later_differs() -> None:
    loud_then_hiss = np.concatenate([signal("tone"), signal("hiss")])

    whole = log_mel(loud_then_hiss, 80)[:, 3010:]
    alone = log_mel(signal("hiss"), 80)[:, 10:]

    assert np.ptp(whole) == 0.0  # everything is below the floor
    assert np.ptp(alone) > 0.3


@given(n_samples=st.integers(201, 60_000), n_mels=st.sampled_from([1, 20, 80, 128]))
@settings(max_examples=40)
def test_any_length_gives_one_frame_per_10_ms(n_samples: int, n_mels: int) -> None:
    samples = signal("noise")[:n_samples]

    mel = log_mel(samples, n_mels)

    assert mel.shape == (n_mels, n_samples // HOP_LENGTH)
    assert np.isfinite(mel).all()
    assert np.ptp(mel) <= 2.0 + 1e-6  # 8 powers of ten, over 4


@given(n_samples=st.integers(0, 30_000), n_frames=st.integers(2, 150))
@settings(max_examples=40)
def test_n_frames_pads_or_cuts_before_anything_else(n_samples: int, n_frames: int) -> None:
    samples = signal("noise")[:n_samples]
    wanted = n_frames * HOP_LENGTH

    mel = log_mel(samples, 80, n_frames=n_frames)

    by_hand = np.pad(samples[:wanted], (0, max(0, wanted - n_samples)))
    np.testing.assert_array_equal(mel, log_mel(by_hand, 80))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (np.zeros((2, 400), np.float32), r"shape \(2, 400\)"),
        (np.zeros(400, np.int16), "int16 samples"),
        (np.full(400, np.nan, np.float32), "NaN or an infinity"),
        (np.full(400, np.inf, np.float32), "NaN or an infinity"),
        (np.zeros(200, np.float32), "200 samples are too few"),
    ],
)
def test_samples_without_a_spectrogram_are_rejected(
    samples: NDArray[np.float32], expected: str
) -> None:
    with pytest.raises(AudioError, match=expected):
        log_mel(samples, 80)


def test_a_window_takes_less_than_one_two_hundredth_of_its_length() -> None:
    samples = signal("noise")
    log_mel(samples, 80)  # builds the filters

    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        log_mel(samples, 80)
        seconds.append(time.perf_counter() - start)

    assert min(seconds) < 30 / 200  # measured: 5 ms on one thread


@pytest.mark.parametrize("n_mels", [80, 128])
def test_every_matmul_is_too_small_for_threads_of_openblas(
    n_mels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A matmul of (M, K) and (K, N) runs on the calling thread if M * N * K is at most
    # SMP_THRESHOLD_MIN * GEMM_MULTITHREAD_THRESHOLD: OpenMathLib/OpenBLAS, interface/gemm.c and param.h.
    sizes: list[int] = []
    matmul = np.matmul

    def recorded(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
        sizes.append(a.shape[0] * a.shape[1] * b.shape[1])
        return matmul(a, b, out=out)

    monkeypatch.setattr(np, "matmul", recorded)
    log_mel(signal("noise"), n_mels)

    assert sizes
    assert max(sizes) <= 65536 * 4
