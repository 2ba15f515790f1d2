"""Measure the CPU time of decoding one window, with PyTorch and with the cached decoder of a bundle.

    python -m benchmarks.speed.decoder_cpu [--sizes embedded tiny base small] [--work DIR] [--rounds 5]

This is the pipeline whose encoder runs on an accelerator: the encoder's output comes from elsewhere and the
decoder runs on the CPU. Only the decoder is measured: cross-attention K/V, start tokens and all tokens of
one window of 30 s. Sizes other than `embedded` have random weights and decode `--tokens` tokens; `embedded`
is the model that comes with whisperport, and decodes speech. Every side has the same float16 weights, which
are computed in float32 except where the side says otherwise, the same features and the same rules for
tokens, and must decode the same tokens.

Each side is a process of its own. The sides take turns in every round, so that other load on the machine
affects all alike. CPU time is user and system time of all threads of the process. Figures are medians of
rounds; a ratio is the median of the rounds' ratios. Writes `results/speed.json` after every
size, and prints tables.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.build.export import bundle_cache
from whisperport.program.bundle import Bundle
from whisperport.runtime import DecodeOptions, Decoder, decode_window
from whisperport.runtime.engine.engine import load_engine
from whisperport.targets import RunOptions
from whisperport.verification import versions
from whisperport.verification.clips import shipped_audio

from ..memory.shared_weights import exported
from ..models import random_checkpoint
from ..record import record

WINDOW_S = 30.0
EMBEDDED = "embedded"
GOAL = 0.5  # largest ratio of the recommended setting to a PyTorch decoder
PYTORCH: Mapping[str, int | None] = {  # side -> CPU threads; None: PyTorch chooses
    "openai-whisper": None,
    "openai-whisper, 1 thread": 1,
    "transformers": None,
}
COMPARED = ("openai-whisper", "transformers")  # the pipelines that the goal is about
OURS: Mapping[str, RunOptions] = {
    "default": RunOptions(),
    "1 thread": RunOptions(threads=1),
}
RECOMMENDED = "1 thread"
SIDES = (*PYTORCH, *OURS)
START = (50258, 50259, 50359, 50363)  # start of transcript, English, transcribe, no timestamps
END = 50257  # end of text; all ids above it are special tokens
VOCABULARY = 51865
AUDIO = "19-long.flac"  # its first window is decoded with the embedded model

Floats = NDArray[np.float32]
Run = Callable[[], tuple[int, ...]]
"""Decodes the window and returns its tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    sizes = (EMBEDDED, "tiny", "base", "small")
    parser.add_argument("--sizes", nargs="+", choices=sizes, default=list(sizes))
    parser.add_argument("--work", type=Path, default=Path("build/memory"))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        serve(chosen.side, chosen.sizes[0], chosen.work, chosen.tokens)
        return
    rows: list[dict[str, Any]] = []
    for size in chosen.sizes:
        bundle_of(size, chosen.work)  # before anything is measured
        rows.append(compare(size, chosen))
        show(rows[-1])
        save(rows, chosen)


def bundle_of(size: str, work: Path) -> Path:
    return (
        bundle_cache.bundle_of("default").folder
        if size == EMBEDDED
        else exported(size, work, "onnxruntime")
    )


