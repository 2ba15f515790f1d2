"""Record the result of a verification in the bundle's manifest, as evidence about its files."""

from whisperport.program.bundle import Bundle
from whisperport.program.bundle.origin import is_trusted, record_own
from whisperport.program.bundle.writing import rewrite_manifest
from whisperport.targets import RunOptions
from whisperport.verification.evidence import with_evidence
from whisperport.verification.report import Report


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
