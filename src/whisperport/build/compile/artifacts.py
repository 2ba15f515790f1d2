"""Put compiled files into a bundle, which is then replaced completely or not at all."""

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from whisperport.errors import BundleError
from whisperport.program.bundle import Bundle, Manifest, ProgramEntry
from whisperport.program.bundle.folder import file_sha256
from whisperport.program.bundle.listed_files import DAMAGED
from whisperport.program.bundle.writing import writing_bundle
from whisperport.program.checks import Check
from whisperport.program.evidence import Evidence, Kind, with_added
from whisperport.verification.evidence import today


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A compiled file to be put into a bundle.

    Attributes:
        path: the compiled file.
        suffix: suffix of the file in the bundle, such as ".bin".
        facts: JSON for the manifest.
        compiler: name of the compiler; empty if it is not known.
        machine: description of the machine that ran the compiler, as JSON; empty if it is not known.
        beside: further files that belong to the compiled file.
        emulation: the kind of evidence that `checks` are.
        checks: comparisons of what the vendor's emulator computed.
        logs: logs of the compiler's stages.
    """

    path: Path
    suffix: str
    facts: Mapping[str, Any]
    compiler: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[Path, ...] = ()
    emulation: Literal["emulated", "simulated"] = "emulated"
    checks: tuple[Check, ...] = ()
    logs: tuple[Path, ...] = ()


def put_artifacts(
    opened: Bundle, artifacts: Mapping[str, Artifact], *, out: Path | None = None
) -> Bundle:
    """Write a copy of a bundle with compiled files, completely or not at all.

    The compiled file becomes the first file of its program. Evidence about replaced files is removed.

    Args:
        opened: the bundle to copy.
        artifacts: program -> its compiled file.
        out: folder of the new bundle. Default: None, the new bundle replaces the old one.

    Raises:
        BundleError: a file has changed since the bundle was opened, or the new one cannot be written.
    """
    manifest = opened.manifest
    with writing_bundle(out or Path(os.path.realpath(opened.folder))) as writer:
        opened.check_unchanged()  # no other process can replace it from here on
        for relative, listed in manifest.files.items():
            copy = writer.folder / relative
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(opened.path(relative), copy)
            if file_sha256(copy) != listed.sha256:  # the new manifest would list it as it is now
                raise _changed(relative, opened.folder)
        entries = []
        for entry in manifest.programs:
            artifact = artifacts.get(entry.spec.name)
            if artifact is not None:
                entry = put_artifact(entry, artifact, writer.folder, entry.target)
            entries.append(entry)
        new_manifest = writer.preview(replace(manifest, programs=tuple(entries))).manifest
        return writer.commit(_without_stale_evidence(new_manifest))


def _changed(relative: str, folder: Path) -> BundleError:
    return BundleError(
        f"{relative} in bundle {folder} has changed since the command began",
        why="its SHA-256 differs from the one in the manifest; the bundle was not replaced",
        hint=DAMAGED,
    )


def put_artifact(
    entry: ProgramEntry, artifact: Artifact, folder: Path, inside: str = "."
) -> ProgramEntry:
    """Copy a compiled file to a folder that has the lowered files of its program.

    Args:
        entry: the program; its files are relative to `folder`.
        artifact: the compiled file.
        folder: the folder.
        inside: its subfolder for the compiled file.

    Returns:
        The entry of the program, with the compiled file first, and with evidence.
    """
    stem = Path(inside, entry.spec.name).as_posix()
    beside = {f"{stem}{path.suffix}": path for path in artifact.beside}
    sources = {f"{stem}{artifact.suffix}": artifact.path, **beside}
    for file, source in sources.items():
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(source, folder / file)
    compiled_files = tuple(sources)
    evidence = entry.evidence
    if artifact.compiler:
        evidence = with_added(evidence, _evidence("compiled", artifact, folder, compiled_files))
    if artifact.checks:
        # Emulation runs the files that the compiled file was made from, not the compiled file.
        lowered = [file for file in entry.files if not file.endswith(artifact.suffix)]
        ran = (
            compiled_files
            if artifact.emulation == "simulated"
            else dict.fromkeys((*lowered, *beside))
        )
        evidence = with_added(evidence, _evidence(artifact.emulation, artifact, folder, ran))
    return replace(
        entry,
        files=tuple(dict.fromkeys((compiled_files[0], *entry.files, *beside))),
        facts=entry.facts.compiled(artifact.facts),
        evidence=evidence,
    )


def _evidence(kind: Kind, artifact: Artifact, folder: Path, files: Iterable[str]) -> Evidence:
    return Evidence(
        kind=kind,
        files={file: file_sha256(folder / file) for file in files},
        runtime={artifact.compiler: str(artifact.facts.get("compiler", ""))},
        machine=artifact.machine,
        date=today(),
        checks=() if kind == "compiled" else artifact.checks,
    )


def _without_stale_evidence(manifest: Manifest) -> Manifest:
    programs = (
        replace(entry, evidence=manifest.evidence(entry.spec.name)) for entry in manifest.programs
    )
    return replace(manifest, programs=tuple(programs))
