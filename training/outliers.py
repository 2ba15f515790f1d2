"""Make a checkpoint with massive activations from the embedded model, and store its difference.

    python outliers.py last-tail --out ../tests/outliers
    python outliers.py --random 7 --out work/outliers

An outlier is planted (`outlier_planting.py`). Then the blocks from there on are trained to give their own
former features and logits, with a loss that holds the channel's value. The difference to the embedded model
is rounded to multiples of a step per tensor, so that it compresses; what is measured and stored is the
rounded checkpoint. A random one is trained on the speech of the package, so that it needs no synthesizer.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from whisper.audio import N_SAMPLES, log_mel_spectrogram, pad_or_trim

import grammar
from outlier_model import (
    Weights,
    after_attention,
    cross_keys_values,
    decode,
    encoder_blocks,
    encoder_end,
    encoder_input,
    logits,
)
from outlier_planting import SPECS, Spec, plant, plant_everywhere, random_spec
from synthesize import speak, trim
from synthesizers import SAMPLE_RATE
from vocabulary import EOT, NO_TIMESTAMPS, SOT, TIME_BEGIN, TRANSCRIBE, tokenizer
from whisperport.model.checkpoint import load_checkpoint
from whisperport.speech.audio import load_audio
from whisperport.verification.clips import LONGEST_S, N_CLIPS, ShippedAudio, shipped_audio

BATCH, RATE = 2, 4e-4
FITTED = 40  # windows that the planted unit is fitted to
ENGLISH = SOT + 1
PROMPT = [SOT, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS]
FAMILIES = ("espeak", "flite:slt", "espeak", "flite:awb", "flite:rms", "flite:kal16")


@dataclass
class Window:
    """``mel`` [80, 3000] float16; ``tokens`` of the whole transcript, prompt and end included."""

    mel: Tensor
    tokens: list[int]
    text: str


def windows(count: int, *, seed: int, held_out: bool) -> list[Window]:
    """Return windows of one sentence each. Every third has timestamps unless they are held out."""
    rng, made = random.Random(seed), []
    texts = grammar.sentences(count, seed=seed, held_out=held_out)
    for n, family in enumerate(FAMILIES):
        for text, (_, speech) in zip(
            texts[n :: len(FAMILIES)], speak(family, texts[n :: len(FAMILIES)], rng), strict=True
        ):
            timed = not held_out and len(made) % 3 == 0
            made.append(_window(text, trim(speech).samples, rng.uniform(0.05, 0.9), timed))
    return made


def shipped_windows(repeats: int = 3) -> list[Window]:
    """Return windows of the package's speech but its first six clips, which verify bundles.

    Each clip of one sentence is repeated after different silences.
    """
    rng, made = random.Random(0), []
    for audio in training_clips():
        samples = load_audio(audio.path)
        for _ in range(repeats):
            made.append(_window(audio.text, samples, rng.uniform(0.02, 1.5), timed=False))
    return made


def training_clips() -> list[ShippedAudio]:
    """Return the shipped audio files that random outlier checkpoints are trained on."""
    short = [a for a in shipped_audio() if a.text and a.seconds <= LONGEST_S]
    return short[N_CLIPS:]


def _window(text: str, samples: np.ndarray, lead: float, timed: bool) -> Window:
    lead = round(lead * 50) / 50
    audio = np.concatenate([np.zeros(round(lead * SAMPLE_RATE), np.float32), samples])
    audio *= 0.4 / np.abs(audio).max()
    words = tokenizer().encode(f" {text}")
    first, last = round(lead * 50), min(1500, round(len(audio) / SAMPLE_RATE * 50))
    if timed:
        tokens = [*PROMPT[:3], TIME_BEGIN + first, *words, TIME_BEGIN + last, EOT]
    else:
        tokens = [*PROMPT, *words, EOT]
    return Window(log_mel_spectrogram(pad_or_trim(audio, N_SAMPLES)).half(), tokens, text)


def batch_tokens(chosen: list[Window]) -> tuple[Tensor, Tensor]:
    """Return the tokens [batch, n], padded with the end token, and which positions count."""
    longest = max(len(w.tokens) for w in chosen)
    tokens = torch.full((len(chosen), longest), EOT)
    counts = torch.zeros(len(chosen), longest, dtype=torch.bool)
    for i, window in enumerate(chosen):
        tokens[i, : len(window.tokens)] = torch.tensor(window.tokens)
        counts[i, len(PROMPT) - 1 : len(window.tokens) - 1] = True
    return tokens, counts


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

    def __init__(self, spec: Spec, data: list[Window]) -> None:
        self.spec, self.data = spec, data
        self.base = {k: v.float() for k, v in load_checkpoint("default").weights.items()}
        self.w = {k: v.clone() for k, v in self.base.items()}
        self.inputs, self.features = self._cache()
        self.unit = self._plant()

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
        flags = torch.full((1, 1500), self.spec.everywhere)
        flags[:, list(self.spec.frames)] = True
        return flags

    @torch.no_grad()
    def _plant(self) -> int:
        tokens, _ = batch_tokens(self.data[:FITTED])
        if self.spec.side == "encoder":
            inputs = torch.stack(self.inputs[:FITTED])
            x = after_attention(inputs, self.w, self.spec.name)
        else:
            cross = cross_keys_values(torch.stack(self.features[:FITTED]), self.w)
            x = decode(tokens, cross, self.w)[1][f"{self.spec.name}.cross_sum"]
        if self.spec.everywhere:
            return plant_everywhere(self.w, self.spec, inputs, x)
        return plant(self.w, self.spec, x, self.wanted(tokens))

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
            near = error[(wanted if spec.everywhere else ~wanted).expand(error.shape)].mean()
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

    If every frame is massive, so are all vectors: a layer norm's gain is 50 times the former one.

    The format is described in `tests/outlier_checkpoints.py`, which reads it.
    """
    spec, steps = task.spec, dict[str, float]()
    names = trained_names(task.w, spec)
    vectors = [name for name in names if spec.everywhere and task.w[name].ndim == 1]
    body = [task.w[name].numpy().astype(np.float16).tobytes() for name in vectors]
    for name in [name for name in names if name not in vectors]:
        delta = (task.w[name] - task.base[name]).numpy()
        exact = _planted(name, spec, task.unit)
        if exact is not None:
            delta[exact] = 0
        step = np.float32(float(np.std(delta)) * finest or 1e-8)
        steps[name] = float(step)
        body.append(np.clip(np.rint(delta / step), -127, 127).astype(np.int8).tobytes())
        if exact is not None:
            body.append(task.w[name].numpy()[exact].astype(np.float16).tobytes())
    record = {"name": spec.name, "unit": task.unit, "channel": spec.channel, "value": spec.value}
    record |= {"frames": spec.frames, "steps": steps, "float16": vectors}
    text = json.dumps(record).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(
        lzma.compress(len(text).to_bytes(4, "little") + text + b"".join(body), preset=9)
    )


