"""openai-whisper's argument names are keyword arguments of `transcribe`."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from whisperport.errors import UsageError
from whisperport.runtime import DecodeOptions, Thresholds
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.transcription.transcriber import TranscribeArguments, with_arguments


def test_the_arguments_are_the_fields_of_the_options() -> None:
    parts = (TranscribeOptions, DecodeOptions, Thresholds)
    names = {field.name for part in parts for field in fields(part)}

    assert set(TranscribeArguments.__annotations__) == names - {
        *("decode", "run", "thresholds", "prompt")
    }


def test_arguments_replace_the_values_of_the_options() -> None:
    options = TranscribeOptions(decode=DecodeOptions(language="de", beam_size=2), prefix="a")

    found = with_arguments(
        options,
        {"language": "en", "temperature": 0.2, "logprob_threshold": None, "initial_prompt": None},
    )

    assert found == TranscribeOptions(
        decode=DecodeOptions(language="en", beam_size=2),
        prefix="a",
        temperatures=(0.2,),
        thresholds=Thresholds(logprob_threshold=None),
    )


@pytest.mark.parametrize(("name", "hint"), [("langage", "`language`"), ("qqq", "word_timestamps")])
def test_an_unknown_argument_is_a_usage_error_with_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        with_arguments(None, {name: 1})

    assert hint in raised.value.hint


def test_a_transcriber_accepts_arguments(exported: Any) -> None:
    transcriber = Transcriber(exported("onnxruntime").folder, RunOptions(trust=True))

    found = transcriber.transcribe(
        np.zeros(16_000, np.float32),
        language="de",
        max_tokens=2,
        temperature=0,
        without_timestamps=True,
    )

    assert found.language == "de"
