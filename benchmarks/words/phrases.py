"""Count wrong names with and without a list of phrases, and what the list costs all other words.

    python -m benchmarks.words.phrases --checkpoint FOLDER --speech FOLDER [--target onnxruntime ...]

`--speech` has `names.json` (sentences with one listed name each), `others.json` (sentences without any;
those with `name` have one that is similar to listed ones), both lists of `file`, `text` and `name`, with
the WAV files in folders of these names; and `names.txt` and `unspoken.txt`, names that no sentence has.
training/names.py makes them, and checkpoints that can write such names. Each bonus is used with greedy
decoding and with beams. A name counts as right if the text has it. Writes `results/words.json`.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whisperport.build.export.export import export
from whisperport.model.checkpoint import load_checkpoint
from whisperport.speech.audio import load_audio
from whisperport.speech.text import normalize
from whisperport.targets import RunOptions
from whisperport.transcription import Transcriber
from whisperport.verification import text_errors, versions

from ..record import record
from .short_windows import GREEDY


@dataclass(frozen=True, slots=True)
class Spoken:
    """A sentence that was spoken."""

    samples: Any  # (n,) float32, 16 kHz
    text: str
    name: str  # empty: it has no rare name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--checkpoint", nargs="+", required=True)
    parser.add_argument("--speech", type=Path, required=True)
    parser.add_argument("--target", nargs="+", default=["onnxruntime"])
    parser.add_argument("--bonus", type=float, nargs="+", default=[0.8, 1.0])
    parser.add_argument("--beams", type=int, nargs="+", default=[0, 5], help="0: greedy")
    parser.add_argument("--clips", type=int, help="use only the first sentences with listed names")
    options = parser.parse_args()
    names = spoken(options.speech, "names")[: options.clips]
    others = spoken(options.speech, "others")
    lists = {
        kind: (options.speech / f"{kind}.txt").read_text("utf-8").split("\n")
        for kind in ("names", "unspoken")
    }
    rows = []
    for path in options.checkpoint:
        for target in options.target:
            with tempfile.TemporaryDirectory() as folder:
                bundle = export(load_checkpoint(path), target, Path(folder, "bundle"))
                transcriber = Transcriber(bundle, RunOptions(threads=1))
                for beams in options.beams:
                    about = {"checkpoint": Path(path).name, "target": target, "beams": beams}
                    for row in measured(transcriber, beams, options.bonus, names, others, lists):
                        rows.append({**about, **row})
                        print(rows[-1], flush=True)
    result = {
        "what": "wrong names and other words with a list of phrases",
        "names": len(names),
        "other_words": words_of([each for each in others if not each.name]),
        "similar_words": words_of([each for each in others if each.name]),
        "rows": rows,
        "versions": versions(("whisperport", "torch", "onnxruntime", "numpy")),
    }
    record("words", "phrases", result)


def spoken(folder: Path, kind: str) -> list[Spoken]:
    """Read the sentences of a kind."""
    entries = json.loads((folder / f"{kind}.json").read_text("utf-8"))
    return [
        Spoken(load_audio(folder / kind / entry["file"]), entry["text"], entry.get("name") or "")
        for entry in entries
    ]


def measured(
    transcriber: Transcriber,
    beams: int,
    bonuses: Sequence[float],
    names: Sequence[Spoken],
    others: Sequence[Spoken],
    lists: dict[str, list[str]],
) -> list[dict[str, Any]]:
    """Return a row without a list, and one per bonus."""
    arguments: dict[str, Any] = {"beam_size": beams or None, "language": "en"}

    def texts(sentences: Sequence[Spoken], phrases: Sequence[Any]) -> list[str]:
        return [
            transcriber.transcribe(each.samples, GREEDY, phrases=phrases, **arguments).text
            for each in sentences
        ]

    groups = {
        "other_errors": [each for each in others if not each.name],
        "similar_errors": [each for each in others if each.name],
    }
    before = texts(names, ())
    right = [has_name(text, each) for text, each in zip(before, names, strict=True)]
    rows: list[dict[str, Any]] = [{"bonus": 0.0, "wrong_names": right.count(False)}]
    rows[0]["errors_beside_names"] = errors(before, names, without_names=True)
    rows[0] |= {kind: errors(texts(group, ()), group) for kind, group in groups.items()}
    for bonus in bonuses:
        listed, unspoken = ([(name, bonus) for name in lists[kind] if name] for kind in lists)
        with_list = texts(names, listed)
        after = [has_name(text, each) for text, each in zip(with_list, names, strict=True)]
        row = {
            "bonus": bonus,
            "wrong_names": after.count(False),
            "became_wrong": sum(was and not now for was, now in zip(right, after, strict=True)),
            "errors_beside_names": errors(with_list, names, without_names=True),
        }
        for kind, group in groups.items():
            row[kind] = errors(texts(group, listed), group)
            row[f"{kind}_unspoken"] = errors(texts(group, unspoken), group)
        rows.append(row)
    return rows


def words_of(sentences: Sequence[Spoken]) -> int:
    """Return the number of words of sentences."""
    return sum(len(normalize(each.text).split()) for each in sentences)


def has_name(text: str, sentence: Spoken) -> bool:
    """Return whether the text has the name of a sentence, as a word."""
    return normalize(sentence.name) in normalize(text).split()


def errors(texts: Sequence[str], sentences: Sequence[Spoken], without_names: bool = False) -> int:
    """Return the number of wrong words, with a rare name replaced by one word in both texts."""
    total = 0
    for text, sentence in zip(texts, sentences, strict=True):
        wrong = text_errors(text, sentence.text).errors
        if without_names and not has_name(text, sentence):
            wrong -= 1  # the name itself: one word in the sentence
        total += max(0, wrong)
    return total


if __name__ == "__main__":
    main()
