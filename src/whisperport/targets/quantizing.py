"""Replace a program's file by its quantized form, with the errors of the quantizer explained."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from whisperport.errors import LoweringError, MissingPackageError


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
        quantize: reads the first path, and writes the second, whose folder is deleted afterwards.
        failure: what happened if it fails, as words that precede the file's name in the message.
        missing: what is wrong if a package cannot be imported, for messages.
        target: name of the target, for messages.
        extra: pip extra that installs the quantizer, for messages.

    Raises:
        MissingPackageError: a package is not installed.
        LoweringError: the quantizer could not quantize the file.
    """
    from whisperport.inspection.quiet import quiet, quiet_natively

    try:
        with quiet(), quiet_natively(), TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, path.name)
            quantize(path, made)
            shutil.copymode(path, made)
            os.replace(made, path)
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
