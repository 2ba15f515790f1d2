"""Many inputs of many formats, several workers at a time; what is found is saved, to be repeated."""

import json
import math
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.case import ACCEPTED, REJECTED, Format, Outcome
from fuzz.supervisor import Supervisor
from whisperport.progress import Progress

KEPT = 3  # inputs that are saved of each kind of finding
AGAIN = (
    "hang",
    "memory",
)  # found once more before they count: another process may have slowed this one
INPUT = "input"  # name of the folder in an archive


@dataclass
class Tally:
    """What came of the inputs of one format."""

    inputs: int = 0
    rejected: int = 0
    accepted: int = 0
    findings: dict[str, int] = field(default_factory=dict)  # kind -> count
    slowest_s: float = 0.0
    peak_bytes: int = 0
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count one."""
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
    """One run: which inputs, and where findings go."""

    formats: Sequence[Format]
    count: int
    seed: int
    jobs: int
    seeds: Path
    work: Path
    findings: Path
    progress: Progress
    minutes: float = math.inf  # after which no input is begun
    tallies: dict[str, Tally] = field(default_factory=dict)
    found: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)  # -> input numbers
    _until: float = math.inf
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> float:
        """Run it; seconds of wall time."""
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
        except KeyboardInterrupt:  # what was found so far is reported
            self._until = 0.0
            for thread in threads:
                thread.join()
        return time.monotonic() - started

    def _tasks(self) -> Iterator[tuple[Format, int]]:
        """Formats in turn, so that a campaign that is cut short has something of each."""
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
            self.progress(f"found: {chosen.name}: {outcome.kind}: {outcome.where}")
        name = f"{''.join(letter for letter in chosen.name if letter.isalnum())}-{number}"
        self.findings.mkdir(parents=True, exist_ok=True)
        supervisor.stop()  # the input is made again: what was read may have been changed
        request = {"format": chosen.name, "seed": self.seed, "number": number}
        supervisor.make(request)
        with tarfile.open(
            self.findings / f"{name}.tar", "w"
        ) as archive:  # it knows links and pipes
            archive.add(supervisor.input, INPUT)
        story = {**request, "work": str(supervisor.work), **vars(outcome)}
        (self.findings / f"{name}.json").write_text(json.dumps(story, indent=1) + "\n")


def counts(formats: Sequence[Format], count: int) -> list[int]:
    """How many inputs of each format: their shares of `count`, and never none."""
    total = sum(entry.share for entry in formats)
    return [max(1, round(entry.share * count / total)) for entry in formats]


def make_seeds(seeds: Path, formats: Sequence[Format], progress: Progress) -> None:
    """Each group that is wanted, in a process of its own."""
    wanted = dict.fromkeys(group for entry in formats for group in entry.groups)
    missing = [group for group in wanted if not (seeds / group).is_dir()]
    if missing:
        progress(f"making the seeds: {', '.join(missing)}")
        command = [sys.executable, "-m", "fuzz.seeds", str(seeds), *missing]
        subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[1])


def replay(saved: Path, seeds: Path) -> Outcome:
    """A saved input once more, in the folder in which it was found: it may name files beside it."""
    story = json.loads(saved.with_suffix(".json").read_text())
    supervisor = Supervisor(Path(story["work"]), seeds)
    request = {"format": story["format"], "saved": str(saved.with_suffix(".tar").absolute())}
    try:
        return supervisor.ask(request)
    finally:
        supervisor.close()
