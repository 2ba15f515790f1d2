"""The compared models, in our bundles and in the two forms that the peers' converters read.

    python models.py NAME FOLDER [--target onnxruntime]

Writes `FOLDER/huggingface`, `FOLDER/openai.pt` and a bundle `FOLDER/TARGET`, all with the same weights.
What exists is not written again. The embedded model's bundle for onnxruntime is the one in the package.
This runs in whisperport's own environment, and in a process of its own: its memory is free when it ends.
"""

import argparse
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from whisperport.build.export.bundle_cache import bundle_of
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.search.search import export_best
from whisperport.model.checkpoint import Checkpoint, load_checkpoint
from whisperport.model.checkpoint.names import to_huggingface
from whisperport.program.program_kind import COARSE_PROJECTION
from whisperport.speech.data.embedded_model import unpack_model
from whisperport.targets import RunOptions
from whisperport.verification.clips import Clip

from ..models import EMBEDDED, WIDENED, random_checkpoint, widened_checkpoint
from .contenders import ALL_BF16, AUTO, COARSE, ENCODER, IN_BF16, IN_W8

BATCH = 8
THREADS = 2  # as the contenders have


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", action="append", default=[], help="export a bundle for it")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = checkpoint_of(chosen.name)
    if not (chosen.folder / "huggingface").exists():
        write_huggingface(checkpoint, chosen.folder / "huggingface")
    if not (chosen.folder / "openai.pt").exists():
        write_openai(checkpoint, chosen.folder / "openai.pt")
    for target in chosen.target:
        if (chosen.folder / target).exists():
            continue
        if chosen.name == EMBEDDED and target == "onnxruntime":
            (chosen.folder / target).symlink_to(bundle_of("default").folder)
        elif target == AUTO:
            how = replace(options(chosen.name), run=RunOptions(threads=THREADS))
            export_best(checkpoint, AUTO, chosen.folder / target, how)
        else:
            name = target.partition("+")[0]
            placement = {COARSE_PROJECTION: name} if COARSE in target else {}
            of_encoder = ("encoder", "cross_kv") if ENCODER in target else ()
            precisions = dict.fromkeys(of_encoder, "bf16") if IN_BF16 in target else {}
            placement |= dict.fromkeys(of_encoder, "openvino")
            how = replace(
                options(chosen.name),
                placement=placement,
                precision=precision_of(target),
                precisions=precisions,
            )
            export(checkpoint, name, chosen.folder / target, how)


def checkpoint_of(name: str) -> Checkpoint:
    if name == EMBEDDED:
        return load_checkpoint("default")
    return widened_checkpoint(WIDENED[name]) if name in WIDENED else random_checkpoint(name)


def precision_of(target: str) -> str:
    """Return the precision of all programs without one of their own."""
    if target.endswith(ALL_BF16):
        return "bf16"
    return "w8" if target.endswith(IN_W8) else ""


def options(name: str) -> ExportOptions:
    """Verify the embedded model; random weights give no text that could be verified."""
    if name.startswith(EMBEDDED):
        return ExportOptions(batch=BATCH)
    noise = (0.1 * np.random.default_rng(0).standard_normal(16_000)).astype(np.float32)
    return ExportOptions(
        batch=BATCH,
        clips=[Clip("noise", "", noise)],
        allow_unverified=True,
        run=RunOptions(threads=1),
    )


def write_huggingface(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a folder that transformers reads: that of the embedded model, with other sizes and weights."""
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    unpack_model(part)
    dims = checkpoint.dims
    change_json(
        part / "config.json",
        d_model=dims.n_audio_state,
        encoder_layers=dims.n_audio_layer,
        decoder_layers=dims.n_text_layer,
        encoder_attention_heads=dims.n_audio_head,
        decoder_attention_heads=dims.n_text_head,
        encoder_ffn_dim=dims.n_audio_ffn,
        decoder_ffn_dim=dims.n_text_ffn,
        dtype="float32",
    )
    heads = [list(head) for head in checkpoint.generation.alignment_heads]
    change_json(part / "generation_config.json", alignment_heads=heads)
    tensors = {
        to_huggingface(name): weight.float().contiguous()
        for name, weight in checkpoint.weights.items()
    }
    safetensors.torch.save_file(tensors, part / "model.safetensors", {"format": "pt"})
    part.rename(folder)


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=1))


def write_openai(checkpoint: Checkpoint, path: Path) -> None:
    """Write a file that openai-whisper reads. Its sizes have no width of the feed-forward layers."""
    dims = {k: v for k, v in asdict(checkpoint.dims).items() if not k.endswith("_ffn")}
    weights = {name: weight.float() for name, weight in checkpoint.weights.items()}
    part = path.with_suffix(".part")
    torch.save({"dims": dims, "model_state_dict": weights}, part)
    part.rename(path)


if __name__ == "__main__":
    main()
