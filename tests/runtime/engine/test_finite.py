"""A NaN or an infinity that a program returns is an error that names the program, never text."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from whisperport.errors import NumericalError
from whisperport.model.network.whisper import Whisper
from whisperport.program.runner import Runner
from whisperport.runtime import DecodeOptions, Decoder, Engine, decode_window

from ...micro import DIMS, GENERATION

TEXT = DecodeOptions(language="en", without_timestamps=True)
MEL = np.zeros((DIMS.n_mels, DIMS.n_frames), np.float32)
Change = Callable[[np.ndarray], np.ndarray]


class Changed(Runner):
    """A runner with one of its outputs changed."""

    def __init__(self, runner: Runner, output: str, change: Change) -> None:
        super().__init__(runner.spec)
        self.runner, self.output, self.change = runner, output, change

    def _run(self, inputs: Any) -> Any:
        names = [tensor.name for tensor in self.spec.inputs]
        outputs = self.runner.run(dict(zip(names, inputs, strict=True)))
        return list((outputs | {self.output: self.change(outputs[self.output])}).values())


@pytest.fixture
def with_output(micro: Whisper, eager_runners: Any) -> Callable[..., Decoder]:
    """`with_output(program, output, change)`: a decoder over the micro model, one program changed."""

    def make(program: str, output: str, change: Change) -> Decoder:
        runners = eager_runners(micro)
        runners[program] = Changed(runners[program], output, change)
        tables = micro.decoder.token_embedding.weight, micro.decoder.positional_embedding
        return Decoder(Engine(DIMS, GENERATION, runners, *(table.numpy() for table in tables)))

    return make


def one(value: float) -> Change:
    """The last value becomes `value`."""

    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.flat[-1] = value
        return array

    return change


def transcribe(decoder: Decoder) -> None:
    decoded = decode_window(decoder, decoder.engine.encode(MEL), TEXT)
    decoder.align([*decoded.tokens, GENERATION.end_of_text])


PROGRAMS = [
    ("encoder", "features"),
    ("cross_kv", "cross_k_0"),
    ("cross_kv", "cross_v_1"),
    ("prefill_4", "logits"),
    ("step", "logits"),
    ("align", "scores"),
    ("align", "rows"),
]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("program", "output"), PROGRAMS)
def test_a_value_that_is_not_finite_is_an_error_that_names_the_program(
    with_output: Any, program: str, output: str, value: float
) -> None:
    decoder = with_output(program, output, one(value))

    with pytest.raises(NumericalError, match=f"the program `{program}` returned") as caught:
        transcribe(decoder)

    assert caught.value.program == program
    assert caught.value.why.startswith("1 of ")
    assert f"`{output}`" in caught.value.why
    assert "whisperport verify" in caught.value.hint


@pytest.mark.parametrize(("program", "output"), PROGRAMS)
def test_large_values_are_no_error(with_output: Any, program: str, output: str) -> None:
    """Their sum and their squares overflow; they themselves do not."""
    huge = np.finfo(np.float32).max
    decoder = with_output(program, output, lambda array: np.full_like(array, huge))

    if program == "encoder":
        assert (decoder.engine.encode(MEL) == huge).all()
    elif program == "cross_kv":
        decoder.start_window(np.zeros((DIMS.n_audio_ctx, DIMS.n_audio_state), np.float32))
    else:
        decoder.start_window(np.zeros((DIMS.n_audio_ctx, DIMS.n_audio_state), np.float32))
        decoder.prefill([1, 2, 3])
        decoder.step(4)
        decoder.align([1, 2])


@pytest.mark.parametrize("table", ["embedding", "positions"])
def test_a_table_that_is_not_finite_is_an_error_that_names_the_tables(
    micro: Whisper, eager_runners: Any, table: str
) -> None:
    tables = {
        "embedding": micro.decoder.token_embedding.weight.numpy().copy(),
        "positions": micro.decoder.positional_embedding.numpy().copy(),
    }
    tables[table][:, 0] = np.nan
    decoder = Decoder(Engine(DIMS, GENERATION, eager_runners(micro), **tables))

    with pytest.raises(NumericalError, match="the bundle's tables contain"):
        transcribe(decoder)
