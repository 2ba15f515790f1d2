"""Programs that run in another process, which has a vendor's SDK: arrays in, arrays out."""

import io
import json
import os
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event, Timer
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import BundleError, LoweringError, MissingPackageError, WhisperportError
from whisperport.system.child import Child, exit_reason
from whisperport.system.process import OwnProcess
from whisperport.targets.toolchain import driver
from whisperport.targets.toolchain.interpreter import Installed
from whisperport.targets.toolchain.process import PROBE_S, start_process

RUN_S = 3600.0  # time limit in seconds of one run; an emulator needs minutes for a large encoder
MAX_LINE = 2**16  # bytes of a message's first line
LAST = 2000  # bytes of the log's end that are searched for its last line

Array = NDArray[Any]


class ServedPrograms:
    """A process of a toolchain's interpreter that runs programs. One thread may use it at a time.

    The process ends when this object is deleted or `close` is called, and when this process ends.
    """

    def __init__(
        self,
        installed: Installed,
        script: Path,
        settings: Mapping[str, Any],
        programs: Mapping[str, Sequence[Path]],
        title: str,
        *,
        run_s: float = RUN_S,
    ) -> None:
        """Start the process, and load the programs.

        Args:
            installed: the toolchain.
            script: the vendor's stage script, which defines `load`; see `toolchain/driver.py`.
            settings: JSON for `check` of the script.
            programs: name of a program -> its files, as `load` of the script expects them.
            title: name of what runs the programs, for errors.
            run_s: time limit of one run, in seconds.

        Raises:
            MissingPackageError: the interpreter does not have the SDK.
            LoweringError: the SDK does not support the settings.
            BundleError: a program cannot be loaded, or the process ended.
        """
        files = {name: [os.path.abspath(file) for file in each] for name, each in programs.items()}
        argument = json.dumps({**settings, "programs": files})
        self._title, self._run_s, self._installed = title, run_s, installed
        self._log: IO[bytes] = TemporaryFile()  # noqa: SIM115  # the process writes to it until it ends
        self._child = start_process(
            installed, [driver.__file__, "--serve", os.fspath(script), argument], stderr=self._log
        )
        self._end = weakref.finalize(self, _end, OwnProcess(), self._child, self._log)
        event = ""
        while event != "ready":
            event, _ = self._answer("the programs", PROBE_S)

    def run(self, program: str, inputs: Mapping[str, Array]) -> list[Array]:
        """Run a program once.

        Args:
            program: its name.
            inputs: input name -> array.

        Returns:
            The outputs, in the order of the program.

        Raises:
            BundleError: the program failed, took too long, or the process ended.
        """
        content = io.BytesIO()
        np.savez(content, **inputs)  # type: ignore[arg-type]  # its stub takes the names for options
        header = json.dumps({"program": program, "bytes": content.tell()}).encode("ascii")
        pipe = self._child.process.stdin
        assert pipe is not None
        try:
            pipe.write(header + b"\n" + content.getvalue())
            pipe.flush()
        except (OSError, ValueError):  # ValueError: `close` was called
            raise self._ended(f"`{program}`", timed_out=False) from None
        _, answer = self._answer(f"`{program}`", self._run_s)
        with np.load(io.BytesIO(answer), allow_pickle=False) as arrays:
            return [arrays[name] for name in arrays.files]

    def close(self) -> None:
        """End the process."""
        self._end()

    def _answer(self, what: str, seconds: float) -> tuple[str, bytes]:
        """Return the next event and its bytes; raise the error that an event reports."""
        pipe = self._child.process.stdout
        assert pipe is not None
        late = Event()
        timer = Timer(seconds, _kill_late, [late, self._child])
        timer.daemon = True
        timer.start()
        try:
            event = json.loads(pipe.readline(MAX_LINE))
            content = pipe.read(event["bytes"])
            if len(content) < event["bytes"]:
                raise EOFError
        except (OSError, ValueError, EOFError):  # the last message is incomplete or missing
            raise self._ended(what, timed_out=late.is_set()) from None
        finally:
            timer.cancel()
        if event["event"] in ("missing", "unsuitable", "failed"):
            raise self._error(event)
        return event["event"], content

    def _error(self, event: Mapping[str, Any]) -> WhisperportError:
        kind, why = event["event"], event["message"]
        if kind == "failed":
            return BundleError(
                f"`{event['program']}` failed in {self._title}",
                why=why,
                hint="compile the bundle again with `whisperport compile BUNDLE`",
            )
        error = MissingPackageError if kind == "missing" else LoweringError
        return error(
            f"{self._title} cannot be used",
            why=why,
            hint=f"{self._installed.path} is the interpreter that was used",
        )

    def _ended(self, what: str, *, timed_out: bool) -> BundleError:
        """Return the error for a process that ended, and why it did."""
        if timed_out:
            why = f"a run took longer than {self._run_s:g} s"
        elif self._child.process.stdin is None or self._child.process.stdin.closed:
            why = "its process was closed"
        else:
            try:
                why = exit_reason(self._child.process.wait(PROBE_S))
            except subprocess.TimeoutExpired:
                why = "the process does not answer"
            why = "; ".join(filter(None, (why, self._last_line())))
        self.close()
        return BundleError(
            f"cannot run {what} in {self._title}",
            why=why,
            hint="use a machine with more memory, or a smaller checkpoint",
        )

    def _last_line(self) -> str:
        """Return what the process printed last."""
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - LAST))
        return self._log.read().decode("utf-8", "replace").strip().rpartition("\n")[2][:300]


def _kill_late(late: Event, child: Child) -> None:
    late.set()
    child.kill()


def _end(process: OwnProcess, child: Child, log: IO[bytes]) -> None:
    """End the child in the process that started it, and not in its forks."""
    if process.is_current:
        child.end()
        log.close()
