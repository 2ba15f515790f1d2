"""Keep the latest result of each benchmark in `results/QUESTION.json`; git's history has the older ones."""

import datetime
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from whisperport.verification import machine

RESULTS = Path(__file__).parent / "results"
DIGITS = 5  # significant ones of a figure; the noise of every measurement is larger
WIDTH = 400  # characters; a shorter value is one line


def record(question: str, name: str, result: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Keep a result beside those that answer the same question; return their file.

    Args:
        question: folder of the benchmark, and name of the file.
        name: of the result in the file; an earlier one of this name is replaced.
        result: what was measured. The date, the command and the machine are added.
        folder: where the files are.
    """
    circumstances = {
        "measured_on": datetime.date.today().isoformat(),
        "command": _command(),
        "machine": machine(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{question}.json"
    results = _read(path) | {name: circumstances | dict(result)}
    path.write_text(compact(results) + "\n", encoding="utf-8")
    return path


def recorded(question: str, name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Read the latest result of this name; empty if there is none."""
    result: dict[str, Any] = _read(folder / f"{question}.json").get(name, {})
    return result


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return results


def compact(result: Any) -> str:
    """Return JSON with rounded figures, in which a record is one line."""
    return "\n".join(_lines(_rounded(result)))


def _command() -> str:
    """Return the command that runs this process, as it is typed in the project's folder.

    A path outside of the project is DIR and its last name: other machines have other folders.
    """
    module = sys.modules["__main__"].__spec__
    name = module.name.removesuffix(".__main__") if module else Path(sys.argv[0]).name
    return shlex.join(["python", "-m", name, *map(_without_folders, sys.argv[1:])])


def _without_folders(argument: str) -> str:
    option, equals, value = (
        argument.partition("=") if argument.startswith("--") else ("", "", argument)
    )
    path, project = Path(value), RESULTS.parents[1]
    if not path.is_absolute():
        return argument
    inside = path.is_relative_to(project)
    return f"{option}{equals}{path.relative_to(project) if inside else Path('DIR', path.name)}"


def _lines(value: Any) -> Iterator[str]:
    line = json.dumps(value, ensure_ascii=False)
    if len(line) <= WIDTH or not isinstance(value, list | dict):
        yield line
        return
    opening, closing = "[]" if isinstance(value, list) else "{}"
    members = [("", item) for item in value] if isinstance(value, list) else list(value.items())
    yield opening
    for number, (key, item) in enumerate(members, 1):
        rows = list(_lines(item))
        if opening == "{":
            rows[0] = f"{json.dumps(key, ensure_ascii=False)}: {rows[0]}"
        if number < len(members):
            rows[-1] += ","
        yield from (f" {row}" for row in rows)
    yield closing


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
