"""Run a bundle: load its programs (`Engine`), keep the state of one call (`Decoder`), decode windows."""

from whisperport.runtime.batch import Batch, BatchDecoder
from whisperport.runtime.batch_executor import BatchExecutor, decode_together
from whisperport.runtime.cache import Cache, Floats
from whisperport.runtime.decode import (
    Decoded,
    decode_window,
    decoding,
    detect_language,
    start_tokens,
)
from whisperport.runtime.decoder import Decoder
from whisperport.runtime.engine import Engine, RunnerWrapper, load_engine
from whisperport.runtime.fallback import (
    TEMPERATURES,
    Thresholds,
    compression_ratio,
    decoding_with_fallback,
    is_silence,
)
from whisperport.runtime.options import DecodeOptions
from whisperport.runtime.search import TokenSampler
from whisperport.runtime.segments import SegmentedWindow, WindowSegment, split_segments
from whisperport.runtime.stepping import Step, Steps, complete

__all__ = [
    "TEMPERATURES",
    "Batch",
    "BatchDecoder",
    "BatchExecutor",
    "Cache",
    "DecodeOptions",
    "Decoded",
    "Decoder",
    "Engine",
    "Floats",
    "RunnerWrapper",
    "SegmentedWindow",
    "Step",
    "Steps",
    "Thresholds",
    "TokenSampler",
    "WindowSegment",
    "complete",
    "compression_ratio",
    "decode_together",
    "decode_window",
    "decoding",
    "decoding_with_fallback",
    "detect_language",
    "is_silence",
    "load_engine",
    "split_segments",
    "start_tokens",
]
