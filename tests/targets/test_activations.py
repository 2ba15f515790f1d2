"""Activations that 8 bits ruin, and files that are replaced by their quantized form."""

import math
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.errors import LoweringError, MissingPackageError
from whisperport.targets.activations import MIN_SQNR_DB, Activation
from whisperport.targets.quantizing import replace_by_quantized

# Activations that 8 bits ruin are found by their frames, and described by channel and frames.


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


def test_a_channel_that_is_massive_in_every_frame_is_found() -> None:
    values = noise(0)
    values[..., 3] *= 2000

    assert activation(values).sqnr_db() < 0


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


# A file is replaced by its quantized form completely, or not at all.

NAMES = {"failure": "it could not quantize", "missing": "it is absent", "target": "t", "extra": "e"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step.bin"
    path.write_bytes(b"float")
    path.chmod(0o640)
    return path


def test_the_file_is_replaced_and_keeps_its_mode(file: Path) -> None:
    def quantize(source: Path, made: Path) -> None:
        made.with_name("temporary").write_bytes(b"")
        made.write_bytes(source.read_bytes() + b" as integers")

    replace_by_quantized(file, quantize, **NAMES)

    assert file.read_bytes() == b"float as integers"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("error", "expected", "what", "why"),
    [
        (
            KeyError("x"),
            LoweringError,
            "it could not quantize step.bin for `t`",
            "KeyError: 'x'",
        ),
        (RuntimeError(), LoweringError, "for `t`", "RuntimeError: "),
        (RuntimeError("first\nsecond"), LoweringError, "for `t`", "RuntimeError: first"),
        (ImportError("no q"), MissingPackageError, "cannot quantize for `t`: it is absent", "no q"),
    ],
)
def test_after_an_error_the_file_is_unchanged(
    file: Path, error: Exception, expected: Any, what: str, why: str
) -> None:
    def quantize(source: Path, made: Path) -> None:
        made.write_bytes(b"half")
        raise error

    with pytest.raises(expected) as raised:
        replace_by_quantized(file, quantize, **NAMES)

    assert what in raised.value.what
    assert raised.value.why == why
    assert raised.value.hint
    assert file.read_bytes() == b"float"
    assert list(file.parent.iterdir()) == [file]


def test_a_quantizer_that_writes_nothing_is_an_error(file: Path) -> None:
    with pytest.raises(LoweringError):
        replace_by_quantized(file, lambda source, made: None, **NAMES)

    assert file.read_bytes() == b"float"
