"""Recognize the output of a coarse quantization, however small its SQNR is.

In a checkpoint with massive activations, one step of a static 8-bit range is as large as most values, so
that the error is as large as the output: no correction halves it. But the output still rises and falls in
time with the expected one. Compared is the correlation of the values' deviations from the means of their
channels: with the expected output, with what simulated 8-bit encoders compute by several recipes, and with
the same for other inputs. A file has the error of a simulation if both agree in what the exact output does
not explain. Outputs for other inputs agree there by less than 0.36, and those of 20 quantizers that round
what the recipe rounds by 0.44 to 0.95 (benchmarks/answers/coarse_diagnosis.py).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from whisperport.program.runner import Array
from whisperport.verification.array_comparison import compare
from whisperport.verification.diagnosis.buffers import limits_of
from whisperport.verification.diagnosis.candidates import Candidate, file_values
from whisperport.verification.diagnosis.causes import CauseCode, Finding
from whisperport.verification.diagnosis.expected import (
    Alternative,
    Expected,
    ExpectedTensor,
    Simulations,
)
from whisperport.verification.diagnosis.explaining import (
    Explanation,
    channels_moved_back,
    moved_channels,
)
from whisperport.verification.diagnosis.explanation_search import search
from whisperport.verification.diagnosis.geometries import rolled_channels
from whisperport.verification.diagnosis.raw_files import RawOutput
from whisperport.verification.diagnosis.reference_outputs import (
    ReferenceOutput,
    of_alternative,
    of_expected,
)
from whisperport.verification.diagnosis.scales import BlockSums, Line, ScaleFit, line_findings
from whisperport.verification.diagnosis.similarity import over_time, shared_error
from whisperport.verification.diagnosis.verdict import SAME_DB

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
OF_INPUTS_DB = 1.0  # the same between two other inputs, if the usual one is excluded
SHARED = 0.4  # correlation of the errors of a file and a simulation that is no chance
SETTLED = 0.97  # correlation with a simulation that ends the search for other inputs
CLEAR = 0.85  # correlation that outputs for different inputs do not have
ROUGH = 0.15  # by which the error is less like that of the next frame than the output is
USUAL_FACTOR = math.sqrt(2)  # the values' deviation may be larger or smaller by this much
TOOLCHAIN = "the toolchain's own recipe"
USUAL_OFFSET = 0.25  # largest difference of their means, in parts of the deviation


@dataclass(frozen=True, slots=True, eq=False)
class _Input:
    """What the input may have been, and how similar the file is to the outputs for it."""

    reference: ReferenceOutput
    exact: float  # correlation with the float32 output
    # recipe -> the output of that simulation
    simulations: Mapping[str, ReferenceOutput] = field(default_factory=dict)
    recipe: str = ""  # of the simulation with the largest correlation
    simulated: float = 0.0  # that correlation
    shared: float = 0.0  # correlation of its error with that of the file
    is_clear: bool = True  # whether no other input is about equally similar

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

    def is_nearer_than(self, rival: "_Input", margin_db: float = OTHER_INPUT_DB) -> bool:
        """Whether the file is clearly more similar to its outputs than to those for the other one."""
        if self.best >= rival.best + (OTHER_CLIP if self.is_clip else OTHER_INPUT):
            return True
        return _rest_db(rival.best) - _rest_db(self.best) >= margin_db

    @property
    def has_its_error(self) -> bool:
        """Whether the file shares the error of the simulation."""
        return self.best >= LEAST and self.shared >= SHARED


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


def known_output(raw: RawOutput, tensor: ExpectedTensor, expected: Expected) -> Explanation | None:
    """Return the explanation of a file that holds what the 8-bit program computes on this machine.

    None if that output is not known, the file holds another one, or that output is that of another input.
    """
    known = expected.known.get(tensor.name)
    if known is None or not _is_of_right_input(known, tensor, expected):
        return None
    same = replace(tensor, array=known)
    best = search(raw, same, replace(expected, tensors=(same,), make_alternatives=tuple)).best
    if best is None or best.sqnr_db < SAME_DB:
        return None
    right = of_expected(tensor)
    error = float(np.nanmean(np.square(best.corrected - right.array))) / right.mean_square
    finding = _finding(
        "The file holds what the 8-bit program computes on this machine, with an SQNR of "
        f"{_db(1 / error):.1f} dB."
    )
    values = known.reshape(-1).astype(np.float64)
    is_limited = limits_of(
        values, np.isfinite(values)
    ).mask.any()  # the ranges of the program end there
    findings = tuple(
        f for f in best.findings if not (is_limited and f.cause is CauseCode.SATURATED)
    )
    if not compare(tensor.name, known, tensor.array, expected.limit(tensor.name)):
        findings = (*findings, finding)
    return replace(best, reference=right, findings=findings, error=error)


def _is_of_right_input(known: Array, tensor: ExpectedTensor, expected: Expected) -> bool:
    output = ReferenceOutput.of(tensor, known, (), "")
    if output.frames.shape[0] < FEWEST_FRAMES:
        return True
    usual = _Input(of_expected(tensor), _alike(output, of_expected(tensor)))
    if usual.exact >= CLEAR:
        return True
    wrong_inputs = (
        _Input(r, _alike(output, r)) for r in _references(tensor, expected.alternatives)
    )
    return usual.exact >= LEAST and not any(
        wrong_input.is_nearer_than(usual) for wrong_input in wrong_inputs
    )


def _alike(output: ReferenceOutput, reference: ReferenceOutput) -> float:
    """Return the correlation of two outputs' deviations from the means of their channels."""
    x, r = (a.frames - a.frames.mean(axis=0) for a in (output, reference))
    return float(np.vdot(x, r)) / max(math.sqrt(float(np.vdot(x, x) * np.vdot(r, r))), 1e-300)


