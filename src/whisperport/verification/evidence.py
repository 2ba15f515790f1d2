"""Record evidence about each program: from a report of a verification, and from vendors' partitioners."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from whisperport.errors import WhisperportError
from whisperport.program.bundle import Bundle, Manifest, ProgramEntry
from whisperport.program.bundle.origin import is_trusted, record_own
from whisperport.program.bundle.writing import rewrite_manifest
from whisperport.program.checks import Check
from whisperport.program.evidence import Evidence, Kind, with_added
from whisperport.system.progress import begin_stage
from whisperport.targets import RunOptions, Target, get_target
from whisperport.targets.base import RunMode
from whisperport.targets.partitioner import Partition
from whisperport.verification.machine import machine, versions
from whisperport.verification.report import Report

EVIDENCE: Mapping[RunMode, Kind] = {
    "device": "run",
    "simulator": "simulated",
    "quantized": "emulated",
    "emulation": "emulated",
}
log = logging.getLogger(__name__)

RULE = "every operator is in the list of the vendor's partitioner"
SHOWN = 3  # names of declined operators in a reason


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


def with_partitions(manifest: Manifest, folder: Path) -> Manifest:
    """Return the manifest with the answer of each vendor's partitioner in the evidence of its programs.

    Programs whose target has no partitioner, or one that cannot be asked on this machine, are unchanged.

    Args:
        manifest: with the hashes of all files.
        folder: folder of the bundle.
    """
    programs = tuple(_with_partition(manifest, entry, folder) for entry in manifest.programs)
    return replace(manifest, programs=programs)


def _with_partition(manifest: Manifest, entry: ProgramEntry, folder: Path) -> ProgramEntry:
    partitioner = get_target(entry.target).partitioner
    if partitioner is None or not partitioner.suffix:
        return entry
    file = next((file for file in entry.files if file.endswith(partitioner.suffix)), None)
    if file is None:
        return entry
    if reason := partitioner.unavailable():
        begin_stage(f"{entry.spec.name}: not asking {partitioner.title}: {reason}")
        return entry
    begin_stage(f"{entry.spec.name}: asking {partitioner.title}")
    try:
        partition = partitioner.partition(folder / file)
    except WhisperportError as error:
        log.warning("%s: %s: %s", entry.spec.name, error.what, error.why)
        return entry
    evidence = Evidence(
        kind="partitioned",
        files={file: manifest.files[file].sha256},
        runtime=partition.runtime,
        machine=machine(),
        date=today(),
        checks=(partition_check(entry.spec.name, partition),),
    )
    return replace(entry, evidence=with_added(entry.evidence, evidence))


def partition_check(program: str, partition: Partition) -> Check:
    """Return the answer of a partitioner as a check, which passes if every operator was accepted."""
    return Check(
        level="operators",
        program=program,
        what="operators",
        value={"operators": partition.total, "accepted": partition.accepted},
        rule=RULE,
        passed=bool(partition),
        reason="" if partition else _reason(partition),
    )


def _reason(partition: Partition) -> str:
    if not partition.total:
        return "the file has no operators"
    names = list(dict.fromkeys(declined.operator for declined in partition.declined))
    ellipsis = ", …" if len(names) > SHOWN else ""
    return (
        f"{len(partition.declined)} of {partition.total} operators were declined: "
        f"{', '.join(names[:SHOWN])}{ellipsis}"
    )
