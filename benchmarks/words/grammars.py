"""Count the commands of a grammar that are right, and other sentences that are told to be no match.

    python -m benchmarks.words.grammars --checkpoint default FOLDER --speech FOLDER [--beams 0 5]

`--speech` has `commands.gbnf`, all its sentences in `commands.txt`, and lists of `file` and `text` with WAV
files in folders of their names: `inside.json` (commands), `near.json` (commands with another word) and
`other.json`. training/names.py makes them. The threshold is chosen on every second clip, as the one with
the fewest wrong verdicts in per cent, and judged on the others. Writes `results/words.json`.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.build.export.export import export
from whisperport.model.checkpoint import load_checkpoint
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.verification import versions

from ..record import record
from .phrases import Spoken, spoken
from .short_windows import GREEDY

KINDS = ("inside", "near", "other")
THRESHOLDS = tuple(np.arange(0.5, 20.25, 0.25).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--checkpoint", nargs="+", required=True)
    parser.add_argument("--speech", type=Path, required=True)
    parser.add_argument("--target", default="onnxruntime")
    parser.add_argument("--beams", type=int, nargs="+", default=[0], help="0: greedy")
    parser.add_argument("--clips", type=int, help="use the first of each kind only")
    options = parser.parse_args()
    clips = {kind: spoken(options.speech, kind)[: options.clips] for kind in KINDS}
    grammar = (options.speech / "commands.gbnf").read_text("utf-8")
    sentences = set((options.speech / "commands.txt").read_text("utf-8").splitlines())
    rows = []
    for path in options.checkpoint:
        with tempfile.TemporaryDirectory() as folder:
            bundle = export(load_checkpoint(path), options.target, Path(folder, "bundle"))
            transcriber = Transcriber(bundle, RunOptions(threads=1))
            for beams in options.beams:
                row = measured(transcriber, beams, clips, grammar, sentences)
                rows.append({"checkpoint": Path(path).name, "beams": beams, **row})
                print(rows[-1], flush=True)
    result = {
        "what": "commands of a grammar that are right, and other sentences that are no match",
        "target": options.target,
        "sentences": len(sentences),
        "threshold": TranscribeOptions().grammar_threshold,
        "clips": {kind: len(clips[kind]) for kind in KINDS},
        "rows": rows,
        "versions": versions(("whisperport", "torch", "onnxruntime", "numpy")),
    }
    record("words", "grammars", result)


def measured(
    transcriber: Transcriber,
    beams: int,
    clips: dict[str, list[Spoken]],
    grammar: str,
    sentences: set[str],
) -> dict[str, Any]:
    """Return the counts at the default threshold, and those of a threshold that half of the clips chose."""
    scores: dict[str, list[float]] = {}
    row: dict[str, Any] = {"texts_outside": 0}
    for kind in KINDS:
        scores[kind], texts = [], []
        for clip in clips[kind]:
            transcript = transcriber.transcribe(
                clip.samples, GREEDY, grammar=grammar, beam_size=beams or None
            )
            texts.append(transcript.text)
            matches = [segment.match for segment in transcript.segments if segment.match]
            scores[kind].append(max((match.score for match in matches), default=0.0))
            written = {segment.text.strip() for segment in transcript.segments}
            row["texts_outside"] += len(written - sentences - {""})
        row[f"{kind}_refused"] = texts.count("")
        if kind == "inside":
            free = [
                transcriber.transcribe(clip.samples, GREEDY, beam_size=beams or None).text
                for clip in clips[kind]
            ]
            row["inside_right"] = right(texts, clips[kind])
            row["inside_right_without_grammar"] = right(free, clips[kind])
    return row | fitted(scores)


def right(texts: list[str], clips: list[Spoken]) -> int:
    """Return how many texts are those of the clips."""
    return sum(text == clip.text for text, clip in zip(texts, clips, strict=True))


def fitted(scores: dict[str, list[float]]) -> dict[str, float]:
    """Return the threshold of every second clip, and its wrong verdicts in per cent of the others."""

    def wrong(threshold: float, half: int) -> tuple[float, float]:
        inside = np.array(scores["inside"][half::2])
        outside = np.array(scores["near"][half::2] + scores["other"][half::2])
        return float((inside > threshold).mean()), float((outside <= threshold).mean())

    best = min(THRESHOLDS, key=lambda threshold: sum(wrong(threshold, 0)))
    refused, accepted = wrong(best, 1)
    return {
        "fitted_threshold": best,
        "fitted_inside_refused": 100 * refused,
        "fitted_outside_accepted": 100 * accepted,
    }


if __name__ == "__main__":
    main()
