"""Write the folder that ONNX Runtime GenAI loads, and run its graphs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.build.layouts.arrays import Floats, decoded_together
from whisperport.build.layouts.huggingface_files import (
    N_FFT,
    generation_config,
    tokenizer_config,
    tokenizer_json,
    write_json,
)
from whisperport.build.layouts.onnx_graph.file import open_session, run_session
from whisperport.build.layouts.onnxruntime_genai.graphs import write_decoder, write_encoder
from whisperport.program.dims import Dims
from whisperport.speech.audio import HOP_LENGTH

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
GRAPHS = {"encoder": ENCODER, "decoder": DECODER}
WINDOW = 1500  # positions: it gives 30 s to the encoder


def unsupported(checkpoint: "Checkpoint", _precision: str) -> str:
    """Return why ONNX Runtime GenAI cannot run a checkpoint; empty: it can."""
    if checkpoint.dims.n_audio_ctx != WINDOW:
        return f"its window is {checkpoint.dims.window_s:g} s; ONNX Runtime GenAI encodes 30 s"
    return ""


def write(checkpoint: "Checkpoint", precision: str, folder: Path) -> None:
    """Write the graphs, the settings and the tokenizer.

    Args:
        checkpoint: its weights are read one at a time.
        precision: fp32; fp16: stored in float16, computed in float32; w8: matrices of 8 bits.
        folder: an empty folder.
    """
    write_encoder(checkpoint, precision, folder / ENCODER)
    write_decoder(checkpoint, precision, folder / DECODER)
    write_json(folder / "genai_config.json", genai_config(checkpoint))
    write_json(folder / "audio_processor_config.json", audio_config(checkpoint.dims))
    # For the caller, who writes the prompt: the app reads no file of this name.
    write_json(folder / "generation_config.json", generation_config(checkpoint))
    write_json(folder / "tokenizer.json", tokenizer_json(checkpoint))
    write_json(folder / "tokenizer_config.json", tokenizer_config())


def genai_config(checkpoint: "Checkpoint") -> dict[str, Any]:
    dims, end = checkpoint.dims, checkpoint.generation.end_of_text
    # The app makes caches of the decoder's sizes.
    decoder = _sizes(dims.n_text_state, dims.n_text_head, dims.n_text_layer)
    encoder = _sizes(dims.n_audio_state, dims.n_audio_head, dims.n_audio_layer)
    model = {
        "type": "whisper",
        "vocab_size": dims.n_vocab,
        "context_length": dims.n_text_ctx,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
        "encoder": {
            "filename": ENCODER,
            **encoder,
            "inputs": {"audio_features": "audio_features"},
            "outputs": {
                "encoder_hidden_states": "hidden_states",
                "cross_present_key_names": "present_key_cross_%d",
                "cross_present_value_names": "present_value_cross_%d",
            },
        },
        "decoder": {
            "filename": DECODER,
            **decoder,
            "inputs": {
                "input_ids": "input_ids",
                "past_key_names": "past_key_self_%d",
                "past_value_names": "past_value_self_%d",
                "cross_past_key_names": "past_key_cross_%d",
                "cross_past_value_names": "past_value_cross_%d",
            },
            "outputs": {
                "logits": "logits",
                "present_key_names": "present_key_self_%d",
                "present_value_names": "present_value_self_%d",
            },
        },
    }
    greedy = {"do_sample": False, "num_beams": 1, "past_present_share_buffer": False}
    return {"model": model, "search": {**greedy, "max_length": dims.n_text_ctx}}


def _sizes(width: int, n_heads: int, n_layers: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "head_size": width // n_heads,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_heads,
        "num_hidden_layers": n_layers,
    }


def audio_config(dims: Dims) -> dict[str, Any]:
    """Return the steps from the bytes of an audio file to the log-mel spectrogram."""
    stft = {"n_fft": N_FFT, "frame_length": N_FFT, "hop_length": HOP_LENGTH}
    mel = {"n_fft": N_FFT, "hop_length": HOP_LENGTH, "chunk_size": 30, "n_mel": dims.n_mels}
    steps = [
        {"name": "audio_decoder", "type": "AudioDecoder"},
        {"name": "STFT", "type": "STFTNorm", "attrs": stft},
        {"name": "log_mel_spectrogram", "type": "LogMelSpectrum", "attrs": mel},
    ]
    return {"feature_extraction": {"sequence": [{"operation": step} for step in steps]}}


def logits(
    folder: Path,
    _precision: str,
    mel: Floats,
    tokens: Sequence[int],
    n_prompt: int,
    caches: dict[str, Floats],
) -> Floats:
    """Run the written graphs as the app does; return the logits as `Layout.logits` says."""
    stated = json.loads((folder / "genai_config.json").read_bytes())["model"]
    files = [Path(stated[part].get("filename", name)).name for part, name in GRAPHS.items()]
    encoder, decoder = (open_session(folder / name) for name in files)
    _, *cross = run_session(encoder, {encoder.get_inputs()[0].name: mel[None]})
    names = [value.name for value in decoder.get_inputs()]
    # The app gives tokens of the type that the graph states.
    ids = np.int64 if decoder.get_inputs()[0].type == "tensor(int64)" else np.int32
    _, n_heads, _, width = decoder.get_inputs()[1].shape
    past = [np.zeros((1, n_heads, 0, width), np.float32)] * len(cross)
    rows: list[Floats] = []
    for new in decoded_together(tokens, n_prompt):
        values = (np.array([new], ids), *past, *cross)
        new_logits, *past = run_session(decoder, dict(zip(names, values, strict=True)))
        rows.append(new_logits[0])
        for side, arrays in (("decoder", past), ("encoder", cross)):
            for i, array in enumerate(arrays):
                caches.setdefault(f"{i // 2}.{side}.{('key', 'value')[i % 2]}", array[0])
    return np.concatenate(rows)
