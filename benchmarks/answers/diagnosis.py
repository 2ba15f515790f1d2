"""Measure how well `diagnose` names the causes of generated wrong outputs, and how long it takes.

    python -m benchmarks.answers.diagnosis [--cases 1000] [--seed 0] [--processes 1] [--worlds embedded ...]

The cases are those of `tests/verification/diagnosis_cases`: outputs of the embedded model and of
models with random weights, in files that a simulated device and script wrote, with no, one or two
mistakes. Writes `results/answers.json`, and prints precision and recall of every cause, what was
confused, and the time of a case. Interrupted with Ctrl-C, it writes the result of the first
cases, without a gap.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several threads are slower at these sizes


import numpy as np
from tests.verification.diagnosis_cases.cases import one
from tests.verification.diagnosis_cases.evaluation import Outcome, Score, answer, evaluate
from tests.verification.diagnosis_cases.worlds import provide

from whisperport.build.export.bundle_cache import bundle_of
from whisperport.speech.data.embedded_model import unpack_model
from whisperport.verification import versions

from ..record import record

CONFUSIONS = 12  # rows of the list of what was confused


def main() -> None:
    parser = argparse.ArgumentParser(description="Precision and recall of the diagnosis.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", nargs="*", default=[], help="names of models; default: all")
    parser.add_argument("--processes", type=int, default=1)
    chosen = parser.parse_args()
    outcomes: list[Outcome] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(chosen.processes, initializer=prepare, initargs=(folder,)) as pool,
    ):
        unpack_model(Path(folder))
        pending = pool.map(outcome_of, *zip(*cases_of(chosen), strict=True))
        try:
            for outcome in pending:
                outcomes.append(outcome)
                show_progress(outcomes, chosen.cases)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
    write(outcomes, chosen)


def cases_of(chosen: argparse.Namespace) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    return ((chosen.seed, number, tuple(chosen.worlds)) for number in range(chosen.cases))


def outcome_of(seed: int, number: int, worlds: tuple[str, ...]) -> Outcome:
    """Diagnose one case; the result does not hold its file and its arrays."""
    outcome = evaluate(one(seed, number, worlds=worlds), answer)
    return replace(outcome, case=replace(outcome.case, file=b"", true=np.empty(0, np.float32)))


def prepare(checkpoint: str) -> None:
    """Prepare a process of the pool: it leaves Ctrl-C to its parent, and finds the embedded model."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    provide(bundle=bundle_of("default").folder, embedded=Path(checkpoint))


def show_progress(outcomes: Sequence[Outcome], cases: int) -> None:
    if len(outcomes) % 25 == 0:
        score = Score.of(outcomes)
        shown = f"precision {score.precision:.3f}, recall {score.recall:.3f}"
        print(f"{len(outcomes)} of {cases} cases: {shown}", file=sys.stderr, flush=True)


def write(outcomes: Sequence[Outcome], chosen: argparse.Namespace) -> None:
    score = Score.of(outcomes)
    seconds = sorted(outcome.seconds for outcome in outcomes)
    result = {
        "what": "causes named by diagnose for generated device outputs, against the true ones",
        "cases": score.cases,
        "cases_with_two_mistakes": sum(len(outcome.case.kinds) == 2 for outcome in outcomes),
        "cases_without_a_visible_mistake": sum(not outcome.case.labels for outcome in outcomes),
        "exact": score.exact,
        "precision": score.precision,
        "recall": score.recall,
        "one_mistake_or_none": part(o for o in outcomes if len(o.case.kinds) < 2),
        "two_mistakes": part(o for o in outcomes if len(o.case.kinds) == 2),
        "median_s": statistics.median(seconds),
        "p95_s": seconds[int(0.95 * (len(seconds) - 1))],
        "causes": rows(score),
        "misses": [miss(outcome) for outcome in outcomes if not outcome.exact],
        "load": os.getloadavg(),
        "versions": versions(("whisperport", "numpy")),
        "processes": chosen.processes,
    }
    record("answers", "diagnosis", result)
    print_tables(score, outcomes, result)


def part(outcomes: Iterable[Outcome]) -> dict[str, float]:
    score = Score.of(outcomes)
    return {
        "cases": score.cases,
        "exact": score.exact,
        "precision": score.precision,
        "recall": score.recall,
    }


def rows(score: Score) -> list[dict[str, float | str]]:
    names = sorted({*score.found, *score.missed, *score.wrong})
    return [
        {
            "cause": name,
            "found": score.found[name],
            "missed": score.missed[name],
            "wrong": score.wrong[name],
        }
        for name in names
    ]


def miss(outcome: Outcome) -> dict[str, object]:
    """Return a case that was not named exactly, with what repeats it."""
    case = outcome.case
    return {
        "number": case.number,
        "model": case.plan.world,
        "program": case.plan.program,
        "output": case.plan.output,
        "mistakes": list(case.kinds),
        "true": sorted(outcome.right),
        "named": sorted(outcome.answer.causes),
        "passed": outcome.answer.passed,
    }


def print_tables(score: Score, outcomes: Sequence[Outcome], result: dict[str, object]) -> None:
    print("| Cause | Found | Missed | Wrongly named | Precision | Recall |")
    print("|---|---|---|---|---|---|")
    for row in result["causes"]:
        precision, recall = score.of_cause(row["cause"])
        counts = f"{row['found']} | {row['missed']} | {row['wrong']}"
        print(f"| {row['cause']} | {counts} | {precision:.3f} | {recall:.3f} |")
    counts = f"{score.found.total()} | {score.missed.total()} | {score.wrong.total()}"
    print(f"| all | {counts} | {score.precision:.3f} | {score.recall:.3f} |")
    print(f"\n{score.exact} of {score.cases} cases are named exactly.")
    print(
        f"Median time of a case {result['median_s']:.2f} s, 95 of 100 below {result['p95_s']:.2f} s."
    )
    confused = Counter(
        (" + ".join(sorted(outcome.right)) or "nothing", said(outcome))
        for outcome in outcomes
        if not outcome.exact
    )
    if confused:
        print("\n| True | Named | Cases |\n|---|---|---|")
    for (true, named), count in confused.most_common(CONFUSIONS):
        print(f"| {true} | {named} | {count} |")


def said(outcome: Outcome) -> str:
    if outcome.answer.passed:
        return "passed"
    return " + ".join(sorted(outcome.answer.causes)) or "nothing"


if __name__ == "__main__":
    main()
