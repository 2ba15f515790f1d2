"""Compare a decoder of fixed length without KV cache with a cached one: operations by kind, and time.

    python -m benchmarks.speed.fixed_decoder [--rounds 5] [--threads 2]

Both have Whisper tiny's sizes and random weights, in float32 on ONNX Runtime. The fixed decoder is that of
openai-whisper with 32 tokens and 1500 audio positions; it runs once per token. The cached decoder runs
`cross_kv` once and `step` once per token. Rounds are interleaved; figures are medians of rounds.
"""

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from whisper.model import TextDecoder

from whisperport.model.inspection.cost import NodeCost, cost_of
from whisperport.model.inspection.read_exported import read_exported
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.onnx import SharedWeights, write_onnx
from whisperport.model.trace.program import Program, trace
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts

from ..models import TINY

TOKENS = 30  # tokens of the transcript
POSITIONS = 32  # sequence length of the fixed decoder
KINDS = ("projections", "self-attention", "cross-attention", "cross K/V", "vocabulary", "rest")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    fixed, cross_kv, step = _programs()

    once, each = _operations(cross_kv), _operations(step)
    whole = {kind: TOKENS * count for kind, count in _operations(fixed).items()}
    cached = {kind: once[kind] + TOKENS * each[kind] for kind in KINDS}
    print(f"{'':16}{'fixed':>10}{'cached':>10}{'ratio':>8}   MFLOP, {TOKENS} tokens")
    for kind, a, b in [(k, whole[k], cached[k]) for k in KINDS] + [
        ("all", sum(whole.values()), sum(cached.values()))
    ]:
        print(f"{kind:16}{a / 1e6:10.0f}{b / 1e6:10.0f}{a / b:8.1f}")

    with tempfile.TemporaryDirectory() as folder:
        runs = [_session(p, Path(folder), options.threads) for p in (fixed, cross_kv, step)]
        times = [_times(runs) for _ in range(options.rounds + 1)][
            1:
        ]  # the first round is a warm-up
    fixed_s, cached_s = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(a / b for a, b in times)
    print(f"measured: fixed {fixed_s:.2f} s, cached {cached_s:.2f} s, ratio {ratio:.1f}")


def _programs() -> tuple[Program, Program, Program]:
    theirs = TextDecoder(TINY.n_vocab, TINY.n_text_ctx, 384, 6, 4)
    torch.nn.init.normal_(theirs.positional_embedding, std=0.02)  # it is created without values
    inputs = (torch.ones(1, POSITIONS, dtype=torch.int64), torch.zeros(1, 1500, 384))
    ours = {
        p.name: p
        for p in whisper_programs(Parts(Whisper(TINY).eval(), [(0, 0)]), ("cross_kv", "step"))
    }
    return trace("fixed", theirs, inputs, ["logits"]), ours["cross_kv"], ours["step"]


def _operations(program: Program) -> dict[str, int]:
    graph = read_exported(program.name, program.exported)
    counts: Counter[str] = Counter()
    for node in cost_of(graph).nodes:
        counts[_kind(program.name, node)] += node.flops
    return {kind: counts[kind] for kind in KINDS}


def _kind(program: str, cost: NodeCost) -> str:
    """Classify a node by its operator, the module that called it, and its sizes."""
    node, module = cost.node, cost.node.module
    if node.op in ("linear", "matmul") and node.output.shape[-1] == TINY.n_vocab:
        return "vocabulary"
    if program == "cross_kv":
        return "cross K/V"
    if node.op == "linear":
        crossing = "cross_attn.key" in module or "cross_attn.value" in module
        return "cross K/V" if crossing and program == "fixed" else "projections"
    if node.op in ("scaled_dot_product_attention", "bmm", "softmax"):
        crossing = any(1500 in (value.shape or ()) for value in (*node.tensors, node.output))
        return "cross-attention" if crossing else "self-attention"
    return "rest"


def _session(program: Program, folder: Path, threads: int) -> Callable[[], object]:
    path = folder / f"{program.name}.onnx"
    write_onnx(program, path, SharedWeights(folder / f"{program.name}.bin"))
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = threads
    session = ort.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    feed = {t.name: np.ones(t.shape, t.dtype) for t in program.spec.inputs}
    return lambda: session.run(None, feed)


def _times(runs: list[Callable[[], object]]) -> tuple[float, float]:
    """Return the seconds of one transcript with the fixed decoder and with the cached one."""
    fixed, cross_kv, step = runs
    start = time.perf_counter()
    for _ in range(TOKENS):
        fixed()
    middle = time.perf_counter()
    cross_kv()
    for _ in range(TOKENS):
        step()
    return middle - start, time.perf_counter() - middle


if __name__ == "__main__":
    main()
