"""Replace a program's file by its quantized form, with the errors of the quantizer explained."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

from whisperport.errors import LoweringError, MissingPackageError
from whisperport.program.spec import ProgramSpec
from whisperport.targets.target_options import Option

if TYPE_CHECKING:  # a board runs programs, and compiles none
    from whisperport.targets.compiler import CalibrationNeed

Sensitive = Annotated[
    Literal["w8", "as-others"],
    Option(
        "Precision of operators in a statically quantized program that a fixed scale makes inaccurate, as "
        "the calibration shows: w8, which scales activations in every run (float32 in attention), or "
        "as-others, the precision of all other operators"
    ),
]
"""Type of an option for lowering."""
SAMPLES = 32  # of calibration; the shipped audio files give enough


def static_calibration(spec: ProgramSpec) -> "CalibrationNeed":
    """Return the samples that a static quantization of a program at its export needs."""
    from whisperport.targets.compiler import CalibrationNeed

    return CalibrationNeed(samples=SAMPLES, names=tuple(tensor.name for tensor in spec.inputs))


def replace_by_quantized(
    path: Path,
    quantize: Callable[[Path, Path], None],
    *,
    failure: str,
    missing: str,
    target: str,
    extra: str,
) -> None:
    """Quantize a file in place. It is replaced at the end: the quantizer, or a run, may have mapped it.

    Args:
        path: of the file in float32. After an error it is unchanged.
        quantize: reads the first path, and writes the second. Files beside it that have the name of a file
            beside the first replace these.
        failure: what happened if it fails, as words that precede the file's name in the message.
        missing: what is wrong if a package cannot be imported, for messages.
        target: name of the target, for messages.
        extra: pip extra that installs the quantizer, for messages.

    Raises:
        MissingPackageError: a package is not installed.
        LoweringError: the quantizer could not quantize the file.
    """
    from whisperport.model.inspection.quiet import quiet, quiet_natively

    try:
        with quiet(), quiet_natively(), TemporaryDirectory(dir=path.parent) as folder:
            out = Path(folder, path.name)
            quantize(path, out)
            files = [file for file in Path(folder).iterdir() if path.with_name(file.name).exists()]
            for file in sorted({*files, out}, key=out.__eq__):  # the file itself is the last
                shutil.copymode(path, file)
                os.replace(file, path.with_name(file.name))
    except ImportError as error:
        raise MissingPackageError(
            f"cannot quantize for `{target}`: {missing}",
            why=str(error),
            hint=f'pip install "whisperport[{extra}]"',
        ) from error
    except Exception as error:  # a quantizer raises anything, from KeyError to its own
        text = str(error).strip().splitlines()
        raise LoweringError(
            f"{failure} {path.name} for `{target}`",
            why=f"{type(error).__name__}: {text[0] if text else ''}"[:300],
            hint="choose another precision with `--precision`",
        ) from error
