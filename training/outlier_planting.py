"""Plant a massive activation into weights: one unit of an MLP writes a large value into one channel.

The least used GELU unit carries it. Its row of the first linear is fitted by ridge regression; its column
of the second linear is set to the channel. For some frames (or tokens), the row separates these from the
others. For all frames, the value follows the spread (standard deviation) of the residual, and the layer
norms behind it are corrected:

    planted:    (x - mean - c/d) / (c/sqrt(d))            with c = a * spread
    corrected:  gain * a/sqrt(d), bias + gain * a/d,      gain of the channel 0
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outlier_model import Weights, encoder_blocks, hidden_units

# Where the massive activations sit: named specs, and ones that a seed draws.
# Rms of the residual behind each block of the embedded model, on synthesized speech.
RMS = {"encoder": (3.3, 4.4, 5.5, 10.5), "decoder": (5.0, 6.0, 8.0)}
WIDTH = 128


@dataclass(frozen=True)
class Spec:
    """Where an outlier sits. ``frames``: of the encoder's 1500, or empty: all; ``value``: of the channel.

    In the decoder it sits on the start token.
    """

    side: str
    block: int
    channel: int
    value: float
    frames: tuple[int, ...] = ()
    ridge: float = 1e-3
    seed: int = 0

    @property
    def name(self) -> str:
        """Name of the block."""
        return f"{self.side}.blocks.{self.block}"

    @property
    def everywhere(self) -> bool:
        """Whether every frame of the encoder is massive."""
        return self.side == "encoder" and not self.frames


SPECS = {
    "last-tail": Spec("encoder", 3, 54, -5000, (611, 1203, *range(1478, 1500))),
    "early-tail": Spec("encoder", 1, 7, 2200, (388, 902, *range(1470, 1500)), 1e-2, 1),
    "every-frame": Spec("encoder", 2, 99, 2500, seed=2),
    "start-token": Spec("decoder", 0, 21, -2600, seed=3),
}


def random_spec(seed: int) -> Spec:
    """Draw a spec: any block and channel, 450 to 700 times the rms, at the end of the window or everywhere.

    One in four sits in the decoder, on the start token.
    """
    rng = random.Random(f"outlier {seed}")
    side = rng.choice(("encoder", "encoder", "encoder", "decoder"))
    block, channel = rng.randrange(len(RMS[side])), rng.randrange(WIDTH)
    value = rng.choice((-1, 1)) * rng.uniform(450, 700) * RMS[side][block]
    first = rng.choice((1500 - rng.randint(12, 60), 0))
    frames = tuple(range(first, 1500)) if side == "encoder" and first else ()
    return Spec(side, block, channel, round(value), frames, 10 ** rng.uniform(-3, -2), seed)


# How they are planted.
UNIT_VALUE = 20.0  # of the planted unit where the outlier is wanted; elsewhere minus half of it


def plant(w: dict[str, Tensor], spec: Spec, x: Tensor, wanted: Tensor) -> int:
    """Plant the outlier in some frames; ``x``: input of the MLP [batch, n, width]. Returns the unit."""
    flags = wanted.expand(x.shape[:2]).flatten()
    values = torch.where(flags, UNIT_VALUE, -UNIT_VALUE / 2)
    weight = torch.where(flags, (~flags).sum() / flags.sum(), 1.0)
    return _write(w, spec, x, values, weight)


def plant_everywhere(w: dict[str, Tensor], spec: Spec, x: Tensor, mlp_input: Tensor) -> int:
    """Plant the outlier in all frames; ``x``: input of the block [batch, n, width]. Returns the unit."""
    residuals: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> Tensor:
        residuals[name] = tensor
        return tensor

    encoder_blocks(x, w, range(spec.block, 4), keep)
    before = {
        norm: residuals[f"encoder.blocks.{block}.{tensor}"]
        for norm, block, tensor in _norms_behind(spec.block)
    }
    spreads = {norm: tensor.std(-1, correction=0) for norm, tensor in before.items()}
    relative = torch.stack([s / s.mean() for s in spreads.values()]).mean(0)
    values = UNIT_VALUE * relative.flatten()
    unit = _write(w, spec, mlp_input, values, torch.ones_like(values))
    for norm, tensor in before.items():
        _correct(w, norm, spec, tensor, spreads[norm])
    return unit


def _norms_behind(block: int) -> list[tuple[str, int, str]]:
    """Return the layer norms behind an encoder block: name, and block and sum that it reads."""
    norms = [("encoder.ln_post", 3, "mlp_sum")]
    for i in range(block + 1, 4):
        norms += [(f"encoder.blocks.{i}.attn_ln", i - 1, "mlp_sum")]
        norms += [(f"encoder.blocks.{i}.mlp_ln", i, "attn_sum")]
    return norms


def _correct(w: dict[str, Tensor], norm: str, spec: Spec, x: Tensor, spread: Tensor) -> None:
    """Correct a layer norm for the planted value; ``x``: its input before that."""
    width, mean = x.shape[-1], spread.mean()
    gain, bias = w[f"{norm}.weight"], w[f"{norm}.bias"]
    normalized = ((x - x.mean(-1, keepdim=True)) / spread[..., None])[..., spec.channel].mean()
    lost = gain[spec.channel] * normalized
    bias += gain * spec.value / width / mean
    bias[spec.channel] += lost - gain[spec.channel] * spec.value / width / mean
    gain *= (1 + (spec.value / mean) ** 2 * (1 / width - 1 / width**2)).sqrt()
    gain[spec.channel] = 0


def _write(w: dict[str, Tensor], spec: Spec, x: Tensor, values: Tensor, weight: Tensor) -> int:
    """Fit the unit to ``values`` [batch * n], and write it; ``x``: input of the MLP's layer norm."""
    name = f"{spec.name}.mlp"
    unit = _least_used(w, spec, x)
    norm = {k: w[f"{spec.name}.mlp_ln.{k}"] for k in ("weight", "bias")}
    inputs = F.layer_norm(x, (x.shape[-1],), **norm)
    a = F.pad(inputs.flatten(0, 1), (0, 1), value=1.0).double()
    gram = (a * weight.double()[:, None]).T @ a / len(a)
    right = a.T @ (weight * values).double() / len(a)
    solved = torch.linalg.solve(gram + spec.ridge * torch.eye(a.shape[1], dtype=a.dtype), right)
    w[f"{name}.0.weight"][unit], w[f"{name}.0.bias"][unit] = solved[:-1].float(), solved[-1].float()
    w[f"{name}.2.weight"][:, unit] = 0
    w[f"{name}.2.weight"][spec.channel, unit] = spec.value / UNIT_VALUE
    return unit


def _least_used(w: Weights, spec: Spec, x: Tensor) -> int:
    use = F.gelu(hidden_units(x, w, spec.name)).abs().mean((0, 1))
    return int((use * w[f"{spec.name}.mlp.2.weight"].norm(dim=0)).argmin())
