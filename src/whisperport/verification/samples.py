"""Samples for the comparison of two programs: random inputs, shipped audio, and inputs from files."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.errors import AudioError
from whisperport.program.spec import ProgramSpec
from whisperport.speech.audio import HOP_LENGTH, log_mel
from whisperport.verification.clips import shipped_clips

if TYPE_CHECKING:  # boards have no torch
    from torch import Tensor

    from whisperport.model.trace.program import Program

RANDOM = ((0, 1.0), (1, 0.1), (2, 10.0))  # seed and scale of random floats
AUDIO_FILES = 2  # number of shipped audio files used
MELS = (80, 128)  # numbers of mel bins that Whisper models have


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One set of inputs of a program."""

    name: str  # such as "noise of scale 1", "01-espeak.wav" or "calls.npz"
    inputs: "tuple[Tensor, ...]"  # in the order of the program's signature


def samples_of(
    program: "Program", files: Sequence[str | os.PathLike[str]] = ()
) -> tuple[Sample, ...]:
    """Return the samples of a program.

    They are random inputs at three scales, shipped audio if the only input is a mel spectrogram, and files.

    Args:
        program: the program.
        files: `.npz` files with one array per input, by the input's name.

    Raises:
        ProgramError: a file is missing or damaged, or its arrays do not match the program's inputs.
    """
    return tuple(_samples(program, files))


def _samples(program: "Program", files: Sequence[str | os.PathLike[str]]) -> Iterator[Sample]:
    from torch import from_numpy

    from whisperport.model.inspection.graph import Value
    from whisperport.model.inspection.inputs import inputs_for, read_inputs
    from whisperport.model.trace.trial import random_inputs

    for seed, scale in RANDOM:
        inputs = random_inputs(program, seed)
        scaled = (x * scale if x.is_floating_point() else x for x in inputs)
        yield Sample(f"noise of scale {scale:g}", tuple(scaled))
    if shape := mel_shape(program.spec):
        for name, mel in _shipped(*shape):
            yield Sample(name, (from_numpy(mel).reshape(program.spec.inputs[0].shape),))
    values = [Value(tensor.name, tensor.shape, tensor.dtype) for tensor in program.spec.inputs]
    for file in files:
        arrays = inputs_for(values, read_inputs(Path(file)))
        yield Sample(Path(file).name, tuple(from_numpy(array) for array in arrays))


def mel_shape(spec: ProgramSpec) -> tuple[int, int] | None:
    """Return (bins, frames) if the only input is a mel spectrogram; None otherwise.

    The input has the shape (1, bins, frames) or (1, bins, 1, frames).
    """
    if len(spec.inputs) != 1 or spec.inputs[0].dtype != "float32":
        return None
    shape = spec.inputs[0].shape
    if len(shape) == 4 and shape[2] == 1:
        shape = (*shape[:2], shape[3])
    if len(shape) != 3 or shape[0] != 1 or shape[1] not in MELS:
        return None
    return shape[1], shape[2]


def _shipped(bins: int, frames: int) -> Iterator[tuple[str, Any]]:
    try:
        clips = shipped_clips(AUDIO_FILES)
    except AudioError:
        return  # this installation has no audio files; the result lists the samples that were used
    for clip in clips:
        yield clip.name, log_mel(clip.samples[: frames * HOP_LENGTH], bins, n_frames=frames)
