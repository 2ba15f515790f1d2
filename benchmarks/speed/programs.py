"""Compare each program with torch eager in one run, and with the limit of the machine.

    python -m benchmarks.speed.programs [--threads 2] [--rounds 7]

The sizes are those of Whisper tiny, the weights are random. Rounds are interleaved, so that other load on
the machine affects all alike; the figure is the median of rounds, and the ratio the median of the rounds'
ratios. Writes `results/speed.json` and prints a table.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whisperport.apps.bench.roofline import Rates, measure_rates, work_of
from whisperport.apps.bench.timed import measure
from whisperport.model.network.decoder import Decode
from whisperport.model.network.whisper import Whisper
from whisperport.model.rewrites import run_rewrites
from whisperport.model.trace.program import Program
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.runner import Runner
from whisperport.system.progress import reporting
from whisperport.targets import TARGETS, RunOptions, Target
from whisperport.verification import versions

from ..models import TINY
from ..record import record

TIMED = {"encoder": 3, "step": 30}  # runs a round
GOALS = {
    ("encoder", "xnnpack"): 0.75,
    ("step", "onnxruntime"): 0.80,
}  # largest ratio to torch eager's time

Run = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = Whisper(TINY).eval().requires_grad_(False)
    for table in (model.encoder.positional_embedding, model.decoder.positional_embedding):
        torch.nn.init.normal_(table, std=0.02)

    contenders = {
        ("encoder", "torch eager"): eager_encoder(model),
        ("step", "torch eager"): eager_step(model),
    }
    programs = [p for p in whisper_programs(Parts(model, [(0, 0)])) if p.name in TIMED]
    with tempfile.TemporaryDirectory() as folder:
        for target in (t for t in TARGETS if not t.spec.runs.emulation):
            contenders |= lowered(
                target, programs, Path(folder) / target.spec.name, options.threads
            )
        rates = measure_rates(options.threads)
        rounds = [one_round(contenders) for _ in range(options.rounds)]
    report(rounds, programs, rates, options)


def eager_encoder(model: Whisper) -> Run:
    mel = torch.randn(1, TINY.n_mels, TINY.n_frames)
    return lambda: model.encode(mel)


def eager_step(model: Whisper) -> Run:
    """Return the same cached step in eager torch: embedding on the host, cross K/V computed once."""
    step = Decode(model.decoder)
    inputs = [torch.from_numpy(array) for array in step_inputs().values()]
    n = TINY.n_text_layer
    caches = [inputs[2 + i * n : 2 + (i + 1) * n] for i in range(4)]

    def run() -> object:
        with torch.no_grad():
            return step(inputs[0], inputs[1], *caches)

    return run


def step_inputs() -> dict[str, np.ndarray]:
    rng, heads, width = np.random.default_rng(0), TINY.n_text_head, TINY.text_head_width
    shapes = {"x": (1, 1, TINY.n_text_state), "mask": (1, 1, TINY.n_text_ctx + 1)}
    for name, shape in (
        ("self_k", (heads, width, TINY.n_text_ctx)),
        ("self_v", (heads, TINY.n_text_ctx, width)),
        ("cross_k", (heads, width, TINY.n_audio_ctx)),
        ("cross_v", (heads, TINY.n_audio_ctx, width)),
    ):
        shapes |= {f"{name}_{layer}": shape for layer in range(TINY.n_text_layer)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def lowered(target: Target, programs: list[Program], folder: Path, threads: int) -> dict[Any, Run]:
    folder.mkdir()
    ready = [run_rewrites(program, target.spec.lowering.rewrites)[0] for program in programs]
    with reporting(print):
        entries = target.lower(ready, folder)
    runners = target.load(folder, entries, RunOptions(threads=threads))
    mel = np.random.default_rng(0).standard_normal((1, TINY.n_mels, TINY.n_frames), np.float32)
    inputs = {"encoder": {"mel": mel}, "step": step_inputs()}
    return {(name, target.spec.name): bound(runners[name], inputs[name]) for name in TIMED}


def bound(runner: Runner, inputs: dict[str, np.ndarray]) -> Run:
    """Run a program as the engine does: constants and state are bound once."""
    binding = runner.binding()
    for name, role in runner.roles.items():
        if role != "input":
            binding.bind(name, inputs[name])
    return lambda: binding.run(inputs)


def random_inputs(runner: Runner, tokens: int | None = None) -> dict[str, np.ndarray]:
    """Return an array for each input; with `tokens`, caches for so many, if the program reads them."""
    random = np.random.default_rng(0)
    shapes = {tensor.name: list(tensor.shape) for tensor in runner.spec.inputs}
    if tokens is not None and "self_k_0" in runner.free_axes:
        spare = shapes["self_k_0"][runner.free_axes["self_k_0"]] - tokens
        for name, axis in runner.free_axes.items():
            shapes[name][axis] -= spare
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def one_round(contenders: dict[Any, Run]) -> dict[Any, float]:
    return {
        key: measure(run, warmup=1, n=TIMED[key[0]]).median_ms for key, run in contenders.items()
    }


def report(
    rounds: list[dict[Any, float]],
    programs: list[Program],
    rates: Rates,
    options: argparse.Namespace,
) -> None:
    tokens = TINY.n_text_ctx  # the whole cache is read
    work = {one.name: work_of(one.spec, "fp32", TINY, tokens=tokens) for one in programs}
    rows = []
    for program, contender in rounds[0]:
        ms = statistics.median(r[program, contender] for r in rounds)
        ratio = statistics.median(r[program, contender] / r[program, "torch eager"] for r in rounds)
        goal = GOALS.get((program, contender))
        rows.append(
            {
                "program": program,
                "on": contender,
                "median_ms": ms,
                "of_eager": ratio,
                "of_limit": work[program].limit_ms(rates) / ms,
                "goal": goal,
            }
        )
    result = {
        "what": "Whisper tiny's encoder and step, float32, random weights, batch 1",
        "rates": asdict(rates),
        "work": {name: asdict(one) for name, one in work.items()},
        "rows": rows,
        "threads": options.threads,
        "rounds": options.rounds,
        "versions": versions(("whisperport", "torch", "onnxruntime", "executorch", "numpy")),
    }
    record("speed", "programs", result)
    print(f"\n{'program':9}{'on':13}{'median ms':>10}{'/ eager':>10}{'of the limit':>14}  goal")
    for row in rows:
        goal = f"≤ {row['goal']:.2f}" if row["goal"] else ""
        print(
            f"{row['program']:9}{row['on']:13}{row['median_ms']:10.2f}{row['of_eager']:10.2f}"
            f"{row['of_limit']:14.0%}  {goal}"
        )
    print(
        f"\nlimits with {options.threads} threads: {rates.gflop:.0f} GFLOP/s (encoder: "
        f"{work['encoder'].gflop:.1f} GFLOP), {rates.read_gb:.0f} GB/s (step: "
        f"{work['step'].read_gb:.3f} GB)"
    )


if __name__ == "__main__":
    main()
