"""What users download and install of whisperport itself."""

import zlib
from pathlib import Path

import whisperport

PACKAGE = Path(whisperport.__file__).parent
MB = 1_000_000


def test_the_wheel_has_at_most_8_mb_and_is_installed_in_15() -> None:
    found = [p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    files = {path.relative_to(PACKAGE).as_posix(): path.read_bytes() for path in found}

    # A wheel is a zip file: it compresses each file alone, and names it twice in its own tables and once
    # with a hash in RECORD.
    packed = sum(len(zlib.compress(data)) + 3 * len(name) + 200 for name, data in files.items())

    assert packed <= 8 * MB
    assert sum(map(len, files.values())) <= 15 * MB
