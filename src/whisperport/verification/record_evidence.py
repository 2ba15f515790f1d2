"""Verify a bundle, and keep the result in the bundle as evidence about its files."""

import os

from whisperport.bundle import Bundle
from whisperport.bundle.manifest_update import rewrite_manifest
from whisperport.bundle.origin import is_trusted, record_own
from whisperport.progress import Progress
from whisperport.targets import RunOptions
from whisperport.verification.bundle_check import verify
from whisperport.verification.evidence import with_evidence
from whisperport.verification.report import Report


def verify_and_record(
    bundle: Bundle | str | os.PathLike[str],
    *,
    run: RunOptions | None = None,
    progress: Progress = lambda _: None,
) -> Report:
    """Verify a bundle on this machine, and add what was found to the evidence in its manifest.

    A report that failed is recorded too: the last run of a program decides whether it is verified.

    Raises:
        BundleError: the bundle is damaged, is being written, or cannot be written to.
        MissingPackageError: a target's runtime is not installed.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    report = verify(opened, run=run, progress=progress)
    progress("writing the manifest")
    trusted = is_trusted(opened)  # by the checksum of the old manifest
    options = run.options if run else {}
    made = rewrite_manifest(opened, with_evidence(opened.manifest, report, options))
    if trusted:
        record_own(made.manifest)
    return report
