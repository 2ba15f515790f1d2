"""Methods of a .pte file for XNNPACK whose decoder keeps its cache: for apps that ExecuTorch runs.

The encoder returns the keys and values of the cross-attention, which such an app hands to the decoder as it
is: see `whisperport.model.network.with_state`.
"""

from typing import TYPE_CHECKING, Any

from whisperport.build.layouts.arrays import half, is_half, quantized_rows, weight
from whisperport.build.layouts.huggingface_files import added_tokens, tokenizer_json

if TYPE_CHECKING:  # it needs torch
    from torch import Tensor, nn

    from whisperport.model.checkpoint.checkpoint import Checkpoint
    from whisperport.model.network.whisper import Whisper
    from whisperport.model.trace.program import Program

EMBEDDING = "decoder.token_embedding.weight"


def packed_audio(name: str, model: "Whisper", precision: str) -> "nn.Module":
    """Return the encoder (1, n_mels, 2T) -> (1, T, 2·L·d), rewritten for XNNPACK.

    Args:
        name: of the method.
        model: its weights are shared.
        precision: fp32, or w8: matrices of 8 bits, inputs rounded in each run.
    """
    import torch

    from whisperport.model.network.with_state import PackedAudio

    mel = torch.zeros(1, model.dims.n_mels, model.dims.n_frames)
    return _rewritten(name, PackedAudio(model), (mel,), precision)


def token_decoder(
    name: str, checkpoint: "Checkpoint", model: "Whisper", precision: str, n_positions: int
) -> "nn.Module":
    """Return a `DecodeToken`, rewritten for XNNPACK.

    Args:
        name: of the method.
        checkpoint: of the model.
        model: its weights are shared.
        precision: as of `packed_audio`.
        n_positions: tokens of the longest text with its prompt.
    """
    import torch

    from whisperport.model.network.with_state import DecodeToken, Step, Table

    dims = model.dims
    rows, width = dims.n_text_layer * dims.n_text_head, dims.n_text_state // dims.n_text_head
    x, mask = torch.zeros(1, 1, dims.n_text_state), torch.zeros(1, 1, n_positions + 1)
    caches = torch.zeros(rows, width, n_positions), torch.zeros(rows, n_positions, width)
    step = _rewritten(name, Step(model), (x, mask, *caches, audio_of(model)), precision)
    return DecodeToken(model, step, Table(*_embeddings(checkpoint, precision)), n_positions)


def audio_of(model: "Whisper") -> "Tensor":
    """Return zeros in the place of what `packed_audio` returns."""
    import torch

    dims = model.dims
    return torch.zeros(1, dims.n_audio_ctx, 2 * dims.n_text_layer * dims.n_text_state)


def method(
    name: str, module: "nn.Module", inputs: "tuple[Tensor, ...]", shapes: Any = None
) -> "Program":
    """Trace a method. Its signature stays empty: programs of bundles have static shapes and no state."""
    import torch

    from whisperport.model.trace.program import Program, tracing
    from whisperport.program.spec import ProgramSpec

    with tracing(name):  # in their mode: an exported graph cannot change it
        exported = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
    return Program(exported, ProgramSpec(name, (), ()))


def complete_tokenizer(checkpoint: "Checkpoint") -> dict[str, Any]:
    """Return the tokenizer with all V tokens: such apps make room for as many logits as it has tokens."""
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
