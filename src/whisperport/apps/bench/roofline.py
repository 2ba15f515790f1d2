"""What programs must read and multiply at least, and how fast this machine can do that.

The time of a program that reads its weights once and computes only its matrix multiplications is its limit:
reading and multiplying can overlap, so the limit is the longer of the two. Other operations are below 1 %.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from whisperport.apps.bench.acceptance import How
from whisperport.apps.bench.timed import measure
from whisperport.program.bundle import Manifest
from whisperport.program.dims import Dims
from whisperport.program.program_kind import (
    CROSS_KV,
    ENCODER,
    PREFILL,
    STEP,
    VOCAB_PROJECTION,
)
from whisperport.program.spec import ProgramSpec
from whisperport.program.window import Window
from whisperport.system.machine import usable_cores

READ_BYTES = 2**28  # much more than the caches of a CPU
SIZE = 1536  # rows and columns of the multiplied matrices
RUNS = 7  # the fastest counts
TOKENS = 64  # in the cache of a step
STORED_BYTES = {"fp32": 4.0, "fp16": 2.0, "w8": 1.0, "w8a8": 1.0}  # of a weight
IN_8_BITS = ("w8", "w8a8")
# ONNX graphs of one node with the inputs a (m, k), b (k, n) and the output c (m, n), as `onnx` writes them:
# MatMul in float32, and MatMulInteger of uint8 and int8.
_MATMUL = bytes.fromhex(
    "08083a5b0a110a01610a016212016322064d61744d756c1201675a150a016112100a0e0801120a0a0312016d0a0312016b5a"
    "150a016212100a0e0801120a0a0312016b0a0312016e62150a016312100a0e0801120a0a0312016d0a0312016e42040a0010"
    "12"
)
_MATMUL_INTEGER = bytes.fromhex(
    "08083a620a180a01610a0162120163220d4d61744d756c496e74656765721201675a150a016112100a0e0802120a0a031201"
    "6d0a0312016b5a150a016212100a0e0803120a0a0312016b0a0312016e62150a016312100a0e0806120a0a0312016d0a0312"
    "016e42040a001012"
)


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine does per second at most, measured.

    Attributes:
        read_gb: GB that are read from memory.
        gflop: GFLOP of matrix multiplications in float32.
        gop_8_bits: the same of 8-bit integers.
    """

    read_gb: float
    gflop: float
    gop_8_bits: float


@dataclass(frozen=True, slots=True)
class Work:
    """What one run of a program needs at least. A multiply-add is 2 operations.

    Attributes:
        read_gb: GB of weights, and of keys and values.
        gflop: operations in float32.
        gop_8_bits: operations of 8-bit integers.
    """

    read_gb: float
    gflop: float
    gop_8_bits: float = 0.0

    def limit_ms(self, rates: Rates) -> float:
        """Return the least time of a run, in milliseconds."""
        multiplying = self.gflop / rates.gflop + self.gop_8_bits / rates.gop_8_bits
        return 1e3 * max(self.read_gb / rates.read_gb, multiplying)


@dataclass(frozen=True, slots=True)
class Limit:
    """A program's measured time beside its limit.

    Attributes:
        program: its name.
        precision: its precision.
        work: of one run.
        limit_ms: the least time of a run on this machine.
        ms: the measured median.
    """

    program: str
    precision: str
    work: Work
    limit_ms: float
    ms: float

    @property
    def share(self) -> float:
        """The limit's share of the time.

        It is above 1 if the machine was loaded while its rates were measured, or if the CPU's caches have a
        part of what is read.
        """
        return self.limit_ms / self.ms


