"""Convert a manifest to format version 1, which older versions of whisperport wrote."""

from typing import Any


def as_format_1(document: dict[str, Any]) -> dict[str, Any]:
    """Return the members of a version 2 manifest as in version 1; the checksum is not updated."""
    old = {**document, "format_version": 1, "precision": "fp32", "verified": True}
    old["programs"] = [_program(entry) for entry in document["programs"]]
    return old


def _program(entry: dict[str, Any]) -> dict[str, Any]:
    old = {name: entry[name] for name in ("spec", "method", "files", "delegation")}
    return {**old, "target": entry["placement"]["target"], "status": "run here"}
