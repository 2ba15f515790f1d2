"""Run optimum's ORTModelForSpeechSeq2Seq; see `run_client.py`."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from optimum.onnxruntime import ORTModelForSpeechSeq2Seq

SAMPLE_RATE = 16_000


def versions() -> dict[str, str]:
    names = ("optimum-onnx", "optimum", "transformers", "onnxruntime", "torch")
    return {name: version(name) for name in names}


def load(job: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    from transformers import AutoProcessor

    model = ORTModelForSpeechSeq2Seq.from_pretrained(job["model"])
    read_processor: Any = AutoProcessor.from_pretrained  # a function without types
    processor = read_processor(job["model"])
    generation = model.generation_config
    options = (
        {"language": job["language"], "task": "transcribe"} if generation.is_multilingual else {}
    )

    def transcribe(samples: Any) -> dict[str, Any]:
        inputs = processor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        (sequence,) = model.generate(inputs.input_features, **options).tolist()
        return {
            "tokens": _text_tokens(sequence, generation),
            "text": processor.decode(sequence, skip_special_tokens=True),
        }

    return transcribe


def _text_tokens(sequence: list[int], generation: Any) -> list[int]:
    """Return the tokens after the prompt, with which some versions begin, and before the end of text."""
    end, has_prompt = generation.eos_token_id, sequence[0] == generation.decoder_start_token_id
    first = sequence.index(generation.no_timestamps_token_id) + 1 if has_prompt else 0
    tokens = sequence[first:]
    return tokens[: tokens.index(end)] if end in tokens else tokens
