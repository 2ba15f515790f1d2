"""Run sherpa-onnx; see `run_client.py`."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from string import punctuation
from typing import Any

import sherpa_onnx

SAMPLE_RATE = 16_000
MARKS = "\"'.。,，!！?？:：”)]}、"  # joined to the word before them


def versions() -> dict[str, str]:
    return {"sherpa-onnx": version("sherpa-onnx")}


def load(job: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    def path(end: str) -> str:  # the app's own models have names such as tiny-encoder.int8.onnx
        return str(min(Path(job["model"]).glob(f"*{end}")))

    recognizer = sherpa_onnx.OfflineRecognizer.from_whisper(
        encoder=path("encoder*.onnx"),
        decoder=path("decoder*.onnx"),
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
    """Join tokens (text, start, duration) to words [start, end, text].

    A word begins with a space or a mark. A mark after a word belongs to it, but its time does not, as in
    openai-whisper.
    """
    words: list[list[Any]] = []
    for text, start, duration in tokens:
        if words and text in MARKS:
            words[-1][2] += text
        elif words and not text.startswith(" ") and text not in punctuation:
            words[-1][1:] = [start + duration, words[-1][2] + text]
        else:
            words.append([start, start + duration, text])
    return words
