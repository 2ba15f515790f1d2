"""Measure how much faster 8 windows are decoded together than one after the other.

Both ways decode the same windows in the same process, in turn, and give the same tokens. Every window has
the same number of tokens: the end of text is suppressed. The figures are medians of the rounds' ratios. On
a loaded machine, the CPU time is the more reliable one.

    steps    one token of each window, without rules and search: the program alone, and the host's caches
    windows  cross_kv, prompt, steps, rules and the choice of tokens

    python -m benchmarks.speed.batch
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.program.bundle import Bundle
from whisperport.runtime import (
    Batch,
    BatchExecutor,
    Decoded,
    DecodeOptions,
    Decoder,
    Engine,
    Floats,
    Step,
    Steps,
    decode_window,
    decoding,
    load_engine,
)
from whisperport.speech.audio import load_audio, log_mel
from whisperport.system.progress import reporting
from whisperport.targets import RunOptions
from whisperport.verification import versions
from whisperport.verification.clips import Clip, shipped_audio

from ..models import random_checkpoint
from ..record import record

ROWS = 8
ONE_THREAD = RunOptions(threads=1)
Measured = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["embedded", "tiny"])
    parser.add_argument("--work", type=Path, default=Path("build/batch"))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    rows = []
    for size in chosen.sizes:
        bundle = Bundle.open(bundle_of(size, chosen.work))
        engine = load_engine(bundle, RunOptions(threads=chosen.threads))
        rows.append(compare(size, engine, chosen.tokens, chosen.rounds))
        show(rows[-1])
    save(rows, chosen)


def bundle_of(size: str, work: Path) -> Path:
    """Return a bundle with `step_8`; export it if needed."""
    folder = work / size
    if not folder.exists():
        hiss = (0.1 * np.random.default_rng(0).standard_normal(16_000)).astype(np.float32)
        options = ExportOptions(
            batch=ROWS, clips=[Clip("hiss", "", hiss)], allow_unverified=True, run=ONE_THREAD
        )
        checkpoint = "default" if size == "embedded" else random_checkpoint(size)
        work.mkdir(parents=True, exist_ok=True)
        with reporting(print):
            export(checkpoint, "onnxruntime", folder, options)
    return folder


def windows(engine: Engine) -> list[Floats]:
    """Return the features (T, d) of the first window of 8 shipped audio files."""
    clips = [clip for clip in shipped_audio() if clip.text][:ROWS]
    dims = engine.dims
    return [
        engine.encode(log_mel(load_audio(clip.path), dims.n_mels, n_frames=dims.n_frames))
        for clip in clips
    ]


def compare(size: str, engine: Engine, tokens: int, rounds: int) -> dict[str, Any]:
    features = windows(engine)
    end = engine.generation.end_of_text
    options = DecodeOptions(
        language="en", without_timestamps=True, max_tokens=tokens, suppress_tokens=(-1, end)
    )
    # Both have their memory before the first round, as in a transcription after its first window.
    decoder, executor = Decoder(engine), BatchExecutor(engine, ROWS)
    ways: dict[str, Callable[[], Any]] = {
        "steps, one": partial(steps_singly, engine, features, tokens),
        "steps, together": partial(steps_together, engine, features, tokens),
        "windows, one": partial(measured, partial(singly, decoder, features, options)),
        "windows, together": partial(measured, partial(together, executor, features, options)),
    }
    expected = [one.tokens for one in singly(decoder, features, options)]
    same = [one.tokens for one in together(executor, features, options)] == expected
    results: dict[str, list[Measured]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            results[name].append(way())
    n_tokens = ROWS * tokens
    return {
        "size": size,
        "rows": ROWS,
        "tokens_per_window": tokens,
        "same_tokens": same,
        "ways": {
            name: {
                "cpu_ms_per_token": 1e3 * statistics.median(r["cpu_s"] for r in found) / n_tokens,
                "wall_ms_per_token": 1e3 * statistics.median(r["wall_s"] for r in found) / n_tokens,
            }
            for name, found in results.items()
        },
        "times_faster": {
            f"{what}, {clock}": ratio(results, what, f"{clock}_s")
            for what in ("steps", "windows")
            for clock in ("cpu", "wall")
        },
    }


def ratio(results: dict[str, list[Measured]], what: str, clock: str) -> float:
    pairs = zip(results[f"{what}, one"], results[f"{what}, together"], strict=True)
    return statistics.median(one[clock] / other[clock] for one, other in pairs)


def singly(decoder: Decoder, features: Sequence[Floats], options: DecodeOptions) -> list[Decoded]:
    return [decode_window(decoder, each, options) for each in features]


def together(
    executor: BatchExecutor, features: Sequence[Floats], options: DecodeOptions
) -> list[Decoded]:
    futures = [executor.submit(partial(decoded, each, options)) for each in features]
    return [future.result() for future in futures]


def decoded(features: Floats, options: DecodeOptions, decoder: Decoder) -> Steps[Decoded]:
    return decoding(decoder, features, options)


def steps_singly(engine: Engine, features: Sequence[Floats], tokens: int) -> Measured:
    decoder = Decoder(engine)
    total = {"cpu_s": 0.0, "wall_s": 0.0}
    for each in features:
        decoder.start_window(each)
        decoder.prefill([engine.generation.start_of_transcript, 1])

        def steps() -> None:
            for token in range(tokens):
                decoder.score(Step(token, decoder.cache))

        for clock, seconds in measured(steps).items():
            total[clock] += seconds
    return total


def steps_together(engine: Engine, features: Sequence[Floats], tokens: int) -> Measured:
    batch = Batch(engine)
    decoders = [decoder for _ in features if (decoder := batch.decoder())]
    for decoder, each in zip(decoders, features, strict=True):
        decoder.start_window(each)
        decoder.prefill([engine.generation.start_of_transcript, 1])

    def steps() -> None:
        for token in range(tokens):
            batch.step_all([(decoder, Step(token, decoder.cache)) for decoder in decoders])

    return measured(steps)


def measured(run: Callable[[], object]) -> Measured:
    """Return seconds of CPU time of all threads of this process, and of wall-clock time."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['size']}: {row['rows']} windows of {row['tokens_per_window']} tokens")
    print(f"{'':20}{'CPU ms / token':>16}{'wall ms / token':>17}")
    for name, way in row["ways"].items():
        print(f"{name:20}{way['cpu_ms_per_token']:16.3f}{way['wall_ms_per_token']:17.3f}")
    for name, times in row["times_faster"].items():
        print(f"times faster, {name}: {times:.2f}")
    print(f"same tokens: {'yes' if row['same_tokens'] else 'NO'}", flush=True)


def save(rows: list[dict[str, Any]], chosen: argparse.Namespace) -> None:
    result = {
        "what": f"{ROWS} windows decoded together with `step_{ROWS}`, and one after the other",
        "rows": rows,
        "versions": versions(("whisperport", "onnxruntime", "numpy")),
    }
    record("speed", f"batch_threads_{chosen.threads}", result)


if __name__ == "__main__":
    main()
