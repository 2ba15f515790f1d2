"""Simulate an encoder as a static 8-bit program: one stored range per tensor, in several recipes."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

LEVELS = 255
LINEARS = ("linear", "conv1d")
VIEWS = ("permute", "reshape", "__get__")  # functions that compute no new values


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which tensors are stored in 8 bits, and where their ranges end.

    Attributes:
        percentile: of a tensor's values, at which its range ends.
        has_all: whether the output of every operator is stored; False: the inputs and outputs of linears
            and convolutions, and sums.
        has_parts: whether each part of a layer norm is stored, as in .tflite files.
    """

    percentile: float = 100.0
    has_all: bool = False
    has_parts: bool = False


PER_TENSOR = "min-max per tensor"
RECIPES: Mapping[str, Recipe] = {
    f"{PER_TENSOR}, of linears and sums": Recipe(),
    "percentile 99.9 per tensor, of linears and sums": Recipe(percentile=99.9),
    f"{PER_TENSOR}, of every operator": Recipe(has_all=True),
    f"{PER_TENSOR}, of every operator and each part of a layer norm": Recipe(
        has_all=True, has_parts=True
    ),
}


@dataclass(frozen=True, slots=True, order=True)
class Widest:
    """The tensor whose largest value is the largest multiple of its median, and where that value is."""

    ratio: float
    module: str
    channel: int


class StaticInt8Encoder(TorchFunctionMode):
    """An encoder that stores tensors in 8-bit integers by a recipe; weights have one scale per tensor.

    Real toolchains fuse some of these tensors and round others, so that errors are similar and not equal.

    Args:
        encoder: the encoder; its weights are rounded in place.
        mels: calibration inputs, (1, n_mels, 2T) each.

    Attributes:
        widest: the output of a linear or a sum that 8 bits suit least; None without calibration inputs.
    """

    def __init__(self, encoder: nn.Module, mels: Sequence[Tensor]) -> None:
        super().__init__()
        self.widest: Widest | None = None
        self._encoder = encoder
        self._ranges: dict[str, dict[float, tuple[float, float]]] = {}
        self._recipe: Recipe | None = None  # None: the ranges are recorded
        self._modules: list[str] = []  # that are being called
        self._seen: Counter[str] = Counter()
        layers = [m for m in encoder.modules() if isinstance(m, nn.Linear | nn.Conv1d)]
        for name, module in encoder.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._modules.append(name))
            module.register_forward_hook(self._leave)
        for mel in mels:
            self._run(mel)
        for layer in layers:
            step = layer.weight.abs().max().clamp_min(1e-30) / 127
            layer.weight.data = (layer.weight / step).round() * step

    def encode(self, mel: Tensor, recipe: str) -> Tensor:
        """Return the features (1, T, d) with a recipe of `RECIPES`."""
        self._recipe = RECIPES[recipe]
        return self._run(mel)

    @torch.no_grad()
    def _run(self, mel: Tensor) -> Tensor:
        self._seen.clear()
        stored = self._stored("input", mel)
        with self:
            return cast(Tensor, self._encoder(stored))

    def _leave(self, *_: Any) -> None:
        self._modules.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch; round what it reads and returns, as the recipe has it."""
        name, recipe = getattr(func, "__name__", ""), self._recipe
        if name in LINEARS and not (recipe and recipe.has_all):
            args = (self._stored("input", args[0]), *args[1:])
        if func is F.layer_norm and (recipe is None or recipe.has_parts):
            return self._layer_norm(args[0], **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if name in VIEWS or not isinstance(out, Tensor):
            return out
        if recipe is None or recipe.has_all or name in (*LINEARS, "add"):
            return self._stored(name, out)
        return out

    def _layer_norm(self, x: Tensor, *, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        centred = self._stored("centred", x - x.mean(-1, keepdim=True))
        variance = self._stored("variance", centred.square().mean(-1, keepdim=True))
        factor = self._stored("factor", torch.rsqrt(variance + eps))
        normal = self._stored("normal", centred * factor)
        scaled = self._stored("scaled", normal * weight)
        return self._stored("layer_norm", scaled + bias)

    def _stored(self, what: str, x: Tensor) -> Tensor:
        """Return the values as 8-bit integers represent them; record their ranges before."""
        name = f"{self._modules[-1] if self._modules else ''} {what}"
        self._seen[name] += 1
        key = f"{name} {self._seen[name]}"
        if self._recipe is None:
            self._record(key, x.numpy(), is_linear=what in (*LINEARS, "add", "input"))
            return x
        low, high = self._ranges[key][self._recipe.percentile]
        step = max(high - low, 1e-30) / LEVELS
        zero_point = round(-low / step)
        return ((x / step).round() + zero_point).clamp(0, LEVELS).sub(zero_point) * step

    def _record(self, key: str, values: Any, *, is_linear: bool) -> None:
        known = self._ranges.setdefault(key, {})
        for percentile in (99.9, 100.0) if is_linear else (100.0,):
            if percentile == 100:
                low, high = values.min(), values.max()
            else:
                low, high = np.percentile(values, (100 - percentile, percentile))
            before = known.get(percentile, (0.0, 0.0))
            known[percentile] = min(before[0], float(low)), max(before[1], float(high))
        if is_linear:
            sizes = np.abs(values)
            ratio = float(sizes.max() / max(np.median(sizes), 1e-30))
            channel = int(sizes.argmax()) % values.shape[-1]
            widest = Widest(ratio, key.split(" ")[0], channel)
            self.widest = max(widest, self.widest) if self.widest else widest
