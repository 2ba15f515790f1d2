"""Files that stages leave beside a compiled file. They may be missing, damaged or from elsewhere."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 8 * 2**20  # of a file that are read
MAX_SHOWN = 200  # characters of a line that are shown


def read_text(path: Path) -> str:
    """Return the text of a file, "" if it is missing; only the first part of a long one."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def read_report(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file, empty if the file is missing or damaged."""
    report = read_json(path)
    return report if isinstance(report, dict) else {}


def read_json(path: Path) -> Any:
    """Return the JSON value in a file, None if the file is missing or damaged."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError):
        return None


def printable_texts(values: object) -> list[str]:
    """Return the elements of a list as printable texts; empty if it is no list."""
    return [printable(value) for value in values] if isinstance(values, list) else []


def printable(value: object) -> str:
    """Return a value as one line without control characters, cut to `MAX_SHOWN` characters."""
    text = str(value).strip()[:MAX_SHOWN]
    return "".join(c if c.isprintable() else " " for c in text).strip()
