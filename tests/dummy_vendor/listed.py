"""The dummy vendor as a part of the package: its folder among the targets, its line in their list.

The folder lies here instead of in `src/whisperport/targets`, which looks for modules in both places.
"""

import sys
from pathlib import Path

from whisperport import targets

HERE = Path(__file__).parent
if str(HERE) not in targets.__path__:
    targets.__path__.append(str(HERE))

from whisperport.targets.dummy.target import CHIPS, Dummy  # noqa: E402

WITH_DUMMY = (*targets.TARGETS, *map(Dummy, CHIPS))


def interpreter(folder: Path) -> Path:
    """An interpreter that has the SDK, and nothing of whisperport."""
    path = folder / "dummy-python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{HERE / "sdk"}" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path
