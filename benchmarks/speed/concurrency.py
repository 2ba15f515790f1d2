"""Use one `Transcriber` in several threads: compare results with single calls, and measure throughput.

    python -m benchmarks.speed.concurrency [--threads 8] [--calls 100] [--targets onnxruntime xnnpack]

Each thread makes `--calls` calls for the short shipped audio files with the embedded model; every runtime
uses one thread. Every transcript is compared with that of a single call. Throughput is compared with one
thread that makes calls one after another. Writes `results/speed.json`, prints a table, and exits
with 1 if a transcript differs.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from whisperport.build.export.bundle_cache import bundle_of
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.model.checkpoint import load_checkpoint
from whisperport.program.bundle import Bundle
from whisperport.runtime import DecodeOptions
from whisperport.speech.audio import load_audio
from whisperport.system.machine import usable_cores
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber, Transcript
from whisperport.verification import versions
from whisperport.verification.clips import shipped_audio

from ..record import record

LONGEST_S = 6.0
ONE_THREAD = RunOptions(threads=1)
# With timestamps, with word timestamps, and without timestamps: each call differs from the previous one.
WAYS = (
    TranscribeOptions(decode=DecodeOptions(language="en")),
    TranscribeOptions(decode=DecodeOptions(language="en"), word_timestamps=True),
    TranscribeOptions(decode=DecodeOptions(language="en", without_timestamps=True)),
)

Call = tuple[np.ndarray, TranscribeOptions]


def main() -> None:
    parser = argparse.ArgumentParser(description="Concurrent calls of one transcriber.")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--calls", type=int, default=100, help="calls per thread")
    parser.add_argument("--targets", nargs="+", default=["onnxruntime", "xnnpack"])
    chosen = parser.parse_args()
    sys.setswitchinterval(1e-4)  # Python switches threads 50 times as often as by default
    rows = []
    for target in chosen.targets:
        with tempfile.TemporaryDirectory() as folder:
            bundle = embedded(target, Path(folder))
            rows.append({"target": target} | measured(bundle, chosen.threads, chosen.calls))
    write(rows, chosen)
    sys.exit(any(row["wrong"] for row in rows))


def embedded(target: str, folder: Path) -> Bundle:
    """Return the embedded model as a bundle for a target."""
    if target == "onnxruntime":
        return bundle_of("default")
    checkpoint = load_checkpoint("default")
    return export(checkpoint, target, folder / target, ExportOptions(run=ONE_THREAD))


def measured(bundle: Bundle, threads: int, calls: int) -> dict[str, float]:
    transcriber = Transcriber(bundle, ONE_THREAD, max_concurrent=threads)
    short = [r.path for r in shipped_audio() if r.seconds < LONGEST_S]
    kinds: list[Call] = [(load_audio(path), way) for path in short for way in WAYS]
    expected = [transcriber.transcribe(*kind) for kind in kinds]
    order = [i % len(kinds) for i in range(threads * calls)]

    def call(i: int) -> Transcript:
        return transcriber.transcribe(*kinds[i])

    started = time.perf_counter()
    one_by_one = order[: max(len(kinds), len(order) // threads)]
    for i in one_by_one:
        call(i)
    alone = len(one_by_one) / (time.perf_counter() - started)

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(call, order))
    seconds = time.perf_counter() - started
    wrong = sum(transcript != expected[i] for transcript, i in zip(found, order, strict=True))
    return {
        "threads": threads,
        "calls": len(order),
        "wrong": wrong,
        "seconds": seconds,
        "calls_per_s": len(order) / seconds,
        "one_thread_calls_per_s": alone,
        "ratio": len(order) / seconds / alone,
    }


def write(rows: Sequence[dict], chosen: argparse.Namespace) -> None:
    result = {
        "what": "the embedded model, short shipped audio files, one thread per runtime",
        "rows": rows,
        "cores": usable_cores(),
        "load": os.getloadavg(),
        "versions": versions(("whisperport", "onnxruntime", "executorch", "numpy")),
    }
    record("speed", "concurrency", result)
    print("| Target | Threads | Calls | Wrong | Time | Calls per second | Relative to one thread |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['target']} | {row['threads']} | {row['calls']} | {row['wrong']} | "
            f"{row['seconds']:.1f} s | {row['calls_per_s']:.1f} | {row['ratio']:.2f} |"
        )


if __name__ == "__main__":
    main()
