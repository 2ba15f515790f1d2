"""Kill exports, imports and compilations at random moments, and check the files that remain.

    python -m fuzz.kill [--count 200] [--seed 0] [--commands 20]

`count` kills with SIGKILL of `export`, as many of `import` and of `compile` in forked processes (see
`killed_jobs`), and `commands` kills of the command `whisperport export default`: of all its processes, of
the parent only or of the child only with SIGKILL; of the parent with SIGTERM; of all with SIGINT, as by
Ctrl-C. Half of the moments are uniform over the whole job, half over its last stage, in which
the new bundle replaces the old one.

After each kill, the old or the new bundle must exist, be complete, and have correct hashes. The next run
must delete all leftovers, and no other file may have changed. The table is printed; the table and every
kill are written to build/fuzz/kill.json. The exit status is 1 if a check failed.
"""

import argparse
import datetime
import hashlib
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from fuzz import processes
from fuzz.killed_jobs import LAST_STAGES, Job, fork, make_jobs
from whisperport.errors import BundleError
from whisperport.program.bundle import MANIFEST, Bundle
from whisperport.program.bundle.writing import writing_bundle
from whisperport.system.progress import reporting

RESULT = Path("build/fuzz/kill.json")
OURS = re.compile(
    r"\.nano(\.compile|\.import)?\.(whisperport-lock|(partial|discarded|replaced)-[0-9a-f]{16})"
)
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")
HEADINGS = (
    *("killed", "moments", "kills", "old complete", "new complete"),
    *("with leftovers", "cleared", "failures"),
)
SIGNALS = {"terminated": signal.SIGTERM, "interrupted": signal.SIGINT}  # all others: SIGKILL
VICTIMS = ("all", "parent", "child", *SIGNALS)
REHEARSALS = 3
PATIENCE_S = 120


@dataclass
class Kill:
    """One kill, and the state after it."""

    job: str
    moments: str  # "whole job" or "last stage"
    after_s: float
    stage: str = ""  # the last stage that was reported
    found: str = ""  # "old", "new", or the reason why there is no bundle
    leftovers: list[str] = field(default_factory=list)
    cleared: bool = False
    failures: list[str] = field(default_factory=list)


class NextRun(Exception):  # noqa: N818  # not an error: it ends a run that was to do nothing else
    """Raised to end the next run right after it has deleted the leftovers."""


class Place:
    """A folder with an output, and files of the user beside it that must not change."""

    def __init__(self, folder: Path, old: Path) -> None:
        self.folder, self.out, self.work = folder, folder / "nano", folder / "nano.compile"
        shutil.copytree(old, self.out)
        self._old = (self.out / MANIFEST).read_bytes()
        mine = ("notes.txt", ".nano.partial-mine/notes.txt", ".nano.lock", "nano.new/notes.txt")
        for name in mine:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("mine")
        self._mine = self._files_of_the_users()

    def look(self, kill: Kill) -> None:
        """Record the state after a kill."""
        kill.leftovers = sorted(self._leftovers())
        kill.found = self._bundle()
        if kill.found not in ("old", "new"):
            kill.failures.append(f"no complete bundle: {kill.found}")
        self._check_others(kill, "after the kill")

    def look_again(self, kill: Kill) -> None:
        """Record what the next run has left behind, which should be nothing."""
        left = sorted(self._leftovers())
        kill.cleared = not left
        if left:
            kill.failures.append(f"not cleared by the next run: {left}")
        if (found := self._bundle()) != kill.found:
            kill.failures.append(f"the next run found {found} in place of {kill.found}")
        self._check_others(kill, "after the next run")

    def _bundle(self) -> str:
        try:
            Bundle.open(self.out)
        except BundleError as error:
            return str(error)
        return "old" if (self.out / MANIFEST).read_bytes() == self._old else "new"

    def _check_others(self, kill: Kill, when: str) -> None:
        if self._files_of_the_users() != self._mine:
            kill.failures.append(f"{when}: files of the user's have changed")

    def _leftovers(self) -> Iterator[str]:
        for path in self.folder.iterdir():
            if OURS.fullmatch(path.name):
                yield path.name
        for path in self.work.rglob("*"):
            if TEMPORARY.fullmatch(path.name):
                yield path.relative_to(self.folder).as_posix()

    def _files_of_the_users(self) -> dict[str, str]:
        """Return everything beside the output whose name is not one of whisperport's hidden names."""
        found = {}
        for path in sorted(self.folder.rglob("*")):
            parts = path.relative_to(self.folder).parts
            made_here = parts[0] in ("nano", "nano.log") or OURS.fullmatch(parts[0])
            of_a_stage = parts[0] == "nano.compile"
            if path.is_file() and not made_here and not of_a_stage:
                found["/".join(parts)] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found


