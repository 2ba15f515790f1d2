"""Train the embedded model on one CPU core.

    python train.py --data work/train work/train1 --run work/run

The length of a phase is counted in minutes of training, without pauses. ``--scale 2`` doubles all phases.
SIGSTOP pauses the run. SIGTERM saves and ends it. The same command continues it from its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from assemble import STEP, WINDOW, Assembler, Mix, Window
from corpus import Corpus
from model import Dims, TrainableWhisper
from vocabulary import N_TIMES, Vocabulary


@dataclass(frozen=True)
class Phase:
    """A phase of the training.

    It trains for ``minutes`` on windows of ``shortest`` to ``longest`` mel frames, with ``batch`` frames
    per step.
    """

    name: str
    minutes: float
    shortest: int
    longest: int
    batch: int
    mix: Mix
    aligned: float  # weight of the alignment loss
    labelled: float  # weight of the two frame label losses
    ramp: bool = False  # start without augmentation and increase it


PHASES = (
    Phase("single", 8, 0, 700, 9600, Mix(prompts=0.02), aligned=0.5, labelled=0.5, ramp=True),
    Phase(
        "several",
        20,
        400,
        1400,
        10000,
        Mix(max_utterances=5, prompts=0.1, cut=0.12, strength=0.9, timestamps=0.6),
        aligned=0.3,
        labelled=0.3,
    ),
    Phase(
        "full",
        52,
        WINDOW,
        WINDOW,
        6 * WINDOW,
        Mix(
            max_utterances=6,
            timestamps=0.6,
            prompts=0.5,
            long_prompts=0.6,
            cut=0.3,
            long_lead=0.2,
            no_speech=0.06,
            strength=1.0,
        ),
        aligned=0.2,
        labelled=0.1,
    ),
)
PEAK_RATE, WARM_UP_STEPS = 2e-3, 150
HOLD = 0.35  # part of the time in which the learning rate is constant; then it decreases to zero
PROMPTED = 0.9  # share of windows with a prompt, in batches that have any
CHECKPOINT_SECONDS = 180


@dataclass
class Batch:
    """The windows of one step as tensors.

    ``mel`` [b, 80, 2 n]; ``inputs``, ``targets`` [b, u] classes (-100: not trained); ``spans`` [b, u, 2]
    encoder positions in the window (negative: not trained); ``words``, ``phones`` [b, n] labels.
    """

    mel: Tensor
    offsets: Tensor
    text_offsets: Tensor
    inputs: Tensor
    targets: Tensor
    spans: Tensor
    words: Tensor
    phones: Tensor


def collate(
    windows: list[Window], classes: dict[int, int], word_classes: NDArray[np.int64]
) -> Batch:
    """Stack windows of equal length; scripts are padded at their end."""
    rows = max(len(w.script.inputs) for w in windows)
    inputs = np.zeros((len(windows), rows), np.int64)
    targets = np.full((len(windows), rows), -100, np.int64)
    spans = np.full((len(windows), rows, 2), -1.0, np.float32)
    for i, window in enumerate(windows):
        script, n = window.script, len(window.script.inputs)
        inputs[i, :n] = [classes[token] for token in script.inputs]
        targets[i, :n] = [classes[token] if token >= 0 else -100 for token in script.targets]
        spans[i, :n] = np.array(script.spans, np.float32) / STEP
    return Batch(
        mel=torch.from_numpy(np.stack([w.frames.T for w in windows])),
        offsets=torch.tensor([w.offset for w in windows]),
        text_offsets=torch.tensor([w.text_offset for w in windows]),
        inputs=torch.from_numpy(inputs),
        targets=torch.from_numpy(targets),
        spans=torch.from_numpy(spans),
        words=torch.from_numpy(word_classes[np.stack([w.words for w in windows])]),
        phones=torch.from_numpy(np.stack([w.phones for w in windows])),
    )


def text_loss(logits: Tensor, targets: Tensor, first_time: int) -> tuple[Tensor, float]:
    """Return the cross entropy of the trained positions, and the accuracy of text tokens.

    The target of a timestamp has half of the probability; each neighbor has a quarter.
    """
    trained = targets >= 0
    log_probs, wanted = logits[trained].log_softmax(-1), targets[trained]
    is_time = (wanted >= first_time) & (wanted < first_time + N_TIMES)
    shifts = torch.tensor([-1, 0, 1])
    weights = torch.where(
        is_time[:, None], torch.tensor([0.25, 0.5, 0.25]), torch.tensor([0.0, 1.0, 0.0])
    )
    near = (wanted[:, None] + shifts).clamp(first_time, first_time + N_TIMES - 1)
    near = torch.where(is_time[:, None], near, wanted[:, None])
    loss = -(log_probs.gather(1, near) * weights).sum(1).mean()
    with torch.no_grad():
        accuracy = (log_probs[~is_time].argmax(-1) == wanted[~is_time]).float().mean().item()
    return loss, accuracy


def alignment_loss(scores: list[Tensor], spans: Tensor) -> Tensor:
    """Return the divergence of each token's attention from a uniform distribution over its span.

    It is the mean over heads and tokens.
    """
    positions = torch.arange(scores[0].shape[-1])
    starts, ends = (
        spans[..., 0].floor(),
        torch.maximum(spans[..., 1].ceil(), spans[..., 0].floor() + 1),
    )
    inside = ((positions >= starts[..., None]) & (positions < ends[..., None])).float()
    inside = inside * (spans[..., 1:] > 0)
    rows = inside.sum(-1) > 0
    wanted = inside[rows] / inside[rows].sum(-1, keepdim=True)
    entropy = wanted.sum(-1).new_tensor(0.0) - (wanted * wanted.clamp_min(1e-9).log()).sum(-1)
    losses = [-(wanted * score[rows].log_softmax(-1)).sum(-1) - entropy for score in scores]
    return torch.stack(losses).mean()


def label_loss(head: torch.nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of frame labels on all speech and on a tenth of the silence."""
    kept = (labels > 0) | (torch.rand(labels.shape) < 0.1)
    return F.cross_entropy(head(x[kept].bfloat16()).float(), labels[kept])


