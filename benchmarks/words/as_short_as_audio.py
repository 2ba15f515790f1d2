"""Count words where windows are as short as the audio, against windows of 30 s.

    cd training && python synthesize.py eval --out work/eval     # see training/README.md
    python -m benchmarks.words.as_short_as_audio --eval training/work/eval [--moved N]

Each checkpoint is exported for ONNX Runtime, which decides on its clips whether short windows are used and
which texts are trusted. Other clips, of voices that the clips of the export do not have, are transcribed
both ways: single utterances that fit in a short window, until there are enough words. `--moved` adds
checkpoints with outliers of other blocks and channels, see moved_outliers.py. Writes `results/words.json`.
"""

import argparse
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.build.export.export import export
from whisperport.model.checkpoint import Checkpoint, load_checkpoint
from whisperport.speech.audio import SAMPLE_RATE
from whisperport.targets import RunOptions
from whisperport.transcription import Transcriber
from whisperport.verification import text_errors, versions
from whisperport.verification.clips import Clip
from whisperport.verification.error_rate import increase_bounds

from ..record import record
from .short_windows import GREEDY, together, utterances

LONGEST_S = 18.0  # fits in the longest short window


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--checkpoints", nargs="+", default=["default"])
    parser.add_argument("--moved", type=int, default=0)
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--words", type=int, default=1500)
    parser.add_argument("--work", type=Path, default=Path("build/as_short_as_audio"))
    options = parser.parse_args()
    clips = short_clips(options.eval, options.words)
    rows = []
    for name, checkpoint in checkpoints(options):
        rows.append({"checkpoint": name, **measured(checkpoint, clips, options.work)})
        print(rows[-1], flush=True)
    result = {
        "what": "words of windows as short as the audio, against those of 30 s",
        "clips": len(clips),
        "seconds": round(sum(clip.samples.size for clip in clips) / SAMPLE_RATE, 1),
        "rows": rows,
        "versions": versions(("whisperport", "torch", "onnxruntime", "numpy")),
    }
    record("words", "as_short_as_audio", result)


def checkpoints(options: argparse.Namespace) -> Iterator[tuple[str, Checkpoint]]:
    for name in options.checkpoints:
        yield Path(name).name, load_checkpoint(name)
    if options.moved:
        from .moved_outliers import moved, shipped_windows

        data = shipped_windows(1)
        for seed in range(options.moved):
            yield f"moved {seed}", moved(seed, data)[0]


def short_clips(folder: Path, words: int) -> list[Clip]:
    """Return single utterances with silence around them that have at least so many words."""
    random = np.random.default_rng(7)
    spoken = [*utterances(folder), *utterances(folder, held_out=True)]
    clips: list[Clip] = []
    for index in random.permutation(len(spoken)):
        clip = together([spoken[index]], random, LONGEST_S)
        if clip.text:
            clips.append(clip)
        if sum(len(each.text.split()) for each in clips) >= words:
            break
    return clips


def measured(checkpoint: Checkpoint, clips: Sequence[Clip], work: Path) -> dict[str, Any]:
    shutil.rmtree(work, ignore_errors=True)
    bundle = export(checkpoint, "onnxruntime", work)
    stated = bundle.manifest.short_windows
    full = Transcriber(bundle, RunOptions(threads=1, short_windows=False))
    short = Transcriber(bundle, RunOptions(threads=1, short_windows=True))
    pairs, differ, again = [], 0, 0
    for clip in clips:
        expected, actual = (each.transcribe(clip.samples, GREEDY) for each in (full, short))
        pairs.append(tuple(text_errors(each.text, clip.text) for each in (actual, expected)))
        differ += text_errors(actual.text, expected.text).errors > 0
        again += any(segment.window_s is None for segment in actual.segments)
    low, high = increase_bounds(pairs)
    words = sum(each.length for _, each in pairs)
    return {
        "used": stated is not None,
        "min_logprob": short.engine.short_windows.min_logprob,
        "words": words,
        "errors": [sum(each.errors for each in errors) for errors in zip(*pairs, strict=True)],
        "increase": [low, high],
        "texts_differ": differ,
        "decoded_again": again,
    }


if __name__ == "__main__":
    main()
