"""Write the shipped audio files from the evaluation speech.

    python make_recordings.py --eval work/eval --out ../src/whisperport/speech/data/speech

All sentences are held out from training. The utterances of a voice are selected by a random seed and by
their length, not by the model's result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus import Corpus, Utterance
from mel_frames import noise_wave
from synthesize import HELD_OUT_LANGUAGES, HELD_OUT_RECORDED, HELD_OUT_VARIANTS
from synthesizers import SAMPLE_RATE

SEED = 7


@dataclass(frozen=True)
class Clip:
    """An audio file to write.

    ``voices``: a prefix of the voice for each part; ``rate``: sample rate of the file; ``noise``: kind, and
    dB below the speech; ``count``: number of utterances; ``gaps``: range of the seconds between them.
    """

    file: str
    voices: tuple[str, ...]
    rate: int = 16_000
    noise: tuple[str, float] | None = None
    count: int = 1
    gaps: tuple[float, float] = (0.5, 2.0)


CLIPS = (
    Clip("01-espeak.wav", ("espeak:en-us+",)),
    Clip("02-espeak-british.flac", ("espeak:en-gb-x-rp",), 22_050),
    Clip("03-slt.wav", ("flite:slt",)),
    Clip("04-rms.flac", ("flite:rms",), 22_050),
    Clip("05-awb.mp3", ("flite:awb",), 44_100),
    Clip("06-kal16.wav", ("flite:kal16",)),
    Clip("07-kal.flac", ("festival:kal",)),
    Clip("08-slt-hts.mp3", ("festival:slt_hts",), 22_050),
    Clip("09-ked.flac", ("festival:ked",)),
    Clip("10-ked.mp3", ("festival:ked",), 44_100),
    Clip("11-espeak-scottish.flac", ("espeak:en-gb-scotland",)),
    Clip("12-espeak-linda.flac", ("espeak:en-us+linda",), 22_050),
    Clip("13-slt-in-noise.wav", ("flite:slt",), noise=("pink", 15)),
    Clip("14-espeak-by-a-fan.flac", ("espeak:en-us+",), 22_050, noise=("fan", 12)),
    Clip("15-rms-in-hiss.mp3", ("flite:rms",), 44_100, noise=("hiss", 18)),
    Clip("16-awb.flac", ("flite:awb",), 44_100),
    Clip("17-no-speech.flac", (), noise=("pink", 40), count=0),
    Clip("18-three-commands.flac", ("flite:slt",), count=3, gaps=(6.5, 7.5)),
    Clip("19-long.flac", ("flite:rms", "festival:kal"), count=22, gaps=(0.5, 2.0)),
)


def choose(
    corpus: Corpus, clip: Clip, rng: np.random.Generator, taken: set[str]
) -> list[Utterance]:
    """Choose the utterances of a clip, two in a row per voice. No sentence is used twice."""
    chosen = []
    for i in range(clip.count):
        voice = clip.voices[(i // 2) % len(clip.voices)]
        fitting = [
            u for u in corpus.utterances
            if u.voice.startswith(voice) and held_out(u.voice) == held_out(voice) and u.text not in taken
            and (clip.count > 1 or 2.0 <= u.seconds <= 6.0)
        ]  # fmt: skip
        utterance = fitting[rng.integers(len(fitting))]
        taken.add(utterance.text)
        chosen.append(utterance)
    return chosen


def held_out(voice: str) -> bool:
    """Return whether a voice, or all voices with this prefix, are held out from training."""
    language, _, variant = voice.removeprefix("espeak:").partition("+")
    return (
        voice == HELD_OUT_RECORDED or language in HELD_OUT_LANGUAGES or variant in HELD_OUT_VARIANTS
    )


def join(
    chosen: list[Utterance], clip: Clip, rng: np.random.Generator
) -> tuple[NDArray[np.float32], list[float]]:
    """Join utterances with silence between them.

    Returns the samples at 16 kHz, and the start of each utterance in seconds.
    """
    pieces = [np.zeros(int(rng.uniform(0.2, 0.5) * SAMPLE_RATE), np.float32)]
    starts = []
    for utterance in chosen:
        assert utterance.samples is not None
        starts.append(sum(map(len, pieces)) / SAMPLE_RATE)
        audio = utterance.samples.astype(np.float32)
        gap = np.zeros(int(rng.uniform(*clip.gaps) * SAMPLE_RATE), np.float32)
        pieces += [audio * (0.5 / np.abs(audio).max()), gap]
    pieces[-1] = (
        pieces[-1][: int(0.6 * SAMPLE_RATE)] if chosen else np.zeros(5 * SAMPLE_RATE, np.float32)
    )
    return np.concatenate(pieces), starts


def add_noise(samples: NDArray[np.float32], kind: str, decibels: float) -> NDArray[np.float32]:
    """Add noise that is ``decibels`` below the speech; without speech, below an amplitude of 0.2."""
    loud = np.abs(samples) > 0.01
    level = np.sqrt(np.mean(samples[loud] ** 2)) if loud.any() else 0.2
    return (
        samples
        + level
        * 10 ** (-decibels / 20)
        * noise_wave(kind, len(samples) / SAMPLE_RATE, SEED)[: len(samples)]
    )


def write(samples: NDArray[np.float32], file: Path, rate: int) -> None:
    """Encode with ffmpeg, in the format of the file name's suffix."""
    command = [
        "ffmpeg",
        "-v",
        "error",
        "-y",
        "-f",
        "f32le",
        "-ar",
        str(SAMPLE_RATE),
        "-ac",
        "1",
        "-i",
        "-",
    ]
    command += ["-map_metadata", "-1", "-fflags", "+bitexact", "-ar", str(rate)]
    command += ["-b:a", "64k"] if file.suffix == ".mp3" else ["-sample_fmt", "s16"]
    command += ["-compression_level", "12"] if file.suffix == ".flac" else []
    subprocess.run([*command, str(file)], input=samples.astype("<f4").tobytes(), check=True)


