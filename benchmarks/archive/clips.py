"""Synthesize thousands of short clips for `benchmarks.archive.job`: many voices, speeds and noises.

    python -m benchmarks.archive.clips DIR --count 10000

Needs libespeak-ng and libflite. Clips that exist are kept, so that an interrupted run continues. Every
clip depends on its number only. Its text is in a file beside it.
"""

import argparse
import random
import sys
import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2] / "training"))

from grammar import sentence
from synthesize import LANGUAGES, VARIANTS
from synthesizers import FLITE_VOICES, SAMPLE_RATE, Espeak, Flite

LONGEST_S = 2.2
FLITE_ONE_IN = 4  # clips
NOISE_ONE_IN = 3  # clips


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    chosen = parser.parse_args()
    espeak, flite = Espeak(), {voice: Flite(voice) for voice in FLITE_VOICES}
    for number in range(chosen.count):
        path = chosen.folder / f"{number // 1000:03}" / f"{number:06}.wav"
        if not path.with_suffix(".txt").exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            samples, text = clip(random.Random(number), espeak, flite)
            write(path, samples)
            path.with_suffix(".txt").write_text(f"{text}\n")


def clip(
    rng: random.Random, espeak: Espeak, flite: dict[str, Flite]
) -> tuple[NDArray[np.float32], str]:
    """One short sentence of a random voice and speed, in noise or not; samples at 16 kHz, and its text."""
    while True:
        text = sentence(rng)
        if len(text) > 40:
            continue
        if rng.randrange(FLITE_ONE_IN) == 0:
            speech = flite[rng.choice(FLITE_VOICES)].speak(text, stretch=rng.uniform(0.8, 1.1))
        else:
            voice = f"{rng.choice(LANGUAGES)}+{rng.choice(VARIANTS)}"
            speech = espeak.speak(text, voice=voice, rate=rng.randint(150, 220))
        if speech.samples.size <= LONGEST_S * SAMPLE_RATE:
            return noisy(speech.samples, rng), text


def noisy(samples: NDArray[np.float32], rng: random.Random) -> NDArray[np.float32]:
    """Add noise 15 to 35 dB below the speech to some of the clips."""
    if rng.randrange(NOISE_ONE_IN):
        return samples
    level = float(np.sqrt(np.square(samples).mean())) * 10 ** (-rng.uniform(15, 35) / 20)
    noise = np.random.default_rng(rng.randrange(2**32)).standard_normal(samples.size, np.float32)
    return samples + np.float32(level) * noise


def write(path: Path, samples: NDArray[np.float32]) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())


if __name__ == "__main__":
    main()
