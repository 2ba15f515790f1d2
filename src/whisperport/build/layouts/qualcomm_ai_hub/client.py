"""Do what Qualcomm AI Hub's app does on a device, in the simulator of the chip; see `run_client.py`.

The app runs on devices only. This is its loop once more, in Python: `HfWhisperApp` of qai-hub-models
0.65.0, models/templates/hf_whisper/app.py, with the feature extractor and the tokenizer that it uses.
"""

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

PROVIDER = "QNNExecutionProvider"
POSITIONS, HIDDEN = 200, -100.0
SAMPLE_RATE = 16_000


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("onnxruntime-qnn", "transformers")}


def load(job: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    from transformers import WhisperFeatureExtractor, WhisperTokenizer

    folder = Path(job["model"])
    encoder, decoder = (
        _session(folder / name) for name in ("HfWhisperEncoder", "HfWhisperDecoder")
    )
    extract = WhisperFeatureExtractor.from_pretrained(folder)
    tokenizer = WhisperTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    start, end = config["decoder_start_token_id"], config["eos_token_id"]
    layers, heads = config["decoder_layers"], config["decoder_attention_heads"]
    width = config["d_model"] // heads
    audio_names = [f"{kind}_cache_cross_{i}" for i in range(layers) for kind in "kv"]
    cache_names = [f"{kind}_cache_self_{i}" for i in range(layers) for kind in "kv"]
    shapes = [(heads, 1, width, POSITIONS - 1), (heads, 1, POSITIONS - 1, width)] * layers
    outputs = ["logits", *(f"{name}_out" for name in cache_names)]

    def transcribe(samples: Any) -> dict[str, Any]:
        features = extract(samples, sampling_rate=SAMPLE_RATE, return_tensors="np").input_features
        audio = encoder.run(audio_names, {"input_features": features.astype(np.float32)})
        fixed = dict(zip(audio_names, audio))  # noqa: B905  # Python 3.9 has no `strict`
        caches = [np.zeros(shape, np.float32) for shape in shapes]
        mask = np.full((1, 1, 1, POSITIONS), HIDDEN, np.float32)
        tokens = [start]
        for n in range(POSITIONS - 1):
            mask[..., POSITIONS - n - 1] = 0
            cached = {f"{name}_in": cache for name, cache in zip(cache_names, caches)}  # noqa: B905
            logits, *caches = decoder.run(
                outputs,
                {
                    "input_ids": np.array([[tokens[-1]]], np.int32),
                    "attention_mask": mask,
                    "position_ids": np.array([n], np.int32),
                    **cached,
                    **fixed,
                },
            )
            tokens.append(int(logits.argmax()))
            if tokens[-1] == end:
                break
        emitted = [token for token in tokens[1:] if token != end]
        return {
            "text": tokenizer.decode(emitted, skip_special_tokens=True).strip(),
            "tokens": emitted,
        }

    return transcribe


def _session(folder: Path) -> Any:
    """Load a compiled file in the simulator of its chip."""
    import onnxruntime
    import onnxruntime_qnn

    if PROVIDER not in {device.ep_name for device in onnxruntime.get_ep_devices()}:
        library = onnxruntime_qnn.get_library_path()
        onnxruntime.register_execution_provider_library(PROVIDER, library)
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    backend = {"backend_path": onnxruntime_qnn.get_qnn_htp_path()}
    options.add_provider_for_devices(devices[:1], backend)
    return onnxruntime.InferenceSession(str(folder / "model.onnx"), options, enable_fallback=0)