def describe(
    clip: Clip, chosen: list[Utterance], starts: list[float], seconds: float
) -> dict[str, Any]:
    """Return the entry of a clip in transcripts.json."""
    words, segments = [], []
    for utterance, begin in zip(chosen, starts, strict=True):
        times = utterance.word_times(begin)
        for word, (start, end) in zip(utterance.text.split(), times, strict=True):
            words.append({"word": word, "start": round(start, 3), "end": round(end, 3)})
        segments.append(
            {
                "start": round(begin + utterance.start, 3),
                "end": round(begin + utterance.end, 3),
                "text": utterance.text,
            }
        )
    noise = f", {clip.noise[0]} noise {clip.noise[1]:g} dB down" if clip.noise else ""
    return {
        "file": clip.file,
        "text": " ".join(u.text for u in chosen),
        "voice": ", ".join(dict.fromkeys(u.voice for u in chosen)),
        "held_out": any(held_out(u.voice) for u in chosen),
        "seconds": round(seconds, 3),
        "words": words,
        "segments": segments,
        "made_by": f"training/make_recordings.py, seed {SEED}{noise}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--eval", type=Path, required=True, help="folder of the evaluation speech")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    corpus, rng, taken = Corpus(args.eval), np.random.default_rng(SEED), set[str]()
    entries = []
    for clip in CLIPS:
        chosen = choose(corpus, clip, rng, taken)
        samples, starts = join(chosen, clip, rng)
        if clip.noise:
            samples = add_noise(samples, *clip.noise)
        write(samples, args.out / clip.file, clip.rate)
        entries.append(describe(clip, chosen, starts, len(samples) / SAMPLE_RATE))
    text = json.dumps({"clips": entries}, indent=1)
    (args.out / "transcripts.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
