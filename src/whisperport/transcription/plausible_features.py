"""Find features that cannot be the encoder's output as they are read, by the bundle's reference."""

from collections.abc import Sequence

import numpy as np

from whisperport.errors import UsageError
from whisperport.runtime import Floats

# The encoder ends in a layer norm, so the standard deviation of all features hardly depends on the audio:
# measured with the embedded model, 0.1 to 0.6 % for speech, noise, silence and a tone.
LARGEST_RATIO = 2.0
# Correlation of the means of all channels with the reference's: 0.98 or more was measured for speech, noise
# and silence, 0.49 for a pure tone, at most 0.31 for features in another order.
SAME_CHANNELS, OTHER_CHANNELS = 0.8, 0.45


def check_plausible(features: Floats, reference: Sequence[Floats], source: str) -> None:
    """Raise an error if features have another scale than the reference's, or are stored in another order.

    Args:
        features: (T, d), finite.
        reference: features (T, d) of reference clips; none: nothing is checked.
        source: the file, for the error.

    Raises:
        UsageError: the features cannot be right as they are read.
    """
    if not reference:
        return
    found, usual = float(features.std()), float(np.mean([one.std() for one in reference]))
    if not usual / LARGEST_RATIO <= found <= usual * LARGEST_RATIO:
        raise _implausible(
            source,
            f"their standard deviation is {found:.4g}; that of this encoder's output is {usual:.4g} for "
            "any audio: the dtype, the scale or the zero point is wrong",
        )
    means = np.mean([one.mean(axis=0) for one in reference], axis=0)
    swapped = features.reshape(features.shape[::-1]).T
    if (
        _correlation(features.mean(axis=0), means) < OTHER_CHANNELS
        and _correlation(swapped.mean(axis=0), means) > SAME_CHANNELS
    ):
        raise _implausible(
            source,
            f"they are stored as {features.shape[::-1]}, channels by frames, and were read as "
            f"{features.shape}: give `--features-layout channels-frames`",
        )


def _correlation(x: Floats, y: Floats) -> float:
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt(np.square(x).sum() * np.square(y).sum()))
    return float((x * y).sum()) / size if size > 0 else 0.0


def _implausible(source: str, why: str) -> UsageError:
    return UsageError(
        f"the features in {source} are not as this bundle's encoder computes them",
        why=why,
        hint="`whisperport verify BUNDLE --device-output FILE` finds the cause with the device's output "
        "for a reference clip",
    )
