"""Measure the Hailo hybrid with the chip emulated by ONNX on the CPU: speed of the cache, word errors.

    python -m benchmarks.chips.hailo_hybrid [--threads 2] [--rounds 7] [--eval training/work/eval]

Speed: a transcript of 30 tokens at Whisper tiny's sizes with random weights; both decoders run in float32
on ONNX Runtime in the same run. The cached decoder computes the cross-attention K/V once, then a prompt
of one token, then 29 steps. `uncached_decoder` at [1, 32] computes all 32 positions 30 times. This is
measured with two windows: tiny's own 30 s for both decoders; and as in the hybrid, where
`uncached_decoder` has an audio context of 10 s, a third of the cross-attention, and the cached decoder
has 10 s padded to 30 s. Rounds are interleaved; a ratio is the median of the rounds' ratios on one CPU.
The published ratio of 12.4 for a Raspberry Pi 5 (1,257 and 101 ms) compares something else: a chip
without cache and a CPU with one.

Word errors: the embedded model exported for `hailo8` with the window that is known to compile, compared
with the window of 30 s, on the speech of `words/short_windows.py`. Writes
`results/chips.json`.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.model.network.short_window import AudioPadding
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.variants import program_names, whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.bundle import Bundle
from whisperport.program.window import WindowOptions
from whisperport.runtime import Decoder, Engine
from whisperport.runtime.engine.uncached_decoder import UncachedDecoder
from whisperport.speech.text.vocabulary import openai_generation
from whisperport.targets import RunOptions, get_target
from whisperport.targets.target_options import with_target
from whisperport.transcription import Transcriber
from whisperport.verification import versions
from whisperport.verification.clips import clips_of, shipped_audio

from ..models import TINY
from ..record import record
from ..words import short_windows

TOKENS = 30
WINDOWS = (30.0, 10.0)  # seconds: tiny's own window, and that of the hybrid
GOAL_SPEED = 4.5  # time without cache / time with cache
GOAL_WER = 0.01  # allowed difference from the word error rate of the 30 s window
HYBRID = "hailo8"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--eval", type=Path, help="folder of training/synthesize.py")
    parser.add_argument("--single", type=int, default=100, help="utterances of --eval")
    parser.add_argument("--long", type=int, default=8, help="audio files of 75 s made of --eval")
    parser.add_argument("--work", type=Path, default=Path("build/hailo_hybrid"))
    options = parser.parse_args()
    torch.manual_seed(0)
    speed, words = measured_speed(options), measured_words(options)
    write(speed, words, options)


def measured_speed(options: argparse.Namespace) -> dict[str, Any]:
    engines = {seconds: tiny_engine(seconds, options.threads) for seconds in WINDOWS}
    random = np.random.default_rng(0)
    rounds: dict[float, list[tuple[float, float]]] = {seconds: [] for seconds in WINDOWS}
    for _ in range(options.rounds + 1):
        for seconds, engine in engines.items():
            full = engine.uncached_decoder()
            assert full is not None
            audio = random.standard_normal(
                (engine.dims.n_audio_ctx, TINY.n_audio_state), np.float32
            )
            cached = transcript_ms(Decoder(engine), audio)
            rounds[seconds].append((cached, transcript_ms(full, audio)))
    return {f"{seconds:g} s": summary(seconds, times[1:]) for seconds, times in rounds.items()}


def summary(seconds: float, rounds: list[tuple[float, float]]) -> dict[str, Any]:
    cached_ms, full_ms = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(without / cached for cached, without in rounds)
    print(
        f"{seconds:g} s, {TOKENS} tokens: cached {cached_ms:.0f} ms, uncached_decoder {full_ms:.0f} ms, "
        f"ratio {ratio:.1f}" + (f"; goal {GOAL_SPEED}" if seconds == TINY.window_s else "")
    )
    return {"cached_ms": cached_ms, "full_ms": full_ms, "ratio": ratio, "rounds_ms": rounds}


def tiny_engine(seconds: float, threads: int) -> Engine:
    """Make an engine with random weights; a shorter window is padded to 30 s for the cached decoder."""
    window = WindowOptions(seconds=seconds).of(TINY)
    dims = replace(TINY, n_audio_ctx=window.positions) if window else TINY
    model = Whisper(dims, window).eval().requires_grad_(False)
    torch.nn.init.normal_(model.decoder.positional_embedding, std=0.02)
    torch.nn.init.normal_(model.encoder.positional_embedding, std=0.02)
    if window:
        model.padding = AudioPadding(window, torch.randn(1, window.padded, TINY.n_audio_state))
    cpu, chip = get_target("onnxruntime"), get_target(HYBRID)
    form = chip.uncached_form(dims)
    assert form is not None
    parts = Parts(model, [(0, 0)], form)
    names = (*program_names(), "uncached_decoder")
    programs = {p.name: p for p in whisper_programs(parts, names, chip.spec.lowering.variants)}
    on_chip = [programs.pop(name) for name in ("encoder", "uncached_decoder")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        entries = chip.lower(on_chip, path)
        runners = chip.load(
            path,
            entries,
            RunOptions(
                threads=threads, options=with_target(chip.spec.runs.emulation, chip.spec.name)
            ),
        )
        runners |= cpu.load(
            path, cpu.lower(list(programs.values()), path), RunOptions(threads=threads)
        )
    return Engine(
        model.dims,
        openai_generation(TINY.n_vocab),
        runners,
        model.decoder.token_embedding.weight.numpy(),
        model.decoder.positional_embedding.numpy(),
        window,
    )


def transcript_ms(decoder: Decoder | UncachedDecoder, audio: np.ndarray) -> float:
    """Measure the milliseconds from features to the logits of 30 tokens, after a prompt of one token."""
    started = time.perf_counter()
    decoder.start_window(audio)
    decoder.prefill([50258])
    for token in range(1, TOKENS):
        decoder.step(token)
    return 1e3 * (time.perf_counter() - started)


def measured_words(options: argparse.Namespace) -> dict[str, Any]:
    sets = {"shipped": clips_of(shipped_audio())}
    if options.eval:
        sets |= short_windows.evaluation_sets(options.eval, options.single, options.long)
    rows = {}
    for target in ("onnxruntime", HYBRID):
        run = RunOptions(
            threads=options.threads,
            options=with_target(get_target(target).spec.runs.emulation, target),
        )
        transcriber = Transcriber(bundle(target, options), run)
        row = short_windows.measured(transcriber, WindowOptions(), "greedy", sets)
        rows[target] = row
        print(f"{target:12} {row['window_s']:4.0f} s " + short_windows.line(row), flush=True)
    rise = rows[HYBRID]["all"]["wer"] - rows["onnxruntime"]["all"]["wer"]
    loops = rows[HYBRID]["all"]["loops"]
    print(f"WER changes by {rise:+.2%}, goal at most {GOAL_WER:.0%}; {loops} windows loop, goal 0")
    return {"rows": rows, "rise": rise, "loops": loops}


def bundle(target: str, options: argparse.Namespace) -> Bundle:
    """Return the bundle of the embedded model for this target; export it if it does not exist."""
    folder = options.work / target
    if folder.is_dir():
        return Bundle.open(folder)
    return export("default", target, folder, ExportOptions(run=RunOptions(threads=options.threads)))


def write(speed: dict[str, Any], words: dict[str, Any], options: argparse.Namespace) -> None:
    result = {
        "what": "the Hailo hybrid with the chip emulated by ONNX on the CPU: cached decoder compared with "
        "uncached_decoder at tiny's sizes, and word errors of the embedded model against windows of 30 s",
        "goals": {"speed": GOAL_SPEED, "wer": GOAL_WER, "loops": 0},
        "speed": speed,
        "words": words,
        "threads": options.threads,
        "versions": versions(("whisperport", "torch", "onnxruntime", "numpy")),
    }
    record("chips", "hailo_hybrid", result)


if __name__ == "__main__":
    main()
