"""Sound in: files, pipes and arrays become 16 kHz samples, and samples a log-mel spectrogram."""

from whisperport.audio.decode import DamagedAudioWarning
from whisperport.audio.load import AudioWindow, audio_windows, iter_audio, load_audio
from whisperport.audio.mel import FRAMES_PER_SECOND, HOP_LENGTH, log_mel, mel_filters
from whisperport.audio.pcm import SAMPLE_RATE
from whisperport.audio.recording import RecordingMel
from whisperport.audio.stream import AudioSource, AudioStream

__all__ = [
    "FRAMES_PER_SECOND",
    "HOP_LENGTH",
    "SAMPLE_RATE",
    "AudioSource",
    "AudioStream",
    "AudioWindow",
    "DamagedAudioWarning",
    "RecordingMel",
    "audio_windows",
    "iter_audio",
    "load_audio",
    "log_mel",
    "mel_filters",
]
