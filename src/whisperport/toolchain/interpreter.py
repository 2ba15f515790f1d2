"""Find the Python interpreter that has a vendor's SDK."""

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from whisperport.errors import UsageError


def variable(toolchain: str) -> str:
    """The environment variable that names a toolchain's interpreter."""
    return f"WHISPERPORT_TOOLCHAIN_{re.sub('[^A-Z0-9]', '_', toolchain.upper())}"


def find_interpreter(toolchain: str, sdk: str, given: Mapping[str, str]) -> Path | None:
    """The interpreter that runs a toolchain's stages; None: there is none on this machine.

    The one that `given` names comes first, then the one that the environment variable names, then the
    interpreter that runs whisperport, if the SDK can be imported there.

    Args:
        toolchain: its name, as `--toolchain` has it.
        sdk: the import name of its Python package.
        given: toolchain -> interpreter.

    Raises:
        UsageError: the interpreter that is named is not an executable file.
    """
    named = given.get(toolchain) or os.environ.get(variable(toolchain))
    if not named:
        return Path(sys.executable) if importlib.util.find_spec(sdk) else None
    # Links are not followed: the `python` of a virtual environment is one, and works only by that name.
    found = shutil.which(os.path.expanduser(named))
    if found is None:
        raise UsageError(
            f"the toolchain `{toolchain}` has no interpreter at {named}",
            why="it is not an executable file",
            hint=f"give the Python interpreter that has `{sdk}` installed: `--toolchain "
            f"{toolchain}=/path/to/python`, or set {variable(toolchain)}",
        )
    return Path(os.path.abspath(found))
