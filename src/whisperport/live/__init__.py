"""Transcribe audio while it arrives, in bounded delay and memory; certain words are emitted early."""

from whisperport.live.options import LiveOptions
from whisperport.live.transcriber import LiveTranscriber, LiveUpdate

__all__ = ["LiveOptions", "LiveTranscriber", "LiveUpdate"]
