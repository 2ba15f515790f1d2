"""Put published artifacts into a bundle: a chip runs them, and a checkpoint gives the programs around them.

Those are exported and verified as always, with emulation in place of the artifacts' programs. What is
checked of an artifact is what it says of itself: chip, shapes, checksum. It is not run. No vendor is known
here: a target's `Importer` reads its files.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport import targets
from whisperport.bundle import Bundle, check_writable
from whisperport.bundle.staging import staging
from whisperport.checks import UNCACHED_DECODER
from whisperport.compiling import Artifact, put_artifacts
from whisperport.errors import BundleError, UsageError
from whisperport.exporting import ExportOptions, export
from whisperport.progress import Progress
from whisperport.targets import RunOptions, Target, get_target
from whisperport.targets.importer import Importer
from whisperport.targets.options import by_target, with_target
from whisperport.window import WindowOptions

if TYPE_CHECKING:  # boards have no torch
    from whisperport.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What is imported beside an encoder, and how the rest is exported."""

    target: str = ""  # empty: the one that the encoder's artifact was compiled for
    programs: Mapping[str, Path] = field(default_factory=dict)  # program -> its artifact
    options: Mapping[str, str] = field(default_factory=dict)  # "TARGET.NAME" -> value
    run: RunOptions = field(default_factory=RunOptions)


def import_artifact(
    artifact: str | os.PathLike[str],
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    out: str | os.PathLike[str],
    options: ImportOptions | None = None,
    *,
    progress: Progress = lambda _: None,
) -> Bundle:
    """A bundle around an encoder's artifact, which gives window and target; the checkpoint gives the rest.

    Args:
        artifact: a file that the vendor's compiler made of the checkpoint's encoder.

    Raises:
        BundleError: an artifact is damaged, for another chip, or of another checkpoint; or `out` cannot
            be written.
        UsageError: no such target, program or option.
        CheckpointError, LoweringError, VerificationError: see `export`.
    """
    options, out = options or ImportOptions(), Path(out)
    check_writable(out)
    target, importer = _importer(Path(artifact), options.target)
    artifacts = {"encoder": Path(artifact), **_others(options.programs, target, importer)}
    name = target.spec.name
    chosen = by_target(options.options, {name: importer.options})[name]
    from whisperport.checkpoint import load_checkpoint

    if isinstance(checkpoint, str | os.PathLike):
        progress(f"reading {checkpoint}")
        checkpoint = load_checkpoint(
            checkpoint if isinstance(checkpoint, str) else Path(checkpoint)
        )
    form = importer.form(artifacts, checkpoint.dims)
    importer.check_checkpoint(artifacts, checkpoint, chosen)
    exporting = ExportOptions(
        window=WindowOptions(seconds=form.window_s),
        uncached_decoder=UNCACHED_DECODER in artifacts,
        options=with_target(form.options, name),
        run=options.run,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with staging(out.with_name(f"{out.name}.import")) as folders:
        bundle = export(checkpoint, name, folders.partial / "bundle", exporting, progress=progress)
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
        progress("writing the bundle")
        return put_artifacts(bundle, imported, out=out)


def _importer(artifact: Path, name: str) -> tuple[Target, Importer]:
    """The target named, or the one whose importer says that the artifact was compiled for it."""
    if name:
        target = get_target(name)
        if target.importer is None:
            raise UsageError(
                f"`{name}` imports no artifacts",
                hint=f"targets that do: {', '.join(_importers()) or 'none'}",
            )
        return target, target.importer
    return _made_for(artifact)


def _made_for(artifact: Path) -> tuple[Target, Importer]:
    """The target that an artifact was compiled for.

    Raises:
        BundleError: none of those that import; why is said once where all of them say the same.
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
        f"{artifact.name} is for another chip than those known here",
        why="; ".join(distinct) or "no target says that the file was compiled for it",
        hint=f"targets that import: {', '.join(_importers()) or 'none'}; name one with `--target` to see "
        "what is wrong with the file",
    )


def _importers() -> dict[str, tuple[Target, Importer]]:
    return {
        one.spec.name: (one, one.importer) for one in targets.TARGETS if one.importer is not None
    }


def _others(programs: Mapping[str, Path], target: Target, importer: Importer) -> Mapping[str, Path]:
    known = sorted(importer.programs - {"encoder"})
    for program in programs:
        if program not in known:
            raise UsageError(
                f"`{target.spec.name}` imports no artifact of a program `{program}`",
                hint=f"besides the encoder: {', '.join(known) or 'none'}",
            )
    return programs
