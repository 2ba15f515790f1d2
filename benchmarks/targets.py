"""Measure two bundles of one checkpoint in turn: each program, and one window of 64 tokens.

The figures are medians, and medians of the rounds' ratios: time on the second target / time on the first.
On a loaded machine, the ratios of CPU time are the more reliable ones. Both bundles must give the same
tokens.

    python benchmarks/targets.py                                 the embedded model
    python benchmarks/targets.py --size tiny --threads 2         Whisper tiny's sizes, random weights
"""

import argparse
import datetime
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from batch import RESULTS, Measured, measured
from memory import random_checkpoint

from whisperport.audio import load_audio, log_mel
from whisperport.bundle import Bundle
from whisperport.commands.fastest import noise_call
from whisperport.exporting.export import ExportOptions, export
from whisperport.runtime import DecodeOptions, Decoder, Engine, decode_window, load_engine
from whisperport.runtime.loading import load_runners
from whisperport.targets import RunOptions, get_target
from whisperport.verification import machine, versions
from whisperport.verification.clips import Clip, shipped_audio

WINDOW = "window of 64 tokens"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--targets", nargs=2, default=["onnxruntime", "openvino"])
    parser.add_argument("--size", default="embedded")
    parser.add_argument("--precision", default="", help="of the second target")
    parser.add_argument("--work", type=Path, default=Path("build/targets"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    first, second = chosen.targets
    run = RunOptions(threads=chosen.threads)
    bundles = {
        first: bundle_of(first, chosen.size, "", chosen.work),
        second: bundle_of(second, chosen.size, chosen.precision, chosen.work),
    }
    calls: dict[str, dict[str, Callable[[], Any]]] = {}
    for target, bundle in bundles.items():
        for name, runner in load_runners(bundle, run).items():
            calls.setdefault(name, {})[target] = noise_call(runner)
        engine = load_engine(bundle, run)
        calls.setdefault(WINDOW, {})[target] = partial(one_window, engine)
    same = len({tuple(call().tokens) for call in calls[WINDOW].values()}) == 1
    rows = [row(name, of, chosen.targets, chosen.rounds) for name, of in calls.items()]
    for each in rows:
        print(
            f"{each['what']:20} {each['ms'][first]:9.2f} ms {each['ms'][second]:9.2f} ms   "
            f"wall {each['ratio']:.2f}  CPU {each['cpu_ratio']:.2f}",
            flush=True,
        )
    print(f"same tokens: {'yes' if same else 'NO'}")
    save(rows, same, chosen)


def bundle_of(target: str, size: str, precision: str, work: Path) -> Bundle:
    """Return a bundle with `step_8`; export it if needed."""
    folder = work / f"{size}-{target}{precision and '-' + precision}"
    if not folder.exists():
        hiss = (0.1 * np.random.default_rng(0).standard_normal(16_000)).astype(np.float32)
        options = ExportOptions(
            batch=8,
            precision=precision,
            clips=[Clip("hiss", "", hiss)],
            allow_unverified=True,  # random weights give no words
            run=RunOptions(threads=1),
        )
        work.mkdir(parents=True, exist_ok=True)
        checkpoint = "default" if size == "embedded" else random_checkpoint(size)
        export(checkpoint, target, folder, options, progress=print)
    return Bundle.open(folder)


def one_window(engine: Engine) -> Any:
    """Encode and decode one window; the end of text is suppressed."""
    dims, end = engine.dims, engine.generation.end_of_text
    mel = log_mel(load_audio(shipped_audio()[0].path), dims.n_mels, n_frames=dims.n_frames)
    options = DecodeOptions(
        language="en", without_timestamps=True, max_tokens=64, suppress_tokens=(-1, end)
    )
    return decode_window(Decoder(engine), engine.encode(mel), options)


def row(
    what: str, calls: dict[str, Callable[[], Any]], targets: list[str], rounds: int
) -> dict[str, Any]:
    for call in calls.values():
        call()
    found: dict[str, list[Measured]] = {target: [] for target in targets}
    for _ in range(rounds):
        for target in targets:
            found[target].append(measured(calls[target]))
    first, second = (found[target] for target in targets)

    def ratio(clock: str) -> float:
        return statistics.median(b[clock] / a[clock] for a, b in zip(first, second, strict=True))

    return {
        "what": what,
        "ms": {t: 1e3 * statistics.median(one["wall_s"] for one in found[t]) for t in targets},
        "cpu_ms": {t: 1e3 * statistics.median(one["cpu_s"] for one in found[t]) for t in targets},
        "ratio": ratio("wall_s"),
        "cpu_ratio": ratio("cpu_s"),
    }


def save(rows: list[dict[str, Any]], same: bool, chosen: argparse.Namespace) -> None:
    today = datetime.date.today().isoformat()
    first, second = chosen.targets
    result = {
        "what": f"{second} {chosen.precision} against {first}, {chosen.size}",
        "rows": rows,
        "same_tokens": same,
        "machine": machine(),
        "versions": versions(
            (
                "whisperport",
                "numpy",
                *(get_target(target).spec.runtime for target in chosen.targets),
            )
        ),
        "measured_on": today,
        "command": f"python benchmarks/targets.py --targets {first} {second} --size {chosen.size} "
        + (f"--precision {chosen.precision} " if chosen.precision else "")
        + f"--rounds {chosen.rounds} --threads {chosen.threads}",
    }
    kind = f"{second}{chosen.precision and '_' + chosen.precision}_{chosen.size}"
    (RESULTS / f"targets_{kind}_{today}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
