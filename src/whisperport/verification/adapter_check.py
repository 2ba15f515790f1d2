"""Check programs that take an adapter: with drawn matrices, they compute what torch computes.

Without this check, inputs that are never read, or of the wrong layer, would be seen by nobody: the other
checks run with matrices of zeros.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from whisperport.program.checks import Check
from whisperport.program.dims import Dims
from whisperport.program.low_rank import AdaptedLayer, LowRank
from whisperport.runtime import Decoder, Engine
from whisperport.runtime.engine.adapters import AdapterMatrices, padded_matrices
from whisperport.verification.array_checks import clip_checks
from whisperport.verification.batch_check import batch_checks
from whisperport.verification.reference import Reference, reference_mel

# Standard deviation of what the matrices add for an input of that of 1, as a layer norm returns it. With
# 0.1, a program in 8 bits that ignores its matrices is as near to the reference as 8 bits are. With 1, each
# fails by itself (embedded model, onnxruntime, `w8`: at most 25.8 dB, and the limit is 27.1).
STRENGTH = 1.0


def drawn_matrices(dims: Dims, low_rank: LowRank) -> AdapterMatrices:
    """Return the same random matrices for all layers at every call."""
    generator = np.random.default_rng(0)

    def drawn(layer: AdaptedLayer) -> tuple[np.ndarray, np.ndarray]:
        a = generator.standard_normal((layer.n_inputs, low_rank.rank)) / layer.n_inputs**0.5
        b = generator.standard_normal((low_rank.rank, layer.n_outputs))
        return a, b * (STRENGTH / low_rank.rank**0.5)

    return padded_matrices("drawn", dims, low_rank, drawn)


def adapter_checks(
    engine: Engine, low_rank: LowRank, reference: Reference, precision: Mapping[str, str]
) -> Iterator[Check]:
    """Compare the arrays of a clip, computed with the drawn adapter.

    Args:
        engine: the bundle's programs.
        low_rank: what they take.
        reference: of the bundle. Its adapted clip is compared; without one, the check fails.
        precision: program -> its precision.

    Raises:
        NumericalError: a program returned a NaN or an infinity.
    """
    clip = reference.adapted
    if clip is None:
        yield Check(
            level="arrays",
            program="encoder",
            what="adapter",
            value={},
            rule="the reference has a clip with a drawn adapter",
            passed=False,
            reason="it has none",
        )
        return
    adapted = engine.adapted(drawn_matrices(engine.dims, low_rank))
    features = adapted.encode(reference_mel(engine.dims, clip))
    yield from clip_checks(Decoder(adapted), features, clip, reference, precision)
    yield from batch_checks(adapted, replace(reference, clips=(clip,)), precision)
