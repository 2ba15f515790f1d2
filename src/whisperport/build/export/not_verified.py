"""The error of a bundle that failed its verification, with the words that its precision costs."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from whisperport.errors import VerificationError, WhisperportError
from whisperport.program.bundle import Bundle
from whisperport.system.progress import begin_stage
from whisperport.targets import RunOptions
from whisperport.verification import Report
from whisperport.verification.bundle_check import check_words
from whisperport.verification.precision import coarsest, precisions
from whisperport.verification.reference import Reference
from whisperport.verification.report import rejection
from whisperport.verification.tolerances import BY_WORDS

log = logging.getLogger(__name__)


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
