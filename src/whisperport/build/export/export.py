"""Export a checkpoint as a bundle.

    place the programs ─► read the checkpoint ─► run it in torch ─► lower ─► quantize ─► verify ─► bundle

`drafting.py` has the stages that need torch.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.calibration import CalibrationOptions
from whisperport.build.export.drafting import Draft, drafting, run_further_clips
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.export.exported import Exported
from whisperport.build.export.placing import place_programs
from whisperport.build.export.quantizing import quantize_programs
from whisperport.errors import VerificationError, WhisperportError
from whisperport.program.bundle import SILENCE, Bundle, Manifest
from whisperport.program.bundle.origin import record_own
from whisperport.program.bundle.writing import BundleWriter, writing_bundle
from whisperport.program.dims import published_dims
from whisperport.system.progress import begin_stage
from whisperport.targets import RunOptions
from whisperport.targets.preflight import requires_torch
from whisperport.verification import Report
from whisperport.verification.bundle_check import check_words, verify
from whisperport.verification.evidence import with_evidence, with_partitions
from whisperport.verification.precision import coarsest, precisions
from whisperport.verification.recording import BundleSession
from whisperport.verification.reference import Reference
from whisperport.verification.report import rejection
from whisperport.verification.tolerances import BY_WORDS

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from whisperport.model.checkpoint import Checkpoint

log = logging.getLogger(__name__)


def export(
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    target: str,
    out: str | os.PathLike[str],
    options: ExportOptions | None = None,
) -> Exported:
    """Lower every program of a checkpoint, verify that the result still transcribes, and write a bundle.

    Args:
        checkpoint: a loaded checkpoint, or anything that `load_checkpoint` accepts.
        target: name of a target, as `whisperport targets` lists them. `options.placement` can name another
            target for single programs.
        out: folder of the bundle. A bundle that already exists there is replaced when the new one is
            complete.
        options: see `ExportOptions`. Default: None, all defaults.

    Returns:
        The bundle that was written, see `Exported`.

    Raises:
        UsageError: the target, a program or an option does not exist, or the checkpoint cannot have this
            window.
        CheckpointError: the checkpoint is missing, unknown, damaged, or has unexpected shapes.
        MissingPackageError: torch or an exporter is not installed.
        LoweringError: a compiler rejects a program, or the checkpoint is too large for the target.
        WhisperportError: the machine has too little memory or disk space.
        BundleError: `out` cannot be written.
        VerificationError: the bundle disagrees with its reference; nothing was written.
    """
    options, out = options or ExportOptions(), Path(out)
    with requires_torch("export"):
        import torch
    placed = place_programs(target, options)
    if isinstance(checkpoint, str | os.PathLike):
        options.window.check(published_dims(os.fspath(checkpoint)))
    if options.run.threads:
        torch.set_num_threads(options.run.threads)
    run = replace(options.run.with_emulation(placed.targets.values()), trust=True)  # no trial run
    with (
        writing_bundle(out) as writer,
        drafting(checkpoint, placed, options, writer.folder) as draft,
    ):
        session = BundleSession(writer.preview(draft.manifest), run)
        calibration = CalibrationOptions(source=options.calibration)
        programs = quantize_programs(session, placed, calibration)
        quantized = replace(draft, manifest=replace(draft.manifest, programs=programs))
        verified = _verified(quantized, run, options, writer, out)
        begin_stage("moving the bundle to its folder")
        bundle = writer.commit(verified)
    record_own(bundle.manifest)
    return Exported.of(bundle)


def _verified(
    draft: Draft,
    run: RunOptions,
    options: ExportOptions,
    writer: BundleWriter,
    out: Path,
) -> Manifest:
    """Verify the bundle; return its manifest with the report and the evidence."""
    bundle = writer.preview(draft.manifest)
    report = verify(bundle, run=run)
    if not report and not options.allow_unverified:
        further = partial(run_further_clips, draft.original) if draft.original else None
        raise not_verified(out, report, bundle, run, further)
    manifest = with_evidence(bundle.manifest, report, run.options)
    manifest = with_partitions(manifest, writer.folder)
    if report.short_windows is None:
        (writer.folder / SILENCE).unlink(missing_ok=True)
    return replace(manifest, verification=report.to_json(), short_windows=report.short_windows)


def not_verified(
    out: Path,
    report: Report,
    bundle: Bundle,
    run: RunOptions,
    further_reference: Callable[[], Reference] | None,
) -> VerificationError:
    """Return the error for a bundle whose report failed.

    A few clips may show no loss in a precision whose outputs are far off. More clips are transcribed then.

    Args:
        out: the folder that the bundle is not written to.
        bundle: the complete bundle, in a temporary folder.
        run: how it was verified.
        further_reference: makes a reference with further clips; None: there are none.
    """
    checks, reference = list(report.checks), Reference.from_arrays(bundle.reference())
    missing = report.failures()[sum(not check.passed for check in checks) :]
    words = [check for check in checks if "differ" in check.value]
    by_words = coarsest(precisions(bundle, run).values()) in BY_WORDS
    if (
        further_reference is not None
        and by_words
        and words
        and all(check.passed for check in words)
    ):
        begin_stage("the words show no loss: more clips")
        try:
            clips = (*reference.clips, *further_reference().clips)
            word_checks = check_words(bundle, replace(reference, clips=clips), run)
            checks = [check for check in checks if check.level != "words"] + word_checks
        except WhisperportError as error:  # the bundle is rejected anyway
            log.warning("the words of more clips are not known: %s", error)
    rejected = VerificationError(
        f"the bundle for {out} does not agree with its checkpoint, and was not written",
        why=rejection(checks, reference, bundle.manifest.programs, missing),
        hint="choose another precision with `--precision`, also for single programs; `--allow-unverified` "
        "writes it anyway, permanently marked as failed",
    )
    failed = (
        check.program for check in report.checks if check.level == "arrays" and not check.passed
    )
    rejected.programs = tuple(dict.fromkeys(failed))
    return rejected