@dataclass(frozen=True)
class Lasts:
    """Duration of a job and of its last stage, in seconds."""

    whole_s: float
    last_s: float


def rehearse(job: Job) -> Lasts:
    """Run a job several times without a kill, to measure its duration."""
    runs = []
    for _ in range(REHEARSALS):
        with tempfile.TemporaryDirectory() as folder:
            place = Place(Path(folder), job.old)
            start = last = time.monotonic()
            child, reading = fork(partial(job.run, place.out))
            with open(reading) as stages:
                for stage in stages:
                    last = time.monotonic() if stage.strip() in LAST_STAGES else last
            if os.waitpid(child, 0)[1]:
                raise RuntimeError(f"{job.name} failed without being killed")
            runs.append(Lasts(time.monotonic() - start, time.monotonic() - last))
    return sorted(runs, key=lambda lasts: lasts.whole_s)[REHEARSALS // 2]


def kill_job(job: Job, lasts: Lasts, last_stage: bool, chance: random.Random) -> Kill:
    """Kill one run; try again with another moment if the run ended before the kill."""
    while True:
        limit_s = lasts.last_s if last_stage else lasts.whole_s
        kill = Kill(job.name, _moments(last_stage), chance.uniform(0, limit_s))
        with tempfile.TemporaryDirectory() as folder:
            place = Place(Path(folder), job.old)
            child, reading = fork(partial(job.run, place.out))
            kill.stage = _wait(reading, kill.after_s, last_stage)
            os.kill(child, signal.SIGKILL)
            if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
                continue
            place.look(kill)
            _run_next(job, place, kill)
            place.look_again(kill)
            return kill


def _wait(reading: int, after_s: float, for_last_stage: bool) -> str:
    """Wait for the moment of the kill; return the stage that was reported last."""
    end, stage, text = time.monotonic() + after_s, "", b""
    os.set_blocking(reading, False)
    awaited = for_last_stage
    try:
        while awaited or time.monotonic() < end:
            try:
                new = os.read(reading, 1 << 16)
            except BlockingIOError:
                time.sleep(0.0005)
                continue
            text += new
            stage = text.decode().strip().rpartition("\n")[2]
            if awaited and stage in LAST_STAGES:
                awaited, end = False, time.monotonic() + after_s
            if not new:
                break
    finally:
        os.close(reading)
    return stage


def _run_next(job: Job, place: Place, kill: Kill) -> None:
    """Run what deletes the leftovers: any writer of the output; for a folder of a job, the same job."""
    if job.name in ("compile", "import"):
        child, reading = fork(partial(_run_up_to_the_end, job, place.out))
        os.close(reading)
        if os.waitpid(child, 0)[1]:
            kill.failures.append("the next run failed")
    _write_nothing(place.out)


def _run_up_to_the_end(job: Job, out: Path) -> None:
    """Start the job and end it before it replaces the bundle, which is checked afterwards."""

    def stop_before_writing(stage: str) -> None:
        if stage in LAST_STAGES:
            raise NextRun

    with suppress(NextRun), reporting(stop_before_writing):
        job.run(out)


def _write_nothing(out: Path) -> None:
    with suppress(NextRun), writing_bundle(out):
        raise NextRun


def _moments(last_stage: bool) -> str:
    return "last stage" if last_stage else "whole job"


# The command, which has two processes.


def command(out: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start `whisperport export` for the model that comes with the package."""
    verb = (sys.executable, "-m", "whisperport", "export", "default", "--target", "onnxruntime")
    return subprocess.Popen(
        [*verb, "--out", str(out), "--threads", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,
    )


def kill_command(
    victim: str, whole_s: float, old: Path, last_stage: bool, chance: random.Random
) -> Kill:
    """End one or both of the command's processes with a signal, and wait for the other one to end."""
    while True:
        after_s = chance.uniform(0, 0.15 if last_stage else whole_s)
        kill = Kill(f"command: {victim}", _moments(last_stage), after_s)
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as temporary:
            place = Place(Path(folder), old)
            process = command(place.out, Path(temporary))
            if last_stage:
                _until_complete(place, process)
            time.sleep(after_s)
            pids = _victims(process.pid, victim)
            if process.poll() is not None or not pids:
                _end(process)
                continue
            processes.kill(pids, SIGNALS.get(victim, signal.SIGKILL))
            _end(process)
            place.look(kill)
            if kill.leftovers and victim != "all":
                kill.failures.append(f"the process that could clean up left {kill.leftovers}")
            _write_nothing(place.out)
            place.look_again(kill)
            return kill


def _until_complete(place: Place, process: subprocess.Popen[bytes]) -> None:
    """Wait until the manifest of the new bundle is written."""
    while process.poll() is None:
        if any(place.folder.glob(f".nano.*-*/{MANIFEST}")):
            return
        time.sleep(0.0005)


def _victims(parent: int, victim: str) -> list[int]:
    tree = processes.tree(parent)
    children = [pid for pid in tree[1:] if "whisperport.system.child" in processes.command(pid)]
    if victim == "child":
        return children
    return [parent] if victim in ("parent", "terminated") else tree


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait until all processes of the command's session have ended."""
    process.wait(PATIENCE_S)
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    raise RuntimeError("a process outlived the command")


# The campaign.


def campaign(count: int, commands: int, seed: int) -> Iterator[Kill]:
    """Do all kills, one after the other."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="whisperport-kill-") as folder:
        os.environ["XDG_STATE_HOME"] = str(Path(folder) / "state")
        jobs = make_jobs(Path(folder))
        for job in jobs:
            lasts = rehearse(job)
            for number in range(count):
                yield kill_job(job, lasts, number % 2 == 1, chance)
        whole_s = _duration_of_command(jobs[0].old) if commands else 0
        for number in range(commands):
            victim = VICTIMS[number % len(VICTIMS)]
            yield kill_command(victim, whole_s, jobs[0].old, number % 2 == 1, chance)


def _duration_of_command(old: Path) -> float:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as temporary:
        place, start = Place(Path(folder), old), time.monotonic()
        if command(place.out, Path(temporary)).wait():
            raise RuntimeError("the command failed without being killed")
        return time.monotonic() - start


def table(kills: Sequence[Kill]) -> str:
    """Return a Markdown table with a row for each job and kind of moment."""
    lines = [HEADINGS, ("---",) * len(HEADINGS)]
    for job, moments in dict.fromkeys((kill.job, kill.moments) for kill in kills):
        chosen = [kill for kill in kills if (kill.job, kill.moments) == (job, moments)]
        left = [kill for kill in chosen if kill.leftovers]
        counts = (
            len(chosen),
            sum(kill.found == "old" for kill in chosen),
            sum(kill.found == "new" for kill in chosen),
            len(left),
            sum(kill.cleared for kill in left),
            sum(bool(kill.failures) for kill in chosen),
        )
        lines.append((job, moments, *map(str, counts)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save(kills: Sequence[Kill], seed: int, wall_s: float, path: Path) -> None:
    """Write every kill to a JSON file."""
    from whisperport.verification import machine, versions

    result = {
        "what": "kills at random moments of export, import, compile and the command",
        "seed": seed,
        "wall_s": round(wall_s, 1),
        "table": table(kills).splitlines(),
        "failures": sum(bool(kill.failures) for kill in kills),
        "machine": machine(),
        "versions": versions(("whisperport",)),
        "measured_on": datetime.date.today().isoformat(),
        "kills": [asdict(kill) for kill in kills],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.kill", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--count", type=int, default=200, help="Kills of each job")
    parser.add_argument("--seed", type=int, default=0, help="Another seed gives other moments")
    parser.add_argument("--commands", type=int, default=20, help="Kills of the command")
    parser.add_argument("--save", type=Path, default=RESULT, metavar="FILE", help="The JSON file")
    chosen = parser.parse_args(arguments)
    logging.getLogger("whisperport").setLevel(logging.ERROR)  # leftovers are expected
    start, kills = time.monotonic(), []
    try:
        for kill in campaign(chosen.count, chosen.commands, chosen.seed):
            kills.append(kill)
            for failure in kill.failures:
                print(f"{kill.job}, {kill.stage}, {kill.after_s:.4f} s: {failure}", file=sys.stderr)
    finally:  # after an interrupt too
        save(kills, chosen.seed, time.monotonic() - start, chosen.save)
        print(table(kills))
    return int(any(kill.failures for kill in kills))


if __name__ == "__main__":
    sys.exit(main())
