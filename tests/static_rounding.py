"""An encoder whose tensors are rounded to stored ranges, as a toolchain's quantizer does; in torch."""

import numpy as np
import torch
from torch import Tensor, nn


class Rounding:
    """Rounds inputs and outputs of linear layers and convolutions, and blocks' outputs.

    While `recording`, the ranges are recorded and nothing is rounded.

    Args:
        encoder: the encoder.
        bits: of the rounded tensors.
        percentile: of the values, at which a range ends.
        kept: modules whose output stays in float32.
    """

    def __init__(
        self,
        encoder: nn.Module,
        *,
        bits: int = 8,
        percentile: float = 100.0,
        kept: tuple[str, ...] = (),
    ) -> None:
        self.recording, self._ranges = True, dict[str, tuple[float, float]]()
        self._levels, self._percentile = 2**bits - 1, percentile
        for name, module in encoder.named_modules():
            if isinstance(module, nn.Linear | nn.Conv1d):
                module.register_forward_pre_hook(
                    lambda _, x, name=name: self._round(f"{name}.in", x[0])
                )
            elif not name.startswith("blocks.") or name.count(".") > 1:
                continue
            if name not in kept:
                module.register_forward_hook(lambda _m, _x, y, name=name: self._round(name, y))

    def _round(self, name: str, x: Tensor) -> Tensor:
        if self.recording:
            ends = np.percentile(x.numpy(), (100 - self._percentile, self._percentile))
            low, high = self._ranges.get(name, (0.0, 0.0))
            self._ranges[name] = (min(low, float(ends[0])), max(high, float(ends[1])))
            return x
        low, high = self._ranges[name]
        scale = (high - low) / self._levels
        return ((x.clamp(low, high) - low) / scale).round() * scale + low


def round_weights(encoder: nn.Module, *, per_channel: bool) -> None:
    """Round the weights of linear layers and convolutions to 8 bits, symmetric."""
    for module in encoder.modules():
        if isinstance(module, nn.Linear | nn.Conv1d):
            weight = module.weight.detach()
            largest = weight.abs().flatten(1).amax(1) if per_channel else weight.abs().amax()
            step = largest.reshape(-1, *[1] * (weight.dim() - 1)) / 127
            module.weight = nn.Parameter((weight / step).round() * step, requires_grad=False)


def in_eight_bits(encoder: nn.Module, mels: list[Tensor], kind: str) -> nn.Module:
    """Quantize an encoder in place: "min-max", "percentile", "per-channel weights", or "w8a16"."""
    rounding = Rounding(
        encoder,
        bits=16 if kind == "w8a16" else 8,
        percentile=99.9 if kind == "percentile" else 100.0,
    )
    with torch.no_grad():
        for mel in mels:
            encoder(mel)
    rounding.recording = False
    round_weights(encoder, per_channel=kind in ("per-channel weights", "w8a16"))
    return encoder
