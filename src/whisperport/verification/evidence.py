"""Convert a report to evidence about each program, which files were run and how, and record it."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from whisperport.program.bundle import Bundle, Manifest, ProgramEntry
from whisperport.program.bundle.origin import is_trusted, record_own
from whisperport.program.bundle.writing import rewrite_manifest
from whisperport.program.evidence import Evidence, Kind, with_added
from whisperport.targets import RunOptions, Target, get_target
from whisperport.targets.base import RunMode
from whisperport.verification.machine import versions
from whisperport.verification.report import Report

EVIDENCE: Mapping[RunMode, Kind] = {
    "device": "run",
    "simulator": "simulated",
    "quantized": "emulated",
    "emulation": "emulated",
}


def with_evidence(manifest: Manifest, report: Report, options: Mapping[str, str]) -> Manifest:
    """Return the manifest with the results of a report added to the evidence of each program.

    New evidence replaces evidence of the same kind, machine and runtime.

    Args:
        manifest: manifest of the verified bundle.
        report: result of the verification.
        options: run options of the verification, "TARGET.NAME" -> value.
    """
    programs = []
    for entry in manifest.programs:
        new = _evidence(manifest, entry, report, options)
        programs.append(replace(entry, evidence=with_added(entry.evidence, new)))
    return replace(manifest, programs=tuple(programs))


def today() -> str:
    """Return today's date in UTC, such as "2026-11-22"."""
    return datetime.now(UTC).date().isoformat()


def _evidence(
    manifest: Manifest, entry: ProgramEntry, report: Report, options: Mapping[str, str]
) -> Evidence:
    target = get_target(entry.target)
    mode = target.run_mode(RunOptions(options=options))
    kind = EVIDENCE[mode]
    files = _not_compiled(entry, target) if kind == "emulated" else entry.files
    package = (
        target.spec.software.emulation_runtime
        if mode == "emulation"
        else target.spec.software.runtime
    )
    runtime = versions([package] if package else [])
    if (
        mode == "quantized" and target.compiler is not None
    ):  # its emulator is not in this interpreter
        runtime = {target.compiler.title: entry.facts.compiler}
    return Evidence(
        kind=kind,
        files={path: manifest.files[path].sha256 for path in files},
        runtime=runtime,
        machine=report.machine,
        date=today(),
        checks=tuple(check for check in report.checks if check.involves(entry.spec.name)),
    )


def _not_compiled(entry: ProgramEntry, target: Target) -> tuple[str, ...]:
    """Return a program's files without the compiled one, which no emulation runs."""
    makers = (target.compiler, target.importer)
    compiled = tuple(maker.suffix for maker in makers if maker is not None)
    return tuple(file for file in entry.files if not file.endswith(compiled))


def record_evidence(bundle: Bundle, report: Report, run: RunOptions | None) -> None:
    """Add the result of a verification to the evidence in the bundle's manifest.

    Raises:
        BundleError: another process writes the bundle, or it is not writable.
    """
    trusted = is_trusted(bundle)  # determined before the manifest changes
    options = run.options if run else {}
    updated = rewrite_manifest(bundle, with_evidence(bundle.manifest, report, options))
    if trusted:
        record_own(updated.manifest)
