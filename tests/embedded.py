"""The embedded model as tests use it: its bundle is exported once per run and shared by all workers."""

import os
from functools import cache
from pathlib import Path

from whisperport.build.export.bundle_cache import bundle_of
from whisperport.speech.data.embedded_model import unpack_model


def default_bundle() -> Path:
    """The folder of the embedded model's bundle. Do not write to it: copy it."""
    return _default_bundle()


@cache
def _default_bundle() -> Path:
    if "XDG_CACHE_HOME" not in os.environ:  # conftest.py sets it
        raise RuntimeError("the bundle is exported by tests, not when the tests are collected")
    return bundle_of("default").folder


def unpacked(folder: Path) -> Path:
    """Write the embedded checkpoint to a folder, in transformers' format."""
    unpack_model(folder)
    return folder