class Side:
    """A process that decodes the window on request."""

    def __init__(self, name: str, size: str, chosen: argparse.Namespace) -> None:
        command = [sys.executable, "-m", __spec__.name, "--side", name, "--sizes", size]
        command += ["--work", str(chosen.work), "--tokens", str(chosen.tokens)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.tokens = tuple(self._answer()["tokens"])

    def decode(self) -> dict[str, float]:
        """Measure one window: seconds of CPU time and of wall-clock time."""
        assert self.process.stdin
        self.process.stdin.write("decode\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self.process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):  # libraries print other lines
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError("the process of a side ended")


def serve(side: str, size: str, work: Path, tokens: int) -> None:
    """Decode once, print the tokens, then measure one window per line of standard input."""
    features = features_of(size, work)
    run = (ours if side in OURS else pytorch)(side, size, work, features, tokens)
    print(json.dumps({"tokens": run()}), flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        print(json.dumps({"cpu_s": cpu, "wall_s": wall}), flush=True)


def features_of(size: str, work: Path) -> Floats:
    """Return the features of the window: of speech for the embedded model, otherwise random."""
    bundle = Bundle.open(bundle_of(size, work))
    dims = bundle.manifest.dims
    if size != EMBEDDED:
        shape = (dims.n_audio_ctx, dims.n_audio_state)
        return np.random.default_rng(0).standard_normal(shape, np.float32)
    from whisperport.speech.audio import MelWindows

    mel = MelWindows(
        next(clip.path for clip in shipped_audio() if clip.path.name == AUDIO),
        dims.n_mels,
        dims.n_frames,
    )
    window, _ = mel.window(0)
    mel.close()
    return load_engine(bundle, RunOptions(threads=1)).encode(window[:, : dims.n_frames])


def suppressed(size: str) -> tuple[int, ...]:
    """Return the ids that no side may decode: special tokens. With random weights, also the end."""
    return tuple(range(END + (size == EMBEDDED), VOCABULARY))


def limit_of(size: str, tokens: int) -> int:
    return 224 if size == EMBEDDED else tokens


def ours(side: str, size: str, work: Path, features: Floats, tokens: int) -> Run:
    engine = load_engine(Bundle.open(bundle_of(size, work)), OURS[side])
    decoder = Decoder(engine)
    options = DecodeOptions(
        language="en",
        without_timestamps=True,
        max_tokens=limit_of(size, tokens),
        suppress_blank=False,
        suppress_tokens=suppressed(size),
    )
    return lambda: decode_window(decoder, features, options).tokens


def pytorch(side: str, size: str, work: Path, features: Floats, tokens: int) -> Run:
    import torch

    if threads := PYTORCH[side]:
        torch.set_num_threads(threads)
    of = of_transformers if side == "transformers" else of_openai_whisper
    return of(size, features, tokens)


def of_openai_whisper(size: str, features: Floats, tokens: int) -> Run:
    """Return openai-whisper's `decode`, which skips its encoder if it gets features, with its KV cache."""
    import torch
    import whisper
    from whisper.model import ModelDimensions, Whisper

    dims, weights = checkpoint_of(size)
    model = Whisper(
        ModelDimensions(
            **{name: getattr(dims, name) for name in ModelDimensions.__dataclass_fields__}
        )
    ).eval()
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert not missing, missing
    options = whisper.DecodingOptions(
        language="en",
        without_timestamps=True,
        sample_len=limit_of(size, tokens),
        suppress_blank=False,
        suppress_tokens=list(suppressed(size)),
        fp16=False,
    )
    audio = torch.from_numpy(features)
    return lambda: tuple(whisper.decode(model, audio, options).tokens)


def of_transformers(size: str, features: Floats, tokens: int) -> Run:
    """Return the greedy `generate` of transformers on given encoder outputs, with its KV cache."""
    import torch
    from transformers import GenerationMixin, WhisperConfig, WhisperForConditionalGeneration
    from transformers.modeling_outputs import BaseModelOutput

    from whisperport.model.checkpoint.names import to_huggingface

    dims, weights = checkpoint_of(size)
    config = WhisperConfig(
        vocab_size=dims.n_vocab,
        d_model=dims.n_text_state,
        encoder_layers=dims.n_audio_layer,
        decoder_layers=dims.n_text_layer,
        encoder_attention_heads=dims.n_audio_head,
        decoder_attention_heads=dims.n_text_head,
        encoder_ffn_dim=dims.n_audio_ffn,
        decoder_ffn_dim=dims.n_text_ffn,
    )
    model = WhisperForConditionalGeneration(config).eval()
    named = {to_huggingface(name): weight for name, weight in weights.items()}
    named["proj_out.weight"] = named["model.decoder.embed_tokens.weight"]
    missing = model.load_state_dict(named, strict=False).missing_keys
    assert not missing, missing
    settings = model.generation_config
    settings.suppress_tokens, settings.begin_suppress_tokens = list(suppressed(size)), None
    settings.eos_token_id, settings.pad_token_id = END if size == EMBEDDED else None, END
    start = torch.tensor([START])
    audio = BaseModelOutput(torch.from_numpy(features)[None])  # type: ignore[no-untyped-call]

    def run() -> tuple[int, ...]:
        with torch.no_grad():
            decoded = GenerationMixin.generate(
                model,
                encoder_outputs=audio,
                decoder_input_ids=start,
                max_new_tokens=limit_of(size, tokens),
                do_sample=False,
            )
        return tuple(token for token in decoded[0, len(START) :].tolist() if token != END)

    return run


def checkpoint_of(size: str) -> tuple[Any, dict[str, Any]]:
    """Return the sizes of a checkpoint, and its weights as float32 tensors."""
    from whisperport.model.checkpoint import load_checkpoint

    checkpoint = load_checkpoint("default") if size == EMBEDDED else random_checkpoint(size)
    return checkpoint.dims, {name: weight.float() for name, weight in checkpoint.weights.items()}


def compare(size: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure all sides in turn."""
    sides = {name: Side(name, size, chosen) for name in SIDES}
    rounds = [{name: side.decode() for name, side in sides.items()} for _ in range(chosen.rounds)]
    tokens = {name: side.tokens for name, side in sides.items()}
    for side in sides.values():
        side.close()
    first = tokens[SIDES[0]]
    return {
        "size": size,
        "tokens": len(first),
        "sides": {name: summary(name, rounds, tokens[name] == first) for name in SIDES},
    }


def summary(name: str, rounds: Sequence[Mapping[str, Any]], same: bool) -> dict[str, Any]:
    return {
        "cpu_s": statistics.median(r[name]["cpu_s"] for r in rounds),
        "wall_s": statistics.median(r[name]["wall_s"] for r in rounds),
        "cpu_s_per_audio_s": statistics.median(r[name]["cpu_s"] for r in rounds) / WINDOW_S,
        "same_tokens": same,
        "ratios": {
            other: statistics.median(r[name]["cpu_s"] / r[other]["cpu_s"] for r in rounds)
            for other in PYTORCH
        },
    }


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['size']}, {row['tokens']} tokens of a window of {WINDOW_S:.0f} s")
    heads = "".join(f"{f'/ {letter}':>6}" for letter in "ABC")
    print(f"{'decoder':36}{'CPU s':>8}{'CPU s / audio s':>17}{'wall s':>8}{heads}  same tokens")
    for number, (name, side) in enumerate(row["sides"].items()):
        library = f"{'ABC'[number]}: PyTorch" if name in PYTORCH else "   whisperport"
        ratios = "".join(f"{side['ratios'][other]:6.2f}" for other in PYTORCH)
        print(
            f"{f'{library}, {name}':36}{side['cpu_s']:8.3f}{side['cpu_s_per_audio_s']:17.4f}"
            f"{side['wall_s']:8.3f}{ratios}  {'yes' if side['same_tokens'] else 'NO'}"
        )
    best = row["sides"][RECOMMENDED]
    reached = best["same_tokens"] and all(best["ratios"][other] <= GOAL for other in COMPARED)
    print(f"goal: {RECOMMENDED} at most {GOAL:.2f} of A and of C: {'yes' if reached else 'NO'}")


def save(rows: list[dict[str, Any]], chosen: argparse.Namespace) -> None:
    result = {
        "what": "CPU seconds of the decoder for one window of 30 s: cross K/V, start tokens, all tokens",
        "goal": GOAL,
        "recommended": RECOMMENDED,
        "rows": rows,
        "versions": versions(
            ("whisperport", "onnxruntime", "torch", "openai-whisper", "transformers", "numpy")
        ),
    }
    record("speed", "decoder_cpu", result)


if __name__ == "__main__":
    main()
