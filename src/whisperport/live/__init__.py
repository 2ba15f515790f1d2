"""Sound that is still growing, to text: words as they become certain, in bounded delay and memory."""

from whisperport.live.options import LiveOptions
from whisperport.live.transcriber import LiveTranscriber, LiveUpdate

__all__ = ["LiveOptions", "LiveTranscriber", "LiveUpdate"]
