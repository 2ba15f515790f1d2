"""Synthesize speech with word and phone timestamps with eSpeak NG, flite and Festival.

Each synthesizer returns :class:`Speech` at 16 kHz. The timestamps come from the synthesizer itself (events,
relations), not from a recognizer, so they are exact.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import tempfile
import wave
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 16_000
FLITE_VOICES = ("slt", "awb", "rms", "kal16", "kal")
FESTIVAL_VOICES = {"kal": "kal_diphone", "ked": "ked_diphone", "slt_hts": "cmu_us_slt_arctic_hts"}

Samples = NDArray[np.float32]


@dataclass
class Speech:
    """A synthesized text.

    ``samples``: 16 kHz. ``words``: (start, end) in seconds of each whitespace-separated word. ``phones``:
    (phone, end in seconds).
    """

    samples: Samples
    words: list[tuple[float, float]]
    phones: list[tuple[str, float]]

    def at_speed(self, factor: float) -> Speech:
        """Return the speech played faster, for a ``factor`` above 1. Pitch and formants change too."""
        samples, ratio = resample(self.samples, factor * SAMPLE_RATE)
        return Speech(
            samples,
            [(start * ratio, end * ratio) for start, end in self.words],
            [(phone, end * ratio) for phone, end in self.phones],
        )


def resample(samples: Samples, rate: float) -> tuple[Samples, float]:
    """Resample from ``rate`` to 16 kHz in the frequency domain.

    Returns the samples and the length ratio, which differs from 16000 / rate by at most 0.1 %, so that both
    FFT lengths have small prime factors.
    """
    padded = np.zeros(-(-(len(samples) + 1024) // 2048) * 2048, np.float32)
    padded[: len(samples)] = samples
    length = round(len(padded) * SAMPLE_RATE / rate / 64) * 64
    spectrum = np.fft.rfft(padded)[: length // 2 + 1]
    spectrum = np.pad(spectrum, (0, max(0, length // 2 + 1 - len(spectrum))))
    ratio = length / len(padded)
    out = np.fft.irfft(spectrum, length) * ratio
    return out[: round(len(samples) * ratio)].astype(np.float32), ratio


# eSpeak NG, in this process ---------------------------------------------------------------------


class _Event(ctypes.Structure):
    """espeak_EVENT of espeak-ng/speak_lib.h."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    ]


_WORD, _PHONEME = 1, 7
_RATE, _PITCH, _RANGE = 1, 3, 4
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


