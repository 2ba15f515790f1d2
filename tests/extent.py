"""How much a test repeats: a core in `make test`, everything in `make test-all`.

Every behaviour is in the core. Only the number of repetitions differs: examples of a property test,
audio files, targets, sizes. Pages in Debian's chromium are opened in `make test-all` only; they need
`pip install -e '.[dev,browser]'` and `apt install chromium`.
"""

import os
import shutil
from typing import TypeVar

import pytest

T = TypeVar("T")

EVERYTHING = os.environ.get("WHISPERPORT_TEST_ALL") == "1"
CHROMIUM = shutil.which("chromium")
IN_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed"),
    pytest.mark.skipif(not EVERYTHING, reason="make test-all"),
]


def core_or_all(core: T, everything: T) -> T:
    """`core` in `make test`, `everything` in `make test-all`."""
    return everything if EVERYTHING else core
