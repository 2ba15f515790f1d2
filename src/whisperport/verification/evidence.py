"""What a report is evidence of: for each program, the files that were run, and how."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from whisperport.bundle import Manifest, ProgramEntry
from whisperport.evidence import Evidence, with_added
from whisperport.targets import Target, get_target
from whisperport.verification.machine import versions
from whisperport.verification.precision import is_emulated
from whisperport.verification.report import Report


def with_evidence(manifest: Manifest, report: Report, options: Mapping[str, str]) -> Manifest:
    """The manifest, with what the report says about each program added to its evidence.

    Evidence of the same kind, from the same machine with the same runtime, is replaced.

    Args:
        manifest: of the bundle that was verified, with the hashes of its files.
        options: the run options that it was verified with, "TARGET.NAME" -> value.
    """
    programs = []
    for entry in manifest.programs:
        new = _evidence(manifest, entry, report, options)
        programs.append(replace(entry, evidence=with_added(entry.evidence, new)))
    return replace(manifest, programs=tuple(programs))


def today() -> str:
    """The date of what is done now, in UTC."""
    return datetime.now(UTC).date().isoformat()


def _evidence(
    manifest: Manifest, entry: ProgramEntry, report: Report, options: Mapping[str, str]
) -> Evidence:
    target, emulated = get_target(entry.target), is_emulated(entry.target, options)
    runtime = target.spec.emulation_runtime if emulated else target.spec.runtime
    files = _lowered(entry, target) if emulated else entry.files
    return Evidence(
        kind="emulated" if emulated else "run",
        files={path: manifest.files[path].sha256 for path in files},
        runtime=versions([runtime] if runtime else []),
        machine=report.machine,
        date=today(),
        checks=tuple(check for check in report.checks if check.involves(entry.spec.name)),
    )


def _lowered(entry: ProgramEntry, target: Target) -> tuple[str, ...]:
    """The files that `lower` wrote, which emulation runs; not those of the vendor's compiler."""
    makers = (target.compiler, target.importer)
    compiled = tuple(maker.suffix for maker in makers if maker is not None)
    return tuple(file for file in entry.files if not file.endswith(compiled))
