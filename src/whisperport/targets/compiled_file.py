"""Compiled files of vendors: input of unknown origin, compared with the program that it should compute.

The stages of a compiler leave other files beside it. They too may be missing, damaged or from elsewhere.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whisperport.errors import BundleError
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.system.regular_file import other_kind

RECOMPILE = "compile the bundle again with `whisperport compile`"


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a compiled file, at most the first `most` bytes.

    Raises:
        BundleError: it is missing, empty, or no regular file.
    """
    if kind := other_kind(path):
        raise not_compiled(path, f"the path is {kind}")
    try:
        with path.open("rb") as file:
            content = file.read(most)
    except OSError as error:
        raise not_compiled(path, str(error)) from error
    if not content:
        raise not_compiled(path, "the file is empty")
    return content


def expect_signature(
    path: Path,
    spec: ProgramSpec,
    inputs: Sequence[str],
    outputs: Sequence[str],
    described: Callable[[TensorSpec], str],
) -> None:
    """Check that a compiled file has the inputs and outputs of a program.

    Args:
        path: of the file, for errors.
        inputs: description of each input that the file states, in the order of the program.
        outputs: description of each output.
        described: describes a tensor of the program in the same way.

    Raises:
        BundleError: a description differs.
    """
    for side, stated, tensors in (
        ("inputs", inputs, spec.inputs),
        ("outputs", outputs, spec.outputs),
    ):
        expected = [described(tensor) for tensor in tensors]
        if list(stated) != expected:
            raise other_program(path, spec, f"its {side} are", stated, expected)


def other_program(
    path: Path, spec: ProgramSpec, what: str, stated: Sequence[object], expected: Sequence[object]
) -> BundleError:
    """Return the error for a compiled file with other inputs or outputs: the first that differ."""
    differ = [pair for pair in zip(stated, expected, strict=False) if pair[0] != pair[1]]
    shown = differ[0] if differ else (", ".join(map(str, stated)), ", ".join(map(str, expected)))
    return BundleError(
        f"{path.name} does not compute `{spec.name}`",
        why=f"{what} {str(shown[0])[:120] or 'none'}; expected {str(shown[1])[:120] or 'none'}",
        hint=RECOMPILE,
    )


def other_chip(path: Path, target: str, why: str) -> BundleError:
    """Return the error for a file that was compiled for another chip than that of a target."""
    return BundleError(f"{path.name} is for another chip than `{target}`", why=why, hint=RECOMPILE)


def not_compiled(path: Path, why: str) -> BundleError:
    """Return the error for a damaged file, or one of another format."""
    return BundleError(
        f"{path.name} is not a compiled file of this target", why=why[:300], hint=RECOMPILE
    )


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
