"""Write the folder that transformers.js, onnx-asr and optimum load, and run its graphs as they do."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.build.layouts.arrays import Floats, decoded_together
from whisperport.build.layouts.huggingface_files import (
    added_tokens,
    config,
    generation_config,
    preprocessor_config,
    tokenizer_config,
    tokenizer_json,
    vocab,
    write_json,
)
from whisperport.build.layouts.layout import ATTENTION
from whisperport.build.layouts.onnx_graph.file import open_session, run_session
from whisperport.build.layouts.transformers_js.graphs import write_encoder, write_merged_decoder

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

# precision -> end of the files' names, and the dtype by which transformers.js finds them
SUFFIXES = {"fp32": "", "fp16": "_fp16", "w8": "_quantized"}
DTYPES = {"fp32": "fp32", "fp16": "fp16", "w8": "q8"}


def write(checkpoint: "Checkpoint", precision: str, folder: Path) -> None:
    """Write the graphs to `onnx/`, and the JSON files.

    Args:
        checkpoint: its weights are read one at a time.
        precision: fp32; fp16: stored in float16, computed in float32; w8: matrices of 8 bits.
        folder: an empty folder.
    """
    graphs = folder / "onnx"
    graphs.mkdir()
    encoder, decoder = graph_paths(folder, precision)
    write_encoder(checkpoint, precision, encoder)
    write_merged_decoder(checkpoint, precision, decoder)
    outside = {
        path.name: path.with_name(f"{path.name}_data").exists() for path in (encoder, decoder)
    }
    settings = {"dtype": DTYPES[precision], "use_external_data_format": outside}
    write_json(folder / "config.json", {**config(checkpoint), "transformers.js_config": settings})
    write_json(folder / "generation_config.json", generation_config(checkpoint))
    write_json(folder / "preprocessor_config.json", preprocessor_config(checkpoint.dims))
    write_json(folder / "tokenizer.json", tokenizer_json(checkpoint))
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    write_json(folder / "vocab.json", vocab(checkpoint))
    write_json(folder / "added_tokens.json", added_tokens(checkpoint))


def graph_paths(folder: Path, precision: str) -> tuple[Path, Path]:
    """Return the files of the encoder and the decoder."""
    end = f"{SUFFIXES[precision]}.onnx"
    return folder / "onnx" / f"encoder_model{end}", folder / "onnx" / f"decoder_model_merged{end}"


def logits(
    folder: Path,
    precision: str,
    mel: Floats,
    tokens: Sequence[int],
    n_prompt: int,
    caches: dict[str, Floats],
) -> Floats:
    """Return the logits (S, V) after each of S tokens, as `Layout.logits` says."""
    encoder_path, decoder_path = graph_paths(folder, precision)
    if not encoder_path.exists():  # optimum writes them beside the settings
        encoder_path, decoder_path = folder / encoder_path.name, folder / decoder_path.name
    (features,) = run_session(open_session(encoder_path), {"input_features": mel[None]})
    decoder = open_session(decoder_path)
    names = [output.name for output in decoder.get_outputs()]
    # As the apps begin: of batch 0, and without a row.
    inputs: dict[str, Any] = {
        value.name: np.zeros((0, value.shape[1], 0, value.shape[3]), np.float32)
        for value in decoder.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    inputs["encoder_hidden_states"] = features
    rows: list[Floats] = []
    attention: dict[str, list[Floats]] = {}
    for new in decoded_together(tokens, n_prompt):
        inputs["input_ids"] = np.array([new], np.int64)
        inputs["use_cache_branch"] = np.array([bool(rows)])
        outputs = dict(zip(names, run_session(decoder, inputs), strict=True))
        rows.append(outputs["logits"][0])
        for name, value in outputs.items():
            if name.startswith("present.") and len(value):
                inputs[name.replace("present.", "past_key_values.")] = value
                caches.setdefault(name.removeprefix("present."), value[0])
            elif name.startswith("cross_attentions."):
                attention.setdefault(f"{name.partition('.')[2]}.{ATTENTION}", []).append(value[0])
    caches |= {name: np.concatenate(parts, axis=1) for name, parts in attention.items()}
    return np.concatenate(rows)
