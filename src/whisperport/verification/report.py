"""The report of a verification: all comparisons, their machine, and why a bundle was rejected."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from whisperport.program.bundle import ProgramEntry
from whisperport.program.checks import LEVELS, Check, Level
from whisperport.program.json_records import Member, from_json, members
from whisperport.program.program_kind import ENCODER
from whisperport.program.strict_json import plain
from whisperport.program.window import ShortWindows
from whisperport.targets import get_target
from whisperport.verification.error_rate import Unit
from whisperport.verification.loss import TORCH_PRECISIONS, Loss
from whisperport.verification.reference import Reference
from whisperport.verification.tolerances import FLOOR_DB, GATES


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipText:
    """What a bundle transcribes in a clip of its reference."""

    clip: str  # name
    text: str
    expected: str  # what the checkpoint transcribes in float32
    correct: str  # transcript; empty: not known
    unit: Unit  # in which errors are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks of a bundle. True if each required level has a check and all checks passed."""

    subject: str  # name of the bundle
    checks: tuple[Check, ...]
    machine: Mapping[str, Any] = field(default_factory=dict)  # description as JSON data
    versions: Mapping[str, str] = field(default_factory=dict)  # package -> installed version
    seconds: float = 0.0  # duration of the verification
    required: tuple[Level, ...] = LEVELS  # levels that must have a check
    texts: tuple[ClipText, ...] = ()  # of each clip
    # Windows as short as the audio that lost no word; None: none did, or they were not measured.
    short_windows: Annotated[
        ShortWindows | None, Member(is_omitted=True), partial(from_json, ShortWindows)
    ] = None

    def __bool__(self) -> bool:
        return not self.failures()

    def failures(self) -> tuple[str, ...]:
        """Return one sentence per failure; empty if the report passed."""
        sentences = [
            f"{check.program}, {check.what} ({check.level}): {check.reason}"
            for check in self.checks
            if not check.passed
        ]
        checked = {check.level for check in self.checks}
        sentences += [
            f"nothing was compared at the level `{level}`"
            for level in self.required
            if level not in checked
        ]
        if not self.checks and not self.required:
            sentences.append("nothing was compared")
        return tuple(sentences)

    def summary(self) -> list[dict[str, str]]:
        """Return one table row per check, as text by column name."""
        return [
            {
                "level": check.level,
                "program": check.program,
                "what": check.what,
                "measured": ", ".join(f"{name} {_short(n)}" for name, n in check.value.items()),
                "rule": check.rule,
                "result": "pass" if check.passed else f"FAIL: {check.reason}",
            }
            for check in self.checks
        ]

    def to_json(self) -> dict[str, Any]:
        """Return JSON data, with NaN, infinity and minus infinity as strings."""
        return {"subject": self.subject, "passed": bool(self), **members(self)}

    @classmethod
    def from_json(cls, data: Any) -> "Report":
        """Read the data that `to_json` returned.

        Raises:
            BundleError: a field is missing or wrong; the message names the field.
        """
        passed, rest = plain(data, "report").split("passed")
        report = from_json(cls, rest)
        if passed.boolean() != bool(report):
            passed.reject(f"is {passed.value}, but its checks result in {bool(report)}")
        return report


def _short(number: float) -> str:
    return f"{number:.4g}" if isinstance(number, float) and abs(number) < 0.99 else f"{number:.6g}"


def rejection(
    checks: Iterable[Check],
    reference: Reference,
    programs: Iterable[ProgramEntry],
    missing: Sequence[str] = (),
) -> str:
    """Return all failures, one a line: words first, then outputs by their SQNR.

    The words that differ from float32's follow, what torch keeps in other precisions, and those that the
    targets have.

    Args:
        checks: all checks.
        reference: of the bundle.
        programs: entries of the programs that were checked.
        missing: failures that are no check's.
    """
    checks = list(checks)
    failed = sorted((check for check in checks if not check.passed), key=_order)
    lines = [f"{c.program}, {c.what} ({c.level}): {c.reason}" for c in failed]
    words = [_words(check) for check in checks if "differ" in check.value]
    losses = reference.losses("features")
    return "\n".join([*lines, *missing, *words, *_kept(losses), *_finer(programs, losses)])


def _words(check: Check) -> str:
    """Say how many words, or characters, a check compared and how many of them were lost."""
    value = check.value
    unit, name = ("words", "WER") if "words" in value else ("characters", "CER")
    total, clips, points = int(value[unit]), int(value["clips"]), 100 * value["increase_at_most"]
    if not value["differ"]:
        return (
            f"{unit}: none of {total} differs from float32's in {clips} clips, which cannot show that the "
            f"{name} increases by less than {points:.1f} points"
        )
    return (
        f"{unit}: {int(value['differ'])} of {total} differ from float32's in {clips} clips ({name} "
        f"{100 * value['change']:+.1f} points; with 95%, at most {points:+.1f})"
    )


def _order(check: Check) -> tuple[bool, float]:
    sqnr_db = check.value.get("sqnr_db", math.nan)
    return check.level != "words", -math.inf if math.isnan(sqnr_db) else sqnr_db


def _kept(losses: Mapping[str, Loss]) -> list[str]:
    """Say what torch keeps of this checkpoint in other precisions; nothing if it was not measured."""
    kept = [f"{p} {loss.sqnr_db:.0f} dB" for p, loss in losses.items() if loss.sqnr_db >= FLOOR_DB]
    if not kept:
        return []
    return [
        f"torch's own encoder of this checkpoint keeps {', '.join(kept)} (w8: 8-bit weights, as in w8 and "
        "w8a16): these precisions can be verified where the target's compiler loses little more"
    ]


def _finer(programs: Iterable[ProgramEntry], losses: Mapping[str, Loss]) -> list[str]:
    """Name the precisions in which the targets can run these programs, and lose less.

    For the encoder, those in which torch itself loses too much are left out.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in programs:
        finer = _finer_precisions(entry, losses if entry.spec.kind.name == ENCODER else {})
        if finer:
            groups.setdefault((entry.target, ", ".join(finer)), []).append(entry.spec.name)
    return [
        f"`{target}` also runs {', '.join(names)} in {finer}: "
        f"`--precision {names[0]}={finer.split(', ')[-1]}`"
        for (target, finer), names in groups.items()
    ]


def _finer_precisions(entry: ProgramEntry, losses: Mapping[str, Loss]) -> list[str]:
    """Return the precisions of a program's target that lose less than its own, the least lossy first."""
    target, own = get_target(entry.target), GATES[entry.precision].min_sqnr_db
    lost = {p for p, loss in losses.items() if loss.sqnr_db < FLOOR_DB}
    finer = [
        precision
        for precision in target.spec.runs.precisions
        if GATES[precision].min_sqnr_db > own
        and TORCH_PRECISIONS.get(precision) not in lost
        and target.unsupported(entry.spec.name, precision) is None
    ]
    return sorted(finer, key=lambda precision: -GATES[precision].min_sqnr_db)
