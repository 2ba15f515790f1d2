"""Write the folder that react-native-executorch loads: a .pte file for XNNPACK, tokenizer and languages."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.build.layouts.arrays import half, is_half, quantized_rows, weight
from whisperport.build.layouts.huggingface_files import added_tokens, tokenizer_json, write_json
from whisperport.speech.audio import HOP_LENGTH

if TYPE_CHECKING:  # it needs torch
    from torch import Tensor, nn

    from whisperport.model.checkpoint.checkpoint import Checkpoint
    from whisperport.model.trace.program import Program
    from whisperport.program.dims import Dims

MODEL, TOKENIZER, LANGUAGES = "model.pte", "tokenizer.json", "languages.json"
ENCODE, DECODE, SCHEMA = "encode", "decode", "get_model_schema"
PIECE_S = 29  # of audio, which the app encodes in one run
SHORTEST = 201  # samples that the app gives at least, and that the spectrogram reflects at each end
EMBEDDING = "decoder.token_embedding.weight"
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
    write_json(folder / TOKENIZER, _tokenizer(checkpoint))
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


def _tokenizer(checkpoint: "Checkpoint") -> dict[str, Any]:
    """Return the tokenizer with all V tokens: the app makes room for as many logits as it has tokens."""
    stored = tokenizer_json(checkpoint)
    added = stored.setdefault("added_tokens", [])
    known = {token["id"] for token in added}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added += [
        {"id": i, "content": token, **flags, "special": True}
        for token, i in added_tokens(checkpoint).items()
        if i not in known
    ]
    return stored


def _programs(checkpoint: "Checkpoint", precision: str) -> "list[Program]":
    """Return the two methods. Their large parts are rewritten as the programs of bundles are."""
    import torch

    from whisperport.model.network.whisper import build_model
    from whisperport.model.network.with_state import DecodeToken, Encode, PackedAudio, Step, Table

    model, dims = build_model(checkpoint), checkpoint.dims
    rows, width = dims.n_text_layer * dims.n_text_head, dims.n_text_state // dims.n_text_head
    mel = torch.zeros(1, dims.n_mels, dims.n_frames)
    audio = torch.zeros(1, dims.n_audio_ctx, 2 * dims.n_text_layer * dims.n_text_state)
    x, mask = torch.zeros(1, 1, dims.n_text_state), torch.zeros(1, 1, POSITIONS + 1)
    caches = torch.zeros(rows, width, POSITIONS), torch.zeros(rows, POSITIONS, width)
    packed = _rewritten(ENCODE, PackedAudio(model), (mel,), precision)
    step = _rewritten(DECODE, Step(model), (x, mask, *caches, audio), precision)
    table = Table(*_embeddings(checkpoint, precision))
    longest = dims.n_frames * HOP_LENGTH
    samples = torch.export.Dim("n", min=SHORTEST, max=longest)
    token, position = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    return [
        _program(ENCODE, Encode(dims, packed), (torch.zeros(longest // 2),), ({0: samples},)),
        _program(DECODE, DecodeToken(model, step, table, POSITIONS), (token, position, audio)),
    ]


def _embeddings(checkpoint: "Checkpoint", precision: str) -> "tuple[Tensor, Tensor | None]":
    """Return the rows of the token embedding, and their steps if they are integers of 8 bits.

    They are float16 if that holds them exactly: the file has them twice, here and in the projection.
    """
    from torch import from_numpy

    if precision == "w8":
        integers, factors = quantized_rows(weight(checkpoint, EMBEDDING))
        return from_numpy(integers), from_numpy(1 / factors)[:, None]
    stored = half if is_half(checkpoint, EMBEDDING) else weight
    return from_numpy(stored(checkpoint, EMBEDDING)), None


def _rewritten(
    name: str, module: "nn.Module", inputs: "tuple[Tensor, ...]", precision: str
) -> "nn.Module":
    """Return a module with the rewrites of the target `xnnpack`, and with linear layers of 8 bits in w8."""
    from whisperport.model.rewrites import run_rewrites
    from whisperport.model.trace.program import trace
    from whisperport.targets import get_target

    rewrites = get_target("xnnpack").spec.lowering.rewrites
    program, _ = run_rewrites(trace(name, module, inputs), rewrites)
    graph = program.exported.module(check_guards=False)
    return _quantized(graph, inputs) if precision == "w8" else graph


def _quantized(graph: "nn.Module", inputs: "tuple[Tensor, ...]") -> "nn.Module":
    """Return a graph whose linear layers have weights of 8 bits, with a step for each row."""
    import torch
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    form = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    quantizer = XNNPACKQuantizer().set_operator_type(torch.ops.aten.linear.default, form)
    prepared = prepare_pt2e(graph, quantizer)
    prepared(*inputs)
    quantized: nn.Module = convert_pt2e(prepared)
    return quantized


def _program(
    name: str, module: "nn.Module", inputs: "tuple[Tensor, ...]", shapes: Any = None
) -> "Program":
    """Trace a method. Its signature stays empty: programs of bundles have static shapes and no state."""
    import torch

    from whisperport.model.trace.program import Program, tracing
    from whisperport.program.spec import ProgramSpec

    with tracing(name):  # in their mode: an exported graph cannot change it
        exported = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
    return Program(exported, ProgramSpec(name, (), ()))
