"""From sound to text, as openai-whisper's `transcribe` goes: `Transcriber`, over a loaded bundle."""

from whisperport.transcription.options import TranscribeOptions
from whisperport.transcription.transcriber import Transcriber, default_bundle, transcribe
from whisperport.transcription.transcript import Heard, Transcript

__all__ = [
    "Heard",
    "TranscribeOptions",
    "Transcriber",
    "Transcript",
    "default_bundle",
    "transcribe",
]
