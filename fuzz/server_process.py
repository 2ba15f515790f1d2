"""A `whisperport serve` process on a free port, for the drivers of loads."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Self

import httpx


class ServerProcess:
    """Starts a server and waits until it is ready. Use it in a `with` block.

    Args:
        arguments: of `whisperport serve`, such as `--model default`.

    Attributes:
        arguments: as they were given.
        url: its address.
        ready_s: seconds from the start of the process to the first answer 200 of `/ready`.
    """

    def __init__(self, *arguments: str) -> None:
        self.arguments = arguments
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed at the end
        self.folder = tempfile.TemporaryDirectory()  # where it may have temporary files
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "whisperport", "serve", "--port", "0", *arguments],
            stderr=self._log,
            env=os.environ | {"TMPDIR": self.folder.name},
        )
        self.url = self._listening()
        with httpx.Client(trust_env=False) as client:
            while client.get(f"{self.url}/ready", timeout=60).status_code != 200:
                time.sleep(0.01)
        self.ready_s = time.perf_counter() - began

    @property
    def log(self) -> str:
        """What the server has printed."""
        self._log.seek(0)
        return self._log.read()

    @property
    def rss_mib(self) -> float:
        """Resident memory in MiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) / 1024

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def n_open_files(self) -> int:
        """Number of open descriptors, anonymous temporary files among them."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    @property
    def files_left(self) -> list[str]:
        """Names of the files in its temporary folder."""
        return [path.name for path in Path(self.folder.name).rglob("*")]

    def metric(self, name: str) -> float:
        """Return a metric without labels."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=30).text
        return float(re.findall(rf"^whisperport_{name} (\S+)$", text, re.MULTILINE)[0])

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        """Send a signal, and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)
        self._log.close()
        self.folder.cleanup()

    def _listening(self) -> str:
        while not (found := re.findall(r"listening on (\S+)", self.log)):
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{self.log}")
            time.sleep(0.01)
        return found[0]
