"""Find the SDK of a vendor whose compiler is a command-line program."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from whisperport.errors import UsageError
from whisperport.toolchain.interpreter import Installed, variable


def find_command(
    toolchain: str, command: str, variables: Sequence[str], given: Mapping[str, str]
) -> Installed | None:
    """Find the SDK that has a toolchain's command-line program.

    The choices are, in this order: the path in `given`, the one in the toolchain's environment variable,
    those in the vendor's own environment variables, and the program in the folders of PATH.

    The stage script receives the path in the toolchain's environment variable. It knows where the program
    is inside the SDK, and checks that it can be started.

    Args:
        toolchain: name of the toolchain, as in `--toolchain NAME=PATH`.
        command: name of the program.
        variables: the vendor's own environment variables for the folder of the SDK.
        given: toolchain -> folder of the SDK, or path of the program.

    Returns:
        The SDK; None if there is none on this machine.

    Raises:
        UsageError: the named path does not exist.
    """
    own = variable(toolchain)
    named = given.get(toolchain) or next(filter(None, map(os.environ.get, (own, *variables))), None)
    if not named:
        found = shutil.which(command)
        return _installed(own, Path(found)) if found else None
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
