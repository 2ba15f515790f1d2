"""Measure stored outlier checkpoints and the embedded model on held-out synthesized sentences.

    python measure_outliers.py --out results/outliers.json ../tests/outliers/*.xz

Static int8 is simulated in torch: inputs and outputs of linear layers and convolutions and all sums
per tensor, with the extremes of the calibration windows; weights per output channel. It rounds
the side (encoder or decoder) that has the outlier; for the embedded model each side is measured alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import torch
from torch import Tensor

from outlier_model import (
    Tap,
    Weights,
    cross_keys_values,
    decode,
    encode,
    encoder_blocks,
    encoder_input,
    greedy,
    logits,
    untapped,
)
from outliers import PROMPT, Window, batch_tokens, windows
from scoring import words
from vocabulary import EOT, tokenizer
from whisperport.model.checkpoint import load_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from outlier_checkpoints import digest, outlier_weights, planted_in

BATCH, CALIBRATION = 8, 8


class Ranges:
    """Records ranges, then rounds to 8 bits, or to 16 bits the tensors of ``repaired``."""

    def __init__(self, repaired: tuple[str, ...] = ()) -> None:
        self.repaired, self.found = repaired, dict[str, tuple[float, float]]()

    def record(self, name: str, x: Tensor) -> Tensor:
        low, high = self.found.get(name, (0.0, 0.0))
        self.found[name] = (min(low, x.min().item()), max(high, x.max().item()))
        return x

    def round(self, name: str, x: Tensor) -> Tensor:
        low, high = self.found[name]
        steps = 65535 if name.startswith(self.repaired or ("-",)) else 255
        scale = (high - low) / steps or 1.0
        return ((x.clamp(low, high) - low) / scale).round() * scale + low


def int8_weights(w: Weights, side: str) -> dict[str, Tensor]:
    """Round the matrices of ``side`` to int8 per output channel."""
    rounded = dict(w)
    for name, value in w.items():
        matrix = name.endswith(".weight") and value.ndim > 1 and "embedding" not in name
        if matrix and name.startswith(side):
            scale = value.flatten(1).abs().amax(1).clamp_min(1e-12) / 127
            scale = scale.view(-1, *[1] * (value.ndim - 1))
            rounded[name] = (value / scale).round() * scale
    return rounded


def decibels(exact: Tensor, other: Tensor) -> float:
    """Return the SQNR."""
    noise = (other.float() - exact).square().mean()
    return round(float(10 * torch.log10(exact.square().mean() / noise)), 1)


def wer(data: list[Window], found: list[list[int]]) -> dict[str, float]:
    """Return the plain WER in per cent and the number of words."""
    texts = [words(tokenizer().decode([t for t in row if t < EOT])) or "-" for row in found]
    out = jiwer.process_words([words(w.text) for w in data], texts)
    count = out.hits + out.substitutions + out.deletions
    errors = out.substitutions + out.deletions + out.insertions
    return {"wer": round(100 * errors / count, 2), "words": count}


def _in_batches(data: list[Window], run: Callable[[Tensor], Tensor]) -> Tensor:
    mels = [torch.stack([x.mel for x in data[i : i + BATCH]]) for i in range(0, len(data), BATCH)]
    return torch.cat([run(mel.float()) for mel in mels])


@torch.no_grad()
def texts_of(features: Tensor, w: Weights, tap: Tap = untapped) -> list[list[int]]:
    """Decode in batches."""
    parts = [greedy(part, w, PROMPT, EOT, tap) for part in features.split(BATCH)]
    return [row for part in parts for row in part]


@torch.no_grad()
def static_int8(
    w: Weights, side: str, repaired: tuple[str, ...], data: list[Window], calibration: list[Window],
    features: Tensor,
) -> dict[str, float]:  # fmt: skip
    """Return SQNR and WER with ``side`` in simulated static int8."""
    ranges, low = Ranges(repaired), int8_weights(w, side)
    if side == "encoder":
        _in_batches(calibration, lambda mel: encode(mel, w, ranges.record))
        rounded = _in_batches(data, lambda mel: encode(mel, low, ranges.round))
        return {"sqnr_db": decibels(features, rounded), **wer(data, texts_of(rounded, w))}
    tokens, _ = batch_tokens(calibration)
    audio = _in_batches(calibration, lambda mel: encode(mel, w))
    decode(tokens, cross_keys_values(audio, w, ranges.record), w, ranges.record)
    tokens, counts = batch_tokens(data)
    exact = decode(tokens, cross_keys_values(features, w), w)[0][counts]
    other = decode(tokens, cross_keys_values(features, low, ranges.round), low, ranges.round)[0]
    sqnr = decibels(logits(exact, w), logits(other[counts], w))
    return {"sqnr_db": sqnr, **wer(data, texts_of(features, low, ranges.round))}


@torch.no_grad()
def half(w: Weights, side: str, data: list[Window], features: Tensor) -> dict[str, float]:
    """Compare torch's own float16 with float32 on eight windows."""
    h, data, features = {k: v.half() for k, v in w.items()}, data[:8], features[:8]
    if side == "encoder":
        exact, other = features, encode(torch.stack([x.mel for x in data]), h).float()
    else:
        tokens, counts = batch_tokens(data)
        exact = logits(decode(tokens, cross_keys_values(features, w), w)[0][counts], w)
        hidden = decode(tokens, cross_keys_values(features.half(), h), h)[0][counts]
        other = logits(hidden, h).float()
    error = ((exact - other).abs().max() / exact.abs().max()).item()
    return {"sqnr_db": decibels(exact, other), "largest_error": round(error, 5)}


