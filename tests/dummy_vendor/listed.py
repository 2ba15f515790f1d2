"""Make the dummy vendor a part of the package: its folder among the vendors, and its chips in the list.

The folder is here and not in `targets/vendors`; `vendors.__path__` makes Python look in both.
"""

import sys
from pathlib import Path

from whisperport import targets
from whisperport.targets import vendors

HERE = Path(__file__).parent
if str(HERE) not in vendors.__path__:
    vendors.__path__.append(str(HERE))

from whisperport.targets.vendors.dummy.target import TARGETS  # noqa: E402

WITH_DUMMY = (*targets.TARGETS, *TARGETS)


def interpreter(folder: Path) -> Path:
    """Return a Python interpreter that has the SDK and not whisperport."""
    path = folder / "dummy-python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{HERE / "sdk"}" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path
