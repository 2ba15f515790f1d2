"""Recognize the output of a coarse quantization, however small its SQNR is.

In a checkpoint with massive activations, one step of a static 8-bit range is as large as most values, so
that the error is as large as the output: no correction halves it. But the output still rises and falls in
time with the expected one. Compared is the correlation of the values' deviations from the means of their
channels: with the expected output, with what the simulated 8-bit encoder computes, and with the same for
other inputs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whisperport.diagnosis.candidates import Candidate
from whisperport.diagnosis.causes import CauseCode
from whisperport.diagnosis.expected import Alternative, Expected, ExpectedTensor
from whisperport.diagnosis.explaining import Explanation
from whisperport.diagnosis.file_values import file_values
from whisperport.diagnosis.reference_outputs import ReferenceOutput, of_alternative, of_expected
from whisperport.diagnosis.result import Finding
from whisperport.diagnosis.scales import BlockSums, Line, ScaleFit, line_findings
from whisperport.diagnosis.similarity import over_time
from whisperport.program.runner import Array

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]

NOISE_DB = 3.0  # a lower SQNR is no small error
MOST = 0.5  # part of a file's values that noise is named for
CLOSER_DB = 3.0  # noise is smaller by this much than the distance of the outputs for other clips
FEWEST_FRAMES = 16  # that show a correlation over time
LEAST = 0.3  # correlation below which nothing is recognized
PER_CAUSE = 0.1  # by which the correlation must be larger for each cause of a reading or a layout
OTHER_INPUT_DB = 2.0  # another input must leave less of the values unexplained by this much
OTHER_INPUT = 0.2  # or by which the correlation must be larger
OTHER_CLIP = 0.02  # the same for the right input of another clip
SHARED_DB = 3.0  # a simulation with the file's error leaves less unexplained by this much
SHARED = 0.2  # or its correlation is larger by this much
SETTLED = 0.97  # correlation with a simulation that ends the search for other inputs
CLEAR = 0.85  # correlation that outputs for different inputs do not have
ROUGH = 0.15  # by which the error is less like that of the next frame than the output is
USUAL_FACTOR = math.sqrt(2)  # the values' deviation may be larger or smaller by this much
USUAL_OFFSET = 0.25  # largest difference of their means, in parts of the deviation


@dataclass(frozen=True, slots=True, eq=False)
class _Input:
    """What the input may have been, and how similar the file is to the outputs for it."""

    reference: ReferenceOutput
    exact: float  # correlation with the float32 output
    simulated: float = 0.0  # the largest with simulated outputs
    simulation: Array | None = None  # that output

    @property
    def best(self) -> float:
        return max(self.exact, self.simulated)

    @property
    def cause(self) -> CauseCode | None:
        """What is wrong with the input; None: nothing."""
        findings = self.reference.findings
        return findings[0].cause if findings else None

    @property
    def is_clip(self) -> bool:
        """Whether it is the right input of another clip."""
        return self.cause is CauseCode.OTHER_CLIP

    def is_nearer_than(self, other: "_Input") -> bool:
        """Whether the file is clearly more similar to its outputs than to those for the other one."""
        if self.best >= other.best + (OTHER_CLIP if self.is_clip else OTHER_INPUT):
            return True
        return _rest_db(other.best) - _rest_db(self.best) >= OTHER_INPUT_DB

    @property
    def has_its_error(self) -> bool:
        """Whether the file shares the error of the simulation."""
        if self.best < LEAST:
            return False
        shared = _rest_db(self.exact) - _rest_db(self.simulated)
        return shared >= SHARED_DB or self.simulated - self.exact >= SHARED


def is_noise(best: Explanation, tensor: ExpectedTensor, expected: Expected) -> bool:
    """Return whether the rest of an error is small enough to be noise on the output that was found.

    The values must be clearly closer to it than the outputs for other clips are to the expected output:
    these are the distances at which another output lies. And most values of the file must belong to it.
    """
    held = min(best.candidate.reading.values.size, best.corrected.size)
    if np.count_nonzero(np.isfinite(best.corrected)) < MOST * held:
        return False
    e = tensor.array.astype(np.float64)
    distances = [NOISE_DB]
    for alternative in expected.alternatives:
        if alternative.cause in (CauseCode.OTHER_CLIP, CauseCode.SILENT_INPUT):
            for reference in _references(tensor, [alternative]):
                error = float(np.sum(np.square(e.reshape(reference.array.shape) - reference.array)))
                if error > 0:
                    distances.append(10 * math.log10(float(np.vdot(e, e)) / error) + CLOSER_DB)
    return best.sqnr_db >= max(distances)


def quantization_error(best: Explanation) -> Finding:
    """Return the cause of noise."""
    rest = 10 * math.log10(best.error / max(best.floor, 1e-12))
    beyond = (
        f", {rest:.0f} dB more than the rounding of the file's dtype" if best.floor > 1e-9 else ""
    )
    return _finding(f"The rest of the error is noise: SQNR {best.sqnr_db:.1f} dB{beyond}.")


def coarse_output(
    candidates: Sequence[Candidate], tensor: ExpectedTensor, expected: Expected
) -> Explanation | None:
    """Return the explanation of a file as a coarsely quantized output; None if it is none.

    Args:
        candidates: likely readings of the file.
        tensor: the output that it is expected to hold.
        expected: the outputs of the program, and those of wrong inputs.
    """
    right = of_expected(tensor)
    if right.frames.shape[0] < FEWEST_FRAMES:
        return None
    clips = [a for a in expected.alternatives if a.cause is CauseCode.OTHER_CLIP]
    simulations = expected.simulate()
    known = [right, *_simulated(right, tensor, simulations), *_references(tensor, clips)]
    scores = [
        (max(over_time(c, r) for r in known) - PER_CAUSE * c.causes, -i, c)
        for i, c in enumerate(candidates)
        if c.layout.shape == right.array.shape
    ]
    if not scores:
        return None
    candidate = max(scores)[2]
    usual = _input(candidate, right, tensor, simulations)
    given = _given(candidate, usual, tensor, expected.alternatives)
    if given is None:
        return None
    if given.best < LEAST:
        return None
    if not given.has_its_error and not _is_noisy(candidate, given):
        return None
    return _explained(candidate, given)


def _references(
    tensor: ExpectedTensor, alternatives: Iterable[Alternative]
) -> list[ReferenceOutput]:
    found = (of_alternative(tensor, alternative) for alternative in alternatives)
    return [reference for reference in found if reference]


def _simulated(
    reference: ReferenceOutput, tensor: ExpectedTensor, outputs: Sequence[Mapping[str, Array]]
) -> list[ReferenceOutput]:
    arrays = (arrays.get(tensor.name) for arrays in outputs)
    return [
        ReferenceOutput.of(tensor, array, reference.findings, reference.described)
        for array in arrays
        if array is not None and array.size == tensor.array.size
    ]


def _input(
    candidate: Candidate,
    reference: ReferenceOutput,
    tensor: ExpectedTensor,
    outputs: Sequence[Mapping[str, Array]],
) -> _Input:
    exact = over_time(candidate, reference)
    found = [(over_time(candidate, s), s.array) for s in _simulated(reference, tensor, outputs)]
    simulated, array = max(found, key=lambda pair: pair[0], default=(0.0, None))
    return _Input(reference, exact, simulated, array)


def _given(
    candidate: Candidate,
    usual: _Input,
    tensor: ExpectedTensor,
    alternatives: Sequence[Alternative],
) -> _Input | None:
    """Return the input that the device was given: the usual one, unless another is clearly more similar.

    An output in 8 bits may be similar to the output for a wrong input by chance, so that the simulations of
    both are compared, if there are any: of each cause, that of the most similar input.

    Returns:
        The input; None if it is not the usual one, and several are about equally similar.
    """
    ranked = []
    for alternative in alternatives:
        if reference := of_alternative(tensor, alternative):
            ranked.append((_Input(reference, over_time(candidate, reference)), alternative))
    ranked.sort(key=lambda one: -one[0].exact)
    found: list[_Input] = []
    for one, alternative in ranked:
        is_first = one.cause not in {other.cause for other in found}
        if usual.simulation is not None and (is_first or one.is_clip):
            one = _input(candidate, one.reference, tensor, alternative.simulate())
        found.append(one)
        if usual.simulated >= SETTLED or one.simulated >= SETTLED:
            break
    better = sorted((one for one in found if one.is_nearer_than(usual)), key=lambda one: -one.best)
    if not better:
        return usual
    others = (one for one in found if one.cause is not better[0].cause)
    return better[0] if all(better[0].is_nearer_than(one) for one in others) else None


def _rest_db(correlation: float) -> float:
    """Return the part of the values that a correlation leaves unexplained, in dB."""
    return 10 * math.log10(max(1 - correlation**2, 1e-6))


def _is_noisy(candidate: Candidate, given: _Input) -> bool:
    """Return whether a file is the output with noise, and not that for an input that is not known.

    The outputs for all inputs have much in common, but not as much as that. And the error of an unknown
    input changes as slowly over time as the output itself does.
    """
    if given.exact >= CLEAR:
        return True
    data = file_values(candidate, given.reference)
    x, r = (a - a.mean(axis=0) for a in (data.in_frames(data.x), given.reference.frames))
    error = x - r * (np.vdot(x, r) / np.vdot(r, r))
    return _like_the_next(r) - _like_the_next(error) >= ROUGH


def _like_the_next(values: Doubles) -> float:
    """Return the correlation of each frame with the next one."""
    energy = math.sqrt(float(np.sum(values[1:] ** 2) * np.sum(values[:-1] ** 2)))
    return float(np.vdot(values[1:], values[:-1])) / max(energy, 1e-300)


def _explained(candidate: Candidate, given: _Input) -> Explanation | None:
    """Return the explanation: reading, layout, scale, input and quantization."""
    data = file_values(candidate, given.reference)
    r = data.in_file(given.reference.frames)
    similar = given.simulation if given.has_its_error else None
    quantized = r if similar is None else data.in_file(given.reference.in_frames(similar))
    line = _line(data.x, quantized, data.usable, is_stored=candidate.reading.are_stored)
    if line is None:
        return None
    blocks = BlockSums(data.x, r, data.usable).errors(line)
    fit = ScaleFit(line, int(line.a != 1), blocks, float(np.nanmean(blocks)))
    spread = math.sqrt(given.reference.mean_square)
    of_line, code = line_findings(fit, candidate.reading, spread)
    corrected = (data.x - line.b) / line.a
    error = float(np.mean(np.square(corrected - r)[data.written])) / given.reference.mean_square
    findings = (
        *candidate.findings,
        *candidate.reading.findings,
        *candidate.layout.findings,
        *of_line,
        *given.reference.findings,
        _finding(_sentence(given, error)),
    )
    values = data.in_frames(np.where(data.written, corrected, np.nan))
    return Explanation(
        candidate,
        given.reference,
        findings,
        (*candidate.code, *code, *candidate.layout.code()),
        error,
        0.0,
        0.0,
        given.reference.from_frames(values),
    )


def _line(x: Doubles, r: Doubles, used: Mask, *, is_stored: bool) -> Line | None:
    """Return the line that gives r the mean and the deviation of x; None if x is far from a·r.

    The usual scale is kept if it is near.
    """
    a = float(np.std(x[used]) / np.std(r[used]))
    if not is_stored and 1 / USUAL_FACTOR < a < USUAL_FACTOR:
        a = 1.0
    b = float(np.mean(x[used]) - a * np.mean(r[used]))
    if is_stored:
        return Line(a, b)
    return Line(a) if abs(b) < USUAL_OFFSET * np.std(x[used]) else None


def _sentence(given: _Input, error: float) -> str:
    sqnr = _db(1 / error)
    if given.simulation is None or not given.has_its_error:
        return (
            "The quantization is coarse: the values follow the expected ones, with an SQNR of only "
            f"{sqnr:.1f} dB."
        )
    noise = float(np.mean(np.square(given.simulation - given.reference.array)))
    return (
        "The quantization is coarse: the simulated static 8-bit encoder of this checkpoint has an SQNR of "
        f"{_db(given.reference.mean_square / noise):.1f} dB itself, and the file has the same error: "
        f"{sqnr:.1f} dB."
    )


def _db(ratio: float) -> float:
    return 10 * math.log10(ratio)


def _finding(sentence: str) -> Finding:
    return Finding(
        cause=CauseCode.QUANTIZATION_ERROR,
        sentence=sentence,
        advice="Use 16-bit activations or keep sensitive layers in float; compare with the simulated "
        "quantization to see whether the device or the quantization causes it.",
    )
