"""Run a bundle: load its programs (`Engine`), keep the state of one call (`Decoder`), decode windows."""

from whisperport.runtime.decoding.batch_executor import BatchExecutor, decode_together
from whisperport.runtime.decoding.decode import (
    Decoded,
    decode_window,
    decoding,
    detect_language,
    start_tokens,
)
from whisperport.runtime.decoding.decode_options import DecodeOptions
from whisperport.runtime.decoding.fallback import (
    TEMPERATURES,
    Thresholds,
    compression_ratio,
    decoding_with_fallback,
    is_silence,
    is_trusted,
)
from whisperport.runtime.decoding.search import TokenSampler
from whisperport.runtime.engine.engine import Engine, RunnerWrapper, load_engine
from whisperport.runtime.engine.scores import Floats
from whisperport.runtime.kv_cache.batch import Batch, BatchDecoder
from whisperport.runtime.kv_cache.cache import Cache
from whisperport.runtime.kv_cache.decoder import Decoder
from whisperport.runtime.kv_cache.stepping import Step, Steps, complete
from whisperport.runtime.segments.segments import SegmentedWindow, WindowSegment, split_segments

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
    "is_trusted",
    "load_engine",
    "split_segments",
    "start_tokens",
]
