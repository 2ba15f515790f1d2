"""Run onnx-asr; see `run_client.py`."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import onnx_asr
import onnxruntime

N_PROMPT = 4  # tokens: start, language, task, no timestamps
QUANTIZATIONS = {"fp32": None, "fp16": "fp16", "w8": "quantized"}


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("onnx-asr", "onnxruntime")}


def load(job: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model = onnx_asr.load_model(
        "whisper",
        job["model"],
        quantization=QUANTIZATIONS[job["precision"]],
        sess_options=options,
        providers=["CPUExecutionProvider"],
    )
    decode_tokens = model.asr._decode_tokens
    sequences: list[Any] = []

    def decode(tokens: Any) -> Any:
        sequences.append(tokens.tolist())
        return decode_tokens(tokens)

    model.asr._decode_tokens = decode  # the app returns no ids

    def transcribe(samples: Any) -> dict[str, Any]:
        text = model.recognize(samples, language=job["language"])
        tokens = sequences.pop()[N_PROMPT:]
        end = model.asr._eos_token_id
        return {"text": text, "tokens": tokens[: tokens.index(end)] if end in tokens else tokens}

    return transcribe
