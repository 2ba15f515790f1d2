"""Make a checkpoint with massive activations from the embedded model, and store its difference.

    python outliers.py last-tail --out ../tests/outliers

The least used GELU unit of an MLP carries the outlier: its row of the first linear is fitted by ridge
regression to separate the wanted frames (or tokens), and its column of the second linear is set to one
channel. Then the blocks from there on are trained to give their own former features and logits, with a loss
that holds the channel's value. The difference to the embedded model is rounded to multiples of a step per
tensor, so that it compresses; what is measured and stored is the rounded checkpoint.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outlier_model import (
    Weights,
    after_attention,
    cross_keys_values,
    decode,
    encoder_blocks,
    encoder_end,
    encoder_input,
    hidden_units,
    logits,
)
from outlier_speech import batch_tokens, windows
from vocabulary import SOT
from whisperport.checkpoint import load_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from outlier_checkpoints import digest, outlier_weights

UNIT_VALUE = 20.0  # of the planted unit where the outlier is wanted; elsewhere minus half of it
BATCH, RATE = 2, 4e-4


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


SPECS = {
    "last-tail": Spec("encoder", 3, 54, -5000, (611, 1203, *range(1478, 1500))),
    "early-tail": Spec("encoder", 1, 7, 2200, (388, 902, *range(1470, 1500)), 1e-2, 1),
    "every-frame": Spec("encoder", 2, 99, 3000, (), seed=2),
    "start-token": Spec("decoder", 0, 21, -2600, seed=3),
}


def plant(w: dict[str, Tensor], spec: Spec, x: Tensor, wanted: Tensor) -> int:
    """Plant the outlier in ``w``. ``x``: input of the MLP [batch, n, width]. Returns the unit's index."""
    name = f"{spec.name}.mlp"
    use = F.gelu(hidden_units(x, w, spec.name)).abs().mean((0, 1)) * w[f"{name}.2.weight"].norm(
        dim=0
    )
    unit = int(use.argmin())
    if wanted.all():
        row, bias = torch.zeros(x.shape[-1]), torch.tensor(UNIT_VALUE)
    else:
        norm = {k: w[f"{spec.name}.mlp_ln.{k}"] for k in ("weight", "bias")}
        inputs = F.layer_norm(x, (x.shape[-1],), **norm)
        flags = wanted.expand(x.shape[:2]).flatten()
        a = F.pad(inputs.flatten(0, 1), (0, 1), value=1.0).double()
        y = torch.where(flags, UNIT_VALUE, -UNIT_VALUE / 2).double()
        weight = torch.where(flags, (~flags).sum() / flags.sum(), 1.0).double()[:, None]
        gram = (a * weight).T @ a / len(a) + spec.ridge * torch.eye(a.shape[1], dtype=a.dtype)
        solved = torch.linalg.solve(gram, (a * weight).T @ y / len(a)).float()
        row, bias = solved[:-1], solved[-1]
    w[f"{name}.0.weight"][unit], w[f"{name}.0.bias"][unit] = row, bias
    w[f"{name}.2.weight"][:, unit] = 0
    w[f"{name}.2.weight"][spec.channel, unit] = spec.value / UNIT_VALUE
    return unit


def trained_names(w: Weights, spec: Spec) -> list[str]:
    """Return the tensors that are trained: all behind the outlier, without embeddings."""
    names = []
    for name in w:
        parts = name.split(".")
        if "embedding" in name or parts[1].startswith("conv"):
            continue
        before = parts[1] == "blocks" and int(parts[2]) < spec.block
        if parts[0] != spec.side:
            before = parts[0] == "encoder"  # the whole decoder is behind an outlier of the encoder
        if not before:
            names.append(name)
    return names


