"""Measure the gain of encoding the next chunk while one is decoded: two programs concurrently or in turn.

    python -m benchmarks.speed.overlap [--seconds 90] [--rounds 7]

The audio is made as in chunks.py, with pauses, and transcribed in speech chunks by one worker, with one
thread per program. *In turn* is the same with a lock around all programs, so that only one runs at a time.
Speech detection and spectrograms are computed concurrently in both cases. Rounds are interleaved, so that
other load on the machine affects all alike; the ratio is the median of the rounds' ratios. Models: the
embedded model; and Whisper tiny's sizes with random weights and 30 tokens per chunk, with its encoder on
each target. Writes `results/speed.json` and prints a table.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from whisperport.apps.bench.timed import Clock
from whisperport.build.export.bundle_cache import bundle_of
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.runner import Array, Runner
from whisperport.runtime import DecodeOptions, Engine, Thresholds, load_engine
from whisperport.speech.audio import AudioStream, MelWindows, VadOptions
from whisperport.speech.text import Tokenizer
from whisperport.speech.text.vocabulary import openai_generation
from whisperport.system.progress import reporting
from whisperport.targets import RunOptions, get_target
from whisperport.transcription import TranscribeOptions, Transcript
from whisperport.transcription.speech_pipeline import ChunkedTranscription
from whisperport.verification import versions

from ..models import TINY
from ..record import record
from .chunks import GAPS, made

GOAL = 0.80  # of the time in turn, if the costs of encoder and decoder are within a factor of two
ONE_THREAD = RunOptions(threads=1)
WORDS = TranscribeOptions(decode=DecodeOptions(language="en"), vad=VadOptions())
THIRTY_TOKENS = replace(
    WORDS,
    decode=DecodeOptions(language="en", without_timestamps=True, max_tokens=30),
    temperatures=(0.0,),
    thresholds=Thresholds(
        compression_ratio_threshold=None, logprob_threshold=None, no_speech_threshold=None
    ),
)


class Switch:
    """Lets one program run at a time, or all programs concurrently."""

    def __init__(self) -> None:
        self.in_turn = False
        self.lock = Lock()


class Switched(Runner):
    """A runner that waits for the lock while the switch is on; otherwise any thread may run it."""

    def __init__(self, inner: Runner, switch: Switch) -> None:
        super().__init__(inner.spec, inner.run_lock)
        self.inner, self.switch = inner, switch

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        if not self.switch.in_turn:
            return self.inner._run(inputs)
        with self.switch.lock:
            return self.inner._run(inputs)


class Pair:
    """An encoder and a decoder with one thread each."""

    def __init__(self, options: TranscribeOptions, encoder: str | None = None) -> None:
        """Make the pair.

        Args:
            encoder: target of tiny's encoder, with the decoder on onnxruntime; None: the embedded model.
        """
        self.options, self.clock, self.switch = options, Clock(), Switch()
        bundle = bundle_of("default")
        if encoder is None:
            self.engine = load_engine(bundle, ONE_THREAD, self.wrap_runner)
        else:
            self.engine = self.tiny_engine(encoder)
        self.tokenizer = Tokenizer.from_json(bundle.tokenizer_json(), self.engine.generation)

    def wrap_runner(self, runner: Runner) -> Runner:
        return Switched(self.clock.wrap_runner(runner), self.switch)

    def tiny_engine(self, encoder: str) -> Engine:
        torch.manual_seed(0)
        model = Whisper(TINY).eval().requires_grad_(False)
        for table in (model.encoder.positional_embedding, model.decoder.positional_embedding):
            torch.nn.init.normal_(table, std=0.02)
        programs = list(whisper_programs(Parts(model, [(0, 0)])))
        shares = {
            "encoder": (encoder, [p for p in programs if p.name == "encoder"]),
            "decoder": ("onnxruntime", [p for p in programs if p.name != "encoder"]),
        }
        runners: dict[str, Runner] = {}
        with tempfile.TemporaryDirectory() as parent, reporting(print):
            for share, (name, chosen) in shares.items():
                target, folder = get_target(name), Path(parent) / share
                folder.mkdir()
                runners |= target.load(folder, target.lower(chosen, folder), ONE_THREAD)
        return Engine(
            TINY,
            openai_generation(TINY.n_vocab),
            {name: self.wrap_runner(runner) for name, runner in runners.items()},
            model.decoder.token_embedding.weight.numpy(),
            model.decoder.positional_embedding.numpy(),
        )

    def seconds(self, audio: np.ndarray, *, in_turn: bool) -> tuple[float, float, float]:
        """Return the total time, and those of encoder and decoder; check that the text does not change."""
        self.switch.in_turn = in_turn
        self.clock.reset()
        started = time.perf_counter()
        transcript = self.transcribed(audio)
        whole = time.perf_counter() - started
        assert transcript == self.__dict__.setdefault("first", transcript)
        calls = {name: sum(seconds) for name, seconds in self.clock.calls.items()}
        encoder = calls.pop("encoder")
        return whole, encoder, sum(calls.values())

    def transcribed(self, audio: np.ndarray) -> Transcript:
        dims, vad = self.engine.dims, self.options.vad
        mel = MelWindows(audio, dims.n_mels, dims.n_frames)
        chunked = ChunkedTranscription(self.engine, self.tokenizer, self.options, vad, None)
        with AudioStream(audio, look_back_s=0) as stream:
            return chunked.run(stream, mel, lambda _done, _of: None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    pairs = {
        "embedded model, onnxruntime": Pair(WORDS),
        "tiny, onnxruntime": Pair(THIRTY_TOKENS, "onnxruntime"),
        "tiny, encoder on xnnpack": Pair(THIRTY_TOKENS, "xnnpack"),
    }
    audio, _ = made(chosen.seconds, GAPS["pauses of 0.3 to 2 s"])
    rounds: list[dict] = []
    for _ in range(chosen.rounds + 1):
        rounds.append({})
        for name, pair in pairs.items():
            in_turn, encoder, decoder = pair.seconds(audio, in_turn=True)
            overlapped, _, _ = pair.seconds(audio, in_turn=False)
            rounds[-1][name] = {
                "encoder_s": encoder,
                "decoder_s": decoder,
                "in_turn_s": in_turn,
                "overlapped_s": overlapped,
                "ratio": overlapped / in_turn,
            }
    report(rounds[1:], audio.size / 16_000, chosen)


def report(rounds: list[dict], audio_s: float, chosen: argparse.Namespace) -> None:
    rows = [
        {"pair": name, **{key: statistics.median(r[name][key] for r in rounds) for key in values}}
        for name, values in rounds[0].items()
    ]
    result = {
        "what": "the encoder of the next chunk while one is decoded, against one program at a time",
        "goal": GOAL,
        "rows": rows,
        "rounds": chosen.rounds,
        "audio_s": audio_s,
        "threads": 1,
        "versions": versions(("whisperport", "onnxruntime", "executorch", "numpy")),
    }
    record("speed", "overlap", result)
    print(
        f"\n{'pair':30}{'encoder s':>10}{'decoder s':>10}{'in turn s':>10}{'overlap s':>10}{'ratio':>7}"
    )
    for row in rows:
        print(
            f"{row['pair']:30}{row['encoder_s']:10.2f}{row['decoder_s']:10.2f}"
            f"{row['in_turn_s']:10.2f}{row['overlapped_s']:10.2f}{row['ratio']:7.2f}"
        )


if __name__ == "__main__":
    main()
