"""Verify a bundle, and record the result in its manifest as evidence about its files."""

import os
from collections.abc import Sequence

from whisperport.program.bundle import Bundle
from whisperport.program.bundle.origin import is_trusted, record_own
from whisperport.program.bundle.writing import check_rewritable, rewrite_manifest
from whisperport.system.progress import Progress
from whisperport.targets import RunOptions
from whisperport.verification.bundle_check import verify
from whisperport.verification.evidence import with_evidence
from whisperport.verification.report import Report


def verify_and_record(
    bundle: Bundle | str | os.PathLike[str],
    *,
    run: RunOptions | None = None,
    clips: Sequence[str] = (),
    progress: Progress = lambda _: None,
) -> Report:
    """Verify a bundle on this machine, and add the result to the evidence in its manifest.

    Failures are recorded too. The most recent run of a program decides whether it counts as verified.

    Args:
        bundle: the bundle or its folder.
        run: threads and target options; None: the defaults.
        clips: names of the reference's clips to run; empty: all.
        progress: called with a line for each stage.

    Raises:
        BundleError: the bundle is damaged, another process writes it, or it is not writable.
        UsageError: the reference has no clip of such a name.
        MissingPackageError: a target's runtime is not installed.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    check_rewritable(opened)
    report = verify(opened, run=run, clips=clips, progress=progress)
    progress("writing the manifest")
    trusted = is_trusted(opened)  # determined before the manifest changes
    options = run.options if run else {}
    updated = rewrite_manifest(opened, with_evidence(opened.manifest, report, options))
    if trusted:
        record_own(updated.manifest)
    return report
