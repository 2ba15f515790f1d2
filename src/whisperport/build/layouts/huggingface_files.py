"""The JSON files of transformers, which several apps read, from a checkpoint's own sizes and settings."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.program.dims import SECONDS_PER_POSITION, Dims
from whisperport.speech.audio import FRAMES_PER_SECOND, HOP_LENGTH, SAMPLE_RATE

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

END_OF_TEXT = "<|endoftext|>"
N_FFT = 400  # samples of 25 ms


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON; characters of other scripts stay as they are."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def ids_by_token(checkpoint: "Checkpoint") -> dict[str, int]:
    """Return token -> id for every token of the tokenizer, special ones included."""
    stored = json.loads(checkpoint.tokenizer_json)
    added = {token["content"]: token["id"] for token in stored.get("added_tokens", [])}
    return {**stored["model"]["vocab"], **added}


def tokens_by_id(checkpoint: "Checkpoint") -> list[str]:
    """Return a token for each of the V ids; those that the tokenizer lacks are timestamps, or unused."""
    begin = checkpoint.generation.timestamp_begin
    tokens = {i: token for token, i in ids_by_token(checkpoint).items()}
    for i in range(checkpoint.dims.n_vocab):
        timestamp = f"<|{(i - begin) * SECONDS_PER_POSITION:.2f}|>"
        tokens.setdefault(i, timestamp if i >= begin else f"<|unused{i}|>")
    return [tokens[i] for i in range(checkpoint.dims.n_vocab)]


def tokenizer_json(checkpoint: "Checkpoint") -> dict[str, Any]:
    """Return the tokenizer with its merges as strings, which every version of `tokenizers` reads.

    Current versions write pairs. Those before 0.20 then fail with "untagged enum ModelWrapper".
    """
    stored: dict[str, Any] = json.loads(checkpoint.tokenizer_json)
    merges = stored["model"]["merges"]
    stored["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
    return stored


def preprocessor_config(dims: Dims) -> dict[str, Any]:
    """Return the settings of the log-mel spectrogram."""
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": dims.n_mels,
        "sampling_rate": SAMPLE_RATE,
        "hop_length": HOP_LENGTH,
        "n_fft": N_FFT,
        "chunk_length": dims.n_frames // FRAMES_PER_SECOND,
        "nb_max_frames": dims.n_frames,
        "n_samples": dims.n_frames * HOP_LENGTH,
        "padding_value": 0.0,
        "padding_side": "right",
        "return_attention_mask": False,
    }
