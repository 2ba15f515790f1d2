"""Find the activations of a program that one 8-bit scale ruins, from samples of its inputs.

    all activations ─► SQNR of typical values in 8 bits ─► the worst ones, each alone in 8 bits ─► output

The program is an ONNX file, and runs in ONNX Runtime. Activations are its additional outputs, a part of
them in each run, so that memory is bounded. For the worst ones, a QuantizeLinear and a DequantizeLinear
with the range of the samples are put behind the activation, and nothing else changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from whisperport.errors import ProgramError
from whisperport.program.runner import Array
from whisperport.system.progress import Counted, begin_stage
from whisperport.targets.activations import MIN_SQNR_DB, Activation
from whisperport.targets.onnx.activations import OnnxActivations
from whisperport.verification.loss import loss_of

WORST = 8  # activations that are measured alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """One activation.

    Attributes:
        operator: ONNX operator that computes it.
        tensor: its name in the file.
        activation: its values in the samples; its name is that of the module whose weight or bias it is
            computed with, if the file tells it.
        alone_db: SQNR of the program's worst output if only this activation is in 8 bits; None: not
            measured.
    """

    operator: str
    tensor: str
    activation: Activation
    alone_db: float | None = None

    @property
    def typical_db(self) -> float:
        """SQNR of the activation's typical values in 8 bits."""
        return self.activation.sqnr_db()

    @property
    def is_ruined(self) -> bool:
        """Whether one 8-bit scale ruins it."""
        return self.typical_db < MIN_SQNR_DB


def sensitivities(
    path: Path,
    samples: Sequence[Mapping[str, Array]],
    *,
    worst: int = WORST,
) -> list[Sensitivity]:
    """Return the activations of a program, the one whose typical values lose most first.

    Args:
        path: the ONNX file, with static shapes.
        samples: name of an input -> array; at least one sample.
        worst: number of activations that are measured alone.

    Raises:
        ProgramError: the program has no activation that could be quantized.
    """
    program = OnnxActivations.read(path)
    ranking = [
        Sensitivity(operator=program.operators[tensor], tensor=tensor, activation=activation)
        for tensor, activation in program.measured(program.operators, samples).items()
    ]
    if not ranking:
        raise ProgramError(
            f"{path.name} has no activations to quantize",
            why="no operator computes a float32 tensor with frames and channels from its inputs",
            hint="give an encoder or a decoder with float32 inputs",
        )
    ranking.sort(key=lambda sensitivity: sensitivity.typical_db)
    exact = [outputs for outputs, _ in program.run([], samples[:2])]
    measured = []
    for index, sensitivity in enumerate(ranking[:worst]):
        begin_stage(
            Counted(
                f"in 8 bits alone: {sensitivity.activation.name}", index, min(worst, len(ranking))
            )
        )
        measured.append(_alone(program, sensitivity, samples[:2], exact))
    return [*measured, *ranking[worst:]]


def _alone(
    program: OnnxActivations,
    sensitivity: Sensitivity,
    samples: Sequence[Mapping[str, Array]],
    exact: Sequence[Sequence[Array]],
) -> Sensitivity:
    """Return the sensitivity with the SQNR of the outputs if only this activation is in 8 bits."""
    rounded = program.rounded(sensitivity.tensor, sensitivity.activation)
    sqnrs_db = [
        loss_of(_rows(actual), _rows(expected)).sqnr_db
        for (outputs, _), reference_outputs in zip(rounded.run([], samples), exact, strict=True)
        for actual, expected in zip(outputs, reference_outputs, strict=True)
        if expected.dtype == np.float32 and expected.ndim
    ]
    return replace(sensitivity, alone_db=min(sqnrs_db, default=None))


def _rows(values: Array) -> Array:
    return values.reshape(-1, values.shape[-1])
