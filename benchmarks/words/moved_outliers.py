"""Name and repair massive activations in any block, channel and frames, and channels that are out of scale.

    python -m benchmarks.words.moved_outliers [--count 20]

Each checkpoint is made from the embedded model by a seed: training/outliers.py plants a massive activation
in a drawn block, channel and part of the frames (it is not trained afterwards, so only its encoder is of
use); the channels of the residual are permuted, in all weights that write or read them; and one channel of
the values of a drawn block is made 20 to 60 times the median one, and what reads it is divided.

The truth is measured by hooks on the modules of openai-whisper with these weights, on clips of the package:
the channel of the largest value, and the frames in which it has at least a quarter of it. Named is an
outlier if `sensitivities` reports that channel and that number of frames for the output of this module.
Repaired is an encoder whose static 8 bits have at least 20 dB with exceptions and equalization, in ONNX
Runtime, in clips that were not in the calibration; without them it has less. Writes
`results/words.json`.
"""

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import whisper
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "training"))

import outliers
from outlier_planting import WIDTH, random_spec
from outliers import shipped_windows
from whisperport.build.sensitivity import Sensitivity, sensitivities
from whisperport.model.checkpoint import Checkpoint, load_checkpoint
from whisperport.model.network.equalization import equalize
from whisperport.model.network.whisper import build_model
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.targets import RunOptions, get_target
from whisperport.targets.activations import EXTREME
from whisperport.targets.cpu.onnxruntime import LowerOptions
from whisperport.verification import versions
from whisperport.verification.loss import loss_of

from ..record import record

REPAIRED_DB = 20.0
CALIBRATED, MEASURED = 6, 3  # clips


def moved(seed: int, data: Sequence[Any]) -> tuple[Checkpoint, dict[str, int]]:
    """Return a checkpoint with outliers, and where they were put."""
    spec = next(
        found
        for n in range(100)
        if (found := random_spec(100 * seed + n)).side == "encoder" and found.frames
    )
    rng = random.Random(seed)
    weights = dict(outliers.Task(spec, list(data)).w)
    order = rng.sample(range(WIDTH), WIDTH)  # new channel -> old channel
    for name in weights:
        weights[name] = _permuted(name, weights[name], order)
    block, channel = rng.randrange(4), rng.randrange(WIDTH)
    prefix = f"encoder.blocks.{block}.attn"
    rows = (weights[f"{prefix}.value.weight"] * weights[f"{prefix}_ln.weight"]).norm(dim=1)
    factor = rng.uniform(20, 60) * float(rows.median() / rows[channel])
    for name, part, by in (
        ("value.weight", (channel,), factor),
        ("value.bias", (channel,), factor),
        ("out.weight", (slice(None), channel), 1 / factor),
    ):
        weights[f"{prefix}.{name}"] = weights[f"{prefix}.{name}"].clone()
        weights[f"{prefix}.{name}"][part] *= by
    put = {
        "block": spec.block,
        "channel": order.index(spec.channel),
        "value_block": block,
        "value_channel": channel,
    }
    made = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    return replace(load_checkpoint("default"), weights=MappingProxyType(made)), put


def _permuted(name: str, weight: Tensor, order: list[int]) -> Tensor:
    """Return a weight with the channels of the encoder's residual in another order."""
    reads = (".query.weight", ".key.weight", ".value.weight", ".mlp.0.weight")
    if name.startswith("decoder."):
        is_read = ".cross_attn." in name and name.endswith((".key.weight", ".value.weight"))
        return weight[:, order] if is_read else weight
    if name.endswith(("positional_embedding", *reads)):
        return weight[:, order]
    writes = ("conv2.", "_ln.", ".out.", ".mlp.2.", "ln_post.")
    return weight[order] if any(part in name for part in writes) else weight


