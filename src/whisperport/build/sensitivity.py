"""Measure which activations of a program one 8-bit scale ruins: a file, or a checkpoint's encoder.

    all activations ─► SQNR of typical values in 8 bits ─► the worst ones, each alone in 8 bits ─► output

The program is an ONNX file, and runs in ONNX Runtime. Activations are its additional outputs, a part of
them in each run, so that memory is bounded. For the worst ones, a QuantizeLinear and a DequantizeLinear
with the range of the samples are put behind the activation, and nothing else changes.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.build.compile.lowered_file import read_lowered
from whisperport.build.export.drafting import loaded
from whisperport.build.inspect import size_of
from whisperport.errors import ProgramError
from whisperport.program.host_part import HostPart
from whisperport.program.placement import Placement
from whisperport.program.program_kind import ENCODER
from whisperport.program.runner import Array
from whisperport.system.child import Limits, StoppedError, run_limited
from whisperport.system.progress import Counted, begin_stage
from whisperport.targets.activations import MIN_SQNR_DB, SAMPLES, Activation
from whisperport.targets.onnx.activations import OnnxActivations
from whisperport.targets.preflight import requires_torch
from whisperport.verification.clips import shipped_audio
from whisperport.verification.loss import loss_of
from whisperport.verification.recording.given_inputs import GivenInputs
from whisperport.verification.samples import mel_shape

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


SUFFIXES = (".onnx", ".pt2")
MEMORY = 3.0  # times the bytes of the file, beside the activations of a run
BASE_BYTES = 2 * 2**30
SECONDS = 3600.0


def sensitivity(
    program: str | os.PathLike[str],
    inputs: Path | None = None,
) -> list[dict[str, Any]]:
    """Return the activations of a program that one 8-bit scale ruins, and the others, the worst first.

    A third-party program runs in a child process with limits on memory and time.

    Args:
        program: an `.onnx` or `.pt2` file, or anything that `load_checkpoint` accepts, whose encoder is
            then measured.
        inputs: audio files or arrays, as `compile --inputs` takes them. Default: None, clips of the
            package, for a program that reads a spectrogram.

    Returns:
        JSON objects: `activation`, `operator`, `tensor`, `shape`, `typical_db`, `alone_db` (null: not
        measured), `ruined`, and `text`, a sentence about its values: `smallest`, `largest`, `typical`
        (root mean square of the median frame or channel), `step` of one 8-bit scale, and `channel`, the
        one that is massive (null: none). Of those that are ruined, `channels` and `frames` have the
        largest absolute value of each, over all samples; else these are empty.

    Raises:
        ProgramError: the program or an input is damaged, or the program cannot be run.
        CheckpointError: there is no such file or checkpoint.
        MissingPackageError: torch or onnx is not installed.
    """
    path = Path(program)
    if path.suffix not in SUFFIXES:
        with TemporaryDirectory(prefix="whisperport-") as folder:
            return _rows_of(_encoder_of(program, Path(folder)), inputs)
    limits = Limits(round(BASE_BYTES + MEMORY * size_of(path)), SECONDS)
    arguments = {"path": os.fspath(path), "inputs": None if inputs is None else os.fspath(inputs)}
    try:
        rows: list[dict[str, Any]] = run_limited(
            "whisperport.build.sensitivity:sensitivity_in_child", arguments, limits
        )
    except StoppedError as error:
        raise ProgramError(
            f"{path.name} cannot be measured",
            why=str(error),
            hint="give an encoder or a decoder with static shapes, and fewer inputs",
        ) from error
    return rows


def sensitivity_in_child(*, path: str, inputs: str | None) -> list[dict[str, Any]]:
    """Measure a file in the child process."""
    inputs_path = None if inputs is None else Path(inputs)
    if Path(path).suffix == ".onnx":
        return _rows_of(Path(path), inputs_path)
    program = Path(path)
    from whisperport.model.trace.onnx_file import write_onnx_file
    from whisperport.model.trace.pt2 import read_pt2

    with TemporaryDirectory(prefix="whisperport-") as folder:
        written = Path(folder, f"{program.stem}.onnx")
        write_onnx_file(read_pt2(path), written)
        return _rows_of(written, inputs_path, program.name)


def _encoder_of(checkpoint: str | os.PathLike[str], folder: Path) -> Path:
    """Write the encoder of a checkpoint to an ONNX file."""
    with requires_torch("measure"):
        from whisperport.model.network.whisper import build_model
    from whisperport.model.trace.onnx_file import write_onnx_file
    from whisperport.model.trace.variants import whisper_programs
    from whisperport.model.trace.whisper import Parts

    model = build_model(loaded(checkpoint))
    (encoder,) = whisper_programs(Parts(model, []), [ENCODER])
    begin_stage("writing its encoder as ONNX")
    write_onnx_file(encoder, folder / "encoder.onnx")
    return folder / "encoder.onnx"


def _rows_of(path: Path, inputs: Path | None, name: str = "") -> list[dict[str, Any]]:
    spec = read_lowered(path, Placement("onnxruntime", "fp32")).spec
    if inputs is None and mel_shape(spec) is None:
        raise ProgramError(
            f"{name or path.name} reads no spectrogram, and no inputs are given",
            hint="`--inputs FOLDER` with arrays of all its inputs",
        )
    sample_files = GivenInputs.find(
        inputs or shipped_audio()[0].path.parent, spec, HostPart(), force=False
    )
    names = [tensor.name for tensor in spec.inputs]
    indices = range(min(SAMPLES, len(sample_files.files)))
    samples = [dict(zip(names, arrays, strict=True)) for arrays in sample_files.read(indices)]
    return [
        {
            "activation": result.activation.name,
            "operator": result.operator,
            "tensor": result.tensor,
            "shape": list(result.activation.shape),
            "smallest": result.activation.low,
            "largest": result.activation.high,
            "typical": result.activation.typical,
            "step": result.activation.step(),
            "channel": result.activation.massive_channel,
            "typical_db": result.typical_db,
            "alone_db": result.alone_db,
            "ruined": result.is_ruined,
            "text": str(result.activation),
            "channels": _peaks(result.activation.channel_peaks) if result.is_ruined else [],
            "frames": _peaks(result.activation.frame_peaks) if result.is_ruined else [],
        }
        for result in sensitivities(path, samples)
    ]


def _peaks(values: NDArray[Any]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]
