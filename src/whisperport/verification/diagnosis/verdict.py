"""Three-way verdict: is the quantization bad, or is the device wrong?

The output of the device is compared with that of the simulated quantization, and both with float32. The
device may differ from float32 about as much as the simulation does: at most 3 times its root mean square
error and 5 times its largest error. Source of these two numbers: AWS's guide for Neuron modules, which
compares float32, the CPU in the device's precision, and the device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whisperport.program.runner import Array
from whisperport.verification.array_comparison import Gate, compare

L2_RATIO = 3.0
LARGEST_RATIO = 5.0
SAME_DB = 30.0  # the device and the simulation agree, but for their rounding
EXACT = 1e-6  # an error of the simulation below this part of the reference is that of float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict in one sentence, and its numbers by name."""

    sentence: str
    numbers: Mapping[str, float]


def verdict_of(
    device: Sequence[Array], simulated: Sequence[Array], expected: Sequence[Array], gate: Gate
) -> Verdict:
    """Compare device, simulated quantization and float32.

    Args:
        device: the outputs of the device, corrected; NaN where no value is known.
        simulated: the outputs of the simulated quantization, in the same order and shapes.
        expected: the outputs in float32.
        gate: the tolerances that decide whether the simulated quantization is good.
    """
    d, q, e = (
        np.concatenate([a.astype(np.float64).reshape(-1) for a in arrays])
        for arrays in (device, simulated, expected)
    )
    known = np.isfinite(d) & np.isfinite(q) & np.isfinite(e)
    if not known.any():
        return Verdict(sentence="No values of device and simulation can be compared.", numbers={})
    d, q, e = d[known], q[known], e[known]
    size = max(float(np.linalg.norm(e)), 1e-30)
    of_device, of_simulation = float(np.linalg.norm(d - e)), float(np.linalg.norm(q - e))
    numbers = {
        "device_sqnr_db": _db(size, of_device),
        "simulated_sqnr_db": _db(size, of_simulation),
        "device_against_simulated_sqnr_db": _db(
            float(np.linalg.norm(q)), float(np.linalg.norm(d - q))
        ),
        "l2_ratio": _ratio(of_device, of_simulation, size),
        "largest_ratio": _ratio(
            float(np.abs(d - e).max()), float(np.abs(q - e).max()), float(np.abs(e).max())
        ),
    }
    quantization = compare("simulated", q, e, gate)
    agrees = numbers["l2_ratio"] <= L2_RATIO and numbers["largest_ratio"] <= LARGEST_RATIO
    return Verdict(sentence=_sentence(bool(quantization), agrees, numbers), numbers=numbers)


def _sentence(quantization_is_good: bool, device_agrees: bool, numbers: Mapping[str, float]) -> str:
    simulated = f"the simulated quantization has an SQNR of {numbers['simulated_sqnr_db']:.1f} dB"
    ratio = f"the device's error is {numbers['l2_ratio']:.2g} times that of the simulation"
    if quantization_is_good and device_agrees:
        return f"Quantization and device are right: {simulated}, and {ratio}."
    if device_agrees and numbers["device_against_simulated_sqnr_db"] >= SAME_DB:
        return (
            "The device computes what its toolchain simulates; the model file is the cause, not the "
            f"device: {simulated}."
        )
    if device_agrees:
        return f"The quantization is bad, and the device is right: {simulated}, and {ratio}."
    if quantization_is_good:
        return f"The device is wrong, and the quantization is good: {simulated}, but {ratio}."
    return f"Quantization and device are both wrong: {simulated}, and {ratio}."


def _db(size: float, error: float) -> float:
    return 20 * math.log10(size / error) if error > 0 and size > 0 else math.inf


def _ratio(device: float, simulated: float, size: float) -> float:
    """Return the ratio of two errors, of which those of float32 count as equal."""
    least = EXACT * max(size, 1e-30)
    return max(device, least) / max(simulated, least)
