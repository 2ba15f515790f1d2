"""An interpreter whose packages of the toolchain are small ones that a test writes."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

VERSIONS = {
    "executorch": "1.5.1",
    "ethos_u_vela": "5.1.0",
    "tosa_tools": "2026.5.0",
    "torch": "2.13.0",
}


def interpreter(
    folder: Path, files: Mapping[str, str], versions: Mapping[str, str], options: str = ""
) -> Path:
    """Write the packages, and a command that runs this Python with them.

    Args:
        folder: for the packages and the command.
        files: path of a module -> its text.
        versions: distribution -> version, in addition to `VERSIONS`.
        options: of the interpreter.
    """
    packages = folder / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    for file, text in files.items():
        path = packages / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name, version in {**VERSIONS, **versions}.items():
        described = packages / f"{name}-{version}.dist-info" / "METADATA"
        described.parent.mkdir()
        described.write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} {options} "$@"\n')
    python.chmod(0o755)
    return python