def coarse_output(
    candidates: Sequence[Candidate], tensor: ExpectedTensor, expected: Expected
) -> Explanation | None:
    """Return the explanation of a file as a coarsely quantized output; None if it is none.

    All channels may be moved by the same number.

    Args:
        candidates: likely readings of the file.
        tensor: the output that it is expected to hold.
        expected: the outputs of the program, and those of wrong inputs.
    """
    right = of_expected(tensor)
    if right.frames.shape[0] < FEWEST_FRAMES:
        return None
    for candidate in (c for c in candidates if c.is_plain and c.layout.shape == right.array.shape):
        data = file_values(candidate, right)
        if geometry := rolled_channels(data.in_frames(data.x), right.frames):
            moved = moved_channels(expected, tensor, geometry)
            explanation = _in_usual_order([candidate], moved.tensor(tensor.name), moved)
            return channels_moved_back(explanation, geometry) if explanation else None
    return _in_usual_order(candidates, tensor, expected)


def _in_usual_order(
    candidates: Sequence[Candidate], tensor: ExpectedTensor, expected: Expected
) -> Explanation | None:
    right = of_expected(tensor)
    simulated = _simulated(right, tensor, {TOOLCHAIN: expected.known, **expected.simulate(())})
    clips = [a for a in expected.alternatives if a.cause is CauseCode.OTHER_CLIP]
    known = [right, *simulated.values(), *_references(tensor, clips)]
    scores = [
        (max(over_time(c, r) for r in known) - PER_CAUSE * c.causes, -i, c)
        for i, c in enumerate(candidates)
        if c.layout.shape == right.array.shape
    ]
    if not scores:
        return None
    candidate = max(scores)[2]
    device_input = _device_input(
        candidate, _input(candidate, right, simulated), tensor, expected.alternatives
    )
    if device_input is None or device_input.best < LEAST:
        return None
    if not device_input.has_its_error and not _is_noisy(candidate, device_input):
        return None
    return _explained(candidate, device_input, expected)


def _references(
    tensor: ExpectedTensor, alternatives: Iterable[Alternative]
) -> list[ReferenceOutput]:
    outputs = (of_alternative(tensor, alternative) for alternative in alternatives)
    return [reference for reference in outputs if reference]


def _simulated(
    reference: ReferenceOutput, tensor: ExpectedTensor, outputs: Simulations
) -> dict[str, ReferenceOutput]:
    arrays = {recipe: arrays.get(tensor.name) for recipe, arrays in outputs.items()}
    return {
        recipe: ReferenceOutput.of(tensor, array, reference.findings, reference.described)
        for recipe, array in arrays.items()
        if array is not None and array.size == tensor.array.size
    }


