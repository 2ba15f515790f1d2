"""The acceptance table of a bundle: latencies and accuracy, each with how it was obtained.

A latency of a program that was emulated on the CPU is not a latency of the device, so it is not measured.
Tokens and words are compared with the bundle's reference, as `verify` does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from whisperport.bundle import Bundle, Manifest
from whisperport.checks import ALL_PROGRAMS, Check
from whisperport.progress import Progress
from whisperport.runtime import Engine
from whisperport.targets import RunOptions
from whisperport.verification.bundle_check import check_decoded_features, reference_mel
from whisperport.verification.precision import coarsest, is_emulated, precisions
from whisperport.verification.reference import Reference

Evidence = Literal["run here", "emulated on the CPU", "not run"]

# Name of a program, or the start of it -> metric.
LATENCIES: Mapping[str, str] = {
    "encoder": "encoder latency",
    "cross_kv": "cross-attention K/V latency",
    "prefill": "prefill latency",
    "step": "token latency",
}
TOKENS = "clips with equal tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRow:
    """One row of the acceptance table.

    Attributes:
        metric: what is measured, such as "encoder latency".
        programs: names of the programs that the value depends on.
        targets: targets of these programs.
        value: the value; None: not measured.
        unit: "ms" for the median of one call, "clips", or "share" of words or characters.
        reference: the value of the reference, which computes in float32 with PyTorch; None for latencies.
        rule: the limit that decides `passed`; empty for latencies, which have none.
        passed: whether the value is within the limit; None if there is no limit, or nothing was measured.
        reason: why it is not; empty if it is.
        evidence: how the value was obtained.
    """

    metric: str
    programs: tuple[str, ...]
    targets: tuple[str, ...]
    value: float | None
    unit: Literal["ms", "clips", "share"]
    reference: float | None = None
    rule: str = ""
    passed: bool | None = None
    reason: str = ""
    evidence: Evidence


def check_accuracy(
    bundle: Bundle, engine: Engine, run: RunOptions, progress: Progress = lambda _: None
) -> tuple[Check, ...]:
    """Transcribe the clips of a bundle's reference with its loaded programs; compare tokens and words.

    Raises:
        BundleError: the reference cannot be read, or there are no limits for a program's precision.
        NumericalError: the encoder returned a NaN or an infinity.
    """
    reference = Reference.from_arrays(bundle.reference())
    precision = coarsest(precisions(bundle, run).values())
    features = [engine.encode(reference_mel(engine.dims, clip)) for clip in reference.clips]
    return tuple(check_decoded_features(bundle, engine.decoder(), features, precision, progress))


def acceptance(
    manifest: Manifest,
    latencies_ms: Mapping[str, float],
    checks: Sequence[Check],
    options: Mapping[str, str],
) -> tuple[AcceptanceRow, ...]:
    """Make the acceptance table of a bundle.

    Args:
        manifest: manifest of the bundle.
        latencies_ms: name of a program that ran -> median time of one call, in milliseconds.
        checks: result of `check_accuracy`.
        options: run options that the bundle ran with, "TARGET.NAME" -> value.
    """
    emulated = emulated_programs(manifest, options)
    return (
        *_latency_rows(manifest, latencies_ms, emulated),
        *_accuracy_rows(manifest, checks, emulated),
    )


def emulated_programs(manifest: Manifest, options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the programs that run options, "TARGET.NAME" -> value, emulate on the CPU."""
    return tuple(
        entry.spec.name for entry in manifest.programs if is_emulated(entry.target, options)
    )


def equal_clips(checks: Sequence[Check]) -> tuple[int, int]:
    """Return how many freely decoded clips have exactly the tokens of the reference, and of how many."""
    free = [check.value for check in checks if _is_transcript(check)]
    return sum(_same(value) for value in free), len(free)


def _is_transcript(check: Check) -> bool:
    return check.level == "tokens" and check.program == ALL_PROGRAMS


def _same(value: Mapping[str, float]) -> bool:
    """Whether the numbers of a `TokenIdentity` are those of two equal sequences that are not empty."""
    return 0 < value["n_same"] == value["n_expected"] == value["n_actual"]


def _latency_rows(
    manifest: Manifest, latencies_ms: Mapping[str, float], emulated: Sequence[str]
) -> Iterator[AcceptanceRow]:
    for start, metric in LATENCIES.items():
        for entry in manifest.programs:
            name = entry.spec.name
            if not name.startswith(start):
                continue
            ran = name in latencies_ms
            how: Evidence = (
                "emulated on the CPU" if name in emulated else "run here" if ran else "not run"
            )
            yield AcceptanceRow(
                metric=f"{metric} ({name})" if start == "prefill" else metric,
                programs=(name,),
                targets=(entry.target,),
                value=latencies_ms[name] if how == "run here" else None,
                unit="ms",
                evidence=how,
            )


def _accuracy_rows(
    manifest: Manifest, checks: Sequence[Check], emulated: Sequence[str]
) -> Iterator[AcceptanceRow]:
    how: Evidence = "emulated on the CPU" if emulated else "run here"
    names = tuple(entry.spec.name for entry in manifest.programs)
    targets = tuple(dict.fromkeys(entry.target for entry in manifest.programs))
    transcripts = [check for check in checks if _is_transcript(check)]
    equal, of = equal_clips(checks)
    failed = next((check.reason for check in transcripts if check.reason), "")
    yield AcceptanceRow(
        metric=TOKENS,
        programs=names,
        targets=targets,
        value=equal if transcripts else None,
        unit="clips",
        reference=of if transcripts else None,
        rule=transcripts[0].rule if transcripts else "",
        passed=not failed if transcripts else None,
        reason=failed,
        evidence=how if transcripts else "not run",
    )
    for check in checks:
        if check.level == "words":
            yield _rate_row(check, names, targets, how)


def _rate_row(
    check: Check, programs: tuple[str, ...], targets: tuple[str, ...], how: Evidence
) -> AcceptanceRow:
    """Return the row of an error rate.

    If no clip has a transcript, the rate counts the differences from the reference's text. A check without
    numbers is that of a program that returned a NaN or an infinity.
    """
    unit = next((name for name in ("wer", "cer") if name in check.value), "")
    untranscribed = "change" in check.value and not unit
    what = f"{check.what} against the reference" if untranscribed else check.what
    return AcceptanceRow(
        metric=f"{what}, {check.value.get('clips', 0):.0f} clips",
        programs=programs,
        targets=targets,
        value=check.value.get(unit or "change"),
        unit="share",
        reference=0.0 if untranscribed else check.value.get(f"reference_{unit}"),
        rule=check.rule,
        passed=check.passed,
        reason=check.reason,
        evidence=how,
    )
