"""Measure the time of Python around a step: the decoding loop at Whisper tiny's sizes.

    python benchmarks/loop.py [--threads 1] [--rounds 7]

Weights are random, so decoding does not end early: each round decodes a window of 60 tokens with
timestamps, with every decoding method. Python's time is the time of the loop without the runtime's calls:
token rules, choice of the token, embedding, mask, cache, and checks of arrays. Writes
`results/loop_DATE.json` and prints a table.
"""

import argparse
import datetime
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from programs import TINY

from whisperport.bench.timed import Clock
from whisperport.model.whisper import Whisper
from whisperport.runtime import DecodeOptions, Decoder, Engine, decode_window
from whisperport.targets import RunOptions, get_target
from whisperport.text.vocabulary import openai_generation
from whisperport.trace.variants import whisper_programs
from whisperport.trace.whisper import Parts
from whisperport.verification import machine, versions

RESULTS = Path(__file__).parent / "results"
TOKENS = 60
GOAL = 0.10  # largest share of Python in the time of a step
SEARCHES = {
    "greedy": DecodeOptions(language="en", max_tokens=TOKENS),
    "beam 5": DecodeOptions(language="en", max_tokens=TOKENS, beam_size=5),
    "temperature 0.4": DecodeOptions(language="en", max_tokens=TOKENS, temperature=0.4),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    clock = Clock()
    engine = tiny_engine(chosen.threads, clock)
    features = np.random.default_rng(0).standard_normal(
        (TINY.n_audio_ctx, TINY.n_audio_state), np.float32
    )
    rounds = [
        {name: one_window(engine, features, options, clock) for name, options in SEARCHES.items()}
        for _ in range(chosen.rounds + 1)
    ][1:]
    report(rounds, chosen)


def tiny_engine(threads: int, clock: Clock) -> Engine:
    model = Whisper(TINY).eval().requires_grad_(False)
    torch.nn.init.normal_(model.decoder.positional_embedding, std=0.02)
    target = get_target("onnxruntime")
    with tempfile.TemporaryDirectory() as folder:
        entries = target.lower(list(whisper_programs(Parts(model, [(0, 0)]))), Path(folder), print)
        runners = target.load(Path(folder), entries, RunOptions(threads=threads))
    return Engine(
        TINY,
        openai_generation(TINY.n_vocab),
        {name: clock.wrap_runner(runner) for name, runner in runners.items()},
        model.decoder.token_embedding.weight.numpy(),
        model.decoder.positional_embedding.numpy(),
    )


def one_window(
    engine: Engine, features: np.ndarray, options: DecodeOptions, clock: Clock
) -> dict[str, float]:
    """Decode one window; return the milliseconds of the program `step` and of Python, per step."""
    clock.reset()
    started = time.perf_counter()
    decode_window(Decoder(engine), features, options)
    total = time.perf_counter() - started
    steps = clock.calls["step"]
    inside = sum(sum(calls) for calls in clock.calls.values())
    return {
        "steps": len(steps),
        "step_ms": 1e3 * statistics.median(steps),
        "python_ms": 1e3 * (total - inside) / len(steps),
    }


def report(rounds: list[dict], chosen: argparse.Namespace) -> None:
    rows = []
    for name in SEARCHES:
        step = statistics.median(r[name]["step_ms"] for r in rounds)
        python = statistics.median(r[name]["python_ms"] for r in rounds)
        share = statistics.median(r[name]["python_ms"] / r[name]["step_ms"] for r in rounds)
        rows.append({"search": name, "step_ms": step, "python_ms": python, "share": share})
    result = {
        "what": "Python's time around a step, Whisper tiny's sizes, onnxruntime, float32, random weights",
        "goal": GOAL,
        "rows": rows,
        "rounds": rounds,
        "threads": chosen.threads,
        "machine": machine(),
        "versions": versions(("whisperport", "onnxruntime", "numpy")),
        "measured_on": datetime.date.today().isoformat(),
        "command": f"python benchmarks/loop.py --threads {chosen.threads} --rounds {chosen.rounds}",
    }
    path = RESULTS / f"loop_{result['measured_on']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{'search':18}{'step ms':>9}{'python ms':>11}{'share':>8}  goal ≤ {GOAL:.0%}")
    for row in rows:
        print(f"{row['search']:18}{row['step_ms']:9.3f}{row['python_ms']:11.3f}{row['share']:8.1%}")


if __name__ == "__main__":
    main()
