"""Compare third-party Whisper programs on XNNPACK as exported, fixed by `fix`, and torch eager.

    python -m benchmarks.speed.third_party [--threads 2] [--rounds 9]

The programs are the decoders and encoders of openai-whisper and of transformers at the sizes of tiny.en,
with random weights, 128 tokens and 1500 positions. *Matmul time* is the time that the matrix
multiplications of the fixed program alone would take, at the speed of plain linear layers on XNNPACK;
rewrites that keep them cannot be faster. Rounds are interleaved, so that other load on the machine
affects all alike. A ratio is the median of the rounds' ratios; the ratio of the best times is given
beside it, which is more accurate on a loaded machine. Takes about five minutes. Writes
`results/speed.json` and prints a table.
"""

import argparse
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whisperport.apps.bench.timed import measure
from whisperport.build.fix import fix
from whisperport.model.inspection.gain import compute_and_bytes
from whisperport.model.inspection.read_exported import read_exported
from whisperport.model.trace.program import Program, trace
from whisperport.program.runner import Runner
from whisperport.targets import RunOptions, get_target
from whisperport.verification import versions

from ..record import record

VOCABULARY, WIDTH, HEADS, LAYERS, POSITIONS = 51864, 384, 6, 4, 1500  # tiny.en
TOKENS = 128
GOALS = {"naive_over_fixed": 3.0, "fixed_over_eager": 1.0, "max_relative": 1e-4}

Case = tuple[nn.Module, tuple[Tensor, ...]]
Plain = tuple[Callable[[], Any], int]  # one run, and its operations


