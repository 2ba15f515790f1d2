"""Quantize a .tflite file in place, with the quantizer's output suppressed and its errors explained."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from whisperport.errors import LoweringError, MissingPackageError
from whisperport.targets.tflite_quantization import Recipe, quantize


def quantized(
    path: Path, steps: Recipe, samples: Mapping[str, Mapping[str, Path]] | None = None
) -> None:
    """Quantize a file in place; see `tflite_quantization.quantize`.

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
            "cannot quantize for `litert`: ai-edge-quantizer is not installed",
            why=str(error),
            hint='pip install "whisperport[litert-export]"',
        ) from error
    except Exception as error:  # it raises anything, from KeyError to its own
        raise LoweringError(
            f"ai-edge-quantizer could not quantize {path.name}",
            why=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[
                :300
            ],
            hint="choose another precision with `--precision`",
        ) from error
    finally:
        made.unlink(missing_ok=True)
