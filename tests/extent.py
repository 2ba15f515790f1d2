"""How much a test repeats: a core in `make test`, everything in `make test-all`.

Every behaviour is in the core. Only the number of repetitions differs: examples of a property test,
audio files, targets, sizes.
"""

import os
from typing import TypeVar

T = TypeVar("T")

EVERYTHING = os.environ.get("WHISPERPORT_TEST_ALL") == "1"


def core_or_all(core: T, everything: T) -> T:
    """`core` in `make test`, `everything` in `make test-all`."""
    return everything if EVERYTHING else core
