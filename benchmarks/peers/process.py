"""A contender's process, which loads its model once and then answers requests."""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from select import select
from typing import Any

from .contenders import Contender

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