class Encoder(nn.Module):
    """Wraps transformers' encoder, which returns an object; a program must return tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.model.encoder

    def forward(self, mel: Tensor) -> Any:
        return self.encoder(mel).last_hidden_state


class Decoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.projection = model.model.decoder, model.proj_out

    def forward(self, tokens: Tensor, features: Tensor) -> Any:
        found = self.decoder(input_ids=tokens, encoder_hidden_states=features, use_cache=False)
        return self.projection(found.last_hidden_state)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        plain = plain_linears(Path(folder), options.threads)
        rows = [one_case(name, case, plain, options) for name, case in cases().items()]
    report(rows, options)


def cases() -> dict[str, Case]:
    torch.manual_seed(0)
    openai, transformers = openai_whisper(), transformers_whisper()
    tokens = torch.randint(1, 100, (1, TOKENS))
    features, mel = torch.randn(1, POSITIONS, WIDTH), torch.randn(1, 80, 2 * POSITIONS)
    return {
        "openai-whisper's decoder": (openai.decoder, (tokens.int(), features)),
        "transformers' decoder": (Decoder(transformers), (tokens, features)),
        "openai-whisper's encoder": (openai.encoder, (mel,)),
        "transformers' encoder": (Encoder(transformers), (mel,)),
    }


def openai_whisper() -> Any:
    from whisper.model import ModelDimensions, Whisper

    audio = (80, POSITIONS, WIDTH, HEADS, LAYERS)
    text = (VOCABULARY, 448, WIDTH, HEADS, LAYERS)
    model = Whisper(ModelDimensions(*audio, *text)).eval()
    # The scale of trained models. With torch's default of 1.0, logits would reach 400.
    nn.init.normal_(model.decoder.token_embedding.weight, std=0.05)
    nn.init.normal_(model.decoder.positional_embedding, std=0.05)
    return model


def transformers_whisper() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": WIDTH, "vocab_size": VOCABULARY, "max_source_positions": POSITIONS}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": LAYERS, f"{side}_attention_heads": HEADS}
        sizes |= {f"{side}_ffn_dim": 4 * WIDTH}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 50256)
    config = WhisperConfig(**sizes, **ids, decoder_start_token_id=50257)
    return WhisperForConditionalGeneration(config).eval()


def plain_linears(folder: Path, threads: int) -> Plain:
    """Return four linear layers on XNNPACK with the sizes of a feed-forward block."""
    inner = 4 * WIDTH
    pair = [nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)]
    program = trace("plain", nn.Sequential(*pair, *pair), (torch.randn(1, POSITIONS, WIDTH),))
    runner, _ = lowered(program, folder / "plain", threads)
    arrays = {program.spec.inputs[0].name: torch.randn(1, POSITIONS, WIDTH).numpy()}
    return lambda: runner.run(arrays), matmul_flops(program)


def matmul_flops(program: Program) -> int:
    """Count the operations of linear layers, matrix multiplications and convolutions of a program."""
    return compute_and_bytes(read_exported(program.name, program.exported).nodes)[0]


def one_case(name: str, case: Case, plain: Plain, options: argparse.Namespace) -> dict[str, Any]:
    module, inputs = case
    print(f"{name}: exporting, fixing, lowering twice", flush=True)
    program = trace("program", module, inputs)
    fixed = fix(program, "xnnpack")
    assert all(not step.failed for step in fixed.steps)
    arrays = {t.name: x.numpy() for t, x in zip(program.spec.inputs, inputs, strict=True)}

    def eager() -> Any:
        with torch.no_grad():
            return module(*inputs)

    with tempfile.TemporaryDirectory() as folder:
        runners, facts = {}, {}
        for key, one in (("naive", program), ("fixed", fixed.program)):
            runners[key], facts[key] = lowered(one, Path(folder) / key, options.threads)
        contenders: dict[str, Callable[[], Any]] = {"eager": eager, "matmul": plain[0]}
        contenders |= {key: lambda r=runner: r.run(arrays) for key, runner in runners.items()}
        rounds = [
            {key: measure(run, warmup=1, n=3).best_ms for key, run in contenders.items()}
            for _ in range(options.rounds)
        ]
        (actual,) = runners["fixed"].run(arrays).values()
    flops = matmul_flops(fixed.program)
    for times in rounds:
        times["matmul"] *= flops / plain[1]
    expected = eager()
    difference = float((torch.from_numpy(actual) - expected).abs().max())
    return {
        "program": name,
        "rewrites": {s.outcome.rewrite: len(s.outcome.changed) for s in fixed.steps},
        "remaining": [f"{r.node}: {r.reason}" for r in (*fixed.remaining, *fixed.lookups)],
        "max_abs": difference,
        "max_relative": difference / float(expected.abs().max()),
        "product_gflop": flops / 1e9,
        "median_ms": {k: statistics.median(r[k] for r in rounds) for k in contenders},
        "best_ms": {k: min(r[k] for r in rounds) for k in contenders},
        **ratios(rounds),
        **facts,
    }


def ratios(rounds: list[dict[str, float]]) -> dict[str, float]:
    best = {key: min(r[key] for r in rounds) for key in rounds[0]}
    return {
        "naive_over_fixed": statistics.median(r["naive"] / r["fixed"] for r in rounds),
        "naive_over_fixed_best": best["naive"] / best["fixed"],
        "fixed_over_eager": statistics.median(r["fixed"] / r["eager"] for r in rounds),
        "fixed_over_eager_best": best["fixed"] / best["eager"],
        "matmul_over_fixed": statistics.median(r["matmul"] / r["fixed"] for r in rounds),
        "matmul_over_fixed_best": best["matmul"] / best["fixed"],
    }


def lowered(program: Program, folder: Path, threads: int) -> tuple[Runner, dict[str, Any]]:
    target = get_target("xnnpack")
    folder.mkdir()
    (entry,) = target.lower([program], folder)
    facts = {
        "mb": (folder / entry.files[0]).stat().st_size / 1e6,
        "subgraphs": entry.facts.subgraphs,
        "undelegated": dict(Counter(entry.facts.undelegated)),
    }
    return target.load(folder, [entry], RunOptions(threads=threads))[program.name], facts


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    result = {
        "what": "third-party Whisper at the sizes of tiny.en on XNNPACK, float32, random weights",
        "goals": GOALS,
        "rows": rows,
        "threads": options.threads,
        "rounds": options.rounds,
        "versions": versions(("whisperport", "torch", "executorch", "transformers")),
    }
    record("speed", "third_party", result)
    print(
        f"\n{'program':26}{'eager':>8}{'naive':>8}{'fixed':>8}{'naive/fixed':>16}{'fixed/eager':>16}"
        f"{'matmul/fixed':>17}{'outside':>10}{'error':>10}"
    )
    for row in rows:
        times = "".join(f"{row['median_ms'][key]:8.1f}" for key in ("eager", "naive", "fixed"))
        outside = "→".join(str(sum(row[key]["undelegated"].values())) for key in ("naive", "fixed"))
        shown = "".join(
            f"{row[key]:9.2f} ({row[f'{key}_best']:.2f})"
            for key in ("naive_over_fixed", "fixed_over_eager", "matmul_over_fixed")
        )
        print(f"{row['program']:26}{times}{shown}{outside:>10}{row['max_relative']:10.1e}")
    print("\nmilliseconds, medians of rounds; ratios: median of rounds (of the best times)")
    print(
        "matmul: the matrix multiplications alone, at the speed of plain linear layers on XNNPACK"
    )
    print("outside: nodes that XNNPACK does not run; error: of the largest value, against eager")


if __name__ == "__main__":
    main()
