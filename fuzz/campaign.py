"""Run many inputs of all formats with several workers; save results, and findings that can be repeated."""

import datetime
import json
import math
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.case import ACCEPTED, REJECTED, Format, Outcome
from fuzz.supervisor import Supervisor
from whisperport.system.progress import Progress

KEPT = 3  # number of inputs that are saved for each kind of finding
AGAIN = (
    "hang",
    "memory",
)  # count only if found twice: other processes may have slowed the first run
INPUT = "input"  # name of the folder in an archive


@dataclass
class Tally:
    """Counts of the outcomes of one format."""

    inputs: int = 0
    rejected: int = 0
    accepted: int = 0
    findings: dict[str, int] = field(default_factory=dict)  # kind -> count
    slowest_s: float = 0.0
    peak_bytes: int = 0
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        self.inputs += 1
        self.rejected += outcome.kind == REJECTED
        self.accepted += outcome.kind == ACCEPTED
        if outcome.is_finding:
            self.findings[outcome.kind] = self.findings.get(outcome.kind, 0) + 1
        self.slowest_s = max(self.slowest_s, outcome.seconds)
        self.peak_bytes = max(self.peak_bytes, outcome.peak_bytes)
        self.seconds += outcome.seconds


@dataclass
class Campaign:
    """One run of the fuzzer: its inputs, and the folder for findings."""

    formats: Sequence[Format]
    count: int
    seed: int
    jobs: int
    seeds: Path
    work: Path
    findings: Path
    progress: Progress
    minutes: float = math.inf  # time after which no new input is started
    tallies: dict[str, Tally] = field(default_factory=dict)
    found: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)  # -> input numbers
    _until: float = math.inf
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> float:
        """Run all inputs; return the wall-clock time in seconds."""
        make_seeds(self.seeds, self.formats, self.progress)
        shutil.rmtree(self.findings, ignore_errors=True)
        self.tallies = {entry.name: Tally() for entry in self.formats}
        tasks, started = self._tasks(), time.monotonic()
        self._until = started + 60 * self.minutes
        threads = [
            threading.Thread(target=self._work, args=(tasks, self.work / str(place)))
            for place in range(self.jobs)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:  # the findings so far are reported
            self._until = 0.0
            for thread in threads:
                thread.join()
        return time.monotonic() - started

    def _tasks(self) -> Iterator[tuple[Format, int]]:
        """Yield inputs of all formats in turn, so that an interrupted campaign has run some of each."""
        planned = [
            (number / count, place, number)
            for place, count in enumerate(counts(self.formats, self.count))
            for number in range(count)
        ]
        return ((self.formats[place], number) for _, place, number in sorted(planned))

    def _work(self, tasks: Iterator[tuple[Format, int]], work: Path) -> None:
        supervisor = Supervisor(work, self.seeds)
        try:
            while True:
                with self._lock:
                    task = next(tasks, None)
                if task is None or time.monotonic() > self._until:
                    return
                self._one(supervisor, *task)
        finally:
            supervisor.close()

    def _one(self, supervisor: Supervisor, chosen: Format, number: int) -> None:
        request = {"format": chosen.name, "seed": self.seed, "number": number}
        outcome = supervisor.ask(request)
        if outcome.kind in AGAIN:
            supervisor.stop()
            outcome = supervisor.ask(request)
        with self._lock:
            self.tallies[chosen.name].add(outcome)
            done = sum(tally.inputs for tally in self.tallies.values())
            if outcome.is_finding:
                self._keep(supervisor, chosen, number, outcome)
        if done % 50 == 0:
            self.progress(f"{done} of {self.count} inputs, {len(self.found)} kinds of findings")

    def _keep(self, supervisor: Supervisor, chosen: Format, number: int, outcome: Outcome) -> None:
        key = chosen.name, outcome.kind, outcome.where
        numbers = self.found.setdefault(key, [])
        numbers.append(number)
        if len(numbers) > KEPT:
            return
        if len(numbers) == 1:
            self.progress(f"finding: {chosen.name}: {outcome.kind}: {outcome.where}")
        name = f"{''.join(letter for letter in chosen.name if letter.isalnum())}-{number}"
        self.findings.mkdir(parents=True, exist_ok=True)
        supervisor.stop()  # the input is made again, since reading may have changed it
        request = {"format": chosen.name, "seed": self.seed, "number": number}
        supervisor.make(request)
        with tarfile.open(
            self.findings / f"{name}.tar", "w"
        ) as archive:  # it knows links and pipes
            archive.add(supervisor.input, INPUT)
        story = {**request, "work": str(supervisor.work), **vars(outcome)}
        (self.findings / f"{name}.json").write_text(json.dumps(story, indent=1) + "\n")


def counts(formats: Sequence[Format], count: int) -> list[int]:
    """Return the number of inputs of each format, in proportion to its share, at least 1."""
    total = sum(entry.share for entry in formats)
    return [max(1, round(entry.share * count / total)) for entry in formats]


def make_seeds(seeds: Path, formats: Sequence[Format], progress: Progress) -> None:
    """Make the missing groups of seeds, in a separate process."""
    wanted = dict.fromkeys(group for entry in formats for group in entry.groups)
    missing = [group for group in wanted if not (seeds / group).is_dir()]
    if missing:
        progress(f"making the seeds: {', '.join(missing)}")
        command = [sys.executable, "-m", "fuzz.seeds", str(seeds), *missing]
        subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[1])


