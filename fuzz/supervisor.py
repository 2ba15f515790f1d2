"""Run a worker process, and watch its answers, its time and its memory."""

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fuzz import processes
from fuzz.case import Outcome

LIMIT_S = 30.0
LIMIT_BYTES = 2 << 30
POLL_S = 0.1
LONGEST_S = 300.0  # limit of wall-clock time, also on a loaded machine
INPUTS = 1000  # inputs after which a worker is replaced, since libraries do not free all memory
START_S = 120.0  # limit for making an input, with imports


class Supervisor:
    """Runs one worker after another in the folder `work`."""

    def __init__(self, work: Path, seeds: Path) -> None:
        self.work, self.seeds = work.absolute(), seeds.absolute()
        self.work.mkdir(parents=True, exist_ok=True)
        # A replay happens in the folder of its campaign, which may still run.
        self._lock = self.work.with_name(f"{self.work.name}.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise SystemExit(f"a campaign or a replay is running in {self.work}") from None
        self._process: subprocess.Popen[bytes] | None = None
        self._inputs = 0

    def ask(self, request: dict[str, Any]) -> Outcome:
        """Let the worker make and read one input; return its outcome."""
        failure = self.make(request)
        if failure is not None:
            return Outcome("harness failed", failure.detail, "the input could not be made")
        os.write(self._requests, b'"run"\n')
        answer = self._answer(LIMIT_S, limit_bytes=LIMIT_BYTES)
        if isinstance(answer, Outcome):
            return answer
        seconds = max(0.0, answer["seconds"] - self._waited_s)
        peak = max(answer["peak_bytes"], self._peak)
        outcome = Outcome(**{**answer, "seconds": seconds, "peak_bytes": peak})
        if outcome.peak_bytes > LIMIT_BYTES:
            return Outcome("memory", f"{outcome.peak_bytes} bytes; {outcome.detail}", "peak",
                           outcome.seconds, outcome.peak_bytes)  # fmt: skip
        return outcome

    def make(self, request: dict[str, Any]) -> Outcome | None:
        """Let the worker make an input without reading it; return the failure, if there is one."""
        if self._process is None or self._inputs >= INPUTS:
            self.stop()
            self._start()
        self._inputs += 1
        os.write(self._requests, json.dumps(request).encode() + b"\n")
        made = self._answer(START_S, limit_bytes=8 * LIMIT_BYTES)
        return made if isinstance(made, Outcome) else None

    @property
    def input(self) -> Path:
        """Folder of the latest input."""
        return self.work / "input"

    def stop(self) -> None:
        """End the worker and all processes that it started."""
        if self._process is None:
            return
        processes.kill(processes.tree(self._process.pid))
        self._process.wait()
        for descriptor in (self._requests, self._answers):
            with suppress(OSError):
                os.close(descriptor)
        self._process = None

    def close(self) -> None:
        """Stop the worker and remove its folder."""
        self.stop()
        shutil.rmtree(self.work, ignore_errors=True)
        self._lock.close()

    def _start(self) -> None:
        worker_in, self._requests = os.pipe()
        self._answers, worker_out = os.pipe()
        home = self.work / "home"
        folders = {"TMPDIR": self.work / "tmp", "HOME": home, "XDG_STATE_HOME": home / "state"}
        quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment = os.environ | quiet | {name: str(path) for name, path in folders.items()}
        root = Path(__file__).parents[1]
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        with (self.work / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "fuzz.worker",
                    self.work,
                    self.seeds,
                    str(worker_in),
                    str(worker_out),
                ],
                pass_fds=(worker_in, worker_out),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=root,
            )
        os.close(worker_in)
        os.close(worker_out)
        self._buffer, self._inputs = b"", 0

    def _answer(self, limit_s: float, limit_bytes: int) -> dict[str, Any] | Outcome:
        """Return the next line from the worker, or an Outcome if it does not answer.

        Time in which the worker and its children wait for a CPU core does not count, so the limit is the
        same on a loaded machine.
        """
        assert self._process is not None
        started, self._peak, self._waited_s = time.monotonic(), 0, 0.0
        before = {self._process.pid: processes.waited_s(self._process.pid)}
        after: dict[int, float] = {}
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], POLL_S)
            if ready:
                data = os.read(self._answers, 1 << 16)
                if not data:
                    return self._died(time.monotonic() - started)
                self._buffer += data
                continue
            tree = processes.tree(self._process.pid)
            size = sum(map(processes.resident_bytes, tree))
            after |= {pid: processes.waited_s(pid) - before.get(pid, 0.0) for pid in tree}
            self._waited_s, self._peak = sum(after.values()), max(self._peak, size)
            wall_s = time.monotonic() - started
            seconds = wall_s - self._waited_s
            if size > limit_bytes:
                return self._killed("memory", f"{size} bytes", seconds)
            if seconds > limit_s or wall_s > LONGEST_S:
                return self._killed("hang", f"no answer in {limit_s:g} s", seconds)
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _killed(self, kind: str, detail: str, seconds: float) -> Outcome:
        assert self._process is not None
        tree = processes.tree(self._process.pid)
        running = [processes.command(pid)[:100] for pid in tree[1:]]
        with suppress(OSError):
            os.kill(self._process.pid, signal.SIGABRT)  # faulthandler then writes the stack
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        outcome = self._described(kind, f"{detail}; children: {running}", seconds)
        processes.kill(tree)
        self.stop()
        return outcome

    def _died(self, seconds: float) -> Outcome:
        assert self._process is not None
        status = self._process.wait()
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        outcome = self._described("crash", name, seconds)
        self.stop()
        return outcome

    def _described(self, kind: str, detail: str, seconds: float) -> Outcome:
        """Make an outcome with the end of the worker's log, where faulthandler has written the stack."""
        log = (self.work / "log").read_text(errors="replace")[-6000:]
        lines = [
            line for line in log.splitlines() if line.startswith("  File") and "/fuzz/" not in line
        ]
        line = next((line for line in lines if "/whisperport/" in line), "unknown")
        where = f"{detail.split(';')[0]} at {line.rpartition('/whisperport/')[2]}"
        return Outcome(kind, f"{detail}\n{log[-3000:]}", where, seconds, self._peak)
