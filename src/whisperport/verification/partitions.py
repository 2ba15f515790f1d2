"""Ask vendors' partitioners about the programs of a bundle, and record their answers as evidence."""

import logging
from dataclasses import replace
from pathlib import Path

from whisperport.errors import WhisperportError
from whisperport.program.bundle import Manifest, ProgramEntry
from whisperport.program.checks import Check
from whisperport.program.evidence import Evidence, with_added
from whisperport.system.progress import begin_stage
from whisperport.targets import get_target
from whisperport.targets.partitioner import Partition
from whisperport.verification.evidence import today
from whisperport.verification.machine import machine

log = logging.getLogger(__name__)

SUFFIX = ".tflite"  # the format that partitioners read
RULE = "every operator is in the list of the vendor's partitioner"
SHOWN = 3  # names of declined operators in a reason


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
    file = next((file for file in entry.files if file.endswith(SUFFIX)), None)
    if partitioner is None or file is None:
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
