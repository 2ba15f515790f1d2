"""Transcribe audio with a loaded bundle (`Transcriber`), as openai-whisper's `transcribe` does."""

from whisperport.progress import ProgressCallback
from whisperport.transcription.options import TranscribeOptions
from whisperport.transcription.transcriber import Transcriber, default_bundle, transcribe
from whisperport.transcription.transcript import Transcript

__all__ = [
    "ProgressCallback",
    "TranscribeOptions",
    "Transcriber",
    "Transcript",
    "default_bundle",
    "transcribe",
]
