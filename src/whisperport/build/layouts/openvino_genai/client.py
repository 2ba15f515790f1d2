"""Run OpenVINO GenAI; see `run_client.py`.

The pipeline returns no ids. A streamer is given those of the text, and the segments have the timestamps.
"""

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openvino_genai

FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}  # some processors would compute in bfloat16
# The NPU's plug-in rewrites the graphs and runs their parts on the CPU: no NPU and no driver is needed.
NPUW = {"NPU_USE_NPUW": "YES", "NPUW_DEVICES": "CPU", "NPUW_ONLINE_PIPELINE": "NONE"}
AROUND_TEXT = (
    4 + 1
)  # prompt and end; with word timestamps, a text without room for them ends the process
DEVICES: dict[str, tuple[str, dict[str, Any]]] = {
    "CPU": ("CPU", FLOAT32),
    "NPUW on the CPU": ("NPU", {**NPUW, **FLOAT32}),
    "NPUW on the CPU, static pipeline": ("NPU", {**NPUW, **FLOAT32, "STATIC_PIPELINE": True}),
}


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("openvino", "openvino-genai", "openvino-tokenizers")}


def load(job: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    device, properties = DEVICES[job["device"]]
    names = ("config.json", "generation_config.json")
    sizes, settings = (json.loads((Path(job["model"]) / name).read_bytes()) for name in names)
    # Without alignment heads, the pipeline does not start: a folder of others may have none.
    words = job["words"] and bool(settings.get("alignment_heads"))
    pipeline = openvino_genai.WhisperPipeline(
        job["model"], device, word_timestamps=words, **properties
    )
    config = pipeline.get_generation_config()
    config.return_timestamps, config.word_timestamps = True, words
    config.max_new_tokens = sizes["max_target_positions"] - AROUND_TEXT
    if settings["is_multilingual"]:
        config.language, config.task = f"<|{job['language']}|>", "transcribe"

    def transcribe(samples: Any) -> dict[str, Any]:
        ids: list[int] = []

        class Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]  # it ships no types
            def write(self, token: Any) -> Any:
                ids.extend(token if isinstance(token, list) else [token])
                return openvino_genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        result = pipeline.generate(samples.tolist(), config, Streamer())
        segments = [[c.start_ts, c.end_ts, c.text] for c in result.chunks or ()]
        return {
            "tokens": ids,
            "text": str(result.texts[0]),
            "segments": segments,
            "words": [[w.start_ts, w.end_ts, w.word] for w in result.words or ()],
        }

    return transcribe