class Espeak:
    """libespeak-ng through ctypes. A sentence takes a few milliseconds."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libespeak-ng.so.1")
        self._rate = self._lib.espeak_Initialize(
            1, 500, None, 1
        )  # AUDIO_OUTPUT_RETRIEVAL, with phoneme events
        self._callback = _CALLBACK(self._receive)
        self._lib.espeak_SetSynthCallback(self._callback)
        self._chunks: list[NDArray[np.int16]] = []
        self._events: list[tuple[int, int, float, str]] = []

    def _receive(self, samples, count, events) -> int:  # type: ignore[no-untyped-def]
        if samples and count:
            self._chunks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        i = 0
        while events[i].type:
            event = events[i]
            name = event.id.decode("utf-8", "replace") if event.type == _PHONEME else ""
            self._events.append(
                (event.type, event.text_position - 1, event.audio_position / 1000, name)
            )
            i += 1
        return 0

    def speak(
        self, text: str, *, voice: str, rate: int = 165, pitch: int = 50, pitch_range: int = 50
    ) -> Speech:
        """Synthesize a text. ``rate``: words per minute; ``pitch`` and ``pitch_range``: 0 to 99."""
        if self._lib.espeak_SetVoiceByName(voice.encode()):
            raise ValueError(f"eSpeak NG has no voice {voice!r}")
        for parameter, value in ((_RATE, rate), (_PITCH, pitch), (_RANGE, pitch_range)):
            self._lib.espeak_SetParameter(parameter, value, 0)
        self._chunks, self._events = [], []
        data = text.encode()
        self._lib.espeak_Synth(
            data, len(data) + 1, 0, 1, 0, 1, None, None
        )  # positions in characters, UTF-8
        self._lib.espeak_Synchronize()
        samples, ratio = resample(
            np.concatenate(self._chunks).astype(np.float32) / 32768, self._rate
        )
        return Speech(
            samples, self._word_times(text, len(samples) / ratio / self._rate), self._phones()
        )

    def _phones(self) -> list[tuple[str, float]]:
        marks = [(name, time) for kind, _, time, name in self._events if kind == _PHONEME]
        return [(name, end) for (name, _), (_, end) in pairwise(marks)]

    def _word_times(self, text: str, seconds: float) -> list[tuple[float, float]]:
        """Return (start, end) of each word.

        Word events give the starts. A word ends at the start of the next word, or at a pause before it.
        """
        starts: dict[int, float] = {}
        for kind, position, time, _ in self._events:
            if kind == _WORD:
                starts.setdefault(position, time)
        pauses = [
            time
            for kind, _, time, name in self._events
            if kind == _PHONEME and name.startswith("_")
        ]
        pauses.append(seconds)
        begins, position = [], 0
        for word in text.split():
            position = text.index(word, position)
            begins.append(starts.get(position, -1.0))
            position += len(word)
        return close_words(begins, pauses)


def close_words(begins: list[float], pauses: list[float]) -> list[tuple[float, float]]:
    """Return (start, end) of each word from the starts of words and pauses.

    A start of -1 is unknown: the time of the previous known word is divided among these words.
    """
    known = [i for i, begin in enumerate(begins) if begin >= 0]
    if not known or known[0] != 0:
        raise ValueError("the first word has no start time")
    filled = list(begins)
    for i, begin in enumerate(begins):
        if begin < 0:
            before, after = (
                max(k for k in known if k < i),
                min((k for k in known if k > i), default=None),
            )
            top = (
                begins[after] if after is not None else min(p for p in pauses if p > begins[before])
            )
            span = (after if after is not None else len(begins)) - before
            filled[i] = begins[before] + (top - begins[before]) * (i - before) / span
    ends = [*filled[1:], max(pauses)]
    return [
        (begin, min([end, *(pause for pause in pauses if begin + 0.02 < pause < end)]))
        for begin, end in zip(filled, ends, strict=True)
    ]


# flite, in this process -------------------------------------------------------------------------


class _Wave(ctypes.Structure):
    """cst_wave of flite/cst_wave.h."""

    _fields_ = [
        ("type", ctypes.c_char_p),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    ]


class _Voice(ctypes.Structure):
    """The head of cst_voice of flite/cst_voice.h."""

    _fields_ = [("name", ctypes.c_char_p), ("features", ctypes.c_void_p)]


class Flite:
    """libflite through ctypes, one voice per object."""

    def __init__(self, voice: str) -> None:
        lib = self._lib = ctypes.CDLL("libflite.so.1", mode=ctypes.RTLD_GLOBAL)
        for name in ("libflite_cmulex.so.1", "libflite_usenglish.so.1"):
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        for function, result, arguments in (
            ("flite_synth_text", pointer, [text, pointer]),
            ("utt_wave", ctypes.POINTER(_Wave), [pointer]),
            ("utt_relation", pointer, [pointer, text]),
            ("relation_head", pointer, [pointer]),
            ("item_next", pointer, [pointer]),
            ("item_daughter", pointer, [pointer]),
            ("ffeature_float", ctypes.c_float, [pointer, text]),
            ("ffeature_string", text, [pointer, text]),
            ("delete_utterance", None, [pointer]),
            ("flite_feat_set_float", None, [pointer, text, ctypes.c_float]),
        ):
            getattr(lib, function).restype = result
            getattr(lib, function).argtypes = arguments
        lib.flite_init()
        register = getattr(ctypes.CDLL(f"libflite_cmu_us_{voice}.so.1"), f"register_cmu_us_{voice}")
        register.restype = ctypes.POINTER(_Voice)
        self._voice = register(None)

    def _items(self, utterance: int, relation: bytes) -> list[int]:
        item, items = self._lib.relation_head(self._lib.utt_relation(utterance, relation)), []
        while item:
            items.append(item)
            item = self._lib.item_next(item)
        return items

    def speak(self, text: str, *, stretch: float = 1.0) -> Speech:
        """Synthesize a text. A ``stretch`` above 1 is slower."""
        lib = self._lib
        lib.flite_feat_set_float(self._voice.contents.features, b"duration_stretch", stretch)
        utterance = lib.flite_synth_text(text.encode(), ctypes.cast(self._voice, ctypes.c_void_p))
        wave_ = lib.utt_wave(utterance).contents
        samples = (
            np.ctypeslib.as_array(wave_.samples, (wave_.num_samples,)).astype(np.float32) / 32768
        )
        phones = [
            (lib.ffeature_string(item, b"name").decode(), lib.ffeature_float(item, b"end"))
            for item in self._items(utterance, b"Segment")
        ]
        words = []
        for token in self._items(utterance, b"Token"):
            start = lib.ffeature_float(
                token, b"daughter.R:SylStructure.daughter.daughter.R:Segment.p.end"
            )
            end = lib.ffeature_float(
                token, b"daughtern.R:SylStructure.daughtern.daughtern.R:Segment.end"
            )
            words.append((start, end))
        rate = wave_.sample_rate
        lib.delete_utterance(utterance)
        resampled, ratio = (samples, 1.0) if rate == SAMPLE_RATE else resample(samples, rate)
        exact = ratio * rate / SAMPLE_RATE
        return Speech(
            resampled,
            [(a * exact, b * exact) for a, b in words],
            [(name, end * exact) for name, end in phones],
        )


# Festival, one process for a list of sentences --------------------------------------------------

_FESTIVAL = """
(voice_{voice})
(Parameter.set 'Duration_Stretch {stretch})
(define (last_end words best)
  (if words
    (let ((end (item.feat (car words) "word_end"))) (last_end (cdr words) (if (> end best) end best)))
    best))
(define (print_tokens token)
  (if token (begin
    (format t "TOKEN %f %f\\n" (item.feat token "daughter1.word_start")
      (last_end (item.daughters token) 0))
    (print_tokens (item.next token)))))
(define (one text file)
  (let ((utt (utt.synth (eval (list 'Utterance 'Text text)))))
    (utt.save.wave utt file 'riff)
    (format t "UTT\\n")
    (print_tokens (utt.relation.first utt 'Token))
    (mapcar (lambda (segment) (format t "PHONE %s %f\\n" (item.name segment) (item.feat segment "end")))
      (utt.relation.items utt 'Segment))))
"""


@cache
def has_festival_voice(voice: str) -> bool:
    """Return whether the package of a Festival voice is installed."""
    return any(Path("/usr/share/festival/voices").glob(f"*/{FESTIVAL_VOICES[voice]}"))


def festival(texts: list[str], *, voice: str, stretch: float = 1.0) -> list[Speech]:
    """Synthesize texts in one Festival process. A ``stretch`` above 1 is slower."""
    if not has_festival_voice(voice):
        raise ValueError(
            f"Festival has no voice {FESTIVAL_VOICES[voice]}: install the Debian packages in README.md"
        )
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{i}.wav" for i in range(len(texts))]
        script = _FESTIVAL.format(voice=FESTIVAL_VOICES[voice], stretch=stretch)
        script += "".join(
            f"(one {json.dumps(t)} {json.dumps(f)})\n" for t, f in zip(texts, files, strict=True)
        )
        Path(folder, "speak.scm").write_text(script)
        command = ["festival", "--batch", f"{folder}/speak.scm"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        blocks = output.split("UTT\n")[1:]
        return [_festival_speech(file, block) for file, block in zip(files, blocks, strict=True)]


def _festival_speech(file: str, block: str) -> Speech:
    with wave.open(file) as reader:
        rate = reader.getframerate()
        samples = (
            np.frombuffer(reader.readframes(reader.getnframes()), np.int16).astype(np.float32)
            / 32768
        )
    fields = [line.split() for line in block.splitlines()]
    words = [(float(f[1]), float(f[2])) for f in fields if f and f[0] == "TOKEN"]
    phones = [(f[1], float(f[2])) for f in fields if f and f[0] == "PHONE"]
    if rate != SAMPLE_RATE:
        samples, _ = resample(samples, rate)
    return Speech(samples, words, phones)
