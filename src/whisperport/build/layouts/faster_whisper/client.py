"""Run faster-whisper; see `run_client.py`."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from faster_whisper import WhisperModel


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("faster-whisper", "ctranslate2", "tokenizers")}


def load(job: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    compute_type = "int8_float32" if job["precision"] == "w8" else "float32"
    model = WhisperModel(job["model"], device="cpu", compute_type=compute_type, cpu_threads=1)

    def segments_of(samples: Any, *, words: bool) -> list[Any]:
        segments, _ = model.transcribe(
            samples,
            language=job["language"] if model.model.is_multilingual else "en",
            beam_size=1,
            best_of=1,
            temperature=0.0,
            condition_on_previous_text=False,
            no_speech_threshold=None,
            log_prob_threshold=None,
            compression_ratio_threshold=None,
            word_timestamps=words,
        )
        return list(segments)

    def transcribe(samples: Any) -> dict[str, Any]:
        # Word timestamps change the times of the segments, and where the next window begins.
        segments = segments_of(samples, words=False)
        with_words = segments_of(samples, words=True) if job["words"] else []
        return {
            "tokens": [token for segment in segments for token in segment.tokens],
            "text": "".join(segment.text for segment in segments),
            "segments": [[segment.start, segment.end, segment.text] for segment in segments],
            "words": [[w.start, w.end, w.word] for s in with_words for w in s.words],
        }

    return transcribe