def hooked(
    checkpoint: Checkpoint, put: Mapping[str, int], mels: Sequence[Tensor]
) -> dict[str, Any]:
    """Return channel, value and frames of the largest value of the two modules, by openai-whisper."""
    dims = whisper.model.ModelDimensions(
        **{
            name: getattr(checkpoint.dims, name)
            for name in whisper.model.ModelDimensions.__annotations__
        }
    )
    model = whisper.model.Whisper(dims)
    model.load_state_dict(dict(checkpoint.weights), strict=False)
    seen: dict[str, list[Tensor]] = {"mlp": [], "value": []}
    model.encoder.blocks[put["block"]].mlp[2].register_forward_hook(
        lambda _module, _inputs, output: seen["mlp"].append(output[0])
    )
    model.encoder.blocks[put["value_block"]].attn.value.register_forward_hook(
        lambda _module, _inputs, output: seen["value"].append(output[0])
    )
    with torch.no_grad():
        for mel in mels:
            model.encoder(mel)
    found = {}
    for name, outputs in seen.items():
        joined = torch.cat(outputs).abs()
        largest = float(joined.max())
        frames = int((joined.amax(1) >= EXTREME * largest).sum())
        found[name] = {"channel": int(joined.amax(0).argmax()), "value": largest, "frames": frames}
    return found


def is_named(found: Sequence[Sensitivity], module: str, truth: Mapping[str, Any]) -> bool:
    """Return whether the output of a module is reported with the true channel and number of frames."""
    texts = [str(one.activation) for one in found if one.activation.name == module]
    return any(
        f"channel {truth['channel']} reaches " in text and f" in {truth['frames']} of " in text
        for text in texts
    )


def measured(seed: int, data: Sequence[Any], folder: Path) -> dict[str, Any]:
    """Make one checkpoint, and return what was named and repaired."""
    checkpoint, put = moved(seed, data)
    mels = [one.mel[None].float() for one in data]
    calibrated, others = mels[:CALIBRATED], mels[CALIBRATED : CALIBRATED + MEASURED]
    truth = hooked(checkpoint, put, calibrated)
    model = build_model(checkpoint)
    (program,) = whisper_programs(Parts(model, []), ["encoder"])
    target = get_target("onnxruntime")
    (exact,) = target.lower([program], _new(folder / "float"))
    samples = [{"mel": mel.numpy()} for mel in calibrated]
    found = sensitivities(folder / "float" / exact.files[0], samples, worst=0)
    np.save(folder / "mel.npy", np.stack([sample["mel"] for sample in samples]))
    expected = [_features(folder / "float", exact, mel) for mel in others]
    sqnr = {}
    for name, sensitive in (("naive", "as-others"), ("repaired", "w8")):
        if name == "repaired":
            equalize(model.encoder)
            (program,) = whisper_programs(Parts(model, []), ["encoder"])
        options = LowerOptions(sensitive=sensitive)  # type: ignore[arg-type]
        chosen = target.configured(options).with_precisions({"encoder": "w8a8"})
        (entry,) = chosen.lower([program], _new(folder / name))
        entry = chosen.quantize(entry, folder / name, {"mel": folder / "mel.npy"})
        sqnr[name] = min(
            loss_of(_features(folder / name, entry, mel), of).sqnr_db
            for mel, of in zip(others, expected, strict=True)
        )
    return {
        "seed": seed,
        **put,
        "hooks": truth,
        "planted_channel_is_largest": truth["mlp"]["channel"] == put["channel"],
        "named": is_named(found, f"blocks.{put['block']}.mlp.2", truth["mlp"]),
        "value_named": is_named(found, f"blocks.{put['value_block']}.attn.value", truth["value"]),
        "naive_db": sqnr["naive"],
        "repaired_db": sqnr["repaired"],
        "repaired": sqnr["repaired"] >= REPAIRED_DB,
    }


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _features(folder: Path, entry: Any, mel: Tensor) -> Any:
    runner = get_target("onnxruntime").load(folder, [entry], RunOptions(threads=1))["encoder"]
    return np.array(runner.run({"mel": mel.numpy()})["features"][0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20)
    options = parser.parse_args()
    data = shipped_windows(1)
    rows = []
    packages = ("whisperport", "openai-whisper", "onnxruntime", "torch")
    for seed in range(options.count):
        with TemporaryDirectory() as folder:
            rows.append(measured(seed, data, Path(folder)))
        row = rows[-1]
        print(
            f"{seed:2}  block {row['block']} channel {row['channel']:3}  named {row['named']} and "
            f"{row['value_named']}  {row['naive_db']:5.1f} dB, repaired {row['repaired_db']:5.1f} dB",
            flush=True,
        )
    result = {"versions": versions(packages), "checkpoints": rows}
    record("words", "moved_outliers", result)


if __name__ == "__main__":
    main()
