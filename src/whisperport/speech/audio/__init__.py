"""Read audio from files, pipes, microphones and arrays, and compute log-mel spectrograms.

Modules that import FFmpeg are not imported here: an array of samples needs none of them.
"""

from whisperport.speech.audio.load import AudioWindow, audio_windows, iter_audio, load_audio
from whisperport.speech.audio.mel import FRAMES_PER_SECOND, HOP_LENGTH, log_mel, mel_filters
from whisperport.speech.audio.mel_windows import MelWindows
from whisperport.speech.audio.pcm import SAMPLE_RATE
from whisperport.speech.audio.stream import AudioSource, AudioStream
from whisperport.speech.audio.vad import (
    Span,
    SpeechTurn,
    SpeechTurns,
    VadOptions,
    cut_chunks,
    fill_windows,
    speech_spans,
)

__all__ = [
    "FRAMES_PER_SECOND",
    "HOP_LENGTH",
    "SAMPLE_RATE",
    "AudioSource",
    "AudioStream",
    "AudioWindow",
    "MelWindows",
    "Span",
    "SpeechTurn",
    "SpeechTurns",
    "VadOptions",
    "audio_windows",
    "cut_chunks",
    "fill_windows",
    "iter_audio",
    "load_audio",
    "log_mel",
    "mel_filters",
    "speech_spans",
]