def measure_rates(threads: int | None = None) -> Rates:
    """Measure this machine with numpy and ONNX Runtime, in about a second.

    Args:
        threads: CPU threads. Default: None, one per core.
    """
    count = threads or usable_cores()
    parts = np.array_split(np.ones(READ_BYTES // 4, np.float32), count)
    with ThreadPoolExecutor(count) as pool:
        reading = measure(lambda: list(pool.map(np.max, parts)), n=RUNS)
    random = np.random.default_rng(0)
    floats = random.standard_normal((2, SIZE, SIZE), np.float32)
    bytes_ = random.integers(0, 127, (SIZE, SIZE), np.uint8)
    return Rates(
        READ_BYTES / reading.best_ms / 1e6,
        _per_second(_MATMUL, floats[0], floats[1], count),
        _per_second(_MATMUL_INTEGER, bytes_, bytes_.astype(np.int8), count),
    )


def _per_second(graph: bytes, a: object, b: object, threads: int) -> float:
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.intra_op_num_threads = threads
    session = ort.InferenceSession(graph, settings, providers=["CPUExecutionProvider"])
    timing = measure(lambda: session.run(None, {"a": a, "b": b}), n=RUNS)
    return 2 * SIZE**3 / timing.best_ms / 1e6


def limits_of(
    manifest: Manifest, medians: Mapping[str, float], how: Mapping[str, How], rates: Rates
) -> list[Limit]:
    """Return the limits of the measured programs of a bundle whose work is known.

    Args:
        manifest: of the bundle.
        medians: program -> median time of a run in milliseconds.
        how: program -> how it ran; one that did not run on its target has no limit here.
        rates: of the machine.
    """
    limits = []
    for entry in manifest.programs:
        work = work_of(entry.spec, entry.precision, manifest.dims, manifest.window)
        ms = medians.get(entry.spec.name)
        if work is not None and ms and how.get(entry.spec.name) == "run here":
            limit = work.limit_ms(rates)
            limits.append(Limit(entry.spec.name, entry.precision, work, limit, ms))
    return limits


def work_of(
    spec: ProgramSpec,
    precision: str,
    dims: Dims,
    window: Window | None = None,
    tokens: int = TOKENS,
) -> Work | None:
    """Return the work of one run; None for programs that take little time, and for other precisions.

    Args:
        spec: signature of the program.
        precision: of the program.
        dims: sizes of the checkpoint.
        window: of the bundle; None: the checkpoint's own.
        tokens: in the cache of a step.
    """
    stored, needed = STORED_BYTES.get(precision), _needed(spec, dims, window, tokens)
    if stored is None or needed is None:
        return None
    weights, products, other_products, cached = needed
    read_gb = (stored * weights + 4 * cached) / 1e9
    gop, gflop = 2e-9 * products, 2e-9 * other_products
    if precision in IN_8_BITS:
        return Work(read_gb, gflop, gop)
    return Work(read_gb, gop + gflop)


def _needed(
    spec: ProgramSpec, dims: Dims, window: Window | None, tokens: int
) -> tuple[float, float, float, float] | None:
    """Return what a run needs: weights, multiplications by them, other multiplications, cached values."""
    kind = spec.kind
    positions = kind.positions or (window.positions if window else dims.n_audio_ctx)
    if kind.name == ENCODER:
        stem, layers = _encoder_weights(dims)
        attention = 2.0 * dims.n_audio_layer * dims.n_audio_state * positions**2
        # The first convolution computes twice as many frames as there are positions.
        return stem + layers, layers * positions, attention + _stem(dims) * positions, 0.0
    width, vocabulary = dims.n_text_state, float(dims.n_vocab * dims.n_text_state)
    if kind.name == CROSS_KV:
        weights = 2.0 * dims.n_text_layer * width**2
        return weights, weights * positions, 0.0, 0.0
    if kind.name == VOCAB_PROJECTION:
        return vocabulary, vocabulary, 0.0, 0.0
    if kind.name not in (STEP, PREFILL):
        return None
    context = window.context_positions if window else dims.n_audio_ctx
    tokens_read = kind.tokens or 1  # of each text
    rows = tokens_read * kind.batch
    weights = float(dims.n_text_layer * (6 * width**2 + 2 * width * dims.n_text_ffn))
    values = 2.0 * dims.n_text_layer * width * (context + tokens)  # keys and values of one text
    own = 2.0 * dims.n_text_layer * width * tokens_read
    logits = any(out.name == "logits" for out in spec.outputs)
    projected = vocabulary if logits else 0.0
    answers = 2 if kind.name == PREFILL else kind.batch  # rows of logits
    products = weights * rows + projected * answers
    return weights + projected, products, (values + own) * rows, values * kind.batch


def _encoder_weights(dims: Dims) -> tuple[float, float]:
    """Return the number of weights of the convolutions, and of the layers."""
    d = dims.n_audio_state
    stem = 3.0 * d * (dims.n_mels + d)
    return stem, float(dims.n_audio_layer * (4 * d * d + 2 * d * dims.n_audio_ffn))


def _stem(dims: Dims) -> float:
    """Return the multiplications of the convolutions for each position; they stay in float32."""
    d = dims.n_audio_state
    return 3.0 * d * (2 * dims.n_mels + d)
