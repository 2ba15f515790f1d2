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


def test_no_folder_of_the_package_is_ignored_by_git_and_so_left_out_of_the_wheel() -> None:
    lines = (Path(__file__).parents[1] / ".gitignore").read_text(encoding="utf-8").split()
    anywhere = {line.rstrip("/") for line in lines if not line.startswith("/")}

    folders = {path.name for path in PACKAGE.rglob("*") if path.is_dir()} - {"__pycache__"}

    assert "speech" in folders
    assert not folders & anywhere