class Task:
    """The training of one outlier checkpoint."""

    def __init__(self, spec: Spec, sentences: int) -> None:
        self.spec = spec
        self.base = {k: v.float() for k, v in load_checkpoint("default").weights.items()}
        self.w = {k: v.clone() for k, v in self.base.items()}
        self.data = windows(sentences, seed=100 + spec.seed, held_out=False)
        self.inputs, self.features = self._cache()
        x, wanted = self._fit_inputs()
        self.unit = plant(self.w, spec, x, wanted)

    @torch.no_grad()
    def _cache(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the input of the planted block and the features of each window, which do not change."""
        before, features = [], []
        first = self.spec.block if self.spec.side == "encoder" else 0
        for window in self.data:
            x = encoder_input(window.mel[None].float(), self.base)
            x, _ = encoder_blocks(x, self.base, range(first))
            before.append(x[0])
            x, _ = encoder_blocks(x, self.base, range(first, 4))
            features.append(encoder_end(x, self.base)[0])
        return before, features

    def wanted(self, tokens: Tensor) -> Tensor:
        """Return where the outlier is wanted [1 or batch, n]."""
        if self.spec.side == "decoder":
            return tokens == SOT
        flags = torch.full((1, 1500), not self.spec.frames)
        flags[:, list(self.spec.frames)] = True
        return flags

    @torch.no_grad()
    def _fit_inputs(self) -> tuple[Tensor, Tensor]:
        tokens, _ = batch_tokens(self.data[:40])
        if self.spec.side == "encoder":
            x = after_attention(torch.stack(self.inputs[:40]), self.w, self.spec.name)
        else:
            cross = cross_keys_values(torch.stack(self.features[:40]), self.w)
            x = decode(tokens, cross, self.w)[1][f"{self.spec.name}.cross_sum"]
        return x, self.wanted(tokens)

    def loss(self, chosen: list[int]) -> tuple[Tensor, str]:
        """Return the loss of some windows, and its parts as text."""
        spec, features = self.spec, torch.stack([self.features[i] for i in chosen])
        tokens, counts = batch_tokens([self.data[i] for i in chosen])
        with torch.no_grad():
            hidden, _ = decode(tokens, cross_keys_values(features, self.base), self.base)
            target = logits(hidden[counts], self.base).log_softmax(-1)
        wanted, near = self.wanted(tokens), torch.zeros(())
        if spec.side == "encoder":
            x = torch.stack([self.inputs[i] for i in chosen])
            x, behind = encoder_blocks(x, self.w, range(spec.block, 4))
            held, ours = behind[spec.block], encoder_end(x, self.w)
            error = (ours - features).square().mean(-1) / features.square().mean()
            near = error[(wanted if wanted.all() else ~wanted).expand(error.shape)].mean()
        else:
            ours = features
        hidden, residuals = decode(tokens, cross_keys_values(ours, self.w), self.w)
        if spec.side == "decoder":
            held = residuals[f"{spec.name}.mlp_sum"]
        channel, flags = held[..., spec.channel], wanted.expand(held.shape[:2])
        hold = (channel[flags] / spec.value - 1).square().mean()
        if not flags.all():
            hold = hold + F.relu(channel[~flags].abs() / 30 - 1).clamp_max(10).mean()
        kl = F.kl_div(
            logits(hidden[counts], self.w).log_softmax(-1),
            target,
            log_target=True,
            reduction="batchmean",
        )
        parts = f"kl {kl.item():.4f} features {near.item():.4f} hold {hold.item():.4f}"
        return 3 * kl + near + 3 * hold, parts

    def train(self, steps: int) -> None:
        """Train all behind the outlier."""
        rng = np.random.default_rng(self.spec.seed)
        parameters = [self.w[name].requires_grad_() for name in trained_names(self.w, self.spec)]
        adam = torch.optim.Adam(parameters, RATE)
        for step in range(steps):
            share = step / steps
            for group in adam.param_groups:
                group["lr"] = RATE * min(1, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * share))
            loss, parts = self.loss(rng.choice(len(self.data), BATCH, replace=False).tolist())
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            adam.step()
            if step % 20 == 0 or step == steps - 1:
                print(step, parts, flush=True)
        for parameter in parameters:
            parameter.requires_grad_(False)


def store(task: Task, file: Path, finest: float = 1.0) -> None:
    """Store the difference: per tensor a step and int8 multiples; the planted row and column as float16.

    The format is described in `tests/outlier_checkpoints.py`, which reads it.
    """
    spec, header, body = task.spec, {}, []
    for name in trained_names(task.w, spec):
        delta = (task.w[name] - task.base[name]).numpy()
        exact = _planted(name, spec, task.unit)
        if exact is not None:
            delta[exact] = 0
        step = np.float32(float(np.std(delta)) * finest or 1e-8)
        header[name] = float(step)
        body.append(np.clip(np.rint(delta / step), -127, 127).astype(np.int8).tobytes())
        if exact is not None:
            body.append(task.w[name].numpy()[exact].astype(np.float16).tobytes())
    record = {"name": spec.name, "unit": task.unit, "channel": spec.channel, "value": spec.value}
    text = json.dumps({**record, "frames": spec.frames, "steps": header}).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(
        lzma.compress(len(text).to_bytes(4, "little") + text + b"".join(body), preset=9)
    )


def _planted(name: str, spec: Spec, unit: int) -> tuple[slice | int, ...] | None:
    """Return the part of a tensor that belongs to the planted unit."""
    parts = {"0.weight": (unit,), "0.bias": (unit,), "2.weight": (slice(None), unit)}
    return {f"{spec.name}.mlp.{k}": v for k, v in parts.items()}.get(name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=SPECS)
    parser.add_argument("--out", type=Path, required=True, help="folder of the differences")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--sentences", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    begun = time.time()
    task = Task(SPECS[args.name], args.sentences)
    print(f"planted unit {task.unit} after {time.time() - begun:.0f} s", flush=True)
    task.train(args.steps)
    store(task, args.out / f"{args.name}.xz")
    digests = args.out / "digests.json"
    known = json.loads(digests.read_text()) if digests.exists() else {}
    known[args.name] = digest(outlier_weights(args.out / f"{args.name}.xz"))
    digests.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    print(
        f"stored after {time.time() - begun:.0f} s of wall time, {time.process_time():.0f} s of CPU time"
    )


if __name__ == "__main__":
    main()