def _input(
    candidate: Candidate, reference: ReferenceOutput, simulations: Mapping[str, ReferenceOutput]
) -> _Input:
    exact = over_time(candidate, reference)
    correlations = {
        recipe: over_time(candidate, simulation) for recipe, simulation in simulations.items()
    }
    if not correlations:
        return _Input(reference, exact)
    recipe = max(correlations, key=lambda name: correlations[name])
    shared = shared_error(candidate, reference, simulations[recipe])
    return _Input(reference, exact, simulations, recipe, correlations[recipe], shared)


def _device_input(
    candidate: Candidate,
    usual: _Input,
    tensor: ExpectedTensor,
    alternatives: Sequence[Alternative],
) -> _Input | None:
    """Return the input that the device was given: the usual one, unless another is clearly more similar.

    An output in 8 bits may be similar to the output for a wrong input by chance, so that the simulations of
    both are compared, if there are any: of each cause, that of the most similar input. The simulations have
    the recipe that the right input shows, if it shows one.

    Returns:
        The input. If it is not the usual one, and several are about equally similar, it names no cause;
        None if the file has the error of none of their simulations.
    """
    shown = usual.has_its_error and usual.recipe != TOOLCHAIN
    recipes = (usual.recipe,) if shown else ()
    ranked = []
    for alternative in alternatives:
        if reference := of_alternative(tensor, alternative):
            ranked.append((_Input(reference, over_time(candidate, reference)), alternative))
    ranked.sort(key=lambda pair: -pair[0].exact)
    wrong_inputs: list[_Input] = []
    for wrong_input, alternative in ranked:
        is_first = wrong_input.cause not in {earlier.cause for earlier in wrong_inputs}
        if usual.simulations and (is_first or wrong_input.is_clip):
            simulated = _simulated(wrong_input.reference, tensor, alternative.simulate(recipes))
            wrong_input = _input(candidate, wrong_input.reference, simulated)
        wrong_inputs.append(wrong_input)
        if usual.simulated >= SETTLED or wrong_input.simulated >= SETTLED:
            break
    nearer = sorted(
        (wrong_input for wrong_input in wrong_inputs if wrong_input.is_nearer_than(usual)),
        key=lambda wrong_input: -wrong_input.best,
    )
    if not nearer:
        return usual
    rivals = (
        wrong_input for wrong_input in wrong_inputs if wrong_input.cause is not nearer[0].cause
    )
    is_clear = all(nearer[0].is_nearer_than(wrong_input, OF_INPUTS_DB) for wrong_input in rivals)
    if is_clear:
        return nearer[0]
    sharing = [
        device_input for device_input in (usual, *wrong_inputs) if device_input.has_its_error
    ]
    if not sharing:
        return None
    best = max(sharing, key=lambda device_input: device_input.best)
    return replace(best, is_clear=False, reference=replace(best.reference, findings=()))


def _rest_db(correlation: float) -> float:
    """Return the part of the values that a correlation leaves unexplained, in dB."""
    return 10 * math.log10(max(1 - correlation**2, 1e-6))


def _is_noisy(candidate: Candidate, device_input: _Input) -> bool:
    """Return whether a file is the output with noise, and not that for an input that is not known.

    The outputs for all inputs have much in common, but not as much as that. And the error of an unknown
    input changes as slowly over time as the output itself does.
    """
    if device_input.exact >= CLEAR:
        return True
    data = file_values(candidate, device_input.reference)
    x, r = (a - a.mean(axis=0) for a in (data.in_frames(data.x), device_input.reference.frames))
    error = x - r * (np.vdot(x, r) / np.vdot(r, r))
    return _like_the_next(r) - _like_the_next(error) >= ROUGH


def _like_the_next(values: Doubles) -> float:
    """Return the correlation of each frame with the next one."""
    energy = math.sqrt(float(np.sum(values[1:] ** 2) * np.sum(values[:-1] ** 2)))
    return float(np.vdot(values[1:], values[:-1])) / max(energy, 1e-300)


