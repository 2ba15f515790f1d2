"""Let every system call that changes files fail once, in every command that writes, and kill before each.

    python -m fuzz.faults [--verb NAME ...] [--minutes 10] [--second | --together 100] [--part 1/8] [--save]

Each command of `fuzz.writers` runs once undisturbed, to list its calls: opening for writing, writing,
renaming, linking, deleting, flushing and so on, of all its threads and processes. Then it runs again for
each call, with this call failing (a full disk, a broken one, missing permission, too many open files), and
again with SIGKILL right before it, of all processes or only of the one that calls, and with Ctrl-C. With
`--second`, instead, the same command runs a second time while the first one waits right before the call.
With `--together`, three of it run so many times, as on one machine or, of root, on three with the same
files, and their calls happen in a random order. Of consecutive writes to one file, the first, the second
and the last are disturbed.

A finding is: an output that is neither the old one nor the new one, complete; status 0 without the new
output; an error without a reason or a hint, a traceback, or an "unexpected error"; a file of the user that
changed; a file left behind, after a kill by the next run; a next run that fails; a hang. What a killed
process leaves in the folder of temporary files is none. The table is printed; the exit status is 1 if
there is a finding. Parts of a campaign, such as `--part 1/8`, are saved together.
"""

import argparse
import datetime
import hashlib
import json
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from fuzz.campaign import RESULTS
from fuzz.system_calls import (
    ERRORS,
    INTERRUPT,
    KILL,
    KILL_CALLER,
    ORDER,
    RANDOM,
    SECOND,
    Call,
    Fault,
    Second,
    Watched,
    run_together,
    watched,
    why_not,
)
from fuzz.writers import (
    Writer,
    all_writers,
    is_complete,
    make_old,
    prepare_process,
    trace_once,
)

MINE = {  # files of the user beside the outputs
    "out/notes.txt": "mine",
    "out/.p.onnx.partial-mine/notes.txt": "mine too",
    "out/.bundle.lock": "mine as well",
    "notes.txt": "and mine",
}
TRACED = {"export", "import", "compile", "demo"}  # their first words
INTERRUPTED = 130
UNCHANGED = re.compile(
    r"unchanged|not written|nothing was (written|changed)|error: cannot (write|store)(?: `([^`]+)`)?"
)
STATE = r"home/\.local/state/whisperport/bundles"  # records of what was exported and tried
IGNORED = re.compile(r"(^tmp|/\.[^/]*\.(partial|discarded)-[^/]*)/")  # no run reads such a file
VARIES = re.compile(r"\.(html|json|parquet)$")  # files that may have times in them
FAULTS = "each system call that changes files failed once, and was the last before a kill or Ctrl-C"
SECONDS = "at each system call that changes files, the same command ran a second time"
ORDERS = (
    "three of each command at a time, with their system calls that change files in random order"
)
OPTIONS = {FAULTS: "", SECONDS: " --second", ORDERS: " --together N"}
TOGETHER = 3
Tree = dict[str, str]  # path -> digest of the file; empty for a folder


@dataclass
class Tally:
    """The calls, repetitions and findings of one command, and which parts of all repetitions were done."""

    parts: list[str] = field(default_factory=list)
    calls: int = 0
    planned: int = 0
    repetitions: int = 0
    missed: int = 0  # repetitions in which the call did not happen
    seconds: float = 0.0
    findings: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class Run:
    """One run of a command: what was watched, what it printed, and the files afterwards.

    Attributes:
        others: exit status and output of the same command, if it ran several times at a time. Status None:
            it did not run, or did not end.
    """

    watched: Watched
    printed: str
    tree: Tree
    others: Sequence[tuple[int | None, str]] = ()


