"""Run sherpa-onnx; see `run_client.py`."""

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import sherpa_onnx

SAMPLE_RATE = 16_000


def versions() -> dict[str, str]:
    return {"sherpa-onnx": version("sherpa-onnx")}


def load(job: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    def path(name: str) -> str:
        return os.path.join(job["model"], name)

    recognizer = sherpa_onnx.OfflineRecognizer.from_whisper(
        encoder=path("encoder.onnx"),
        decoder=path("decoder.onnx"),
        tokens=path("tokens.txt"),
        language=job["language"],
        task="transcribe",
        num_threads=1,
        enable_token_timestamps=job["words"],
    )

    def transcribe(samples: Any) -> dict[str, Any]:
        stream = recognizer.create_stream()
        stream.accept_waveform(SAMPLE_RATE, samples)
        recognizer.decode_stream(stream)
        result = stream.result
        timed = zip(result.tokens, result.timestamps, result.durations, strict=False)
        return {"text": result.text, "words": _words(timed) if job["words"] else []}

    return transcribe


def _words(tokens: Any) -> list[list[Any]]:
    """Join tokens (text, start, duration) to words [start, end, text]; each begins with a space."""
    words: list[list[Any]] = []
    for text, start, duration in tokens:
        if words and not text.startswith(" "):
            words[-1][1:] = [start + duration, words[-1][2] + text]
        else:
            words.append([start, start + duration, text])
    return words
