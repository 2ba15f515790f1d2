"""Transcribe audio with a loaded bundle (`Transcriber`), as openai-whisper's `transcribe` does.

What reads files of features is imported when it is first used: it needs the diagnosis of device outputs,
which most transcriptions do not need.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from whisperport.system.progress import ProgressCallback
from whisperport.transcription.files import transcribe_files
from whisperport.transcription.transcribe_options import TranscribeOptions
from whisperport.transcription.transcriber import Transcriber, transcribe
from whisperport.transcription.transcript import Transcript

if TYPE_CHECKING:
    from whisperport.transcription.feature_files import FeatureOptions, transcribe_features
    from whisperport.verification.diagnosis.stored_features import FeatureStorage

__all__ = [
    "FeatureOptions",
    "FeatureStorage",
    "ProgressCallback",
    "TranscribeOptions",
    "Transcriber",
    "Transcript",
    "transcribe",
    "transcribe_features",
    "transcribe_files",
]

_MODULES = {
    "FeatureOptions": "whisperport.transcription.feature_files",
    "FeatureStorage": "whisperport.verification.diagnosis.stored_features",
    "transcribe_features": "whisperport.transcription.feature_files",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return attribute
