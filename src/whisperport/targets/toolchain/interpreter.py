"""Find a vendor's SDK: the Python interpreter that has it, or the vendor's command-line program."""

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from whisperport.errors import UsageError


@dataclass(frozen=True, slots=True)
class Installed:
    """A toolchain that was found on this machine.

    Attributes:
        path: where it was found, as it is shown to the user.
        interpreter: the Python interpreter that runs its stages.
        environment: variables that its stages need in addition.
    """

    path: Path
    interpreter: Path
    environment: Mapping[str, str] = field(default_factory=dict)


def variable(toolchain: str) -> str:
    """Return the name of the environment variable that gives a toolchain's interpreter or SDK."""
    return f"WHISPERPORT_TOOLCHAIN_{re.sub('[^A-Z0-9]', '_', toolchain.upper())}"


def find_interpreter(toolchain: str, sdk: str, paths: Mapping[str, str]) -> Path | None:
    """Find the Python interpreter that runs a toolchain's stages.

    The choices are, in this order: the interpreter in `paths`, the one in the environment variable, and
    the interpreter that runs whisperport if it can import the SDK.

    Args:
        toolchain: name of the toolchain, as in `--toolchain NAME=PYTHON`.
        sdk: import name of the SDK's Python package.
        paths: toolchain -> interpreter.

    Returns:
        The path of the interpreter; None if there is none on this machine.

    Raises:
        UsageError: the named interpreter is not an executable file.
    """
    named = paths.get(toolchain) or os.environ.get(variable(toolchain))
    if not named:
        return Path(sys.executable) if importlib.util.find_spec(sdk) else None
    # Links are not resolved: the `python` of a virtual environment is a link and works only by that path.
    executable = shutil.which(os.path.expanduser(named))
    if executable is None:
        raise UsageError(
            f"the toolchain `{toolchain}` has no interpreter at {named}",
            why="this path is not an executable file",
            hint=f"name the Python interpreter that has `{sdk}` installed: `--toolchain "
            f"{toolchain}=/path/to/python`, or set {variable(toolchain)}",
        )
    return Path(os.path.abspath(executable))


def find_command(
    toolchain: str, command: str, variables: Sequence[str], paths: Mapping[str, str]
) -> Installed | None:
    """Find the SDK that has a toolchain's command-line program.

    The choices are, in this order: the path in `paths`, the one in the toolchain's environment variable,
    those in the vendor's own environment variables, and the program in the folders of PATH.

    The stage script receives the path in the toolchain's environment variable. It knows where the program
    is inside the SDK, and checks that it can be started.

    Args:
        toolchain: name of the toolchain, as in `--toolchain NAME=PATH`.
        command: name of the program.
        variables: the vendor's own environment variables for the folder of the SDK.
        paths: toolchain -> folder of the SDK, or path of the program.

    Returns:
        The SDK; None if there is none on this machine.

    Raises:
        UsageError: the named path does not exist.
    """
    own = variable(toolchain)
    named = paths.get(toolchain) or next(filter(None, map(os.environ.get, (own, *variables))), None)
    if not named:
        executable = shutil.which(command)
        return _installed(own, Path(executable)) if executable else None
    path = Path(os.path.abspath(os.path.expanduser(named)))
    if not path.exists():
        raise UsageError(
            f"the toolchain `{toolchain}` has no SDK at {named}",
            why="this path does not exist",
            hint=f"name the folder of the SDK that has the program {command}: `--toolchain "
            f"{toolchain}=/path/to/sdk`, or set {own}",
        )
    return _installed(own, path)


def _installed(own: str, path: Path) -> Installed:
    return Installed(path, Path(sys.executable), {own: os.fspath(path)})
