"""Transcribe audio with a loaded bundle (`Transcriber`), as openai-whisper's `transcribe` does.

`feature_files` is not imported here: it needs the diagnosis of device outputs, which most transcriptions do
not need.
"""

from whisperport.system.progress import ProgressCallback
from whisperport.transcription.files import transcribe_files
from whisperport.transcription.transcribe_options import TranscribeOptions
from whisperport.transcription.transcriber import Transcriber, transcribe
from whisperport.transcription.transcript import Transcript

__all__ = [
    "ProgressCallback",
    "TranscribeOptions",
    "Transcriber",
    "Transcript",
    "transcribe",
    "transcribe_files",
]
