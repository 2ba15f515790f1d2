"""Compare speech chunks with consecutive windows, and one worker with two: speed and word errors.

    python -m benchmarks.speed.chunks [--minutes 6] [--rounds 3] [--bundle DIR]

The audio consists of the shipped audio files in a fixed random order, with silence between them: pauses of
0.3 to 2 s, and gaps of up to 30 s. Rounds are interleaved, so that other load on the machine affects all
alike; figures are medians. Ratios are relative to windows with 1 thread in the same round, for wall-clock
time and for CPU time, which depends less on other load. Writes `results/speed.json` and prints a
table.
"""

import argparse
import os
import statistics
import time

import numpy as np

from whisperport.build.export.bundle_cache import bundle_of
from whisperport.runtime import DecodeOptions
from whisperport.speech.audio import SAMPLE_RATE, VadOptions, load_audio
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber, Transcript
from whisperport.verification import text_errors, versions
from whisperport.verification.clips import shipped_audio

from ..record import record

GAPS = {"pauses of 0.3 to 2 s": (0.3, 2.0), "gaps of 3 to 30 s": (3.0, 30.0)}
VAD, PACKED = VadOptions(), VadOptions(pack=True)
FIRST = "windows, 1 thread"
MODES = {  # threads, options
    FIRST: (1, {}),
    "windows, 2 threads": (2, {}),
    "chunks, 1 worker of 1 thread": (1, {"vad": VAD}),
    "packed chunks, 1 worker of 1 thread": (1, {"vad": PACKED}),
    "chunks, 2 workers of 1 thread": (1, {"vad": VAD, "workers": 2}),
    "chunks, 1 worker of 2 threads": (2, {"vad": VAD}),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bundle", default=None)
    chosen = parser.parse_args()
    bundle = chosen.bundle or bundle_of("default")
    transcribers = {n: Transcriber(bundle, RunOptions(threads=n)) for n in (1, 2)}
    rows = []
    for name, gap in GAPS.items():
        audio, text = made(chosen.minutes * 60, gap)
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        cpu: dict[str, list[float]] = {mode: [] for mode in MODES}
        heard: dict[str, Transcript] = {}
        for _ in range(chosen.rounds):
            for mode, (threads, options) in MODES.items():
                started, started_cpu = time.perf_counter(), time.process_time()
                heard[mode] = transcribers[threads].transcribe(
                    audio,
                    TranscribeOptions(decode=DecodeOptions(language="en"), **options),
                )
                seconds[mode].append(time.perf_counter() - started)
                cpu[mode].append(time.process_time() - started_cpu)
        duration = audio.size / SAMPLE_RATE
        for mode in MODES:
            errors = text_errors(heard[mode].text, text)
            rows.append(
                {
                    "sound": name,
                    "mode": mode,
                    "seconds": statistics.median(seconds[mode]),
                    "ratio": median_ratio(seconds[mode], seconds[FIRST]),
                    "cpu_seconds": statistics.median(cpu[mode]),
                    "cpu_ratio": median_ratio(cpu[mode], cpu[FIRST]),
                    "real_time_factor": statistics.median(seconds[mode]) / duration,
                    "errors": errors.errors,
                    "words": errors.length,
                    "wer": errors.errors / errors.length,
                    "windows": len({segment.seek for segment in heard[mode].segments}),
                    "duration_s": duration,
                }
            )
    report(rows, chosen)


def median_ratio(mine: list[float], first: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, first, strict=True))


def made(seconds: float, gap: tuple[float, float]) -> tuple[np.ndarray, str]:
    """Make audio of about `seconds` seconds; return it with its transcript."""
    random = np.random.default_rng(0)
    recordings = [r for r in shipped_audio() if r.text and r.seconds < 10]
    parts, text, n_samples = [], [], 0
    while n_samples < seconds * SAMPLE_RATE:
        recording = recordings[random.integers(len(recordings))]
        silence = 1e-4 * random.standard_normal(round(random.uniform(*gap) * SAMPLE_RATE))
        parts += [silence.astype(np.float32), load_audio(recording.path)]
        text.append(recording.text)
        n_samples += parts[-1].size + parts[-2].size
    return np.concatenate(parts), " ".join(text)


def report(rows: list[dict], chosen: argparse.Namespace) -> None:
    result = {
        "what": "speech chunks compared with consecutive windows",
        "rows": rows,
        "rounds": chosen.rounds,
        "bundle": chosen.bundle or "the embedded model",
        "load_average": os.getloadavg(),  # processes that used or waited for a core, including this one
        "versions": versions(("whisperport", "onnxruntime", "numpy")),
    }
    record("speed", "chunks", result)
    print(
        f"\n{'sound':22}{'mode':37}{'s':>8}{'ratio':>8}{'CPU':>8}{'RTF':>8}{'WER':>8}{'windows':>9}"
    )
    for row in rows:
        print(
            f"{row['sound']:22}{row['mode']:37}{row['seconds']:8.2f}{row['ratio']:8.2f}"
            f"{row['cpu_ratio']:8.2f}{row['real_time_factor']:8.4f}{row['wer']:8.2%}"
            f"{row['windows']:9}"
        )


if __name__ == "__main__":
    main()
