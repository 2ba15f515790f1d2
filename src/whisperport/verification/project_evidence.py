"""Read the evidence that this project collected for each target on its own machines.

`make evidence` writes it. It is not evidence about a user's bundle, whose manifest has its own.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

from whisperport.program import strict_json
from whisperport.program.bundle import Manifest
from whisperport.program.checks import ALL_PROGRAMS, Check
from whisperport.program.evidence import Evidence, Kind, Status, status_of
from whisperport.program.json_records import from_json, to_json
from whisperport.targets import Target, get_target

PLUGINS = "whisperport.targets"


def evidence_file(target: Target) -> Path:
    """Return the path of a target's evidence: `evidence.json` in the folder of its module."""
    folder = type(target).__module__.removeprefix(f"{PLUGINS}.").split(".")[:-1]
    return Path(str(files(PLUGINS))).joinpath(*folder, "evidence.json")


def project_evidence(target: str) -> tuple[Evidence, ...]:
    """Return the evidence about the embedded model's programs on a target; empty: there is none.

    Raises:
        UsageError: the target is unknown.
    """
    return _read(evidence_file(get_target(target))).get(target, ())


@cache
def _read(file: Path) -> Mapping[str, tuple[Evidence, ...]]:
    if not file.is_file():
        return {}
    return {
        name: tuple(from_json(Evidence, piece) for piece in pieces.elements())
        for name, pieces in strict_json.parse(file.read_bytes(), file.name).mapping().items()
    }


def project_status(target: str) -> Status:
    """Return the status of a target in this project; without evidence, the weakest one."""
    return status_of(project_evidence(target))


def status_words(target: str) -> str:
    """Return the status in words, with a note if the target was emulated."""
    emulated = any(piece.kind == "emulated" for piece in project_evidence(target))
    return project_status(target) + ("; emulated on the CPU" if emulated else "")


def evidence_rows(target: str) -> list[tuple[str, str, str, str]]:
    """Return a table row for each piece of evidence about a target: kind, versions, date, processor."""
    return [
        (
            _WORDS[piece.kind],
            ", ".join(f"{name} {version}" for name, version in piece.runtime.items()),
            piece.date,
            f"{piece.machine.get('cpu', 'unknown')}, {piece.machine.get('architecture', 'unknown')}",
        )
        for piece in project_evidence(target)
    ]


_WORDS: Mapping[Kind, str] = {
    "partitioned": "accepted by the vendor's partitioner",
    "compiled": "compiled",
    "emulated": "emulated on the CPU",
    "simulated": "simulated by the vendor's simulator",
    "run": "run",
}


def by_target(manifest: Manifest) -> dict[str, tuple[Evidence, ...]]:
    """Merge the evidence in a bundle's manifest: target -> one piece of each kind and runtime."""
    groups: dict[str, dict[tuple[object, ...], list[Evidence]]] = {}
    for entry in manifest.programs:
        pieces = groups.setdefault(entry.target, {})
        for piece in manifest.evidence(entry.spec.name):
            pieces.setdefault((piece.kind, *sorted(piece.runtime.items())), []).append(piece)
    return {
        target: tuple(_joined(evidence) for evidence in pieces.values())
        for target, pieces in groups.items()
    }


def to_bytes(evidence: Mapping[str, Iterable[Evidence]]) -> bytes:
    """Return the contents of an evidence file: target -> its evidence, as JSON with one event per line."""
    targets = []
    for target, pieces in evidence.items():
        lines = [json.dumps(to_json(piece), ensure_ascii=False) for piece in pieces]
        targets.append(f"{json.dumps(target)}: [\n" + ",\n".join(lines) + "\n]")
    return ("{\n" + ",\n".join(targets) + "\n}\n").encode("utf-8")


def _joined(evidence: list[Evidence]) -> Evidence:
    """Merge evidence of one kind and one runtime about several programs, and count its comparisons."""
    checks = [check for piece in evidence for check in piece.checks]
    unique = [check for place, check in enumerate(checks) if check not in checks[:place]]
    levels = dict.fromkeys(check.level for check in unique)
    machine = evidence[0].machine
    return Evidence(
        kind=evidence[0].kind,
        files={path: sha256 for piece in evidence for path, sha256 in piece.files.items()},
        runtime=evidence[0].runtime,
        machine={name: machine[name] for name in ("cpu", "architecture") if name in machine},
        date=evidence[0].date,
        checks=tuple(_counted([c for c in unique if c.level == level]) for level in levels),
    )


def _counted(checks: list[Check]) -> Check:
    """Return one check in place of all of a level. It fails for the first reason, if one of them failed."""
    return Check(
        level=checks[0].level,
        program=ALL_PROGRAMS,
        what="all comparisons",
        value={"passed": sum(check.passed for check in checks), "compared": len(checks)},
        rule="every comparison passes",
        passed=all(check.passed for check in checks),
        reason=next((check.reason for check in checks if not check.passed), ""),
    )
