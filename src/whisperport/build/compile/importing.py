"""Import compiled files that a vendor published; the other programs are exported from a checkpoint.

The other programs are exported and verified as usual; emulation replaces the imported programs. An imported
file is checked by the facts that it states about itself: chip, shapes, checksum. It is not run. This module
knows no vendor: a target's `Importer` reads the files.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from whisperport import targets
from whisperport.build.compile.artifacts import Artifact, put_artifacts
from whisperport.build.export.drafting import loaded
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.errors import BundleError, UsageError
from whisperport.program.bundle import Bundle
from whisperport.program.bundle.staging import staging
from whisperport.program.bundle.writing import check_writable
from whisperport.program.program_kind import ENCODER, UNCACHED_DECODER
from whisperport.program.window import WindowOptions
from whisperport.system.option import Option
from whisperport.system.progress import begin_stage
from whisperport.targets import RunOptions, Target, get_target
from whisperport.targets.importer import Importer
from whisperport.targets.target_options import by_target, with_target

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from whisperport.model.checkpoint import Checkpoint


def _importers() -> dict[str, tuple[Target, Importer]]:
    return {
        target.spec.name: (target, target.importer)
        for target in targets.TARGETS
        if target.importer is not None
    }


def _files() -> list[str]:
    """Return every target that imports, with the suffix of its files, for a help text."""
    return [f"{name} ({importer.suffix} files)" for name, (_, importer) in _importers().items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Options of `import_artifact`.

    Args:
        options: import options of the target, "TARGET.NAME" -> value. Default: none.
        run: how the bundle's programs are run for verification.
    """

    target: Annotated[
        str,
        Option(
            f"Target that runs FILE: {', '.join(_files())}",
            metavar="NAME",
            flag="--target -t",
            default="the target that FILE was compiled for",
        ),
    ] = ""
    programs: Annotated[
        Mapping[str, Path],
        Option(
            "Compiled file of another program that the vendor published: uncached_decoder=FILE",
            metavar="PROGRAM=FILE",
            flag="--program",
        ),
    ] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    run: RunOptions = field(default_factory=RunOptions)


def import_artifact(
    artifact: str | os.PathLike[str],
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    out: str | os.PathLike[str],
    options: ImportOptions | None = None,
) -> Bundle:
    """Write a bundle with a compiled encoder from a vendor; export the other programs from a checkpoint.

    The window and the target are those of the compiled encoder.

    Args:
        artifact: file that the vendor's compiler made from the checkpoint's encoder.
        checkpoint: a loaded checkpoint, or anything that `load_checkpoint` accepts.
        out: folder of the bundle.
        options: see `ImportOptions`. Default: None, all defaults.

    Returns:
        The bundle that was written.

    Raises:
        BundleError: a compiled file is damaged, for another chip, or made from another checkpoint; or `out`
            cannot be written.
        UsageError: the target, a program or an option does not exist.
        CheckpointError, LoweringError, VerificationError: see `export`.
    """
    options, out = options or ImportOptions(), Path(out)
    check_writable(out)
    target, importer = _importer(Path(artifact), options.target)
    artifacts = {ENCODER: Path(artifact), **_other_artifacts(options.programs, target, importer)}
    name = target.spec.name
    chosen = by_target(options.options, {name: importer.options})[name]
    checkpoint = loaded(checkpoint)
    form = importer.form(artifacts, checkpoint.dims)
    importer.check_checkpoint(artifacts, checkpoint, chosen)
    exporting = ExportOptions(
        window=WindowOptions(seconds=form.window_s),
        uncached_decoder=UNCACHED_DECODER in artifacts,
        options=with_target(form.options, name),
        run=options.run,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with staging(prepared_at(out)) as folders:
        bundle = export(checkpoint, name, folders.partial / "bundle", exporting)
        imported = {
            program: Artifact(
                path=path,
                suffix=importer.suffix,
                facts={
                    **importer.check(path, bundle.manifest.program(program).spec),
                    "imported": path.name,
                },
            )
            for program, path in artifacts.items()
        }
        begin_stage("writing the bundle")
        return put_artifacts(bundle, imported, out=out)


def prepared_at(out: Path) -> Path:
    """Return the path of the bundle before the compiled files are in it; it is hidden beside this path."""
    return out.with_name(f"{out.name}.import")


def _importer(artifact: Path, name: str) -> tuple[Target, Importer]:
    """Return the named target, or else the target that the file was compiled for."""
    if name:
        target = get_target(name)
        if target.importer is None:
            raise UsageError(
                f"the target `{name}` cannot import compiled files",
                hint=f"targets that can: {', '.join(_importers()) or 'none'}",
            )
        return target, target.importer
    return _target_compiled_for(artifact)


def _target_compiled_for(artifact: Path) -> tuple[Target, Importer]:
    """Return the target that a file was compiled for.

    Raises:
        BundleError: the file was compiled for none of the targets that can import. If all of them report
            the same error, that error is raised.
    """
    faults: dict[str, BundleError] = {}
    for name, (target, importer) in _importers().items():
        try:
            if importer.is_for(artifact):
                return target, importer
        except BundleError as error:
            faults[name] = error
    distinct = {error.what: error for error in faults.values()}
    if len(distinct) == 1 and len(faults) == len(_importers()):
        raise next(iter(distinct.values()))
    raise BundleError(
        f"{artifact.name} was compiled for a chip that is not known here",
        why="; ".join(distinct) or "no target recognizes the file",
        hint=f"targets that import: {', '.join(_importers()) or 'none'}; name one with `--target` to see "
        "what is wrong with the file",
    )


def _other_artifacts(
    programs: Mapping[str, Path], target: Target, importer: Importer
) -> Mapping[str, Path]:
    known = sorted(importer.programs - {ENCODER})
    for program in programs:
        if program not in known:
            raise UsageError(
                f"the target `{target.spec.name}` cannot import a program `{program}`",
                hint=f"programs that it can import besides the encoder: {', '.join(known) or 'none'}",
            )
    return programs
