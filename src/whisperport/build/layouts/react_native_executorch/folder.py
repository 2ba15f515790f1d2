"""Write the folder that react-native-executorch loads: a .pte file for XNNPACK, tokenizer and languages."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.build.layouts.huggingface_files import write_json
from whisperport.build.layouts.pte import (
    audio_of,
    complete_tokenizer,
    method,
    packed_audio,
    token_decoder,
)
from whisperport.speech.audio import HOP_LENGTH

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint
    from whisperport.model.trace.program import Program
    from whisperport.program.dims import Dims

MODEL, TOKENIZER, LANGUAGES = "model.pte", "tokenizer.json", "languages.json"
ENCODE, DECODE, SCHEMA = "encode", "decode", "get_model_schema"
PIECE_S = 29  # of audio, which the app encodes in one run
SHORTEST = 201  # samples that the app gives at least, and that the spectrogram reflects at each end
POSITIONS = 128  # of a text with its prompt: MAX_SEQ_LEN in the app


def unsupported(checkpoint: "Checkpoint", _precision: str) -> str:
    """Return why the app cannot run a checkpoint; empty: it can."""
    dims, generation = checkpoint.dims, checkpoint.generation
    if dims.n_text_ctx < POSITIONS:
        return f"its decoder has {dims.n_text_ctx} positions; the app decodes up to {POSITIONS}"
    if dims.window_s < PIECE_S:
        return f"its window is {dims.window_s:g} s; the app encodes up to {PIECE_S} s in one run"
    if generation.is_multilingual and "transcribe" not in generation.tasks:
        return "it has no token <|transcribe|>, which the app's prompt contains"
    return ""


def write(checkpoint: "Checkpoint", precision: str, folder: Path) -> None:
    """Write model.pte, tokenizer.json and languages.json.

    Args:
        checkpoint: its weights are copied.
        precision: fp32, or w8: matrices of 8 bits, inputs rounded in each run.
        folder: an empty folder.

    Raises:
        LoweringError: ExecuTorch could not lower a method.
        MissingPackageError: ExecuTorch is not installed.
    """
    from whisperport.targets.cpu.xnnpack.lowering import import_executorch, lower_to_pte

    import_executorch()  # before minutes of work
    schema = json.dumps(model_schema(checkpoint.dims))
    programs = {program.name: program for program in _programs(checkpoint, precision)}
    lower_to_pte(programs, folder / MODEL, {SCHEMA: schema})
    write_json(folder / TOKENIZER, complete_tokenizer(checkpoint))
    write_json(folder / LANGUAGES, languages(checkpoint))


def languages(checkpoint: "Checkpoint") -> list[str]:
    """Return the app's `supportedLanguages`.

    A list of English alone tells the app that the prompt has no language, as that of English-only models. A
    multilingual model of one language has it twice.
    """
    generation = checkpoint.generation
    if not generation.is_multilingual:
        return ["en"]
    codes = sorted(generation.languages, key=lambda code: generation.languages[code])
    return codes * 2 if len(codes) == 1 else codes


def model_schema(dims: "Dims") -> dict[str, Any]:
    """Return what `get_model_schema` tells the app; without it, the waveform would have one length only.

    Source: react-native-executorch 0.10.2 (npm), cpp/core/schema.cpp.
    """
    longest = dims.n_frames * HOP_LENGTH
    audio = _tensor("float32", 1, dims.n_audio_ctx, 2 * dims.n_text_layer * dims.n_text_state)
    waveform = {"kind": "range", "range": {"min": SHORTEST, "max": longest, "step": 1}}
    return {
        ENCODE: _method([{**_tensor("float32"), "shape": [waveform]}], audio),
        DECODE: _method(
            [_tensor("int64", 1, 1), _tensor("int64", 1), audio],
            _tensor("float32", 1, 1, dims.n_vocab),
        ),
    }


def _method(inputs: list[dict[str, Any]], output: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": inputs, "outputs": [output], "runtimeConstraints": []}


def _tensor(dtype: str, *sizes: int) -> dict[str, Any]:
    return {
        "kind": "Tensor",
        "dtype": dtype,
        "shape": [{"kind": "constant", "value": n} for n in sizes],
    }


def _programs(checkpoint: "Checkpoint", precision: str) -> "list[Program]":
    """Return the two methods."""
    import torch

    from whisperport.model.network.whisper import build_model
    from whisperport.model.network.with_state import Encode

    model, dims = build_model(checkpoint), checkpoint.dims
    encode = Encode(dims, packed_audio(ENCODE, model, precision))
    decode = token_decoder(DECODE, checkpoint, model, precision, POSITIONS)
    longest = dims.n_frames * HOP_LENGTH
    samples = torch.export.Dim("n", min=SHORTEST, max=longest)
    token, position = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    return [
        method(ENCODE, encode, (torch.zeros(longest // 2),), ({0: samples},)),
        method(DECODE, decode, (token, position, audio_of(model))),
    ]
