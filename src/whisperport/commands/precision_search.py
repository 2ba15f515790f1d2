"""Export a checkpoint with its encoder in the fewest bits whose words are as good as float32's.

    float32 ─► precisions, the least exact first ─► export, verify ─► bound of the increase in WER ─► choose

The judge is the words: on the clips of the verification, the one-sided 95% bound of how much the word error
rate increases over float32's must be within the limit. A precision is chosen only if the bundle is smaller,
or its encoder faster, than in float32. Every attempt is told, with the number that stopped it. Attempts are
kept beside the result until it is complete: the same call continues a search that was interrupted.
"""

import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.bundle import MANIFEST, Bundle, Manifest, check_writable
from whisperport.bundle.writing import writing_bundle
from whisperport.commands.kept_attempts import KeptAttempts, dependencies
from whisperport.commands.timing import noise_call
from whisperport.errors import UsageError, VerificationError
from whisperport.exporting.export import ExportOptions, export, loaded
from whisperport.program.checks import Check
from whisperport.program.program_kind import ENCODER
from whisperport.system.progress import Progress
from whisperport.targets import RunOptions, get_target
from whisperport.verification import Report, text_errors
from whisperport.verification.clips import shipped_clips
from whisperport.verification.tolerances import GATES

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from whisperport.checkpoint import Checkpoint

