"""The precision "auto" of the encoder: the fewest bits whose words are as good as float32's.

    float32 ─► precisions, the least exact first ─► export, verify ─► bound of the increase in WER ─► choose

The judge is the words: on the clips of the verification, the one-sided 95% bound of how much the word error
rate increases over float32's must be within the limit. A precision is chosen only if the bundle is smaller,
or its encoder faster, than in float32. Every attempt is told, with the number that stopped it. Attempts are
kept beside the result until it is complete: the same call continues a search that was interrupted.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.export.drafting import loaded
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.export.exported import POINTS, Attempt, Candidate, Exported
from whisperport.build.search.attempts import KeptAttempts, dependencies, first_accepted
from whisperport.build.search.timing import race
from whisperport.errors import UsageError
from whisperport.program.bundle import MANIFEST, Bundle, Manifest
from whisperport.program.bundle.writing import check_writable, writing_bundle
from whisperport.program.checks import Check
from whisperport.program.json_records import to_json
from whisperport.program.program_kind import ENCODER
from whisperport.system.progress import begin_stage, prefixed
from whisperport.targets import RunOptions, get_target
from whisperport.verification import Report, text_errors
from whisperport.verification.clips import shipped_clips
from whisperport.verification.tolerances import GATES

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from whisperport.model.checkpoint import Checkpoint

FLOAT = "fp32"


def export_in_fewest_bits(
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    target: str,
    out: Path,
    options: ExportOptions,
    max_increase: float,
) -> Exported:
    """Export with the encoder in the least exact precision within the limit; see `export_best`."""
    precisions = _precisions(target)
    check_writable(out)
    if options.clips is None and options.verify_with is None:  # the words are known before the work
        words = sum(text_errors(clip.text, clip.text).length for clip in shipped_clips())
        _check_count(words, max_increase)
    checkpoint = loaded(checkpoint, options.adapter)
    with writing_bundle(out) as writer:
        kept = KeptAttempts(out, dependencies(to_json(checkpoint.source), target, options))

        def in_precision(name: str) -> Bundle:
            chosen = replace(options, precisions={**options.precisions, ENCODER: name})
            with prefixed(f"encoder in {name}"):
                return kept.bundle(name, partial(export, checkpoint, target, options=chosen))

        exact = in_precision(FLOAT)
        value = _words(exact).value
        _check_count(int(value.get("words", value.get("characters", 0))), max_increase)
        chosen, attempts = first_accepted(
            lambda _: [*precisions, FLOAT],
            in_precision,
            lambda name, bundle: _judged(name, bundle, exact, max_increase, options.run),
        )
        begin_stage("copying the bundle to its folder")
        ignored_files = shutil.ignore_patterns(MANIFEST)
        shutil.copytree(chosen.folder, writer.folder, ignore=ignored_files, dirs_exist_ok=True)
        bundle = writer.commit(_with_notes(chosen, attempts))
        kept.delete()
        return Exported.of(bundle, attempts)


def _precisions(target: str) -> list[str]:
    """Return the precisions below float32 that a target computes on this machine, the least exact first.

    Raises:
        UsageError: there is none.
    """
    chosen_target = get_target(target)
    computed = [
        precision
        for precision in chosen_target.spec.runs.precisions
        if precision != FLOAT
        and (
            not chosen_target.spec.runs.emulation
            or chosen_target.emulated_precision(precision) == precision
        )
        and chosen_target.unsupported(ENCODER, precision) is None
    ]
    if not computed:
        raise UsageError(
            f"`{target}` has no precision to search on this machine",
            why=f"its encoder runs here in {FLOAT} only, and words of another precision cannot be counted",
            hint="name a precision, such as `--precision encoder=fp16`, and `compile` the bundle",
        )
    return sorted(computed, key=lambda precision: GATES[precision].min_sqnr_db)


def _words(bundle: Bundle) -> Check:
    """Return the comparison of a bundle's words with float32's."""
    report = Report.from_json(bundle.manifest.verification)
    return next(check for check in report.checks if "increase_at_most" in check.value)


def _check_count(count: int, limit: float) -> None:
    """Check that so many words can show an increase within the limit, if none of them is lost.

    Raises:
        UsageError: they cannot.
    """
    if limit * count < 3:  # the rule of three, as in `increase_bounds`
        raise UsageError(
            f"{count} words cannot show that the word error rate increases by at most "
            f"{POINTS * limit:g} points",
            why=f"if none of them is lost, an increase of {POINTS * 3 / max(count, 1):.1f} points is still "
            "possible",
            hint=f"`--verify-with DIR` with audio of at least {round(3 / limit)} words, or a larger "
            "`--max-wer-increase`",
        )


def _judged(
    precision: str, bundle: Bundle, exact: Bundle, limit: float, run: RunOptions
) -> Attempt:
    """Return a verified attempt, with the reason if it is not to be chosen; float32, the last, is."""
    if precision == FLOAT:
        return Attempt(name=FLOAT, size=_size(exact), encoder_ms=_times([exact], run)[0])
    bound = _words(bundle).value["increase_at_most"]
    exact_ms, ms = _times([exact, bundle], run)
    size = _size(bundle)
    rejected = ""
    if bound > limit:
        rejected = (
            f"the word error rate may be {POINTS * bound:.2f} points higher, with 95%; the limit is "
            f"{POINTS * limit:g}"
        )
    elif size >= _size(exact) and ms >= exact_ms:
        rejected = (
            f"neither smaller nor faster than {FLOAT}: {size / 1e6:.1f} and {_size(exact) / 1e6:.1f} MB, "
            f"{ms:.0f} and {exact_ms:.0f} ms"
        )
    return Attempt(name=precision, bound=bound, size=size, encoder_ms=ms, rejected=rejected)


def _size(bundle: Bundle) -> int:
    """Return the bytes of all program files."""
    files = {name for entry in bundle.manifest.programs for name in entry.files}
    return sum((bundle.folder / name).stat().st_size for name in files)


def _times(bundles: Sequence[Bundle], run: RunOptions) -> list[float]:
    """Return the median time of each bundle's encoder, in milliseconds; they run in turn."""
    rivals = {}
    for bundle in bundles:
        entry = bundle.manifest.program(ENCODER)
        target = get_target(entry.target)
        runners = target.load(bundle.folder, [entry], run.with_emulation([target]))
        rivals[Candidate(entry.target, entry.precision)] = [runners[ENCODER]]
    return [timed.ms for timed in race(rivals)]


def _with_notes(bundle: Bundle, attempts: Sequence[Attempt]) -> Manifest:
    """Return a bundle's manifest with the attempts among the notes of its encoder."""
    programs = tuple(
        replace(entry, facts=replace(entry.facts, notes=(*entry.facts.notes, *map(str, attempts))))
        if entry.spec.name == ENCODER
        else entry
        for entry in bundle.manifest.programs
    )
    return replace(bundle.manifest, programs=programs)
