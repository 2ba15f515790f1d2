"""Run the eager model in a lower precision than float32, layer by layer, without copying the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from whisperport.model.network.whisper import Whisper


def _eight_bits(weight: Tensor) -> Tensor:
    """Round each row of a weight to 255 levels, symmetric; vectors, such as biases, stay."""
    if weight.dim() < 2:
        return weight
    rows = weight.reshape(len(weight), -1)
    step = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 127
    return ((rows / step).round_() * step).reshape(weight.shape)


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "w8": torch.float32}


@contextmanager
def lower_precision(model: "Whisper", precision: str) -> Iterator[torch.dtype]:
    """Let a model compute in "fp16", "bf16" or "w8" (8-bit weights per output channel), as torch does.

    The weights of linears and convolutions, which are nearly all, are converted only while their layer
    runs. The model is unchanged afterwards.

    Yields:
        The dtype of the model's inputs and outputs.
    """
    dtype = DTYPES[precision]
    convert: Callable[[Tensor], Tensor] = (
        _eight_bits if precision == "w8" else lambda weight: weight.to(dtype)
    )
    kept: list[tuple[Tensor, Tensor]] = []
    hooks = []
    layers = []
    try:
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv1d):
                layer = _Layer(module, convert)
                layers.append(layer)
                hooks.append(module.register_forward_pre_hook(layer.enter))
                hooks.append(module.register_forward_hook(layer.leave))
                continue
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            positions = "positional_embedding" in dict(module.named_parameters(recurse=False))
            for tensor in own:
                kept.append((tensor, tensor.data))
                tensor.data = tensor.data.to(dtype) if positions else convert(tensor.data)
        yield dtype
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:  # one that raised an error was not left
            layer.leave()
        for tensor, data in kept:
            tensor.data = data


class _Layer:
    """A layer whose parameters are converted while it runs."""

    def __init__(self, module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
        self._parameters = list(module.parameters(recurse=False))
        self._convert = convert
        self._kept: list[Tensor] = []

    def enter(self, *_: object) -> None:
        self._kept = [parameter.data for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.data = self._convert(parameter.data)

    def leave(self, *_: object) -> None:
        for parameter, data in zip(self._parameters, self._kept, strict=False):
            parameter.data = data
        self._kept = []
