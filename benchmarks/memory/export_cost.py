"""Measure the cost of an export: seconds per phase, and peak memory relative to the model's weights.

    python -m benchmarks.memory.export_cost [--sizes tiny base small] [--targets NAME ...] [--threads N]

Checkpoints with Whisper's sizes and random weights are written to `--work` as folders in float32, as
transformers saves them. Their values fit float16, as those of the published checkpoints do. Each export
runs in a separate process. With random weights, decoding runs until the token limit. Memory is Linux's
resident memory, which includes mapped pages of the checkpoint. Writes `results/memory.json` and
prints a table. To measure another version, set PYTHONPATH to its `src`.
"""

import argparse
import json
import logging
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..models import SIZES
from ..record import record, recorded

GOAL_FACTOR, GOAL_BYTES = (
    2.5,
    1e9,
)  # peak memory: at most so many times the weights, plus so many bytes
PHASES = {  # start of a progress message -> the phase that starts with this message
    "import": "import",
    "reading": "load",
    "building": "build",
    "searching for alignment heads": "alignment heads",
    "running the model": "reference",
    "tracing": "trace",
    "traced": "trace",
    "rewriting": "rewrite",
    "lowering": "lower",
    "writing the ExecuTorch": "lower",
    "writing the embedding": "tables",
    "loading the programs": "verify",
    "moving the bundle": "commit",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "base", "small"])
    parser.add_argument("--targets", nargs="+", default=["onnxruntime", "xnnpack"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("build/export_cost"))
    parser.add_argument("--make", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.make:
        make_checkpoint(chosen.make, chosen.work / chosen.make)
        return
    if chosen.child:
        print(json.dumps(one_export(*chosen.child, chosen.work, chosen.threads)))
        return
    rows = []
    for size in chosen.sizes:
        if not (chosen.work / size / "tokenizer.json").exists():
            child(chosen, "--make", size)
        for target in chosen.targets:
            rows.append(json.loads(child(chosen, "--child", size, target)))
            show(rows[-1])
    save(rows)


def child(chosen: argparse.Namespace, *arguments: str) -> str:
    """Run this script in another process; return the last line that it prints."""
    shared = ["--work", str(chosen.work), "--threads", str(chosen.threads)]
    command = [sys.executable, "-m", __spec__.name, *shared, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip().rpartition("\n")[2]


def make_checkpoint(size: str, folder: Path) -> None:
    import torch
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    from whisperport.speech.text.vocabulary import openai_generation, openai_tokenizer

    width, heads, layers = SIZES[size]
    known = openai_generation(51865)
    ids: dict[str, Any] = {
        "decoder_start_token_id": known.start_of_transcript,
        "bos_token_id": known.end_of_text,
        "eos_token_id": known.end_of_text,
        "pad_token_id": known.end_of_text,
        "begin_suppress_tokens": list(known.suppressed_at_start),
    }
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", layers),
            ("attention_heads", heads),
            ("ffn_dim", 4 * width),
        )
    }
    torch.manual_seed(0)
    config = WhisperConfig(d_model=width, vocab_size=51865, **sides, **ids)
    model = WhisperForConditionalGeneration(config).half().float()
    model.generation_config = GenerationConfig(
        **ids,
        suppress_tokens=list(known.suppressed),
        no_timestamps_token_id=known.no_timestamps,
        prev_sot_token_id=known.start_of_previous,
        is_multilingual=True,
        lang_to_id={f"<|{code}|>": i for code, i in known.languages.items()},
        task_to_id=dict(known.tasks),
        alignment_heads=[[layers - 1, 0], [layers - 1, 1]],
    )
    model.save_pretrained(folder)
    text = openai_tokenizer(51865).to_str()
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")


def one_export(size: str, target: str, work: Path, threads: int) -> dict[str, Any]:
    """Export once; return seconds and memory at the end of every phase, in the order of the phases."""
    began = [("import", time.perf_counter(), time.process_time(), resident("VmRSS"))]
    logging.disable(logging.WARNING)

    from whisperport.build.export.export import export
    from whisperport.build.export.export_options import ExportOptions
    from whisperport.system.progress import reporting
    from whisperport.targets import RunOptions
    from whisperport.targets.preflight import weight_bytes
    from whisperport.verification import versions

    def progress(message: str) -> None:
        began.append((message, time.perf_counter(), time.process_time(), resident("VmHWM")))
        seconds, peak = began[-1][1] - began[0][1], began[-1][3]
        print(f"{seconds:8.1f} s {peak / 1e9:6.2f} GB  {message}", file=sys.stderr)

    out = work / f"{size}-{target}"
    shutil.rmtree(out, ignore_errors=True)
    options = ExportOptions(allow_unverified=True, run=RunOptions(threads=threads))
    with reporting(progress):
        bundle = export(str(work / size), target, out, options)
    progress("end")
    phases: dict[str, dict[str, float]] = {}
    phase = "import"
    for (message, wall, cpu, _), (_, wall_end, cpu_end, peak) in pairwise(began):
        phase = next((to for start, to in PHASES.items() if message.startswith(start)), phase)
        if " as ONNX" in message:
            phase = "lower"
        found = phases.setdefault(phase, {"wall_s": 0.0, "cpu_s": 0.0, "peak_bytes": 0})
        found["wall_s"] += wall_end - wall
        found["cpu_s"] += cpu_end - cpu
        found["peak_bytes"] = peak  # so far: the peak of a process never falls
    weights = weight_bytes(bundle.manifest.dims)
    peak = resident("VmHWM")
    return {
        "size": size,
        "target": target,
        "wall_s": began[-1][1] - began[0][1],
        "cpu_s": began[-1][2] - began[0][2],
        "weight_bytes": weights,
        "peak_bytes": peak,
        "within_goal": peak <= GOAL_FACTOR * weights + GOAL_BYTES,
        "phases": phases,
        "threads": threads,
        "versions": versions(("whisperport", "torch", "onnxruntime", "executorch")),
    }


def resident(field: str) -> int:
    """Read resident memory in bytes from `/proc`; `VmHWM` is the peak so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def show(row: dict[str, Any]) -> None:
    weights, peak = row["weight_bytes"], row["peak_bytes"]
    print(
        f"{row['size']} on {row['target']}: {row['wall_s']:.0f} s ({row['cpu_s']:.0f} s of CPU), "
        f"{peak / 1e9:.2f} GB at peak, {peak / weights:.1f} times the weights ({weights / 1e6:.0f} MB), "
        f"goal {(GOAL_FACTOR * weights + GOAL_BYTES) / 1e9:.2f} GB"
    )
    for phase, found in row["phases"].items():
        print(
            f"    {phase:16}{found['wall_s']:8.1f} s{found['cpu_s']:8.1f} s of CPU"
            f"{found['peak_bytes'] / 1e9:8.2f} GB so far"
        )


def save(rows: list[dict[str, Any]]) -> None:
    """Keep the rows beside those of other sizes and targets."""
    measured = {(row["size"], row["target"]) for row in rows}
    known = recorded("memory", "export_cost").get("rows", [])
    others = [row for row in known if (row["size"], row["target"]) not in measured]
    print(record("memory", "export_cost", {"what": "cost of an export", "rows": others + rows}))


if __name__ == "__main__":
    main()