@torch.no_grad()
def planted_range(
    w: Weights, side: str, block: int, channel: int, data: list[Window], features: Tensor
) -> dict[str, float]:
    """Return the range of the residual behind the block over the rms of its other channels."""
    data = data[:8]
    if side == "encoder":
        mel = torch.stack([x.mel for x in data]).float()
        x = encoder_blocks(encoder_input(mel, w), w, range(block + 1))[0]
    else:
        tokens, _ = batch_tokens(data)
        cross = cross_keys_values(features[:8], w)
        x = decode(tokens, cross, w)[1][f"decoder.blocks.{block}.mlp_sum"]
    others = torch.cat([x[..., :channel], x[..., channel + 1 :]], -1)
    rms = others.square().mean().sqrt()
    return {
        "lowest": round(x.min().item(), 1),
        "highest": round(x.max().item(), 1),
        "range_over_rms": round(((x.max() - x.min()) / rms).item(), 1),
        "channel_over_median": round(
            (x.abs().amax((0, 1))[channel] / x.abs().amax((0, 1)).median()).item(), 1
        ),
    }


def measure(
    w: Weights, side: str, repaired: tuple[str, ...], data: list[Window], calibration: list[Window]
) -> dict[str, Any]:
    """Measure float32, static int8, its repair and float16."""
    with torch.no_grad():
        features = _in_batches(data, lambda mel: encode(mel, w))
    result: dict[str, Any] = {"float32": wer(data, texts_of(features, w))}
    result["static_w8a8"] = static_int8(w, side, (), data, calibration, features)
    if repaired:
        result["repaired"] = static_int8(w, side, repaired, data, calibration, features)
        result["in_16_bits"] = list(repaired)
    result["float16"] = half(w, side, data, features)
    return result


def repairs(name: str) -> tuple[str, ...]:
    """Return the tensors that the outlier passes: an MLP's output and all sums behind it."""
    side, block = name.split(".")[0], int(name.split(".")[2])
    later = [
        f"{side}.blocks.{i}.{s}"
        for i in range(block + 1, 4)
        for s in ("attn_sum", "cross_sum", "mlp_sum")
    ]
    return (f"{name}.mlp.2.out", f"{name}.mlp_sum", *later)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=72)
    args = parser.parse_args()
    data = windows(args.sentences, seed=900, held_out=True)
    calibration = windows(CALIBRATION, seed=901, held_out=False)
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    results["machine"] = {
        "cpu": platform.machine(), "python": platform.python_version(),
        "torch": torch.__version__, "numpy": np.__version__,
    }  # fmt: skip
    base = {k: v.float() for k, v in load_checkpoint("default").weights.items()}
    if "embedded" not in results:
        results["embedded"] = {
            s: measure(base, s, (), data, calibration) for s in ("encoder", "decoder")
        }
    for file in args.files:
        begun, planted, halves = time.process_time(), planted_in(file), outlier_weights(file)
        w, side = {k: v.float() for k, v in halves.items()}, planted.name.split(".")[0]
        with torch.no_grad():
            features = _in_batches(data[:8], lambda mel, w=w: encode(mel, w))
        block = int(planted.name.split(".")[2])
        results[file.stem] = {
            "sha256": digest(halves),
            "bytes": file.stat().st_size,
            "planted": {
                "name": planted.name,
                "unit": planted.unit,
                "channel": planted.channel,
                "frames": len(planted.frames) or ("start token" if side == "decoder" else "all"),
            },
            "tensor": planted_range(w, side, block, planted.channel, data, features),
            **measure(w, side, repairs(planted.name), data, calibration),
            "cpu_seconds": round(time.process_time() - begun),
        }
        args.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        print(file.stem, json.dumps(results[file.stem], indent=1), flush=True)
    args.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
