"""Make the training and evaluation speech: texts -> samples, word timestamps and mel frames.

    python synthesize.py train --out work/train
    python synthesize.py eval --out work/eval

Speech is written in parts, each a list of sentences in one family of voices. An interrupted run continues
with the next part. A part consists of ``NAME.npy``, the float16 log10 mel power [frames, 80] of its
utterances, concatenated, and ``NAME.json``, a list of :class:`Record`. Parts of the evaluation also have
their samples in ``NAME.wav.npy`` (int16).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np

import grammar
from mel_frames import log_power
from synthesizers import FLITE_VOICES, SAMPLE_RATE, Espeak, Flite, Speech, festival

PART_SIZE = 200
HELD_OUT_RECORDED = "festival:ked"
HELD_OUT_LANGUAGES = ("en-gb-scotland",)
HELD_OUT_VARIANTS = ("m7", "f5", "adam", "linda")
LANGUAGES = (
    "en-us", "en-us", "en-us", "en", "en", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd",
    "en-029", "en-us-nyc",
)  # fmt: skip
VARIANTS = (
    "Alex", "Alicia", "Andrea", "Andy", "Annie", "Denis", "Diogo", "Gene", "Gene2", "Henrique",
    "Hugo", "Jacky",
    "Lee", "Marco", "Mario", "Michael", "Mike", "Mr", "Nguyen", "anika", "antonio", "aunty",
    "belinda", "benjamin",
    "boris", "caleb", "david", "ed", "edward", "edward2", "f1", "f2", "f3", "f4", "gustave",
    "iven", "iven2",
    "iven3", "iven4", "john", "kaukovalta", "klatt", "klatt2", "klatt3", "klatt4", "m1", "m2",
    "m3", "m4", "m5",
    "m6", "m8", "marcelo", "max", "michel", "miguel", "norbert", "pablo", "paul", "pedro",
    "quincy", "rob",
    "robert", "sandro", "shelby", "steph", "steph2", "steph3", "travis", "victor", "zac",
)  # fmt: skip

# Family of voices -> number of sentences. "espeak" uses a random voice for every sentence.
TRAIN_PLAN = {
    "espeak": 15000,
    "flite:slt": 3200, "flite:awb": 3000, "flite:rms": 3200, "flite:kal16": 1600, "flite:kal": 800,
    "festival:kal": 2000, "festival:slt_hts": 1600,
}  # fmt: skip
EVAL_PLAN = {
    "espeak": 200, "flite:slt": 40, "flite:awb": 40, "flite:rms": 40, "flite:kal16": 30, "flite:kal": 20,
    "festival:kal": 40, "festival:slt_hts": 40, "espeak-held-out": 120, HELD_OUT_RECORDED: 120,
}  # fmt: skip


@dataclass
class Record:
    """One utterance of a part: text, voice, position of its frames, and timestamps.

    Timestamps are in seconds from its first frame.
    """

    text: str
    voice: str
    first_frame: int
    frames: int
    words: list[tuple[float, float]]
    phones: list[tuple[str, float]]


def trim(speech: Speech, margin: float = 0.04) -> Speech:
    """Remove the silence around speech, fade both ends, and add 0.02 s of zeros at each.

    With the zeros, mel frames can be concatenated exactly. The start of the first word and the end of the
    last word are set to where the energy rises and falls.
    """
    energy = (
        np.square(speech.samples[: len(speech.samples) // 80 * 80]).reshape(-1, 80).mean(1)
    )  # 5 ms steps
    loud = np.flatnonzero(energy > 1e-4 * energy.max())
    onset, offset = loud[0] * 0.005, (loud[-1] + 1) * 0.005
    first = max(0, int((onset - margin) * SAMPLE_RATE))
    body = speech.samples[first : int((offset + margin) * SAMPLE_RATE)].copy()
    fade = np.linspace(0, 1, 160, dtype=np.float32)
    body[:160] *= fade
    body[-160:] *= fade[::-1]
    length = -(-(len(body) + 640) // 160) * 160
    samples = np.zeros(length, np.float32)
    samples[320 : 320 + len(body)] = body
    shift = 0.02 - first / SAMPLE_RATE
    words = [(a + shift, b + shift) for a, b in speech.words]
    words[0] = (onset + shift, max(words[0][1], onset + shift + 0.04))
    words[-1] = (min(words[-1][0], offset + shift - 0.04), offset + shift)
    return Speech(samples, words, [(name, end + shift) for name, end in speech.phones])


@cache
def _espeak() -> Espeak:
    return Espeak()


@cache
def _flite(voice: str) -> Flite:
    return Flite(voice)


def _speak_espeak(
    texts: list[str], rng: random.Random, held_out: bool
) -> Iterator[tuple[str, Speech]]:
    for text in texts:
        if not held_out:
            voice = f"{rng.choice(LANGUAGES)}+{rng.choice(VARIANTS)}"
        elif rng.random() < 0.5:
            voice = f"{rng.choice(HELD_OUT_LANGUAGES)}+{rng.choice(VARIANTS)}"
        else:
            voice = f"{rng.choice(LANGUAGES)}+{rng.choice(HELD_OUT_VARIANTS)}"
        rate, pitch, spread = rng.randint(120, 190), rng.randint(25, 75), rng.randint(30, 70)
        yield (
            f"espeak:{voice}",
            _espeak().speak(text, voice=voice, rate=rate, pitch=pitch, pitch_range=spread),
        )


def speak(family: str, texts: list[str], rng: random.Random) -> Iterator[tuple[str, Speech]]:
    """Synthesize texts in one family of voices, with random tempo. Yields (voice, speech)."""
    engine, _, voice = family.partition(":")
    if engine.startswith("espeak"):
        yield from _speak_espeak(texts, rng, held_out=engine == "espeak-held-out")
    elif engine == "flite":
        assert voice in FLITE_VOICES
        for text in texts:
            speech = _flite(voice).speak(text, stretch=rng.uniform(0.8, 1.25))
            yield family, speech.at_speed(rng.uniform(0.92, 1.1))
    else:
        for i in range(0, len(texts), 50):
            for speech in festival(texts[i : i + 50], voice=voice, stretch=rng.uniform(0.8, 1.25)):
                yield family, speech.at_speed(rng.uniform(0.92, 1.1))


def make_part(job: tuple[str, int, int, str, Path]) -> str:
    """Synthesize one part; ``job`` is (family, number of sentences, seed, part name, folder)."""
    family, count, seed, name, folder = job
    target = folder / f"{name}.json"
    if target.exists():
        return f"{name}: exists already"
    begun, rng = time.time(), random.Random(seed)
    is_eval = folder.name.startswith("eval")
    texts = grammar.sentences(count, seed=seed, held_out=is_eval)
    records, pieces, audio, position = [], [], [], 0
    for text, (voice, speech) in zip(texts, speak(family, texts, rng), strict=True):
        if len(speech.words) != len(text.split()):
            continue  # the synthesizer split the text into other words; this concerns few sentences
        speech = trim(speech)
        frames = log_power(speech.samples).astype(np.float16)
        records.append(
            asdict(Record(text, voice, position, len(frames), speech.words, speech.phones))
        )
        pieces.append(frames)
        audio.append(speech.samples)
        position += len(frames)
    np.save(folder / f"{name}.npy", np.concatenate(pieces))
    if is_eval:
        np.save(folder / f"{name}.wav.npy", (np.concatenate(audio) * 32767).astype(np.int16))
    target.write_text(json.dumps(records))
    minutes, took = position / 6000, time.time() - begun
    return f"{name}: {len(records)} of {count} sentences, {minutes:.1f} min, in {took:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("split", choices=("train", "eval"))
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder; for the evaluation its name starts with eval",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    plan = TRAIN_PLAN if args.split == "train" else EVAL_PLAN
    jobs = []
    for number, (family, count) in enumerate(plan.items()):
        for part, start in enumerate(range(0, count, PART_SIZE)):
            seed = (
                args.seed * 1_000_000
                + number * 1000
                + part
                + (500_000 if args.split == "eval" else 0)
            )
            name = f"{family.replace(':', '-')}-{args.seed}-{part:03d}"
            jobs.append((family, min(PART_SIZE, count - start), seed, name, args.out))
    random.Random(args.seed).shuffle(jobs)
    with multiprocessing.Pool(args.jobs) as pool:
        for i, line in enumerate(pool.imap_unordered(make_part, jobs)):
            print(f"[{i + 1}/{len(jobs)}] {line}", flush=True)


if __name__ == "__main__":
    main()
