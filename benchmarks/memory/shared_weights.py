"""Measure memory and loading time of programs, with shared weights and with separate weights.

    python -m benchmarks.memory.shared_weights [--target xnnpack] [--sizes tiny base small] [--rounds 5]

Bundles with Whisper's sizes and random float16 weights are exported to `--work` unless they exist.
*Separate*: every program has its own packed weights. *Shared*: programs are loaded as in a bundle. Memory
is the resident memory of a new process minus that before loading. A window has 30 s, a prompt of 200
tokens, 30 steps, and word timestamps. Times of programs are CPU time on one
thread; separate and shared take turns, so that other load on the machine affects both alike. Writes
`results/memory.json` and prints tables.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from whisperport.program.bundle import Bundle
from whisperport.program.runner import Runner
from whisperport.runtime import Decoder, Engine
from whisperport.system.progress import reporting
from whisperport.targets import RunOptions, get_target
from whisperport.verification import versions

from ..models import SIZES, random_checkpoint
from ..record import record

RUNS = {
    "step": 10,
    "prefill_4": 5,
    "prefill_64": 3,
    "align": 3,
}  # runs per round; 1 for other programs
ONE_THREAD = RunOptions(threads=1)
WAYS = ("separate", "shared")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "base", "small"])
    parser.add_argument("--work", type=Path, default=Path("build/memory"))
    parser.add_argument("--target", choices=("onnxruntime", "xnnpack"), default="onnxruntime")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(one_process(chosen.work, chosen.child, chosen.target)))
        return
    rows = []
    for size in chosen.sizes:
        folder = exported(size, chosen.work, chosen.target)
        memory = {way: in_a_process_of_its_own(folder, way, chosen.target) for way in WAYS}
        programs = speeds(folder, chosen.target, chosen.rounds)
        rows.append({"size": size, "memory": memory, "programs": programs})
        show(rows[-1])
        save(rows, chosen)


def exported(size: str, work: Path, target: str) -> Path:
    """Return a bundle with random weights; export it if needed. It is not verified."""
    folder = work / f"{size}-{target}"
    if folder.exists():
        return folder
    from whisperport.build.export.export import export
    from whisperport.build.export.export_options import ExportOptions
    from whisperport.verification.clips import Clip

    hiss = 0.1 * np.random.default_rng(0).standard_normal(16_000)
    options = ExportOptions(
        clips=[Clip("hiss", "", hiss.astype(np.float32))], allow_unverified=True, run=ONE_THREAD
    )
    with reporting(print):
        export(random_checkpoint(size), target, folder, options)
    return folder


def loaded(bundle: Bundle, way: str, target_name: str) -> dict[str, Runner]:
    """Load all programs. XNNPACK: load separate weights first; sharing cannot be switched off again."""
    target, entries = get_target(target_name), bundle.manifest.programs
    if way == "shared":
        return target.load(bundle.folder, entries, ONE_THREAD)
    runners: dict[str, Runner] = {}
    with patch("whisperport.targets.cpu.xnnpack.runtime.share_packed_weights", lambda: False):
        for entry in entries:
            runners |= target.load(bundle.folder, [entry], ONE_THREAD)
    return runners


def in_a_process_of_its_own(folder: Path, way: str, target: str) -> dict[str, float]:
    """Measure in two new processes; return the mean of each figure."""
    command = [
        sys.executable,
        "-m",
        __spec__.name,
        "--work",
        str(folder),
        "--child",
        way,
        "--target",
        target,
    ]
    outputs = [
        json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[
                -1
            ]
        )
        for _ in range(2)
    ]
    return {name: statistics.mean(found[name] for found in outputs) for name in outputs[0]}


def one_process(folder: Path, way: str, target: str) -> dict[str, float]:
    """Measure seconds and MiB for loading a bundle, and MiB after two windows."""
    import google.protobuf.message  # noqa: F401  # imports are not counted

    if target == "onnxruntime":
        import onnxruntime  # noqa: F401
    else:
        import executorch.runtime  # noqa: F401

    bundle = Bundle.open(folder, check_hashes=False)
    before, cpu, wall = resident("VmRSS"), time.process_time(), time.perf_counter()
    runners = loaded(bundle, way, target)
    found = {"load_s": time.perf_counter() - wall, "load_cpu_s": time.process_time() - cpu}
    found |= {"loaded_mib": resident("VmRSS") - before, "peak_mib": resident("VmHWM") - before}
    manifest = bundle.manifest
    tables = bundle.embedding(), bundle.positions()
    decoder = Decoder(Engine(manifest.dims, manifest.generation, runners, *tables))
    for _ in range(2):
        one_window(decoder)
    return found | {"after_windows_mib": resident("VmRSS") - before}


def one_window(decoder: Decoder) -> None:
    engine = decoder.engine
    shape = engine.dims.n_mels, engine.dims.n_frames
    mel = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    decoder.start_window(engine.encode(mel))
    decoder.prefill(range(200))
    for token in range(30):
        decoder.step(token)
    decoder.align(range(60))


def resident(field: str) -> float:
    """Read resident memory in MiB from `/proc`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def speeds(folder: Path, target: str, rounds: int) -> dict[str, dict[str, float]]:
    """Measure milliseconds per run, and the median of the rounds' ratios of shared to separate."""
    bundle = Bundle.open(folder)
    both = {way: loaded(bundle, way, target) for way in WAYS}
    found = {}
    for name in both["shared"]:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        runs = {way: with_inputs(both[way][name]) for way in WAYS}
        for number in range(rounds + 1):  # the first round allocates memory
            for way in WAYS if number % 2 else WAYS[::-1]:
                started = time.process_time()
                for _ in range(RUNS.get(name, 1)):
                    runs[way]()
                spent = time.process_time() - started
                times[way].append(1e3 * spent / RUNS.get(name, 1))
        kept = {way: values[1:] for way, values in times.items()}
        ratios = [
            shared / own for own, shared in zip(kept["separate"], kept["shared"], strict=True)
        ]
        medians = {f"{way}_ms": statistics.median(values) for way, values in kept.items()}
        found[name] = medians | {"ratio": statistics.median(ratios)}
    return found


def with_inputs(runner: Runner) -> Callable[[], Any]:
    random = np.random.default_rng(0)
    inputs = {
        tensor.name: 0.1 * random.standard_normal(tensor.shape, np.float32)
        for tensor in runner.spec.inputs
    }
    return lambda: runner.run(inputs)


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['size']:12}{'load s':>8}{'CPU s':>8}{'MiB':>8}{'peak':>8}{'after windows':>15}")
    for way, found in row["memory"].items():
        seconds = f"{found['load_s']:8.2f}{found['load_cpu_s']:8.2f}"
        sizes = f"{found['loaded_mib']:8.0f}{found['peak_mib']:8.0f}"
        print(f"{way:12}{seconds}{sizes}{found['after_windows_mib']:15.0f}")
    for name, found in row["programs"].items():
        print(f"{name:12}{found['separate_ms']:8.1f}{found['shared_ms']:8.1f}{found['ratio']:8.2f}")


def save(rows: list[dict[str, Any]], chosen: argparse.Namespace) -> None:
    result = {
        "what": "programs with separate and with shared weights, one thread, CPU time",
        "rows": rows,
        "versions": versions(
            ("whisperport", chosen.target.replace("xnnpack", "executorch"), "numpy")
        ),
    }
    record("memory", f"memory_{chosen.target}", result)


if __name__ == "__main__":
    main()
