"""A manifest as whisperport wrote it in format version 1."""

from typing import Any


def as_format_1(document: dict[str, Any]) -> dict[str, Any]:
    """The members of a manifest of version 2, as version 1 had them; the checksum no longer fits."""
    old = {**document, "format_version": 1, "precision": "fp32", "verified": True}
    old["programs"] = [_program(entry) for entry in document["programs"]]
    return old


def _program(entry: dict[str, Any]) -> dict[str, Any]:
    old = {name: entry[name] for name in ("spec", "method", "files", "delegation")}
    return {**old, "target": entry["placement"]["target"], "status": "run here"}
