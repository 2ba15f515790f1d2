"""Of a session: which language a recording is heard in."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from whisperport.transcription.session import spoken_language

from ..micro import GENERATION


class Unheard:
    """A spectrogram of which no window may be asked for."""

    duration_s = None

    def window(self, start: int) -> Any:
        raise AssertionError("no window is needed")


@pytest.mark.parametrize(
    ("generation", "language"),
    [
        (replace(GENERATION, language="de"), "de"),
        (replace(GENERATION, languages={}, tasks={}), "en"),
    ],
)
def test_no_window_is_encoded_for_a_language_that_is_known_beforehand(
    generation: Any, language: str
) -> None:
    decoder: Any = SimpleNamespace(engine=SimpleNamespace(generation=generation))

    assert spoken_language(decoder, None, Unheard(), 0) == language
