"""A process that makes inputs, passes each to its reader, and reports the outcome.

    supervisor ── "format number" ──► worker ──► function that a user would call
               ◄────── outcome ──────┘

The process may crash, hang or use too much memory at any time; the supervisor handles that. It may write
only to the subfolders `input`, `tmp`, `cwd` and `home` of its folder. It must not touch `outside`.
"""

import ctypes
import faulthandler
import json
import os
import shutil
import struct
import sys
import tarfile
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from fuzz import processes
from fuzz.case import ACCEPTED, REJECTED, Format, Outcome, random_for
from fuzz.command_line import UnsafeOutputError, check_printed, printed
from fuzz.formats import all_formats
from whisperport.system import child

PR_SET_CHILD_SUBREAPER = 36
MAX_DESCRIPTORS = 4096
ENDS_S = 1.0  # in which a killed process ends
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
TOLERATED = ("torchinductor_",)  # prefix of a folder that torch makes when it is imported
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # processes of Python


class Worker:
    """The folder of one worker, which is this process, and the forbidden actions that it has seen."""

    def __init__(self, work: Path, seeds: Path) -> None:
        self.work, self.seeds = work, seeds
        self.input = work / "input"
        self.outside = Outside(work / "outside")
        self.actions: list[str] = []  # actions that no reader may do
        self._copies = _canaries(seeds)
        for name in ("tmp", "cwd", "home", "input"):
            (work / name).mkdir(parents=True, exist_ok=True)
        os.chdir(work / "cwd")
        sys.addaudithook(self._audit)
        self._audited = False
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphaned processes become its children
        fork_jobs()

    def make(self, chosen: Format, seed: int, number: int) -> None:
        """Write the input."""
        _cleared(self.input)
        self.outside.fill(self._copies)
        random = random_for(seed, chosen.name, number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen.make(random, self.seeds, self.input, str(self.outside.folder))

    def load(self, saved: Path) -> None:
        """Unpack an input that was saved."""
        _cleared(self.input)
        self.outside.fill(self._copies)
        with tarfile.open(saved) as archive:
            archive.extractall(self.work, filter="fully_trusted")

    def run(self, chosen: Format) -> Outcome:
        """Pass the input to its reader."""
        self.outside.watch()
        self.actions.clear()
        _forget_peak()
        before, started = _listing(self.input), time.monotonic()
        self._audited = True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kind, detail, where = _judged(chosen, self.input)
        finally:
            self._audited = False
        seconds, peak = time.monotonic() - started, _peak_bytes()
        for wrong, found in (
            ("outside touched", self.outside.touched()),
            ("forbidden action", self.actions),
            ("file left", self._left()),
            ("input changed", sorted(before ^ _listing(self.input))),
            ("process left", _children()),
        ):
            if found:
                kind, detail, where = wrong, "; ".join(map(str, found))[:400], str(found[0])[:60]
                break
        _cleared(self.work / "tmp")
        _cleared(self.work / "cwd")
        return Outcome(kind, detail, where, seconds, peak)

    def _left(self) -> list[str]:
        return [
            f"{folder}/{name}"
            for folder in ("tmp", "cwd")
            for name in os.listdir(self.work / folder)
            if not name.startswith(TOLERATED)
        ]

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Audit hook for actions of Python code; it does not see native code or other processes."""
        if not self._audited:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes) and isinstance(flags, int) and flags & WRITES:
                name = os.path.abspath(os.fsdecode(path))
                allowed = name.startswith(
                    (str(self.work / "tmp"), str(self.work / "home"), "/dev/")
                )
                if not allowed and "__pycache__" not in name:
                    self.actions.append(f"opens {name} for writing")
        elif event in ("socket.connect", "socket.getaddrinfo", "os.system", "os.exec"):
            self.actions.append(f"{event} {arguments!r}"[:200])


def fork_jobs() -> None:
    """Let the jobs of `whisperport.system.child` run in forks of this process, which has imported modules.

    A new interpreter imports a runtime for up to 3 s, and the job itself takes some milliseconds. The
    fork has a session, pipes, limits and an exit status of its own, like the interpreter that it replaces.
    """
    start = child.Child.__init__

    def start_in_fork(self: child.Child, command: Sequence[str], **how: Any) -> None:
        if command[-1] == child._BOOT:
            how["preexec_fn"] = _serve_and_exit
        start(self, command, **how)

    child.Child.__init__ = start_in_fork  # type: ignore[method-assign]


def _serve_and_exit() -> None:
    """Serve a job in place of the interpreter that would be started; its pipes are ready."""
    code = 1
    try:
        os.closerange(3, MAX_DESCRIPTORS)
        request = json.loads(os.fdopen(os.dup(0), "rb", 0).readline())
        if limits := request.get("limits"):  # the imported modules do not count
            limits["memory_bytes"] += child._statm(os.getpid())[5]
        child.serve(request)
        code = 0
    finally:
        os._exit(code)


def _judged(chosen: Format, folder: Path) -> tuple[str, str, str]:
    """Run the reader; return kind of outcome, detail, and the place that distinguishes findings."""
    import click

    from whisperport.errors import WhisperportError

    try:
        chosen.run(folder)
    except UnsafeOutputError as error:
        return error.kind, str(error), error.kind
    except WhisperportError as error:
        try:
            check_printed(printed(error))
        except UnsafeOutputError as unsafe:
            return f"{unsafe.kind} in an error", str(unsafe), _place(error)
        return REJECTED, str(error)[:300], ""
    except click.ClickException as error:
        return REJECTED, error.format_message()[:300], ""
    except BaseException as error:
        text = "".join(traceback.format_exception(error))[-2500:]
        return "exception", text, f"{type(error).__name__} at {_place(error)}"
    return ACCEPTED, "", ""


def _place(error: BaseException) -> str:
    """Return the innermost frame of the package in the traceback of an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    package = [frame for frame in frames if "/whisperport/" in frame.filename]
    if not package:
        return "the harness"
    return f"{package[-1].filename.rpartition('/whisperport/')[2]}:{package[-1].name}"


def _canaries(seeds: Path) -> dict[str, bytes]:
    """Return the files for the folder outside; some are valid, so a reader would accept them."""
    copies = {"canary.bin": bytes(range(256)) * 1000, "weights.bin": bytes(200_000)}
    for pattern in ("checkpoint/*", "bundle-onnxruntime/bundle/*", "audio/tone.wav"):
        for path in seeds.glob(pattern):
            if path.is_file():
                copies[path.name] = path.read_bytes()
    return copies


def _listing(folder: Path) -> set[tuple[str, int, int]]:
    """Return names, sizes and modification times of all files in a folder."""
    found = set()
    for path in folder.rglob("*"):
        with suppress(OSError):
            stated = path.lstat()
            size, time_ns = (0, 0) if path.is_dir() else (stated.st_size, stated.st_mtime_ns)
            found.add((str(path.relative_to(folder)), size, time_ns))
    return found


def _cleared(folder: Path) -> None:
    """Empty a folder, and keep it, since it may be the current folder of a process."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _children() -> list[str]:
    """Return the commands of the processes that are left; one that was killed may need a moment to end."""
    end = time.monotonic() + ENDS_S
    while True:
        commands = [processes.command(pid) for pid in processes.tree(os.getpid())[1:]]
        left = [text for text in commands if text and not any(name in text for name in HELPERS)]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.02)


def _forget_peak() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """Return the peak memory of this process since `_forget_peak`, without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {
        line.split(":")[0]: line.split()[1]
        for line in lines
        if line.startswith(("VmHWM", "RssFile"))
    }
    return 1024 * (int(sizes.get("VmHWM", 0)) - int(sizes.get("RssFile", 0)))


# A folder that no reader may touch; inotify reports files that are opened, read, written or removed.

IN_ACCESS, IN_MODIFY, IN_OPEN, IN_CREATE, IN_DELETE = 0x1, 0x2, 0x20, 0x100, 0x200
IN_ISDIR = 0x40000000
NAMES = {
    IN_ACCESS: "read",
    IN_MODIFY: "written",
    IN_OPEN: "opened",
    IN_CREATE: "made",
    IN_DELETE: "removed",
}
EVENT = struct.Struct("iIII")


class Outside:
    """The folder with files that must not be touched, and the inotify watch for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._watch = -1

    def fill(self, copies: dict[str, bytes]) -> None:
        """Fill the folder with new files: valid copies, which a reader would accept."""
        if self._watch >= 0:
            os.close(self._watch)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for name, content in copies.items():
            (self.folder / name).write_bytes(content)

    def watch(self) -> None:
        """Start to watch the folder.

        Raises:
            OSError: the system has no more inotify instances.
        """
        self._watch = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        mask = IN_ACCESS | IN_MODIFY | IN_OPEN | IN_CREATE | IN_DELETE
        folders = [self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())]
        for folder in folders:
            if self._libc.inotify_add_watch(self._watch, os.fsencode(folder), mask) < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch")

    def touched(self) -> list[str]:
        """Return the actions since `watch`, such as "canary.bin opened"; listing folders is ignored."""
        found: dict[str, None] = {}
        try:
            data = os.read(self._watch, 1 << 20)
        except BlockingIOError:
            return []
        while data:
            _, mask, _, length = EVENT.unpack_from(data)
            name = data[EVENT.size : EVENT.size + length].rstrip(b"\0").decode("utf-8", "replace")
            data = data[EVENT.size + length :]
            if not mask & IN_ISDIR or mask & (IN_CREATE | IN_DELETE):
                found |= {f"{name} {word}": None for bit, word in NAMES.items() if mask & bit}
        return list(found)


def main() -> None:
    """Arguments: work folder, folder of seeds, descriptors for requests and for answers."""
    work, seeds, reads, writes = sys.argv[1:]
    faulthandler.enable()
    worker = Worker(Path(work), Path(seeds))
    formats = all_formats()
    chosen = next(iter(formats.values()))
    with open(int(reads)) as requests, open(int(writes), "w") as answers:
        for line in requests:
            request = json.loads(line)
            if request == "run":
                answer = vars(worker.run(chosen))
            else:
                chosen = formats[request["format"]]
                for module in chosen.imports:
                    import_module(module)
                if "saved" in request:
                    worker.load(Path(request["saved"]))
                else:
                    worker.make(chosen, request["seed"], request["number"])
                answer = {"made": True}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
