"""Measure word errors and loops with shorter windows, for each window, padding and decoding method.

    python -m benchmarks.words.short_windows [--checkpoint default] [--eval FOLDER] [--paddings 10 5]

Exports a bundle for every window and padding, and transcribes speech with it. The speech is that of the
package, and with `--eval` also single utterances and long audio files made of them:

    cd training && python synthesize.py eval --out work/eval     # see training/README.md

A window loops if it reaches the token limit, or if its text in the transcript has a compression ratio above
2.4 or repeats four words three times in a row. Bundles are kept in `--work` and used again. Writes
`results/words.json` and prints a table.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.model.checkpoint import Checkpoint, load_checkpoint
from whisperport.program.bundle import Bundle
from whisperport.program.window import WindowOptions
from whisperport.runtime import TEMPERATURES, DecodeOptions, compression_ratio
from whisperport.speech.audio import SAMPLE_RATE
from whisperport.speech.text import Segment
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber, Transcript
from whisperport.verification import TextErrors, text_errors, versions
from whisperport.verification.clips import Clip, clips_of, shipped_audio

from ..record import record

MAX_RATIO = 2.4  # as openai-whisper's threshold
LOOP = re.compile(r"\b((?:\S+ ){4})\1\1")  # four words, three times
HELD_OUT = (
    "espeak-held-out",
    "festival-ked",
)  # voices that the embedded model was not trained with

ENGLISH = DecodeOptions(language="en")
GREEDY = TranscribeOptions(decode=ENGLISH, temperatures=(0.0,))
# As in a checkpoint's own window: the previous text is the prompt, without a repetition penalty.
UNGUARDED = replace(
    GREEDY, condition_on_previous_text=True, decode=replace(ENGLISH, repetition_penalty=1.0)
)
HEARD_ONCE = "heard once"  # segments at a window's end are believed, as in openai-whisper
WAYS = {
    "greedy": GREEDY,
    HEARD_ONCE: GREEDY,
    "fallback": replace(GREEDY, temperatures=TEMPERATURES),
    "unguarded": UNGUARDED,
    "conditioned": replace(GREEDY, condition_on_previous_text=True),
    "no penalty": replace(GREEDY, decode=UNGUARDED.decode),
    "no timestamps": replace(GREEDY, decode=replace(ENGLISH, without_timestamps=True)),
}
# Each row differs from the default of its window in one setting.
PLAN = (
    (WindowOptions(), ("greedy",)),
    (WindowOptions(seconds=20.0), ("greedy",)),
    (WindowOptions(seconds=20.0, padding="none"), ("greedy",)),
    (WindowOptions(seconds=15.0), ("greedy",)),
    (WindowOptions(seconds=15.0, padding="none"), ("greedy",)),
    (WindowOptions(seconds=10.0), tuple(WAYS)),
    (WindowOptions(seconds=10.0, padding="none"), ("greedy", HEARD_ONCE)),
    (WindowOptions(seconds=10.0, padding="features"), ("greedy",)),
    (WindowOptions(seconds=10.0, padding="keys-and-values"), ("greedy",)),
    (WindowOptions(seconds=10.0, context_s=14.0), ("greedy",)),
    (WindowOptions(seconds=10.0, audio_s=9.0), ("greedy",)),
    (WindowOptions(seconds=5.0), tuple(WAYS)),
    (WindowOptions(seconds=5.0, padding="none"), ("greedy",)),
    (WindowOptions(seconds=5.0, padding="features"), ("greedy",)),
    (WindowOptions(seconds=5.0, padding="keys-and-values"), ("greedy",)),
)
PADDINGS = ("silence", "none", "features", "keys-and-values")
DEFAULTS = tuple((WindowOptions(seconds=s), ("greedy",)) for s in (None, 20.0, 15.0, 10.0, 5.0))


@dataclass(frozen=True, slots=True)
class Heard:
    """The results for the clips of one set."""

    errors: TextErrors
    windows: int
    looped: int  # of these windows

    def __add__(self, other: "Heard") -> "Heard":
        return Heard(
            self.errors + other.errors, self.windows + other.windows, self.looped + other.looped
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--checkpoint", default="default")
    parser.add_argument("--target", default="onnxruntime")
    parser.add_argument("--eval", type=Path, help="folder of training/synthesize.py")
    parser.add_argument("--work", type=Path, default=Path("build/short_windows"))
    parser.add_argument("--single", type=int, default=100, help="utterances of --eval")
    parser.add_argument("--long", type=int, default=8, help="audio files of 75 s made of --eval")
    parser.add_argument("--defaults", action="store_true", help="only the default of every window")
    parser.add_argument(
        "--paddings", nargs="+", type=float, metavar="SECONDS", help="only the paddings of windows"
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    sets: dict[str, Sequence[Clip]] = {"shipped": clips_of(shipped_audio())}
    if options.eval:
        sets |= evaluation_sets(options.eval, options.single, options.long)
    checkpoint = load_checkpoint(options.checkpoint)
    rows = []
    for window, ways in plan(options):
        made = bundle(checkpoint, window, options)
        for way in ways:
            row = measured(Transcriber(made, threads(options)), window, way, sets)
            print(line(row), flush=True)
            rows.append(row)
    write(rows, sets, options)


def plan(options: argparse.Namespace) -> Sequence[tuple[WindowOptions, tuple[str, ...]]]:
    """Return the windows to measure, and the ways of decoding each."""
    if options.paddings:
        pairs = product(options.paddings, PADDINGS)
        return [(WindowOptions(seconds=s, padding=p), ("greedy",)) for s, p in pairs]
    return DEFAULTS if options.defaults else PLAN


def bundle(checkpoint: Checkpoint, window: WindowOptions, options: argparse.Namespace) -> Bundle:
    """Return the bundle for a window; export it, without verification, if it does not exist."""
    name = Path(options.checkpoint).name
    parts = (name, options.target, window.seconds, window.padding, window.context_s, window.audio_s)
    folder = options.work / "-".join(str(part) for part in parts)
    if folder.is_dir():
        return Bundle.open(folder)
    how = ExportOptions(window=window, clips=(), allow_unverified=True, run=threads(options))
    return export(checkpoint, options.target, folder, how)


def threads(options: argparse.Namespace) -> RunOptions:
    return RunOptions(threads=options.threads)


def measured(
    transcriber: Transcriber, window: WindowOptions, way: str, sets: Mapping[str, Sequence[Clip]]
) -> dict[str, Any]:
    if way == HEARD_ONCE:
        transcriber.engine.window = None  # as if it were the checkpoint's own
    found = {name: heard(transcriber, clips, way) for name, clips in sets.items()}
    found["all"] = sum(found.values(), Heard(TextErrors(), 0, 0))
    return {
        "window_s": transcriber.engine.dims.window_s,
        "padding": window.padding if window.seconds else "none",
        "heard_s": window.context_s,
        "sound_s": window.audio_s,
        "way": way,
        **{name: as_json(item) for name, item in found.items()},
    }


def heard(transcriber: Transcriber, clips: Sequence[Clip], way: str) -> Heard:
    total = Heard(TextErrors(), 0, 0)
    for clip in clips:
        transcript = transcriber.transcribe(clip.samples, WAYS[way])
        windows = [list(group) for _, group in groupby(transcript.segments, lambda s: s.seek)]
        looped = sum(loops(window, transcript) for window in windows)
        total += Heard(text_errors(transcript.text, clip.text), len(windows), looped)
    return total


def loops(window: Sequence[Segment], transcript: Transcript) -> bool:
    text = "".join(segment.text for segment in window).strip()
    limit = any(abs(window[0].seek / 100 - start) < 1e-6 for start in transcript.truncated)
    repeats = LOOP.search(f"{text} ".lower()) is not None
    return limit or repeats or compression_ratio(text) > MAX_RATIO


def as_json(found: Heard) -> dict[str, Any]:
    return {
        "wer": found.errors.rate,
        "substitutions": found.errors.substitutions,
        "deletions": found.errors.deletions,
        "insertions": found.errors.insertions,
        "words": found.errors.length,
        "windows": found.windows,
        "loops": found.looped,
    }


def evaluation_sets(folder: Path, n_single: int, n_long: int) -> dict[str, list[Clip]]:
    """Make single utterances with half a second of silence around them, and audio of 75 s with gaps."""
    random = np.random.default_rng(5)
    spoken = list(utterances(folder))
    single = [
        together([spoken[i]], random, 30.0)
        for i in random.choice(len(spoken), min(n_single, len(spoken)), replace=False)
    ]
    long = [
        together([spoken[i] for i in random.integers(len(spoken), size=40)], random, 75.0)
        for _ in range(n_long)
    ]
    return {"single": single, "long": long}


def utterances(folder: Path, *, held_out: bool = False) -> Iterator[Clip]:
    """Yield the utterances of voices that the embedded model was trained with, or of the others."""
    for index in sorted(folder.glob("*.json")):
        if index.name.startswith(HELD_OUT) != held_out:
            continue
        samples = np.load(index.with_suffix(".wav.npy"))
        for entry in json.loads(index.read_text()):
            start, stop = (160 * n for n in (entry["first_frame"], entry["frames"]))
            audio = samples[start : start + stop].astype(np.float32) / 32768
            yield Clip(entry["voice"], entry["text"], audio)


def together(spoken: Sequence[Clip], random: np.random.Generator, seconds: float) -> Clip:
    """Join utterances at equal loudness with gaps of 0.3 to 2.5 s, as many as fit into `seconds`."""
    pieces, texts = [np.zeros(int(random.uniform(0.05, 0.9) * SAMPLE_RATE), np.float32)], []
    for clip in spoken:
        if sum(map(len, pieces)) + clip.samples.size > seconds * SAMPLE_RATE:
            break
        gap = np.zeros(int(random.uniform(0.3, 2.5) * SAMPLE_RATE), np.float32)
        pieces += [clip.samples * (0.4 / np.abs(clip.samples).max()), gap]
        texts.append(clip.text)
    pieces[-1] = pieces[-1][: SAMPLE_RATE // 3]
    return Clip("made", " ".join(texts), np.concatenate(pieces))


def line(row: dict[str, Any]) -> str:
    audio = f"{row['sound_s'] or row['window_s']:.1f}"
    cells = [
        f"{row[name]['wer']:7.2%} {row[name]['loops']:3d}/{row[name]['windows']:<4d}"
        for name in ("shipped", "single", "long", "all")
        if name in row
    ]
    where = f"{row['window_s']:4.0f} {audio:>5} {row['padding']:15} {row['way']:13}"
    return " ".join([where, *cells])


def write(
    rows: list[dict[str, Any]], sets: Mapping[str, Sequence[Clip]], options: argparse.Namespace
) -> None:
    result = {
        "what": "word error rate and looping windows, by window, padding and way of decoding",
        "checkpoint": options.checkpoint,
        "target": options.target,
        "sets": {
            name: {
                "clips": len(clips),
                "seconds": round(sum(clip.samples.size for clip in clips) / SAMPLE_RATE, 1),
            }
            for name, clips in sets.items()
        },
        "rows": rows,
        "versions": versions(("whisperport", "torch", "onnxruntime", "executorch", "numpy")),
    }
    which = "_defaults" if options.defaults else "_paddings" if options.paddings else ""
    if options.checkpoint != "default":
        which += f"_{Path(options.checkpoint).name}"
    record("words", f"short_windows{which}", result)


if __name__ == "__main__":
    main()