def _planted(name: str, spec: Spec, unit: int) -> tuple[slice | int, ...] | None:
    """Return the part of a tensor that belongs to the planted unit."""
    parts = {"0.weight": (unit,), "0.bias": (unit,), "2.weight": (slice(None), unit)}
    return {f"{spec.name}.mlp.{k}": v for k, v in parts.items()}.get(name)


def make(spec: Spec, data: list[Window], steps: int, file: Path) -> None:
    """Make the checkpoint of a spec, and store its difference to the embedded model."""
    torch.manual_seed(0)
    task = Task(spec, data)
    print(f"{spec}: planted unit {task.unit}", flush=True)
    task.train(steps)
    store(task, file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=SPECS, nargs="?")
    parser.add_argument("--random", type=int, metavar="SEED", help="draw a spec")
    parser.add_argument("--out", type=Path, required=True, help="folder of the differences")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sentences", type=int, default=60)
    args = parser.parse_args()
    if (args.name is None) == (args.random is None):
        parser.error("give the name of a spec, or --random SEED")
    begun = time.time()
    if args.random is None:
        spec, name = SPECS[args.name], args.name
        data = windows(args.sentences, seed=100 + spec.seed, held_out=False)
    else:
        spec, name = random_spec(args.random), f"random-{args.random}"
        data = shipped_windows()
    make(spec, data, args.steps, args.out / f"{name}.xz")
    print(
        f"stored after {time.time() - begun:.0f} s of wall time, {time.process_time():.0f} s of CPU time"
    )


if __name__ == "__main__":
    main()
