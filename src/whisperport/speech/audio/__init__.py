"""Read audio from files, pipes, microphones and arrays, and compute log-mel spectrograms.

What imports FFmpeg is imported when it is first used: an array of samples needs none of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from whisperport.speech.audio.decode import ClippedAudioWarning, DamagedAudioWarning
    from whisperport.speech.audio.live_pieces import ReadAhead, live_audio
    from whisperport.speech.audio.microphone import AudioGapWarning, microphone_audio
    from whisperport.speech.audio.pcm_stream import PcmStream

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

_WITH_FFMPEG = {
    "ClippedAudioWarning": "decode",
    "DamagedAudioWarning": "decode",
    "ReadAhead": "live_pieces",
    "live_audio": "live_pieces",
    "AudioGapWarning": "microphone",
    "microphone_audio": "microphone",
    "PcmStream": "pcm_stream",
}


def __getattr__(name: str) -> Any:
    """Import what needs FFmpeg when it is first used."""
    if name not in _WITH_FFMPEG:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_WITH_FFMPEG[name]}"), name)
    return globals().setdefault(name, value)