def replay(saved: Path, seeds: Path) -> Outcome:
    """Read a saved input again, in the same folder as before, since it may name files beside it."""
    story = json.loads(saved.with_suffix(".json").read_text())
    supervisor = Supervisor(Path(story["work"]), seeds)
    request = {"format": story["format"], "saved": str(saved.with_suffix(".tar").absolute())}
    try:
        return supervisor.ask(request)
    finally:
        supervisor.close()


# The results, as a table and as a JSON file.

RESULTS = Path(__file__).with_name("results.json")  # a list of campaigns
PACKAGES = (
    "whisperport",
    "onnxruntime",
    "executorch",
    "torch",
    "onnx",
    "tokenizers",
    "av",
    "numpy",
)
HEADINGS = ("format", "read by", "inputs", "rejected", "accepted", "findings", "slowest", "memory")


def table(campaign: Campaign) -> str:
    """Return a Markdown table with a row for each format, and the sum."""
    readers = {entry.name: entry.reader for entry in campaign.formats}
    rows = [_row(name, f"`{readers[name]}`", tally) for name, tally in campaign.tallies.items()]
    rows.append(_row("all", "", total(campaign.tallies)))
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def total(tallies: Mapping[str, Tally]) -> Tally:
    """Return the sums over all formats; for time and memory, the maximum."""
    found = Tally()
    for tally in tallies.values():
        found.inputs += tally.inputs
        found.rejected += tally.rejected
        found.accepted += tally.accepted
        found.seconds += tally.seconds
        found.slowest_s = max(found.slowest_s, tally.slowest_s)
        found.peak_bytes = max(found.peak_bytes, tally.peak_bytes)
        for kind, count in tally.findings.items():
            found.findings[kind] = found.findings.get(kind, 0) + count
    return found


def _row(name: str, reader: str, tally: Tally) -> tuple[str, ...]:
    findings = ", ".join(f"{count} {kind}" for kind, count in tally.findings.items()) or "0"
    counts = (str(tally.inputs), str(tally.rejected), str(tally.accepted), findings)
    return (
        name,
        reader,
        *counts,
        f"{tally.slowest_s:.1f} s",
        f"{tally.peak_bytes / 2**20:.0f} MiB",
    )


def save(campaign: Campaign, wall_s: float, command: str) -> Path:
    """Add the campaign to the JSON file, in place of those with its seed whose formats it has.

    Returns:
        The file's path.
    """
    from whisperport.verification import machine, versions

    result: dict[str, Any] = {
        "what": "mutated inputs, each passed to the function or command that a user would call; limits "
        "30 s and 2 GiB per input",
        "seed": campaign.seed,
        "inputs": total(campaign.tallies).inputs,
        "wall_s": round(wall_s, 1),
        "formats": {name: vars(tally) for name, tally in campaign.tallies.items()},
        "findings": [
            {"format": name, "kind": kind, "where": where, "inputs": len(numbers)}
            for (name, kind, where), numbers in campaign.found.items()
        ],
        "machine": machine(),
        "versions": versions(PACKAGES),
        "measured_on": datetime.date.today().isoformat(),
        "command": command,
    }
    earlier = json.loads(RESULTS.read_text())
    done = result["formats"].keys()
    kept = [
        each
        for each in earlier
        if not (
            "formats" in each and each["seed"] == campaign.seed and each["formats"].keys() <= done
        )
    ]
    RESULTS.write_text(json.dumps([*kept, result], indent=1) + "\n")
    return RESULTS
