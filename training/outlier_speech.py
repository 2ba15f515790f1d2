"""Synthesized sentences for the outlier checkpoints: mel windows of 30 s, tokens and texts."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from whisper.audio import N_SAMPLES, log_mel_spectrogram, pad_or_trim

import grammar
from synthesize import speak, trim
from synthesizers import SAMPLE_RATE
from vocabulary import EOT, NO_TIMESTAMPS, SOT, TIME_BEGIN, TRANSCRIBE, tokenizer
from whisperport.speech.audio import load_audio
from whisperport.verification.clips import LONGEST_S, N_CLIPS, ShippedAudio, shipped_audio

ENGLISH = SOT + 1
PROMPT = [SOT, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS]
FAMILIES = ("espeak", "flite:slt", "espeak", "flite:awb", "flite:rms", "flite:kal16")


@dataclass
class Window:
    """``mel`` [80, 3000] float16; ``tokens`` of the whole transcript, prompt and end included."""

    mel: Tensor
    tokens: list[int]
    text: str


def windows(count: int, *, seed: int, held_out: bool) -> list[Window]:
    """Return windows of one sentence each. Every third has timestamps unless they are held out."""
    rng, made = random.Random(seed), []
    texts = grammar.sentences(count, seed=seed, held_out=held_out)
    for n, family in enumerate(FAMILIES):
        for text, (_, speech) in zip(
            texts[n :: len(FAMILIES)], speak(family, texts[n :: len(FAMILIES)], rng), strict=True
        ):
            timed = not held_out and len(made) % 3 == 0
            made.append(_window(text, trim(speech).samples, rng.uniform(0.05, 0.9), timed))
    return made


def shipped_windows(repeats: int = 3) -> list[Window]:
    """Return windows of the package's speech but its first six clips, which verify bundles.

    Each clip of one sentence is repeated after different silences.
    """
    rng, made = random.Random(0), []
    for audio in training_clips():
        samples = load_audio(audio.path)
        for _ in range(repeats):
            made.append(_window(audio.text, samples, rng.uniform(0.02, 1.5), timed=False))
    return made


def training_clips() -> list[ShippedAudio]:
    """Return the shipped audio files that random outlier checkpoints are trained on."""
    short = [a for a in shipped_audio() if a.text and a.seconds <= LONGEST_S]
    return short[N_CLIPS:]


def _window(text: str, samples: np.ndarray, lead: float, timed: bool) -> Window:
    lead = round(lead * 50) / 50
    audio = np.concatenate([np.zeros(round(lead * SAMPLE_RATE), np.float32), samples])
    audio *= 0.4 / np.abs(audio).max()
    words = tokenizer().encode(f" {text}")
    first, last = round(lead * 50), min(1500, round(len(audio) / SAMPLE_RATE * 50))
    if timed:
        tokens = [*PROMPT[:3], TIME_BEGIN + first, *words, TIME_BEGIN + last, EOT]
    else:
        tokens = [*PROMPT, *words, EOT]
    return Window(log_mel_spectrogram(pad_or_trim(audio, N_SAMPLES)).half(), tokens, text)


def batch_tokens(chosen: list[Window]) -> tuple[Tensor, Tensor]:
    """Return the tokens [batch, n], padded with the end token, and which positions count."""
    longest = max(len(w.tokens) for w in chosen)
    tokens = torch.full((len(chosen), longest), EOT)
    counts = torch.zeros(len(chosen), longest, dtype=torch.bool)
    for i, window in enumerate(chosen):
        tokens[i, : len(window.tokens)] = torch.tensor(window.tokens)
        counts[i, len(PROMPT) - 1 : len(window.tokens) - 1] = True
    return tokens, counts
