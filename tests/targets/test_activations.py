"""Activations that 8 bits ruin are found by their frames, and described by channel and frames."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.targets.activations import MIN_SQNR_DB, Activation


def activation(*samples: np.ndarray) -> Activation:
    found = Activation("mlp.2")
    for sample in samples:
        found.add(sample)
    return found


def noise(seed: int, frames: int = 200, channels: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, frames, channels)).astype(np.float32)


def massive(value: float, channel: int = 3, frames: tuple[int, ...] = (190, 195)) -> np.ndarray:
    values = noise(0)
    values[:, frames, channel] = value
    return values


def test_a_typical_activation_has_the_noise_of_one_step() -> None:
    values = noise(0)
    step = (values.max() - values.min()) / 255
    rounded = np.round(values / step) * step
    measured = 10 * math.log10(np.mean(values**2) / np.mean((rounded - values) ** 2))

    assert activation(values).sqnr_db() == pytest.approx(measured, abs=0.5)


def test_16_bits_have_48_db_more() -> None:
    found = activation(noise(0))

    assert found.sqnr_db(16) == pytest.approx(found.sqnr_db(8) + 48.2, abs=0.1)


@pytest.mark.parametrize("value", [-900.0, 900.0])
def test_a_massive_channel_in_few_frames_is_found_although_the_sqnr_of_the_tensor_is_good(
    value: float,
) -> None:
    values = massive(value)
    step = (values.max() - values.min()) / 255
    of_tensor = 10 * math.log10(12 * np.mean(values**2) / step**2)

    found = activation(noise(1), values)

    assert of_tensor > MIN_SQNR_DB
    assert found.sqnr_db() < 0
    assert str(found).startswith(f"mlp.2: channel 3 reaches {value:.4g}, ")
    assert "in 2 of 400 frames" in str(found)


@given(factor=st.floats(1e-6, 1e6), shift=st.integers(0, 15))
def test_scale_and_order_of_channels_change_nothing_but_the_channel(
    factor: float, shift: int
) -> None:
    before = activation(massive(-500.0))
    after = activation(np.roll(massive(-500.0), shift, axis=-1) * np.float64(factor))

    assert after.sqnr_db() == pytest.approx(before.sqnr_db(), abs=1e-3)
    assert f"channel {(3 + shift) % 16} reaches" in str(after)


def test_zeros_are_exact() -> None:
    zeros = np.zeros((1, 4, 2), np.float32)
    spike = zeros.copy()
    spike[0, 0, 0] = 1

    assert activation(zeros).sqnr_db() == activation(spike).sqnr_db() == math.inf