AUTO = "auto"  # `--precision encoder=auto`
FLOAT = "fp32"
ROUNDS = 5  # runs of each encoder, in turn, after one that is not measured
POINTS = 100  # in 1.0 of a rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One precision of the encoder.

    Attributes:
        precision: its name.
        bound: upper bound of the increase in WER over float32's, with 95%; None: the bundle was rejected.
        size: bytes of the bundle.
        encoder_ms: median time of a run of the encoder, in milliseconds.
        rejected: why it was not chosen; empty: it was.
    """

    precision: str
    bound: float | None = None
    size: int = 0
    encoder_ms: float = 0.0
    rejected: str = ""

    def __str__(self) -> str:
        bound = "" if self.bound is None else f"WER at most {POINTS * self.bound:+.2f} points; "
        measured = f"{bound}{self.size / 1e6:.1f} MB, encoder {self.encoder_ms:.0f} ms"
        return f"{self.precision}: " + (
            f"chosen; {measured}" if not self.rejected else self.rejected.split("\n")[0]
        )


@dataclass(frozen=True, slots=True)
class Searched:
    """The bundle in the chosen precision, and all attempts, in the order in which they were made."""

    bundle: Bundle
    attempts: tuple[Attempt, ...]


def export_in_fewest_bits(
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    target: str,
    out: str | os.PathLike[str],
    options: ExportOptions | None = None,
    *,
    max_increase: float = 0.005,
    progress: Progress = lambda _: None,
) -> Searched:
    """Export with the encoder in the least exact precision whose words are within the limit.

    The attempts are exported to the folder `OUT.attempts`, one after the other. After an interruption, the
    same call continues with the attempts of that folder.

    Args:
        checkpoint: a loaded checkpoint, or anything that `load_checkpoint` accepts.
        target: name of the target that runs the encoder.
        out: folder of the bundle. A bundle that already exists there is replaced when the new one is
            complete.
        options: see `ExportOptions`; `precisions` must not name the encoder. Default: None, all defaults.
        max_increase: largest allowed bound of the increase in WER, such as 0.005 for half a point.
        progress: called with the name of each stage, a few words.

    Raises:
        UsageError: the target computes no precision of the encoder on this machine but float32, or the
            clips have too few words to show that an increase is within the limit.
        VerificationError: float32 itself is not verified.
        WhisperportError: see `export`.
    """
    options, out = options or ExportOptions(), Path(out)
    precisions = _precisions(target)
    check_writable(out)
    if options.clips is None and options.verify_with is None:  # the words are known before the work
        words = sum(text_errors(clip.text, clip.text).length for clip in shipped_clips())
        _check_count(words, max_increase)
    checkpoint = loaded(checkpoint, progress)
    with writing_bundle(out) as writer:
        kept = KeptAttempts(out, dependencies(checkpoint.source.to_json(), target, options))

        def in_precision(name: str) -> Bundle:
            chosen = replace(options, precisions={**options.precisions, ENCODER: name})
            make = partial(
                export,
                checkpoint,
                target,
                options=chosen,
                progress=lambda stage: progress(f"encoder in {name}: {stage}"),
            )
            return kept.bundle(name, make)

        exact = in_precision(FLOAT)
        value = _words(exact).value
        _check_count(int(value.get("words", value.get("characters", 0))), max_increase)
        chosen, attempts = exact, list[Attempt]()
        for name in precisions:
            try:
                bundle = in_precision(name)
            except VerificationError as error:
                attempts.append(Attempt(precision=name, rejected=f"not verified: {error.why}"))
                continue
            attempts.append(_judged(name, bundle, exact, max_increase, options.run))
            if not attempts[-1].rejected:
                chosen = bundle
                break
        if chosen is exact:
            size, ms = _size(exact), next(_times([exact], options.run))
            attempts.append(Attempt(precision=FLOAT, size=size, encoder_ms=ms))
        progress("copying the bundle to its folder")
        others = shutil.ignore_patterns(MANIFEST)
        shutil.copytree(chosen.folder, writer.folder, ignore=others, dirs_exist_ok=True)
        bundle = writer.commit(_with_notes(chosen, attempts))
        kept.delete()
        return Searched(bundle, tuple(attempts))


def _precisions(target: str) -> list[str]:
    """Return the precisions below float32 that a target computes on this machine, the least exact first.

    Raises:
        UsageError: there is none.
    """
    found = get_target(target)
    computed = [
        one
        for one in found.spec.precisions
        if one != FLOAT
        and (not found.spec.emulation or found.emulated_precision(one) == one)
        and found.unsupported(ENCODER, one) is None
    ]
    if not computed:
        raise UsageError(
            f"`{target}` has no precision to search on this machine",
            why=f"its encoder runs here in {FLOAT} only, and words of another precision cannot be counted",
            hint="name a precision, such as `--precision encoder=fp16`, and `compile` the bundle",
        )
    return sorted(computed, key=lambda one: GATES[one].min_sqnr_db)


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
    """Return a verified attempt, with the reason if it is not to be chosen."""
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
    return Attempt(precision=precision, bound=bound, size=size, encoder_ms=ms, rejected=rejected)


def _size(bundle: Bundle) -> int:
    """Return the bytes of all program files."""
    files = {name for entry in bundle.manifest.programs for name in entry.files}
    return sum((bundle.folder / name).stat().st_size for name in files)


def _times(bundles: Sequence[Bundle], run: RunOptions) -> Iterator[float]:
    """Yield the median time of each bundle's encoder, in milliseconds; they run in turn."""
    calls = []
    for bundle in bundles:
        entry = bundle.manifest.program(ENCODER)
        target = get_target(entry.target)
        runners = target.load(bundle.folder, [entry], run.with_emulation([target]))
        calls.append(noise_call(runners[ENCODER]))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(1 + ROUNDS):
        for call, own in zip(calls, times, strict=True):
            started = time.perf_counter()
            call()
            own.append(time.perf_counter() - started)
    yield from (1e3 * statistics.median(own[1:]) for own in times)


def _with_notes(bundle: Bundle, attempts: Sequence[Attempt]) -> Manifest:
    """Return a bundle's manifest with the attempts among the notes of its encoder."""
    programs = tuple(
        replace(entry, facts=replace(entry.facts, notes=(*entry.facts.notes, *map(str, attempts))))
        if entry.spec.name == ENCODER
        else entry
        for entry in bundle.manifest.programs
    )
    return replace(bundle.manifest, programs=programs)
