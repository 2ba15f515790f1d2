"""Convert a manifest of format version 1 to version 2.

Version 1 stored a status for each program, one precision for all programs, and one `verified` for the
bundle. They become evidence: a report that passed becomes evidence about the files that were compared.
Bundles of version 1 were written before a vendor's compiled file was run, so the report is no evidence
about such a file.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whisperport.bundle.evidence_json import check_to_json, read_check
from whisperport.bundle.strict_json import Field
from whisperport.checks import Check
from whisperport.program_kind import UNCACHED_DECODER

PROGRAM_NAMES = {"decode_full": UNCACHED_DECODER}  # name of a program in version 1 -> in version 2
WINDOW_MEMBERS = {"sound": "audio_positions", "heard": "context_positions"}  # members of `window`
STATUSES = ("run here", "compiled here", "checked against contract")


def upgraded(top: Field) -> Field:
    """Convert the JSON of a version 1 manifest to that of version 2.

    Raises:
        BundleError: a member that this function reads is missing or wrong.
    """
    m = top.mapping()
    for name in ("programs", "precision", "verification", "verified", "machine", "files"):
        if name not in m:
            top.reject(f"has no `{name}`")
    report = _Report(m["verification"], m["verified"].boolean())
    hashes = {path: entry.mapping() for path, entry in m["files"].mapping().items()}
    sha256 = {path: entry["sha256"].value for path, entry in hashes.items() if "sha256" in entry}
    programs = [
        _program(entry, m["precision"].text(), report, sha256) for entry in m["programs"].elements()
    ]
    converted = {n: v for n, v in top.value.items() if n not in ("precision", "verified")}
    converted |= {"format_version": 2, "programs": programs, "verification": report.verification}
    if isinstance(converted.get("window"), Mapping):
        converted["window"] = {WINDOW_MEMBERS.get(n, n): v for n, v in converted["window"].items()}
    return Field(converted, "", top.document)


class _Report:
    """The verification report of a bundle of version 1, which becomes evidence of version 2."""

    def __init__(self, report: Field, verified: bool) -> None:
        found = report.mapping()
        # A bundle that was not verified is marked as failed permanently.
        self.verification = report.json_object() | ({} if verified else {"passed": False})
        self.checks: list[Check] = []
        if verified and "checks" in found:
            self.checks = [_check(check) for check in found["checks"].elements()]
        self.runtime = found["versions"].json_object() if "versions" in found else {}
        self.machine = found["machine"].json_object() if "machine" in found else {}

    def evidence(self, kind: str, program: str, files: Mapping[str, Any]) -> list[dict[str, Any]]:
        checks = [check_to_json(check) for check in self.checks if check.involves(program)]
        if not checks or not files:
            return []
        facts = {"runtime": self.runtime, "machine": self.machine, "date": "", "checks": checks}
        return [{"kind": kind, "files": files, **facts}]


def _check(check: Field) -> Check:
    read = read_check(check)
    return replace(read, program=PROGRAM_NAMES.get(read.program, read.program))


def _program(
    entry: Field, precision: str, report: _Report, sha256: Mapping[str, Any]
) -> dict[str, Any]:
    m = entry.members(["spec", "target", "method", "files", "status", "delegation"])
    files = [path.text() for path in m["files"].elements()]
    status = m["status"].one_of(STATUSES)
    facts = m["delegation"].json_object()
    hashes = {path: sha256[path] for path in files if path in sha256}
    artifact = {p: h for p, h in hashes.items() if p == files[0]} if files else {}
    spec = m["spec"].json_object()
    name = PROGRAM_NAMES.get(str(spec.get("name", "")), str(spec.get("name", "")))
    evidence = []
    if status == "run here":
        evidence += report.evidence("run", name, hashes)
    else:
        compiled_by_vendor = status == "compiled here" or "imported" in facts
        emulated = {p: h for p, h in hashes.items() if not (compiled_by_vendor and p in artifact)}
        evidence += report.evidence("emulated", name, emulated)
    if status == "compiled here" and artifact:
        compiler = {"compiler": facts["compiler"]} if "compiler" in facts else {}
        done = {"runtime": compiler, "machine": {}, "date": "", "checks": []}
        evidence.append({"kind": "compiled", "files": artifact, **done})
    return {
        "spec": {**spec, "name": name},
        "placement": {"target": m["target"].value, "precision": precision, "options": {}},
        "method": m["method"].value,
        "files": files,
        "delegation": facts,
        "evidence": evidence,
    }
