"""Run ONNX Runtime GenAI; see `run_client.py`."""

import io
import json
import wave
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai

MAX_TOKENS = 224  # of a window, as in openai-whisper
SAMPLE_RATE = 16_000
ONE_THREAD = {"session_options": {"intra_op_num_threads": 1, "inter_op_num_threads": 1}}


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("onnxruntime-genai", "onnxruntime")}


def load(job: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    config = onnxruntime_genai.Config(job["model"])
    config.overlay(json.dumps({"model": {"encoder": ONE_THREAD, "decoder": ONE_THREAD}}))
    model = onnxruntime_genai.Model(config)
    processor = model.create_multimodal_processor()
    settings = json.loads((Path(job["model"]) / "generation_config.json").read_bytes())
    language = [f"<|{job['language']}|>", "<|transcribe|>"] if settings["is_multilingual"] else []
    prompt = ["<|startoftranscript|>", *language, "<|notimestamps|>"]
    options = onnxruntime_genai.GeneratorParams(model)
    options.set_search_options(max_length=len(prompt) + MAX_TOKENS)

    def transcribe(samples: Any) -> dict[str, Any]:
        audio = onnxruntime_genai.Audios.open_bytes(_wav(samples))
        generator = onnxruntime_genai.Generator(model, options)
        generator.set_inputs(processor("".join(prompt), audios=audio))
        while not generator.is_done():
            generator.generate_next_token()
        tokens = generator.get_sequence(0)[len(prompt) :]
        return {"tokens": tokens.tolist(), "text": processor.decode(tokens)}

    return transcribe


def _wav(samples: Any) -> bytes:
    """Return a WAV file of samples that had 16 bits: the app reads files."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(np.rint(samples * 32768).astype("<i2").tobytes())
    return buffer.getvalue()
