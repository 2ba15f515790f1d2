"""Tell whether the rest of an error can be noise on the output that a file holds."""

import math

import numpy as np

from whisperport.diagnosis.causes import CauseCode
from whisperport.diagnosis.expected import Expected, ExpectedTensor
from whisperport.diagnosis.explaining import Explanation

NOISE_DB = 3.0  # a lower SQNR is no error of the computation but another output
CLOSER_DB = 3.0  # the expected output must be closer by this much than the outputs for other inputs


def is_noise(best: Explanation, tensor: ExpectedTensor, expected: Expected) -> bool:
    """Return whether the rest of the error can be noise on the output that was found.

    The values must be clearly closer to it than the outputs for other clips are to the expected output:
    these are the distances at which another output lies.
    """
    e = tensor.array.astype(np.float64)
    distances = [NOISE_DB]
    for alternative in expected.alternatives:
        other = alternative.arrays.get(tensor.name)
        if other is not None and alternative.cause in (
            CauseCode.OTHER_CLIP,
            CauseCode.SILENT_INPUT,
        ):
            error = float(np.sum(np.square(e - other.reshape(e.shape))))
            distances.append(10 * math.log10(float(np.sum(e * e)) / max(error, 1e-300)) + CLOSER_DB)
    return best.sqnr_db >= max(d for d in distances if math.isfinite(d))
