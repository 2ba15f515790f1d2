"""Run a bundle: an engine over its programs, the cache it owns, and the decoding loop."""

from whisperport.runtime.cache import MASKED, Cache
from whisperport.runtime.decode import (
    Decoded,
    DecodeOptions,
    decode_greedy,
    detect_language,
    start_tokens,
)
from whisperport.runtime.engine import Engine, load_engine

__all__ = [
    "MASKED",
    "Cache",
    "DecodeOptions",
    "Decoded",
    "Engine",
    "decode_greedy",
    "detect_language",
    "load_engine",
    "start_tokens",
]
