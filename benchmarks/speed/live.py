"""Measure the delay of words in live transcription, and compare the text with that of the audio file.

    python -m benchmarks.speed.live [--targets onnxruntime xnnpack] [--threads 2] [--step 0.5]

Plays every shipped audio file in real time, and eight of them one after another with gaps, through
`LiveTranscriber` with the embedded model. The delay of a word is the wall-clock time from the end of the
word in the audio, by the shipped alignments, until the word is committed. Writes `results/speed.json`.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.build.export.bundle_cache import bundle_of
from whisperport.build.export.export import export
from whisperport.speech.audio import SAMPLE_RATE, load_audio
from whisperport.speech.audio.live_pieces import PIECE_S, ReadAhead, in_real_time
from whisperport.speech.text import Word
from whisperport.speech.text.normalize import normalize
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.transcription.live.live_options import LiveOptions
from whisperport.transcription.live.transcriber import LiveTranscriber
from whisperport.verification import versions
from whisperport.verification.clips import shipped_audio

from ..record import record

GAPS_S = (0.4, 3.0, 0.7, 8.0, 1.2, 5.0, 0.5)  # seconds; some are shorter than a pause, some longer
IN_A_ROW = ("18", "01", "04", "06", "08", "10", "11", "15")
GOAL_S, GOAL_EQUAL = 2.0, 0.95


@dataclass(frozen=True)
class Played:
    """Audio, and the times at which its words end."""

    name: str
    samples: np.ndarray
    words: tuple[Word, ...]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", default=["onnxruntime", "xnnpack"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--step", type=float, default=LiveOptions().step_s)
    chosen = parser.parse_args()
    result = {
        "load_before": os.getloadavg()[0],  # processes that used or waited for a core
        "versions": versions(["whisperport", "onnxruntime", "executorch"]),
        "threads": chosen.threads,
        "step_s": chosen.step,
        "targets": {},
    }
    for target in chosen.targets:
        with tempfile.TemporaryDirectory() as folder:
            bundle = (
                bundle_of("default")
                if target == "onnxruntime"
                else export("default", target, Path(folder) / "bundle").folder
            )
            transcriber = Transcriber(bundle, RunOptions(threads=chosen.threads))
            result["targets"][target] = measured(transcriber, LiveOptions(step_s=chosen.step))
    result["load_after"] = os.getloadavg()[0]
    print(record("speed", "live", result))


def measured(transcriber: Transcriber, options: LiveOptions) -> dict[str, Any]:
    """Play all audio to the end; return the delays of all words together."""
    rows = [played_live(transcriber, options, audio) for audio in sounds()]
    delays = [delay for row in rows for delay in row["delays_s"]]
    audio_delays = [delay for row in rows for delay in row["audio_delays_s"]]
    equal, words = sum(row["equal_words"] for row in rows), sum(row["words"] for row in rows)
    firsts = [row["delays_s"][0] for row in rows if row["delays_s"]]
    return {
        "delay_s": spread(delays),
        "delay_in_sound_s": spread(audio_delays),
        "first_word_s": spread(firsts),
        "equal_to_offline": equal / words,
        "words": words,
        "passed": bool(max(firsts) <= GOAL_S and equal / words >= GOAL_EQUAL),
    }


def played_live(transcriber: Transcriber, options: LiveOptions, audio: Played) -> dict[str, Any]:
    live = LiveTranscriber(transcriber, options)
    size = round(PIECE_S * SAMPLE_RATE)
    pieces = [audio.samples[i : i + size] for i in range(0, audio.samples.size, size)]
    committed: list[tuple[Word, float, float]] = []  # word, wall-clock time, audio time
    busy_s, start = 0.0, time.monotonic()
    source = ReadAhead(in_real_time(pieces))
    while (samples := source.take()) is not None:
        began = time.monotonic()
        update = live.feed(samples)
        now = time.monotonic()
        busy_s += now - began
        committed += [(word, now - start, update.audio_s) for word in update.committed]
    update = live.finish()
    now = time.monotonic() - start
    committed += [(word, now, update.audio_s) for word in update.committed]
    text = live.transcript().text
    offline = transcriber.transcribe(audio.samples, TranscribeOptions()).text
    matched = matches(audio.words, committed)
    row = {
        "sound": audio.name,
        "seconds": round(audio.samples.size / SAMPLE_RATE, 2),
        "delays_s": [round(clock - end, 3) for end, clock, _ in matched],
        "audio_delays_s": [round(heard - end, 3) for end, _, heard in matched],
        "words": max(len(offline.split()), len(text.split())),
        "equal_words": equal_words(offline, text),
        "busy_share": round(busy_s / (audio.samples.size / SAMPLE_RATE), 3),
    }
    print(json.dumps({k: v for k, v in row.items() if "delays" not in k}), flush=True)
    if text != offline:
        row |= {"offline": offline, "live": text}
    return row


def matches(
    spoken: Sequence[Word], committed: Sequence[tuple[Word, float, float]]
) -> list[tuple[float, float, float]]:
    """Return, for every spoken word that was transcribed, its end and the times when it was committed."""
    heard: list[tuple[str, float, float]] = []
    for word, clock, audio in committed:
        if heard and not word.word.startswith(" "):  # the "-four" of "twenty-four"
            heard[-1] = (heard[-1][0] + word.word, clock, audio)
        else:
            heard.append((word.word, clock, audio))
    pairs = SequenceMatcher(
        None, [normalize(w.word) for w in spoken], [normalize(w) for w, *_ in heard], autojunk=False
    )
    return [
        (spoken[block.a + i].end, *heard[block.b + i][1:])
        for block in pairs.get_matching_blocks()
        for i in range(block.size)
    ]


def equal_words(one: str, other: str) -> int:
    """Count the words that both texts have in the same order, with punctuation and case."""
    pairs = SequenceMatcher(None, one.split(), other.split(), autojunk=False)
    return sum(block.size for block in pairs.get_matching_blocks())


def sounds() -> list[Played]:
    recordings = shipped_audio()
    alone = [Played(r.path.name, load_audio(r.path), r.words) for r in recordings]
    row = [audio for number in IN_A_ROW for audio in alone if audio.name.startswith(number)]
    return [*alone, in_a_row(row)]


def in_a_row(parts: Sequence[Played]) -> Played:
    """Join several pieces of audio, with silence between them."""
    samples, words, at = [], [], 0.0
    for part, gap in zip(parts, (*GAPS_S, 0.0), strict=True):
        words += [Word(w.word, at + w.start, at + w.end, 1.0) for w in part.words]
        samples += [part.samples, np.zeros(round(gap * SAMPLE_RATE), np.float32)]
        at += (part.samples.size + samples[-1].size) / SAMPLE_RATE
    return Played("eight in a row, with gaps", np.concatenate(samples), tuple(words))


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(float(np.median(values)), 3),
        "p90": round(float(np.percentile(values, 90)), 3),
        "max": round(float(max(values)), 3),
        "n": len(values),
    }


if __name__ == "__main__":
    main()
