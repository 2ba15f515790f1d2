"""The acceptance table of a bundle: latencies and accuracy, each with how it was obtained.

The time of a program that was emulated on the CPU, or ran in the vendor's simulator, is not that of the
device, so the table has no latency of it.
Tokens and words are compared with the bundle's reference, as `verify` does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from whisperport.program.bundle import Bundle, Manifest
from whisperport.program.checks import ALL_PROGRAMS, Check
from whisperport.runtime import Decoder, Engine
from whisperport.targets import RunOptions, get_target
from whisperport.verification.bundle_check import check_decoded_features
from whisperport.verification.precision import coarsest, precisions
from whisperport.verification.reference import Reference, reference_mel

How = Literal["emulated on the CPU", "simulated here", "run here"]  # weakest first
Evidence = How | Literal["not run"]

# Name of a program, or the start of it -> metric.
LATENCIES: Mapping[str, str] = {
    "encoder": "encoder latency",
    "cross_kv": "cross-attention K/V latency",
    "prefill": "prefill latency",
    "step": "token latency",  # of `step_B`: of a call that decodes one token of each of B texts
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


def check_accuracy(bundle: Bundle, engine: Engine, run: RunOptions) -> tuple[Check, ...]:
    """Transcribe the clips of a bundle's reference with its loaded programs; compare tokens and words.

    Raises:
        BundleError: the reference cannot be read, or there are no limits for a program's precision.
        NumericalError: the encoder returned a NaN or an infinity.
    """
    reference = Reference.from_arrays(bundle.reference())
    precision = coarsest(precisions(bundle, run).values())
    features = [engine.encode(reference_mel(engine.dims, clip)) for clip in reference.clips]
    return tuple(check_decoded_features(bundle, Decoder(engine), features, precision))


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
    how = how_programs_run(manifest, options)
    return (
        *_latency_rows(manifest, latencies_ms, how),
        *_accuracy_rows(manifest, checks, min(how.values(), key=get_args(How).index)),
    )


def how_programs_run(manifest: Manifest, options: Mapping[str, str]) -> dict[str, How]:
    """Return how each program runs with these run options, "TARGET.NAME" -> value."""

    def how(target: str) -> How:
        mode = get_target(target).run_mode(RunOptions(options=options))
        if mode in ("emulation", "quantized"):
            return "emulated on the CPU"
        return "simulated here" if mode == "simulator" else "run here"

    return {entry.spec.name: how(entry.target) for entry in manifest.programs}


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
    manifest: Manifest, latencies_ms: Mapping[str, float], how: Mapping[str, How]
) -> Iterator[AcceptanceRow]:
    for start, metric in LATENCIES.items():
        for entry in manifest.programs:
            name = entry.spec.name
            if not name.startswith(start):
                continue
            known = how[name] != "run here" or name in latencies_ms
            evidence: Evidence = how[name] if known else "not run"
            yield AcceptanceRow(
                metric=metric if name == start else f"{metric} ({name})",
                programs=(name,),
                targets=(entry.target,),
                value=latencies_ms[name] if evidence == "run here" else None,
                unit="ms",
                evidence=evidence,
            )


def _accuracy_rows(
    manifest: Manifest, checks: Sequence[Check], how: How
) -> Iterator[AcceptanceRow]:
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
    check: Check, programs: tuple[str, ...], targets: tuple[str, ...], how: How
) -> AcceptanceRow:
    """Return the row of an error rate.

    If no clip has a transcript, the rate counts the differences from the reference's text. A check without
    numbers is that of a program that returned a NaN or an infinity.
    """
    unit = next((name for name in ("wer", "cer") if name in check.value), "")
    untranscribed = "change" in check.value and not unit
    what = f"{check.what} against the reference" if untranscribed else check.what
    return AcceptanceRow(
        metric=f"{what}, {check.value['clips']:.0f} clips" if check.value else what,
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