class Place:
    """The folder in which a command runs, and the template from which it is made for each run."""

    def __init__(self, base: Path, writer: Writer) -> None:
        self.writer, self.work, self._template = writer, base / "work", base / "template"
        self._printed = base / "printed"
        for folder in (self.work, self._template):
            shutil.rmtree(folder, ignore_errors=True)
        for name in ("home", "tmp", "out", "in"):
            (self._template / name).mkdir(parents=True, exist_ok=True)
        writer.prepare(self._template)
        for name, text in MINE.items():
            (self._template / name).parent.mkdir(exist_ok=True)
            (self._template / name).write_text(text)
        if writer.has_old:
            self.reset()
            self.run_undisturbed(writer.old_arguments)
            for name in writer.outputs:
                target = self._template / name
                target.parent.mkdir(parents=True, exist_ok=True)
                (self.work / name).rename(target)
                make_old(target)
        self.followed: dict[frozenset[tuple[str, str]], list[str]] = {}  # files -> findings
        self.old = tree(self._template)
        self.reset()
        first = self.run_undisturbed()
        self.status, self.new = first.watched.status, first.tree
        self.reset()
        again = self.run_undisturbed()
        self.calls = again.watched.calls
        self.callers = again.watched.callers
        self.again = again.tree

    def reset(self) -> None:
        """Make the folder again."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self._template, self.work, symlinks=True)

    def run(self, fault: Fault | None = None, more: Sequence[str] = ()) -> Run:
        """Run the command in the folder as it is, with further arguments."""
        if fault and fault.what == ORDER:
            return self._run_together(Random(fault.call.occurrence))
        printed = self._printed.with_name("printed-second")
        printed.unlink(missing_ok=True)
        second = Second(partial(self._command, more, printed), printed)
        command = partial(self._command, more, self._printed)
        found = watched(command, self.work, fault, second=second)
        others = [(second.status, second.printed)] if fault and fault.what == SECOND else []
        return Run(found, self._printed.read_text(errors="replace"), tree(self.work), others)

    def _run_together(self, order: Random) -> Run:
        """Run several of the command, whose calls happen in this order."""
        printed = [self._printed.with_name(f"printed-{n}") for n in range(TOGETHER)]
        statuses = self._printed.with_name("statuses")
        statuses.unlink(missing_ok=True)
        commands = [partial(self._command, (), path) for path in printed]
        found = watched(partial(run_together, commands, order, statuses), self.work, order=order)
        found.met = True
        if not statuses.exists():
            found.hung = True
            return Run(found, "", tree(self.work), [(None, "")])
        (found.status, first), *others = [
            (status, path.read_text(errors="replace"))
            for status, path in zip(json.loads(statuses.read_text()), printed, strict=True)
        ]
        return Run(found, first, tree(self.work), others)

    def run_undisturbed(self, more: Sequence[str] = ()) -> Run:
        """Run the command in the folder as it is; it must write its outputs.

        Raises:
            RuntimeError: it failed.
        """
        run = self.run(more=more)
        failed = run.watched.status not in (0, 1) or "unexpected error" in run.printed
        if failed or not all((self.work / n).exists() for n in self.writer.outputs):
            raise RuntimeError(f"{self.writer.name}: {run.watched.status}\n{run.printed}")
        return run

    def state(self, name: str, found: Tree) -> str:
        """Return what is at an output: "old", "new", "some" files of a folder's new ones, or "broken"."""
        kept = re.compile(self.writer.keeps)
        now = {p: digest for p, digest in part(found, name).items() if not kept.fullmatch(p)}
        before = part(self.old, name)
        if now == before:
            return "old"
        new, again = part(self.new, name), part(self.again, name)
        if now in (new, again):
            return "new"
        stable = {path for path in new if new[path] == again.get(path) and not VARIES.search(path)}
        differs = any(path in stable and new[path] != digest for path, digest in now.items())
        if not now or differs or not now.keys() <= new.keys() or not is_complete(self.work / name):
            return "broken"
        if now.keys() == new.keys():
            return "new"
        return "some" if name in now and f"{name}/manifest.json" not in new else "broken"

    def _command(self, more: Sequence[str], printed: Path) -> None:
        """Run the command; called in a fork."""
        os.chdir(self.work)
        output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        sys.stdout, sys.stderr = (open(d, "w", closefd=False) for d in (1, 2))  # noqa: SIM115
        tempfile.tempdir = None
        sys.argv = ["whisperport", *self.writer.arguments, *more]
        from whisperport.apps.cli.main import main

        main()


def tree(folder: Path) -> Tree:
    """Return all files and folders below a folder."""
    found = {}
    for path in folder.rglob("*"):
        name = RANDOM.sub("*", path.relative_to(folder).as_posix())
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    return found


def part(found: Tree, name: str) -> Tree:
    """Return what is at a path and below it."""
    return {p: digest for p, digest in found.items() if p == name or p.startswith(f"{name}/")}


