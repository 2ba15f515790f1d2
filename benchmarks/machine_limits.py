"""What this machine can do at most, and what a program needs at least."""

from collections.abc import Callable

import numpy as np
import torch

from whisperport.bench.measure import measure
from whisperport.program.dims import Dims


def gemm_gflops(threads: int, n: int = 2048) -> float:
    """Measure the fastest float32 matrix multiplication of torch and ONNX Runtime, in GFLOP/s.

    Args:
        threads: of ONNX Runtime; those of torch are set by the caller.
        n: rows and columns.
    """
    from onnx import TensorProto, helper
    from onnxruntime import InferenceSession, SessionOptions

    a = np.random.default_rng(0).standard_normal((n, n), np.float32)
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [n, n]) for name in "abc"]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", "b"], ["c"])], "g", info[:2], info[2:]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    settings = SessionOptions()
    settings.intra_op_num_threads = threads
    session = InferenceSession(model.SerializeToString(), settings)
    t = torch.from_numpy(a)
    runs: list[Callable[[], object]] = [
        lambda: t @ t,
        lambda: session.run(None, {"a": a, "b": a}),
    ]
    return max(2 * n**3 / measure(run, n=7).best_ms / 1e6 for run in runs)


def read_gb_per_s(mib: int = 512) -> float:
    """Measure the memory bandwidth in GB/s, with a sum over an array much larger than the CPU's caches."""
    array = torch.ones(mib * 2**18)
    return array.numel() * 4 / measure(lambda: array.sum(), n=7).best_ms / 1e6


def encoder_gflop(dims: Dims) -> float:
    """Compute the encoder's operations: 2 per multiply-add of its matmuls; others are below 1 %."""
    d, t, ffn = dims.n_audio_state, dims.n_audio_ctx, dims.n_audio_ffn
    stem = 2 * t * dims.n_mels * 3 * d + t * d * 3 * d
    layer = t * (4 * d * d + 2 * d * ffn) + 2 * t * t * d
    return 2 * (stem + dims.n_audio_layer * layer) / 1e9


def step_gb(dims: Dims, rows: int = 1, tokens: int | None = None) -> float:
    """Compute the GB that a step must read in float32: the decoder's weights, and caches of each row.

    Args:
        dims: sizes of the model.
        rows: texts that are decoded together.
        tokens: for which the self-attention cache has room; None: for all.
    """
    d, ffn, n = dims.n_text_state, dims.n_text_ffn, dims.n_text_layer
    weights = n * (6 * d * d + 2 * d * ffn) + dims.n_vocab * d  # cross K and V are not projected
    caches = n * 2 * d * ((tokens or dims.n_text_ctx) + dims.n_audio_ctx)
    return 4 * (weights + rows * caches) / 1e9
