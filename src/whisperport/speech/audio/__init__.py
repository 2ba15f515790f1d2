"""Read audio from files, pipes, microphones and arrays, and compute log-mel spectrograms."""

from whisperport.speech.audio.decode import ClippedAudioWarning, DamagedAudioWarning
from whisperport.speech.audio.live_pieces import ReadAhead, live_audio
from whisperport.speech.audio.load import AudioWindow, audio_windows, iter_audio, load_audio
from whisperport.speech.audio.mel import FRAMES_PER_SECOND, HOP_LENGTH, log_mel, mel_filters
from whisperport.speech.audio.mel_windows import MelWindows
from whisperport.speech.audio.microphone import AudioGapWarning, microphone_audio
from whisperport.speech.audio.pcm import SAMPLE_RATE
from whisperport.speech.audio.pcm_stream import PcmStream
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
    "AudioGapWarning",
    "AudioSource",
    "AudioStream",
    "AudioWindow",
    "ClippedAudioWarning",
    "DamagedAudioWarning",
    "MelWindows",
    "PcmStream",
    "ReadAhead",
    "Span",
    "SpeechTurn",
    "SpeechTurns",
    "VadOptions",
    "audio_windows",
    "cut_chunks",
    "fill_windows",
    "iter_audio",
    "live_audio",
    "load_audio",
    "log_mel",
    "mel_filters",
    "microphone_audio",
    "speech_spans",
]