class Trainer:
    """Model, optimizers, data and elapsed time of one run."""

    def __init__(self, data: list[Path], run: Path, phases: tuple[Phase, ...], seed: int) -> None:
        self.run, self.phases, self.seed = run, phases, seed
        run.mkdir(parents=True, exist_ok=True)
        self.corpus, self.vocabulary = self._data(data)
        self.classes = self.vocabulary.class_of()
        self.word_classes = np.zeros(51865, np.int64)
        for token, row in self.classes.items():
            self.word_classes[token] = row + 1 if row < len(self.vocabulary.tokens) else 0
        self.word_classes[0] = 0
        torch.manual_seed(seed)
        self.dims = Dims()
        self.model = TrainableWhisper(self.dims, self.vocabulary, len(self.corpus.phone_labels))
        self.optimizers = self._optimizers()
        self.elapsed, self.step, self.stopped = 0.0, 0, False
        if (run / "checkpoint.pt").exists():
            self._load()
        self.assembler = Assembler(self.corpus, seed + self.step)

    def _data(self, folders: list[Path]) -> tuple[Corpus, Vocabulary]:
        """Load the corpus and its vocabulary.

        A continued run keeps its tokens and phones, also if it has more speech than before.
        """
        tokens, phones = self.run / "vocabulary.json", self.run / "phones.json"
        if not tokens.exists():
            corpus = Corpus(*folders)
            corpus.vocabulary().save(tokens)
            phones.write_text(json.dumps(corpus.phone_labels))
            return corpus, corpus.vocabulary()
        corpus, vocabulary = (
            Corpus(*folders, phone_labels=json.loads(phones.read_text())),
            Vocabulary.load(tokens),
        )
        known = set(vocabulary.tokens)
        corpus.utterances = [u for u in corpus.utterances if known.issuperset(u.tokens)]
        return corpus, vocabulary

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Return Muon for the matrices of the layers, and AdamW for all other parameters."""
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        free: list[Tensor] = []
        for name, parameter in self.model.named_parameters():
            if ".layers." in name and parameter.ndim == 2:
                matrices.append(parameter)
            else:
                (others if parameter.ndim > 1 and "embed" not in name else free).append(parameter)
        groups = [{"params": others, "weight_decay": 0.02}, {"params": free, "weight_decay": 0.0}]
        return [
            torch.optim.Muon(
                matrices, lr=PEAK_RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=True),
        ]

    def _load(self) -> None:
        state = torch.load(self.run / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.elapsed, self.step = state["elapsed"], state["step"]

    def save(self) -> None:
        """Write the checkpoint to a temporary file, then replace the old one."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        state |= {"elapsed": self.elapsed, "step": self.step, "dims": asdict(self.dims)}
        torch.save(state, self.run / "checkpoint.tmp")
        os.replace(self.run / "checkpoint.tmp", self.run / "checkpoint.pt")
        last = self.phases[-1].minutes
        summary = {
            "utterances": len(self.corpus.utterances),
            "hours": round(sum(u.seconds for u in self.corpus.utterances) / 3600, 1),
            "steps": self.step,
            "minutes": round(self.elapsed / 60),
            "full_minutes": round(max(0.0, last - (self.total - self.elapsed) / 60)),
            "seed": self.seed,
        }
        (self.run / "training.json").write_text(json.dumps(summary, indent=1))

    @property
    def total(self) -> float:
        """Planned training time in seconds."""
        return 60 * sum(phase.minutes for phase in self.phases)

    def current(self) -> tuple[Phase, float] | None:
        """Return the current phase and the part of it that has passed; None: the training is complete."""
        begun = 0.0
        for phase in self.phases:
            seconds = 60 * phase.minutes
            if self.elapsed < begun + seconds:
                return phase, (self.elapsed - begun) / seconds
            begun += seconds
        return None

    def rate(self) -> float:
        """Return the learning rate: a warm-up, a constant part, then a linear decrease."""
        done = self.elapsed / self.total
        falling = min(1.0, (1.0 - done) / (1.0 - HOLD))
        return PEAK_RATE * min(1.0, (self.step + 1) / WARM_UP_STEPS) * max(falling, 0.005)

    def _singles(self) -> Iterator[list[int]]:
        """Yield lists of utterances of about equal length, for batches of the first phase."""
        utterances = self.corpus.utterances
        while True:
            picks = self.assembler.rng.choice(len(utterances), 256, replace=False).tolist()
            by_length = sorted(picks, key=lambda i: len(utterances[i].frames))
            size = 32
            order = self.assembler.rng.permutation(len(by_length) // size)
            yield from (by_length[i * size : (i + 1) * size] for i in order)

    def windows(self, phase: Phase, done: float, singles: Iterator[list[int]]) -> list[Window]:
        """Assemble the windows of one step."""
        rng, utterances = self.assembler.rng, self.corpus.utterances
        mix = (
            replace(phase.mix, strength=phase.mix.strength * min(1.0, done * 1.25))
            if phase.ramp
            else phase.mix
        )
        prompted = (
            rng.random() < mix.prompts / PROMPTED
        )  # a whole batch has prompts or none: padding costs time
        mix = replace(mix, prompts=PROMPTED if prompted else 0.0)
        if phase.shortest:
            half = int(rng.integers(phase.shortest // 2, phase.longest // 2 + 1))
            return [
                self.assembler.window(mix, frames=2 * half)
                for _ in range(phase.batch // (2 * half))
            ]
        chosen = next(singles)
        longest = max(len(utterances[i].frames) for i in chosen)
        frames = min(phase.longest, 2 * int(longest * 0.56 + rng.integers(5, 40)))
        chosen = chosen[: max(4, phase.batch // frames)]
        return [self.assembler.window(mix, frames=frames, chosen=[utterances[i]]) for i in chosen]

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        """Return the text, alignment, phone and word losses, and the accuracy of text tokens."""
        audio, middle = self.model.encoder(batch.mel, batch.offsets, torch.bfloat16)
        logits, scores = self.model.decode(batch.inputs, batch.text_offsets, audio.bfloat16())
        text, accuracy = text_loss(logits, batch.targets, self.vocabulary.first_time)
        return (
            text,
            alignment_loss(scores, batch.spans),
            label_loss(self.model.phone_head, middle, batch.phones),
            label_loss(self.model.word_head, audio, batch.words),
            accuracy,
        )

    def _stop(self, *_: object) -> None:
        self.stopped = True

    def train(self) -> None:
        """Train to the end of the last phase or until SIGTERM, then save."""
        singles, smooth, saved = self._singles(), np.zeros(5), time.time()
        signal.signal(signal.SIGTERM, self._stop)
        while (now := self.current()) is not None and not self.stopped:
            phase, done = now
            begun = time.time()
            batch = collate(self.windows(phase, done, singles), self.classes, self.word_classes)
            assembled = time.time() - begun
            *parts, accuracy = self.losses(batch)
            text, aligned, phones, words = parts
            loss = text + phase.aligned * aligned + phase.labelled * (phones + words)
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
                for group in optimizer.param_groups:
                    group["lr"] = self.rate()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
            if math.isfinite(norm):
                for optimizer in self.optimizers:
                    optimizer.step()
            took = time.time() - begun
            self.elapsed += min(took, 5.0)
            self.step += 1
            values = np.array([p.item() for p in parts] + [accuracy])
            smooth = values if self.step == 1 or not smooth.any() else 0.95 * smooth + 0.05 * values
            if self.step % 20 == 0:
                names = ("text", "align", "phone", "word", "accuracy")
                line = " ".join(f"{n} {v:.3f}" for n, v in zip(names, smooth, strict=True))
                print(f"{self.elapsed / 60:6.2f} min {phase.name} step {self.step} {line} norm {norm:.2f} "
                      f"rate {self.rate():.1e} {took:.2f} s ({assembled:.2f})", flush=True)  # fmt: skip
            if time.time() - saved > CHECKPOINT_SECONDS:
                self.save()
                saved = time.time()
        self.save()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, help="folders written by synthesize.py"
    )
    parser.add_argument(
        "--run", type=Path, required=True, help="folder of checkpoint and vocabulary; created"
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="factor by which the minutes of every phase are multiplied [default: 1]",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed [default: 0]")
    args = parser.parse_args()
    torch.set_num_threads(1)
    phases = tuple(replace(phase, minutes=phase.minutes * args.scale) for phase in PHASES)
    trainer = Trainer(args.data, args.run, phases, args.seed)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(
        f"{len(trainer.corpus.utterances)} utterances, {len(trainer.vocabulary.tokens)} tokens, "
        f"{parameters:,} parameters, from step {trainer.step}",
        flush=True,
    )
    trainer.train()


if __name__ == "__main__":
    main()
