"""Compare the programs of bundles for ONNX Runtime's CPU with the limits of this machine.

    python benchmarks/limits.py build/tiny build/small

encoder   share of the fastest float32 matrix multiplication that was measured in this run
step      with a cache for 64 tokens: share of the memory bandwidth that was measured in this run; above
          100 % if the CPU's caches have a part of what is read
step_8    the same, for 8 texts; and how many times the tokens per second of `step`
window    share of Python in a window: all time but that of the programs; and how much of it decodes the
          audio file and computes the spectrogram

Weights may be random: a window decodes a fixed number of tokens. Figures are medians of the rounds, in each
of which everything runs in turn.
"""

import argparse
import datetime
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine_limits import encoder_gflop, gemm_gflops, read_gb_per_s, step_gb
from programs import bound, random_inputs

from whisperport.bench.measure import measure
from whisperport.bench.timed import MEL, Clock, TimedMel
from whisperport.bundle import Bundle
from whisperport.program.runner import Runner
from whisperport.runtime import DecodeOptions, Engine, Thresholds, load_engine
from whisperport.runtime.cache import FEWEST_ROWS
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.verification import machine, versions
from whisperport.verification.clips import shipped_audio

RESULTS = Path(__file__).parent / "results"
RUNS = {"encoder": 3, "step": 30, "step_8": 10}  # in a round
TOKENS = FEWEST_ROWS  # of the caches of `step` and `step_8`
WINDOWS = 3  # in a round, after one that is not measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--spin", action="store_true", help="with onnxruntime.spin=on")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    rows = [row for path in chosen.bundles for row in measured(path, chosen)]
    result = {
        "what": "programs on ONNX Runtime's CPU, relative to the limits of the machine",
        "rows": rows,
        "threads": chosen.threads,
        "machine": machine(),
        "load_average": os.getloadavg(),
        "versions": versions(("whisperport", "torch", "onnxruntime", "numpy")),
        "measured_on": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/limits.py", *sys.argv[1:]]),
    }
    kind = "limits_spin" if chosen.spin else "limits"
    path = RESULTS / f"{kind}_{result['measured_on']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print_table(rows)
    print(f"\n{path}")


def measured(path: Path, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the programs and a window of one bundle."""
    options = {"onnxruntime.spin": "on"} if chosen.spin else {}
    run = RunOptions(threads=chosen.threads, options=options)
    engine = load_engine(Bundle.open(path), run)
    timed = {one.spec.name: bound(one, random_inputs(one, TOKENS)) for one in programs(engine)}
    clock = Clock(cpu_now=time.perf_counter)  # the CPU time is not used, and takes 8 us to read
    transcriber = Transcriber(path, run, wrap_runner=clock.wrap_runner)
    settings = fixed_tokens(engine, chosen.tokens)
    rounds = []
    for _ in range(chosen.rounds):
        found, before = {}, read_gb_per_s(256)
        for name, once in timed.items():
            found[name] = measure(once, warmup=1, n=RUNS[name]).median_ms
            after = read_gb_per_s(256)  # that of a virtual machine changes within seconds
            found[f"{name}, GB/s"], before = (before + after) / 2, after
        found["gflops"] = gemm_gflops(chosen.threads)
        windows = [window_ms(transcriber, clock, settings) for _ in range(1 + WINDOWS)][1:]
        found |= {key: statistics.median(one[key] for one in windows) for key in windows[0]}
        rounds.append(found)
    print(f"{path.name} of {path.parent.name}: measured", file=sys.stderr)
    return rows_of(path, engine, rounds)


def window_ms(
    transcriber: Transcriber, clock: Clock, settings: TranscribeOptions
) -> dict[str, float]:
    """Transcribe one window: the time of all, of what is no program, and of audio and mel in it."""
    clock.reset()
    path = shipped_audio()[0].path
    start = time.perf_counter()
    mel = TimedMel(path, transcriber.engine.dims, clock)
    transcriber.transcribe_mel(mel, settings)
    mel.close()
    window = 1e3 * (time.perf_counter() - start)
    if len(clock.calls["encoder"]) != 1:
        raise SystemExit("the tokens of the window include a timestamp that cut it")
    times = {name: 1e3 * sum(calls) for name, calls in clock.calls.items()}
    audio = times.pop(MEL)
    return {"window": window, "python": window - sum(times.values()), "audio": audio}


def programs(engine: Engine) -> list[Runner]:
    return [r for r in (engine.encoder, engine.step, engine.batch_step) if r is not None]


def fixed_tokens(engine: Engine, tokens: int) -> TranscribeOptions:
    """Return options with which a window decodes this number of tokens."""
    decode = DecodeOptions(
        language="en",
        without_timestamps=True,
        max_tokens=tokens,
        suppress_tokens=(-1, engine.generation.end_of_text),
    )
    never = Thresholds(
        compression_ratio_threshold=None, logprob_threshold=None, no_speech_threshold=None
    )
    return replace(TranscribeOptions(), decode=decode, temperatures=(0.0,), thresholds=never)


def rows_of(path: Path, engine: Engine, rounds: list[dict[str, float]]) -> list[dict[str, Any]]:
    dims = engine.dims

    def median(value: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(value(one) for one in rounds)

    name = f"{path.parent.name}/{path.name}"
    gflop = encoder_gflop(dims)
    rows = [
        row(name, "encoder", median, share=lambda r: gflop / r["encoder"] * 1e3 / r["gflops"]),
        row(name, "window", median, share=lambda r: r["python"] / r["window"])
        | {"of_audio": median(lambda r: r["audio"] / r["window"])},
    ]
    if not engine.projects:  # otherwise, the step has no projection
        rows += step_rows(name, engine, median)
    return [one | {"gflops": median(lambda r: r["gflops"])} for one in rows]


def step_rows(name: str, engine: Engine, median: Any) -> list[dict[str, Any]]:
    """Return the rows of `step` and of `step_B`."""

    def of_bandwidth(program: str, gb: float) -> dict[str, Any]:
        read = f"{program}, GB/s"
        found = row(name, program, median, share=lambda r: gb / r[program] * 1e3 / r[read])
        return found | {"gb_per_s": median(lambda r: r[read])}

    rows = [of_bandwidth("step", step_gb(engine.dims, tokens=TOKENS))]
    if engine.batch_step is not None:
        size, batch = engine.batch_size, engine.batch_step.spec.name
        found = of_bandwidth(batch, step_gb(engine.dims, size, TOKENS))
        rows.append(found | {"times_the_tokens": median(lambda r: size * r["step"] / r[batch])})
    return rows


def row(name: str, program: str, median: Any, share: Callable[[Any], float]) -> dict[str, Any]:
    return {
        "bundle": name,
        "program": program,
        "ms": median(lambda r: r[program]),
        "share": median(share),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'bundle':34}{'program':10}{'ms':>9}{'share':>8}  of")
    for one in rows:
        kind = "the GEMM rate" if one["program"] == "encoder" else "the bandwidth"
        if "gb_per_s" in one:
            kind += f" of {one['gb_per_s']:.0f} GB/s"
        kind = "the window is Python" if one["program"] == "window" else kind
        times = (
            f"; {one['times_the_tokens']:.2f} times the tokens" if "times_the_tokens" in one else ""
        )
        if "of_audio" in one:
            times = f"; {one['of_audio']:.1%} audio and mel"
        print(
            f"{one['bundle']:34}{one['program']:10}{one['ms']:9.2f}{one['share']:8.1%}  {kind}{times}"
        )


if __name__ == "__main__":
    main()
