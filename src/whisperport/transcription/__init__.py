"""Transcribe audio with a loaded bundle (`Transcriber`), as openai-whisper's `transcribe` does."""

from whisperport.diagnosis.stored_features import FeatureStorage
from whisperport.progress import ProgressCallback
from whisperport.transcription.feature_files import FeatureOptions, transcribe_features
from whisperport.transcription.files import transcribe_files
from whisperport.transcription.options import TranscribeOptions
from whisperport.transcription.transcriber import Transcriber, default_bundle, transcribe
from whisperport.transcription.transcript import Transcript

__all__ = [
    "FeatureOptions",
    "FeatureStorage",
    "ProgressCallback",
    "TranscribeOptions",
    "Transcriber",
    "Transcript",
    "default_bundle",
    "transcribe",
    "transcribe_features",
    "transcribe_files",
]
