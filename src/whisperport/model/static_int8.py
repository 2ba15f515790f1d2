"""Simulate an encoder as a static 8-bit program: one stored range per tensor."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

LEVELS = 255
PERCENTILES = (100.0, 99.9)  # of a tensor's values, at which calibrations usually end its range


class StaticInt8Encoder:
    """An encoder whose linears, convolutions and blocks store 8-bit integers.

    Rounded are the inputs and outputs of every linear and convolution, and the output of each block. Real
    toolchains fuse some of these tensors and round others, so that errors are similar and not equal.

    Args:
        encoder: the encoder; its weights are rounded in place.
        mels: calibration inputs, (1, n_mels, 2T) each.
    """

    @torch.no_grad()
    def __init__(self, encoder: nn.Module, mels: Sequence[Tensor]) -> None:
        self._encoder = encoder
        self._ranges: dict[str, list[tuple[float, float]]] = {}
        self._chosen: int | None = None  # of PERCENTILES; None: the ranges are recorded
        layers = []
        for name, module in encoder.named_modules():
            is_layer = isinstance(module, nn.Linear | nn.Conv1d)
            if is_layer:
                layers.append(module)
                module.register_forward_pre_hook(
                    lambda _, x, name=name: self._stored(f"{name}.in", x[0])
                )
            if is_layer or (name.startswith("blocks.") and name.count(".") == 1):
                module.register_forward_hook(lambda _m, _x, y, name=name: self._stored(name, y))
        for mel in mels:
            encoder(mel)
        for layer in layers:
            step = layer.weight.abs().max().clamp_min(1e-30) / 127
            layer.weight.data = (layer.weight / step).round() * step

    @torch.no_grad()
    def encode(self, mel: Tensor) -> tuple[Tensor, ...]:
        """Return the features (1, T, d) with the ranges of each of `PERCENTILES`."""
        found = []
        for self._chosen in range(len(PERCENTILES)):
            found.append(cast(Tensor, self._encoder(mel)))
        return tuple(found)

    def _stored(self, name: str, x: Tensor) -> Tensor:
        """Return the values as 8-bit integers represent them; record their ranges before."""
        if self._chosen is None:
            values = x.numpy()
            known = self._ranges.setdefault(name, [(0.0, 0.0)] * len(PERCENTILES))
            for i, percentile in enumerate(PERCENTILES):
                low, high = np.percentile(values, (100 - percentile, percentile))
                known[i] = min(known[i][0], float(low)), max(known[i][1], float(high))
            return x
        low, high = self._ranges[name][self._chosen]
        step = max(high - low, 1e-30) / LEVELS
        zero_point = round(-low / step)
        return ((x / step).round() + zero_point).clamp(0, LEVELS).sub(zero_point) * step
