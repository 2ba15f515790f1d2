"""A multilingual model: the language is detected, and speech is translated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whisperport.runtime import DecodeOptions
from whisperport.speech.audio import load_audio
from whisperport.speech.text import LANGUAGES
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.verification.clips import shipped_audio

from ...wav import write_wav
from .test_transcriptions import URL, post

ENGLISH = "/v1/audio/translations"


@pytest.fixture(scope="module")
def transcriber(exported: Callable[..., Any]) -> Transcriber:
    return Transcriber(exported("onnxruntime", "micro", batch=2), RunOptions(threads=1))


@pytest.mark.parametrize(
    ("url", "language", "decode"),
    [
        (URL, "", DecodeOptions()),
        (URL, "de", DecodeOptions(language="de")),
        (ENGLISH, "", DecodeOptions(task="translate")),
    ],
)
def test_language_and_task_are_those_of_the_transcriber(
    client: Any,
    transcriber: Transcriber,
    tmp_path: Path,
    url: str,
    language: str,
    decode: DecodeOptions,
) -> None:
    clip = write_wav(tmp_path / "three windows.wav", load_audio(shipped_audio()[0].path)[:8000])
    expected = transcriber.transcribe(clip, TranscribeOptions(decode=decode))
    fields = {"response_format": "verbose_json"} | ({"language": language} if language else {})

    found = post(client, fields, url=url, file=clip.read_bytes()).json()

    assert found["text"] == expected.text != ""
    assert [one["tokens"] for one in found["segments"]] == [
        list(one.tokens) for one in expected.segments
    ]
    shown = "en" if decode.task == "translate" else expected.language
    assert (found["task"], found["language"]) == (decode.task, LANGUAGES[shown])
