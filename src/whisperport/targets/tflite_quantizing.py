"""Quantize a .tflite file for a target: the samples it needs, and the call, with errors explained."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from whisperport.errors import LoweringError, MissingPackageError
from whisperport.spec import ProgramSpec
from whisperport.targets.compiler import CalibrationNeed
from whisperport.targets.tflite_quantization import STATIC_BITS, Recipe, quantize

SAMPLES = 32  # of calibration; the shipped audio files give enough


def static_calibration(spec: ProgramSpec, precision: str) -> CalibrationNeed | None:
    """Return the samples that quantizing a program needs; None: the precision is not static."""
    if precision not in STATIC_BITS:
        return None
    return CalibrationNeed(samples=SAMPLES, names=tuple(tensor.name for tensor in spec.inputs))


def quantize_in_place(
    path: Path,
    steps: Recipe,
    samples: Mapping[str, Mapping[str, Path]] | None = None,
    *,
    target: str,
    extra: str,
) -> None:
    """Quantize a file in place; see `tflite_quantization.quantize`.

    Args:
        path: of the file in float32. After an error it is unchanged.
        steps: the recipe.
        samples: signature -> name of an input -> `.npy` file of its samples, for a static recipe.
        target: name of the target, for messages.
        extra: pip extra that installs the quantizer, for messages.

    Raises:
        MissingPackageError: ai-edge-quantizer is not installed.
        LoweringError: the quantizer could not quantize the file.
    """
    from whisperport.inspection.quiet import quiet, quiet_natively

    # Not written in place: the quantizer, and perhaps a program in use, have mapped the file.
    made = path.with_name(f"{path.stem}.quantized{path.suffix}")
    try:
        with quiet(), quiet_natively():
            quantize(path, made, steps, samples)
        shutil.copymode(path, made)
        os.replace(made, path)
    except ImportError as error:
        raise MissingPackageError(
            f"cannot quantize for `{target}`: ai-edge-quantizer is not installed",
            why=str(error),
            hint=f'pip install "whisperport[{extra}]"',
        ) from error
    except Exception as error:  # it raises anything, from KeyError to its own
        text = str(error).strip().splitlines()
        raise LoweringError(
            f"ai-edge-quantizer could not quantize {path.name} for `{target}`",
            why=f"{type(error).__name__}: {text[0] if text else ''}"[:300],
            hint="choose another precision with `--precision`",
        ) from error
    finally:
        made.unlink(missing_ok=True)
