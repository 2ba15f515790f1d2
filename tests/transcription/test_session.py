"""The language in which a session transcribes an audio file."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from whisperport.program.runner import Runner
from whisperport.runtime import DecodeOptions, Decoder, Engine
from whisperport.speech.text import Tokenizer
from whisperport.transcription import TranscribeOptions
from whisperport.transcription.session import Session, spoken_language

from ..micro import DIMS, GENERATION, tokenizer_json


class UnreadMel:
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

    assert spoken_language(decoder, None, UnreadMel(), 0).code == language


class Counting(Runner):
    """A runner that keeps what it was given."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.spec)
        self.runner, self.given = runner, []

    def _run(self, inputs: Any) -> Any:
        self.given.append([array.copy() for array in inputs])
        return list(self.runner.run(dict(zip(self.names, inputs, strict=True))).values())

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensor in self.spec.inputs]


class Noise:
    """The spectrogram of an audio file of so many frames; silence is -1."""

    def __init__(self, frames: int) -> None:
        self.frames, self.duration_s = frames, frames / 100
        self.whole = np.random.default_rng(0).standard_normal((8, frames)).astype(np.float32)

    def window(self, start: int) -> Any:
        found = np.full((8, 20), -1, np.float32)
        rest = self.whole[:, start : start + 20]
        found[:, : rest.shape[1]] = rest
        return found, rest.shape[1]


@pytest.mark.parametrize(
    ("frames", "runs"),
    [(20, 1), (60, 3), (10, 2)],  # of the last, language and text are read from unequal windows
)
def test_the_window_in_which_the_language_is_detected_is_not_encoded_again(
    micro: Any, eager_runners: Any, frames: int, runs: int
) -> None:
    runners = eager_runners(micro)
    encoder = Counting(runners["encoder"])
    tables = (
        part.numpy()
        for part in (micro.decoder.token_embedding.weight, micro.decoder.positional_embedding)
    )
    engine = Engine(DIMS, GENERATION, {**runners, "encoder": encoder}, *tables)
    decode = DecodeOptions(max_tokens=4, without_timestamps=True)
    options = TranscribeOptions(decode=decode, temperatures=(0.0,))
    tokenizer = Tokenizer.from_json(tokenizer_json(), GENERATION)
    session = Session(engine, tokenizer, options, Noise(frames), None, [(0, None)])

    session.run(Decoder(engine), lambda *_: None)

    assert len(encoder.given) == runs
    windows = [given[0].tobytes() for given in encoder.given]
    assert len(set(windows)) == len(windows)