def plan(place: Place, also_interrupt: bool = True) -> Iterator[Fault]:
    """Yield the faults: for each call, one error that fits it, a kill, and an interrupt."""
    last = Counter((call.kind, call.path) for call in place.calls)
    numbers: Counter[str] = Counter()
    for call, is_child in zip(place.calls, place.callers, strict=True):
        count = last[call.kind, call.path]
        if call.kind == "write" and call.occurrence not in (0, 1, count - 1):
            continue
        errors = ERRORS[call.kind]
        yield Fault(call, errors[numbers[call.kind] % len(errors)])
        numbers[call.kind] += 1
        yield Fault(call, KILL)
        if is_child:
            yield Fault(call, KILL_CALLER)
        if also_interrupt:
            yield Fault(call, INTERRUPT)


def schedules(place: Place) -> Iterator[Fault]:
    """Yield, for each call, that the command runs a second time right before it."""
    return (Fault(call, SECOND) for call in place.calls)


def orders(place: Place, count: int) -> Iterator[Fault]:
    """Yield orders in which the calls of several of the command happen."""
    return (Fault(Call("all calls", "of three", seed), ORDER) for seed in range(count))


def judge_all(place: Place, run: Run) -> Iterator[str]:
    """Yield what is wrong after several commands at a time with the same output."""
    if not run.watched.met:
        return
    if run.watched.hung or any(status is None for status, _ in run.others):
        yield "hang"
        return
    ended = [(run.watched.status, run.printed), *run.others]
    for status, printed in ended:
        is_usage = "usage: " in printed  # of an output that has come to exist
        is_right = is_usage or status == place.status
        yield from _message(printed, 0 if is_right or status is None else status, None)
    if not any(status == place.status for status, _ in ended):
        yield f"none succeeds: {'; '.join(_first_error(printed) for _, printed in ended)}"
    for name in place.writer.outputs:
        if (state := place.state(name, run.tree)) != "new":
            yield f"the output is {state}: {name}"
    yield from _others(place, run.tree)
    if left := sorted(litter(place, run.tree)):
        yield f"left: {', '.join(left)[:200]}"


def judge(place: Place, fault: Fault, run: Run) -> Iterator[str]:
    """Yield what is wrong after one repetition."""
    if fault.what in (SECOND, ORDER):
        yield from judge_all(place, run)
        return
    outputs, status, killed = place.writer.outputs, run.watched.status, fault.what == KILL
    if run.watched.hung:
        yield "hang"
    # What could not be deleted, such as a lock file, is no part of an output.
    kept = {fault.call.path} - place.new.keys() if fault.call.kind == "unlink" else set()
    found = {name: digest for name, digest in run.tree.items() if name not in kept}
    states = {name: place.state(name, found) for name in outputs}
    for name, state in states.items():
        # After a kill, the old files may still be in a hidden folder, from which the next run takes them.
        is_lost = not killed or not set(part(place.old, name).values()) <= set(run.tree.values())
        if state == "broken" and is_lost:
            yield f"broken output: {name}"
    if not killed:
        unchanged = UNCHANGED.search(run.printed)
        about = {unchanged[3]} & states.keys() or states.keys() if unchanged else set()
        if any(states[name] == "new" for name in about):
            yield f"the message is wrong: the output was written: {_first_error(run.printed)}"
        is_new = set(states.values()) == {"new"}
        if status == 0 and not is_new:
            yield f"status 0, but the output is {' and '.join(states.values())}"
        yield from _message(run.printed, 0 if is_new and status == place.status else status, fault)
    yield from _others(place, run.tree)
    left = sorted(litter(place, run.tree))
    # What cannot be deleted stays; so does what a process had, of which its parent knows nothing.
    if left and not (killed or fault.what == KILL_CALLER or fault.call.kind == "unlink"):
        yield f"left: {', '.join(left)[:200]}"
    if _without_state(run.tree) in map(_without_state, (place.old, place.new, place.again)):
        return  # what follows is known
    if place.writer.is_new_only and set(states.values()) == {"new"}:
        return  # the next run must not replace it
    key = frozenset((name, "" if IGNORED.search(name) else run.tree[name]) for name in run.tree)
    if key not in place.followed:
        place.followed[key] = list(_judge_next(place))
    yield from place.followed[key]


def _judge_next(place: Place) -> Iterator[str]:
    """Yield what is wrong after an undisturbed run with what a disturbed one left."""
    following = place.run()
    if following.watched.status != place.status:
        yield f"the next run fails: {_first_error(following.printed)}"
        return
    outputs = place.writer.outputs
    broken = [name for name in outputs if place.state(name, following.tree) != "new"]
    if broken:
        yield f"the next run does not write {', '.join(broken)}"
    still = sorted(name for name in litter(place, following.tree) if not name.startswith("tmp/"))
    if still:
        yield f"not cleared by the next run: {', '.join(still)[:200]}"
    yield from _others(place, following.tree)


