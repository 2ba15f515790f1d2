"""Write the folder of OpenVINO GenAI's WhisperPipeline, and run its graphs on the CPU.

The graphs are made here. Tokenizer and detokenizer have operators of the package openvino-tokenizers, which
makes these two graphs in the app's own environment.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.build.layouts import layout_of
from whisperport.build.layouts.arrays import Floats, decoded_together, is_widened, weight
from whisperport.build.layouts.client import run_script
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
from whisperport.build.layouts.openvino_genai.graphs import (
    EMBEDDING,
    PROJECTION,
    decoder_graph,
    encoder_graph,
)
from whisperport.errors import VerificationError, needs
from whisperport.system.system_error import is_of_stream
from whisperport.targets.cpu.openvino.ir import read_ir, stored_bytes
from whisperport.targets.cpu.openvino.runtime import FLOAT32

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

APP = "openvino-genai"


GRAPHS = {"encoder": encoder_graph, "decoder": decoder_graph}


def write_graphs(
    checkpoint: "Checkpoint", precision: str, folder: Path, names: Collection[str] = GRAPHS.keys()
) -> None:
    """Write the graphs, one after the other, so that the weights of one at a time are in memory."""
    with needs("cannot write OpenVINO files: openvino is not installed", extra="openvino-export"):
        from openvino import save_model
    for name in names:
        path = folder / f"openvino_{name}_model.xml"
        save_model(GRAPHS[name](checkpoint, precision), path, compress_to_fp16=False)
        if precision == "fp32" and any(is_widened(checkpoint, n) for n in checkpoint.weights):
            _put_weights(path, checkpoint)


def _put_weights(path: Path, checkpoint: "Checkpoint") -> None:
    """Put the weights for which a saved graph has zeros into its files, one at a time."""
    graph, xml = read_ir(path), path.read_bytes()
    saved, whole = path.with_suffix(".bin"), path.with_suffix(".whole")
    pieces, written, end = [], 0, 0
    places: dict[str, int] = {}  # of a weight, or of what the saved file has at an offset
    with whole.open("wb") as file:
        for node, stored in stored_bytes(graph, saved):
            name = EMBEDDING if node.name == PROJECTION else node.name
            is_zeros = name in checkpoint.weights and is_widened(checkpoint, name)
            offset = node.attributes["offset"]
            key = name if is_zeros else offset
            if key not in places:
                places[key] = written
                written += file.write((weight(checkpoint, name) if is_zeros else stored).data)
            start = xml.index(f'offset="{offset}"'.encode(), node.span.start, node.span.stop)
            pieces += [xml[end:start], f'offset="{places[key]}"'.encode()]
            end = start + len(f'offset="{offset}"')
    whole.replace(saved)
    path.write_bytes(b"".join([*pieces, xml[end:]]))


def write(checkpoint: "Checkpoint", precision: str, folder: Path) -> None:
    """Write the graphs, the tokenizer and the settings.

    Args:
        checkpoint: its weights are copied only where they are stored in another precision.
        precision: fp32; fp16: stored in float16; w8: matrices of 8 bits.
        folder: an empty folder.

    Raises:
        MissingPackageError: OpenVINO, or the app, is not installed.
    """
    write_graphs(checkpoint, precision, folder)
    write_json(folder / "config.json", config(checkpoint))
    write_json(folder / "generation_config.json", generation_config(checkpoint))
    write_json(folder / "preprocessor_config.json", preprocessor_config(checkpoint.dims))
    write_json(folder / "tokenizer.json", tokenizer_json(checkpoint))
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    write_json(folder / "vocab.json", vocab(checkpoint))
    write_json(folder / "added_tokens.json", added_tokens(checkpoint))
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    """Write the tokenizer's graphs. The app's process tells only in words that it could not write one."""
    try:
        run_script(layout_of(APP).apps[APP], Path(__file__).with_name("tokenizer.py"), folder)
    except VerificationError as error:
        if is_of_stream(error.why):
            raise RuntimeError(error.why) from error
        raise


STATE = re.compile(r"past_key_values\.(\d+\.decoder\.(?:key|value))")


def logits(
    folder: Path,
    _precision: str,
    mel: Floats,
    tokens: Sequence[int],
    n_prompt: int,
    caches: dict[str, Floats],
) -> Floats:
    """Return the logits (S, V) after each of S tokens, as `Layout.logits` says.

    Raises:
        MissingPackageError: OpenVINO is not installed.
    """
    with needs("cannot run OpenVINO files: openvino is not installed", extra="openvino"):
        import openvino

    def opened(name: str) -> Any:
        path = folder / f"openvino_{name}_model.xml"
        return openvino.Core().compile_model(path, "CPU", FLOAT32)

    features = opened("encoder")({"input_features": mel[None]})[0]
    request = opened("decoder").create_infer_request()
    has_places = any("cache_position" in i.get_names() for i in request.get_compiled_model().inputs)
    rows: list[Floats] = []
    n_cached = 0
    for piece in decoded_together(tokens, n_prompt):
        inputs = {
            "input_ids": np.array([piece], np.int64),
            "encoder_hidden_states": features,
            "beam_idx": np.zeros(1, np.int32),
        }
        if has_places:  # as some versions of transformers export it
            inputs["cache_position"] = np.arange(n_cached, n_cached + len(piece))
        n_cached += len(piece)
        rows.append(request.infer(inputs)["logits"][0].copy())
        for state in request.query_state():
            if (place := STATE.match(state.name)) and place[1] not in caches:
                caches[place[1]] = state.state.data[0].copy()
    return np.concatenate(rows)
