"""Write the folder that transformers.js, onnx-asr and optimum load."""

from pathlib import Path
from typing import TYPE_CHECKING

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