def litter(place: Place, found: Tree) -> set[str]:
    """Return what is neither there before a run nor after an undisturbed one.

    A message names the log of an exporter, `NAME.new`, which is a new output that could not be moved, and
    `NAME.replaced`, an old one that could not be deleted.
    """
    known = place.old.keys() | place.new.keys() | place.again.keys()
    documented = re.compile(
        rf"out/[^/]+\.log|out/.+\.(new|replaced)(/.*)?|{STATE}/.*|{place.writer.keeps}"
    )
    return {name for name in found.keys() - known if not documented.fullmatch(name)}


def _without_state(found: Tree) -> Tree:
    """Return the files without the records of what this user exported and tried."""
    return {name: digest for name, digest in found.items() if not name.startswith("home/.local")}


def _others(place: Place, found: Tree) -> Iterator[str]:
    """Yield the files that are no outputs and have changed."""
    for name, digest in place.old.items():
        is_output = any(
            name == output or name.startswith(f"{output}/") for output in place.writer.outputs
        )
        if not is_output and found.get(name) != digest:
            yield f"changed: {name}"


def _message(printed: str, status: int, fault: Fault | None) -> Iterator[str]:
    if "Traceback" in printed:
        yield f"traceback: {printed.rstrip().rpartition(chr(10))[2][:120]}"
    if "unexpected error" in printed:
        yield f"unexpected error: {_first_error(printed)}"
    if status < 0:
        yield f"ended by signal {-status}"
    elif fault and fault.what == INTERRUPT and status == INTERRUPTED:
        return
    elif status:
        for needed in ("error: ", "why: ", "hint: "):
            if needed not in printed:
                yield f"status {status} without `{needed.strip(': ')}`: {_first_error(printed)}"
                return


def _first_error(printed: str) -> str:
    lines = printed.strip().splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith("error:")), 0)
    return " / ".join(line.strip() for line in lines[first : first + 2])[:200]


def campaign(
    writers: Sequence[Writer],
    base: Path,
    seconds: float = math.inf,
    progress: Callable[[str], object] = lambda _: None,
    planned: Callable[[Place], Iterable[Fault]] | None = None,
    part_of: tuple[int, int] = (1, 1),
) -> Iterator[tuple[str, Tally]]:
    """Disturb the commands one after the other; yield the tally of each."""
    end = time.monotonic() + seconds
    for number, writer in enumerate(writers):
        share = (end - time.monotonic()) / (len(writers) - number)
        until = time.monotonic() + share
        yield writer.name, disturb(writer, base, until, progress, planned or plan, part_of)


def disturb(
    writer: Writer,
    base: Path,
    end: float,
    progress: Callable[[str], object] = lambda _: None,
    planned: Callable[[Place], Iterable[Fault]] | None = None,
    part_of: tuple[int, int] = (1, 1),
) -> Tally:
    """Do all repetitions of one command, or, if the time does not suffice, some of them."""
    tally, start = Tally(), time.monotonic()
    try:
        place = Place(base, writer)
    except RuntimeError as error:
        progress(f"not disturbed: {error}")
        return tally
    faults = sorted((planned or plan)(place), key=_is_late)
    tally.calls, tally.planned = len(place.calls), len(faults)
    number, count = part_of
    faults, tally.parts = faults[number - 1 :: count], [f"{number}/{count}"]
    per_run = max(0.001, (time.monotonic() - start) / 3)
    step = max(1, math.ceil(len(faults) * per_run / max(1.0, end - time.monotonic())))
    first = sum(not _is_late(fault) for fault in faults)
    order = [*range(first), *(n for m in range(step) for n in range(first + m, len(faults), step))]
    for number in order:
        if time.monotonic() > end:
            break
        place.reset()
        run = place.run(faults[number])
        tally.repetitions += 1
        tally.missed += not run.watched.met
        for finding in judge(place, faults[number], run):
            where = f"{faults[number].call}: {faults[number]}"
            if finding not in tally.findings:
                progress(f"{writer.name}: {where}: {finding}")
            tally.findings[finding].append(where)
    tally.seconds = time.monotonic() - start
    return tally


def _is_late(fault: Fault) -> bool:
    """Return whether a fault is less critical: it fills a file that has no name at the output yet."""
    return fault.call.kind in ("write", "open", "mkdir") or "tmp/" in fault.call.path