def _explained(
    candidate: Candidate, device_input: _Input, expected: Expected
) -> Explanation | None:
    """Return the explanation: reading, layout, scale, input and quantization."""
    data = file_values(candidate, device_input.reference)
    r = data.in_file(device_input.reference.frames)
    outputs = [r]
    if device_input.has_its_error:
        outputs = [data.in_file(device_input.simulations[device_input.recipe].frames), r]
    line = _line(
        data.x,
        outputs,
        data.usable,
        is_stored=candidate.reading.are_stored,
        has_offset=device_input.has_its_error,
    )
    if line is None:
        return None
    blocks = BlockSums(data.x, r, data.usable).errors(line)
    fit = ScaleFit(line, int(line.a != 1) + int(line.b != 0), blocks, float(np.nanmean(blocks)))
    spread = math.sqrt(device_input.reference.mean_square)
    of_line, code = line_findings(fit, candidate.reading, spread)
    corrected = (data.x - line.b) / line.a
    error = (
        float(np.mean(np.square(corrected - r)[data.written])) / device_input.reference.mean_square
    )
    findings = (
        *candidate.findings,
        *candidate.reading.findings,
        *candidate.layout.findings,
        *of_line,
        *device_input.reference.findings,
        _finding(_sentence(device_input, error, expected)),
    )
    values = data.in_frames(np.where(data.written, corrected, np.nan))
    return Explanation(
        candidate,
        device_input.reference,
        findings,
        (*candidate.code, *code, *candidate.layout.code()),
        error,
        0.0,
        0.0,
        device_input.reference.from_frames(values),
    )


def _line(
    x: Doubles, outputs: Sequence[Doubles], used: Mask, *, is_stored: bool, has_offset: bool
) -> Line | None:
    """Return the line that gives the first output the mean and the deviation of x.

    The usual scale is kept if it is near that of one of the outputs: a layer norm keeps the deviation of
    all values. None if x has another mean, unless `has_offset`: no other input is possible.
    """
    ratios = [float(np.std(x[used]) / np.std(r[used])) for r in outputs]
    a, r = ratios[0], outputs[0]
    if not is_stored and any(1 / USUAL_FACTOR < ratio < USUAL_FACTOR for ratio in ratios):
        a = 1.0
    b = float(np.mean(x[used]) - a * np.mean(r[used]))
    if is_stored:
        return Line(a, b)
    if abs(b) < USUAL_OFFSET * np.std(x[used]):
        return Line(a)
    return Line(a, b) if has_offset else None


def _sentence(device_input: _Input, error: float, expected: Expected) -> str:
    sqnr = _db(1 / error)
    if not device_input.has_its_error:
        return (
            "The quantization is coarse: the values follow the expected ones, with an SQNR of only "
            f"{sqnr:.1f} dB."
        )
    of_recipes = {
        recipe: _sqnr(device_input, simulation)
        for recipe, simulation in device_input.simulations.items()
    }
    best = max(of_recipes, key=lambda name: of_recipes[name])
    remark = ""
    if best != device_input.recipe:
        remark = f" The other recipes have at most {of_recipes[best]:.1f} dB: {best}."
    if not device_input.is_clear:
        remark += " The input may be another one, too; which is not clear."
    return (
        "The quantization is coarse: the file has the error of static 8 bits with this recipe, simulated "
        f"here: {device_input.recipe}. The simulation has {of_recipes[device_input.recipe]:.1f} dB, and "
        f"the file {sqnr:.1f} dB.{remark} {expected.sensitive()}"
    ).rstrip()


def _sqnr(device_input: _Input, simulated: ReferenceOutput) -> float:
    error = float(np.mean(np.square(simulated.array - device_input.reference.array)))
    return _db(device_input.reference.mean_square / error)


def _db(ratio: float) -> float:
    return 10 * math.log10(ratio)


def _finding(sentence: str) -> Finding:
    return Finding(
        cause=CauseCode.QUANTIZATION_ERROR,
        sentence=sentence,
        advice="Use 16-bit activations or keep sensitive layers in float; compare with the simulated "
        "quantization to see whether the device or the quantization causes it.",
    )
