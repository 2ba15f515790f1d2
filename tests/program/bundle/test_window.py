"""The window in a bundle's manifest, which is present only if it differs from the checkpoint's."""

import json
from dataclasses import replace
from typing import Any

import pytest

from whisperport.errors import BundleError
from whisperport.program.bundle import Manifest
from whisperport.program.window import Window

WINDOW = Window(positions=6, audio_positions=5, context_positions=9, padding="features")


def test_a_window_survives_writing_and_reading(manifest: Manifest) -> None:
    shorter = replace(manifest, window=WINDOW)

    assert Manifest.from_bytes(shorter.to_bytes()) == shorter


def test_the_checkpoints_own_window_is_not_written(manifest: Manifest) -> None:
    assert "window" not in json.loads(manifest.to_bytes())
    assert Manifest.from_bytes(manifest.to_bytes()).window is None


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {},
        {**WINDOW.to_json(), "padding": "mirror"},
        {**WINDOW.to_json(), "padding": 1},
        {**WINDOW.to_json(), "padding": "none"},
        {**WINDOW.to_json(), "context_positions": 5},
        {**WINDOW.to_json(), "audio_positions": 0},
        {**WINDOW.to_json(), "positions": -6},
        {**WINDOW.to_json(), "positions": 6.0},
        {**WINDOW.to_json(), "seconds": 10},
        {name: size for name, size in WINDOW.to_json().items() if name != "context_positions"},
        Window(positions=5, audio_positions=5, context_positions=9, padding="features").to_json(),
    ],
)
def test_a_window_that_cannot_be_is_refused_by_name(manifest: Manifest, wrong: Any) -> None:
    with pytest.raises(BundleError, match="window"):
        Manifest.from_json({**manifest.to_json(), "window": wrong})
