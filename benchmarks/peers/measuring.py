"""Measure contenders in turn, each a process that loads its model once and then answers requests."""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import add
from pathlib import Path
from select import select
from typing import Any

from whisperport.verification import text_errors

from .contenders import OURS, Case, Contender

WORKER = Path(__file__).with_name("worker.py")
ANSWER_S = 900.0  # longest time to wait for an answer, in seconds


class FailedError(Exception):
    """The contender could not be measured; the message is the reason."""


class Process:
    """A started contender. It is closed when it fails."""

    def __init__(
        self, contender: Contender, python: Path, folder: Path, threads: int, log: Path
    ) -> None:
        self._log = log
        command = [python, WORKER, contender.engine, folder, str(threads)]
        command += [contender.mode] if contender.mode else []
        settings = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
            "PYTHONDONTWRITEBYTECODE": "",  # compiled modules are kept: each start would compile them again
        }
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | settings,
            )
        self.start = self._answer()  # seconds of import and load, and the memory after it

    def ask(self, audio: Path, tokens: int | None = None) -> dict[str, Any]:
        """Transcribe; see `worker.py`.

        Raises:
            FailedError: the process ended or did not answer.
        """
        assert self._process.stdin is not None
        try:
            print(
                json.dumps({"audio": str(audio), "tokens": tokens}),
                file=self._process.stdin,
                flush=True,
            )
        except BrokenPipeError:
            self._fail("it ended")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select([self._process.stdout], [], [], ANSWER_S)[0]:
            self._fail(f"no answer within {ANSWER_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            self._fail("it ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _fail(self, what: str) -> None:
        self.close()
        lines = self._log.read_text(errors="replace").strip().splitlines()
        raise FailedError(lines[-1] if lines else what)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # the process ended before it read a question
                    pipe.close()


SETTLE_S = 0.3  # before each measurement: threads of the previous contender stop waiting actively
LEAST_ROUNDS = 3
Row = dict[str, Any]


def measure(
    case: Case, processes: Mapping[str, Process], rounds: int, limit_s: float, *, warm_up: bool
) -> tuple[list[Row], dict[str, str]]:
    """Return one row for each contender; and the reasons of those that failed, by name.

    Args:
        case: what is transcribed.
        processes: name of the contender -> its process.
        rounds: in each, every contender transcribes once.
        limit_s: no further round begins after this time, in seconds, if three are done.
        warm_up: run every contender once unmeasured first.
    """
    answers: dict[str, list[Row]] = {name: [] for name in processes}
    failures: dict[str, str] = {}
    started = time.monotonic()
    for number in range(-1 if warm_up else 0, rounds):
        if number >= LEAST_ROUNDS and time.monotonic() - started > limit_s:
            break
        for name in in_turn(list(processes), number):
            if name in failures:
                continue
            time.sleep(SETTLE_S)
            try:
                answer = processes[name].ask(case.audio, case.tokens)
            except FailedError as error:
                failures[name] = str(error)
                continue
            if number >= 0:
                answers[name].append(answer)
    measured = {name: found for name, found in answers.items() if name not in failures}
    base = measured.get(OURS)
    return [row_of(name, found, base, case) for name, found in measured.items()], failures


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """Return the names in an order that changes with every round."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def row_of(name: str, found: Sequence[Row], base: Sequence[Row] | None, case: Case) -> Row:
    row = {
        "case": case.name,
        "contender": name,
        "audio_s": case.audio_s,
        "wall_s": median(found, "wall_s"),
        "cpu_s_per_audio_s": median(found, "cpu_s") / case.audio_s,
        "peak_mib": peak(found),
        "ratio": base and median_ratio(found, base, "wall_s"),
        "ratios": base and [min(ratios(found, base, "wall_s")), max(ratios(found, base, "wall_s"))],
        "cpu_ratio": base and median_ratio(found, base, "cpu_s"),
    }
    if case.tokens is not None:
        return row | {"tokens": found[-1]["tokens"]}
    texts = found[-1]["texts"]
    errors = reduce(add, map(text_errors, texts, case.texts))
    return row | {"wer": errors.rate}


def median(found: Sequence[Row], what: str) -> float:
    return statistics.median(answer[what] for answer in found)


def median_ratio(found: Sequence[Row], base: Sequence[Row], what: str) -> float:
    """Return the median of the rounds' ratios: load that lasts longer than a round affects it less."""
    return statistics.median(ratios(found, base, what))


def ratios(found: Sequence[Row], base: Sequence[Row], what: str) -> list[float]:
    return [mine[what] / ours[what] for mine, ours in zip(found, base, strict=True)]


def peak(found: Sequence[Row]) -> float | None:
    known = [answer["peak_mib"] for answer in found if answer["peak_mib"] is not None]
    return max(known, default=None)


def measure_start(
    commands: Mapping[str, Sequence[Any]], audio: Path, rounds: int
) -> tuple[list[Row], dict[str, str]]:
    """Measure import, load and the first transcript in new processes, in turn.

    Args:
        commands: name of the contender -> the arguments of `Process`.
        audio: what is transcribed.
        rounds: number of processes of each contender.
    """
    laps: dict[str, list[dict[str, Row]]] = {name: [] for name in commands}
    failures: dict[str, str] = {}
    for number in range(-1, rounds):  # the first round reads the files into the system's memory
        for name in in_turn(list(commands), number):
            if name in failures:
                continue
            time.sleep(SETTLE_S)
            try:
                found = one_start(commands[name], audio)
            except FailedError as error:
                failures[name] = str(error)
                continue
            if number >= 0:
                laps[name].append(found)
    measured = {name: found for name, found in laps.items() if name not in failures}
    rows = []
    for name, found in measured.items():
        row: Row = {"contender": name}
        for part in ("import", "load", "first", "total"):
            mine = [lap[part] for lap in found]
            row[part] = {clock: median(mine, clock) for clock in ("wall_s", "cpu_s")}
        if OURS in measured:
            totals = [[lap["total"] for lap in one] for one in (found, measured[OURS])]
            row |= {
                "ratio": median_ratio(*totals, "wall_s"),
                "cpu_ratio": median_ratio(*totals, "cpu_s"),
            }
        rows.append(row)
    return rows, failures


def one_start(command: Sequence[Any], audio: Path) -> dict[str, Row]:
    process = Process(*command)
    try:
        first = process.ask(audio)
    finally:
        process.close()
    laps = {"import": process.start["import"], "load": process.start["load"]}
    laps["first"] = {clock: first[clock] for clock in ("wall_s", "cpu_s")}
    return laps | {
        "total": {clock: sum(lap[clock] for lap in laps.values()) for clock in ("wall_s", "cpu_s")}
    }


# Print the results of this comparison as tables of at most 100 columns.

NAME = 30
REASON = 65


def print_tables(result: Mapping[str, Any]) -> None:
    cases: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        cases.setdefault((row["model"], row["case"]), []).append(row)
    for (model, case), rows in cases.items():
        print(f"\n{model}: {case}")
        heading = f"{'s':>9}{'ratio':>8}{'CPU s / audio s':>17}{'CPU ratio':>11}{'MiB':>8}"
        print(
            f"{'':{NAME}}{heading}{'tokens' if any('tokens' in row for row in rows) else 'WER':>9}"
        )
        for row in sorted_by(rows, "wall_s"):
            print(f"{row['contender']:{NAME}}{row.get('reason') or figures(row)}"[: NAME + REASON])
    if result["start_up"]:
        print_start_up(result["start_up"])


def figures(row: Mapping[str, Any]) -> str:
    quality = str(row["tokens"]) if "tokens" in row else f"{row['wer']:.1%}"
    return (
        f"{row['wall_s']:9.3f}{number(row['ratio'], 8)}{row['cpu_s_per_audio_s']:17.4f}"
        f"{number(row['cpu_ratio'], 11)}{number(row['peak_mib'], 8, 0)}{quality:>9}"
    )


def print_start_up(rows: Iterable[Mapping[str, Any]]) -> None:
    print("\nembedded: start-up in a new process, seconds of CPU time (wall-clock time)")
    parts = ("import", "load", "first", "total")
    print(f"{'':{NAME}}{''.join(f'{part:>14}' for part in parts)}{'CPU ratio':>11}")
    for row in sorted_by(
        [r | {"total_s": r.get("total", {}).get("cpu_s")} for r in rows], "total_s"
    ):
        if "reason" in row:
            print(f"{row['contender']:{NAME}}{row['reason']}"[: NAME + REASON])
            continue
        times = (f"{row[part]['cpu_s']:.2f} ({row[part]['wall_s']:.2f})" for part in parts)
        shown = "".join(f"{time:>14}" for time in times)
        print(f"{row['contender']:{NAME}}{shown}{number(row.get('cpu_ratio'), 11)}")


def sorted_by(rows: Iterable[Mapping[str, Any]], what: str) -> list[Mapping[str, Any]]:
    """Return the fastest row first; those without a figure are last."""
    return sorted(rows, key=lambda row: (row.get(what) is None, row.get(what) or 0.0))


def number(value: float | None, width: int, digits: int = 2) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"
