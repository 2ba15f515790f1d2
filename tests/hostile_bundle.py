"""Bundles that someone edited and hashed again, so that their checksums are right."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whisperport.program.bundle import MANIFEST
from whisperport.program.bundle.manifest import _checksum

from .embedded import default_bundle


def copy_of_shipped(folder: Path) -> Path:
    """A copy of the embedded model's bundle."""
    return Path(shutil.copytree(default_bundle(), folder))


def read(folder: Path) -> dict[str, Any]:
    """The manifest's fields, without the checksum."""
    document: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    del document["checksum"]
    return document


def write(folder: Path, document: dict[str, Any]) -> None:
    """Write the manifest with a checksum that fits."""
    raw = json.dumps({**document, "checksum": _checksum(document)})
    (folder / MANIFEST).write_text(raw, encoding="utf-8")


def rehash(folder: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> None:
    """Change the manifest, and list every file with the size and hash that it has now."""
    document = read(folder)
    change(document)
    for relative, entry in document["files"].items():
        contents = (folder / relative).read_bytes()
        entry |= {"bytes": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}
    write(folder, document)


def program(document: dict[str, Any], name: str) -> dict[str, Any]:
    """The manifest's entry of one program."""
    found: dict[str, Any] = next(p for p in document["programs"] if p["spec"]["name"] == name)
    return found