def environment(base: Path) -> dict[str, str]:
    """Return the environment in which nothing outside of the folder of the run is written."""
    work = base / "work"
    return {
        "HOME": f"{work}/home",
        "XDG_CACHE_HOME": f"{work}/home/.cache",
        "XDG_STATE_HOME": f"{work}/home/.local/state",
        "TMPDIR": f"{work}/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }


def table(tallies: Mapping[str, Tally]) -> str:
    """Return a table with a row for each command, at most 100 columns wide."""
    rows: list[tuple[str, ...]] = [
        ("verb", "calls", "repetitions", "of", "kinds of findings", "seconds")
    ]
    for name, tally in tallies.items():
        counts = (tally.calls, tally.repetitions, tally.planned, len(tally.findings))
        rows.append((name, *map(str, counts), f"{tally.seconds:.0f}"))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def save(tallies: Mapping[str, Tally], wall_s: float, what: str) -> None:
    """Write the result into the file with the results of all campaigns, in place of the earlier one.

    Results of other commands are kept, and added to those of other parts.
    """
    from whisperport.verification import machine, versions

    known = json.loads(RESULTS.read_text())
    before = next((each for each in known if each["what"] == what), {"verbs": {}, "wall_s": 0.0})
    verbs = before["verbs"] | {
        name: added(before["verbs"].get(name, {}), vars(tally)) for name, tally in tallies.items()
    }
    result = {
        "what": what,
        "wall_s": round(wall_s + before["wall_s"], 1),
        "verbs": verbs,
        "machine": machine(),
        "versions": versions(("whisperport",)),
        "measured_on": datetime.date.today().isoformat(),
        "command": f"python -m fuzz.faults{OPTIONS[what]}",
    }
    others = [each for each in known if each["what"] != what]
    RESULTS.write_text(json.dumps([*others, result], indent=1) + "\n")


def added(before: Mapping[str, Any], tally: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tally with those of other parts, if they are of as many calls."""
    done, (part,) = before.get("parts", []), tally["parts"]
    count = part.rpartition("/")[2]
    is_same = all(before.get(name) == tally[name] for name in ("calls", "planned"))
    if not (is_same and done and part not in done and all(p.endswith(f"/{count}") for p in done)):
        return tally
    both = {name: before[name] + tally[name] for name in ("repetitions", "missed", "seconds")}
    return {**tally, **both, "parts": [*done, part]} | {
        "findings": {**before["findings"], **tally["findings"]}
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--verb", action="append", help="Name in the table, or its start")
    parser.add_argument("--minutes", type=float, default=math.inf, help="Time of all together")
    parser.add_argument("--part", default="1/1", help="Which repetitions: the first eighth is 1/8")
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--second", action="store_true", help="Run each command twice at a time")
    several.add_argument("--together", type=int, metavar="N", help="Run three of each, N times")
    parser.add_argument("--save", action="store_true", help=f"Write the result into {RESULTS.name}")
    chosen = parser.parse_args(arguments)
    if why := why_not():
        print(why, file=sys.stderr)
        return 1
    logging.getLogger("whisperport").setLevel(logging.ERROR)
    start, tallies = time.monotonic(), {}
    with tempfile.TemporaryDirectory(prefix="whisperport-faults-") as name:
        base = Path(os.path.realpath(name))
        os.environ.update(environment(base))
        (base / "work/tmp").mkdir(parents=True)
        prepare_process()
        writers = all_writers(base)
        if chosen.verb:
            whole = [w for w in writers if w.name in chosen.verb]
            writers = whole or [w for w in writers if w.name.startswith(tuple(chosen.verb))]
        if any("in/checkpoint" in w.arguments or w.name.split()[0] in TRACED for w in writers):
            trace_once(base)
        seconds = 60 * chosen.minutes
        planned, what = (schedules, SECONDS) if chosen.second else (plan, FAULTS)
        if chosen.together:
            planned, what = partial(orders, count=chosen.together), ORDERS
        number, _, count = chosen.part.partition("/")
        how = (partial(print, flush=True), planned, (int(number), int(count)))
        for verb, tally in campaign(writers, base, seconds, *how):
            tallies[verb] = tally
    print(table(tallies))
    for verb, tally in tallies.items():
        for finding, where in tally.findings.items():
            print(f"{verb}: {finding}: {len(where)} repetitions, such as {where[0]}")
    if chosen.save:
        save(tallies, time.monotonic() - start, what)
    return int(any(tally.findings for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
