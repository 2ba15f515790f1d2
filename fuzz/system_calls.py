"""Stop a process at every system call that changes files, and let one of them fail or be the last.

The process has a seccomp filter that hands these calls to this process before the kernel runs them
(`SECCOMP_RET_USER_NOTIF`, Linux 5.5). Threads and child processes inherit the filter, so that the writes of
native libraries are seen as well, in one order. No compiler and no debugger is needed.
"""

import ctypes
import errno
import json
import os
import platform
import re
import select
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import NoReturn

from fuzz import processes

# Source: the kernel's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
# Kind, then the numbers on x86-64 and on aarch64 (-1: it has none), then the arguments that name a file:
# F a descriptor, D a folder's descriptor, P a path.
_CALLS = (
    ("open", 2, -1, "P"),
    ("open", 257, 56, "DP"),
    ("open", 85, -1, "P"),
    ("write", 1, 64, "F"),
    ("write", 18, 68, "F"),
    ("write", 20, 66, "F"),
    ("write", 296, 70, "F"),
    ("write", 328, 287, "F"),
    ("write", 40, 71, "F"),  # sendfile
    ("write", 326, 285, "..F"),  # copy_file_range
    ("allocate", 285, 47, "F"),
    ("truncate", 76, 45, "P"),
    ("truncate", 77, 46, "F"),
    ("rename", 82, -1, "PP"),
    ("rename", 264, 38, "DPDP"),
    ("rename", 316, 276, "DPDP"),
    ("link", 86, -1, "PP"),
    ("link", 265, 37, "DPDP"),
    ("unlink", 87, -1, "P"),
    ("unlink", 263, 35, "DP"),
    ("unlink", 84, -1, "P"),  # rmdir
    ("symlink", 88, -1, ".P"),
    ("symlink", 266, 36, ".DP"),
    ("mkdir", 83, -1, "P"),
    ("mkdir", 258, 34, "DP"),
    ("fsync", 74, 82, "F"),
    ("fsync", 75, 83, "F"),
    ("chmod", 90, -1, "P"),
    ("chmod", 91, 52, "F"),
    ("chmod", 268, 53, "DP"),
    ("chmod", 452, 452, "DP"),
)
ERRORS = {  # what a full, a broken or a foreign disk answers to each kind of call
    "open": (errno.ENOSPC, errno.EMFILE, errno.EACCES),
    "write": (errno.ENOSPC, errno.EIO),
    "allocate": (errno.ENOSPC,),
    "truncate": (errno.EIO, errno.ENOSPC),
    "rename": (errno.EIO, errno.EACCES, errno.ENOSPC),
    "link": (errno.ENOSPC, errno.EIO),
    "unlink": (errno.EACCES, errno.EIO),
    "symlink": (errno.ENOSPC, errno.EACCES),
    "mkdir": (errno.ENOSPC, errno.EACCES),
    "fsync": (errno.EIO, errno.ENOSPC),
    "chmod": (errno.EPERM, errno.EIO),
}
GROWING = {"write", "allocate", "mkdir", "link", "symlink"}  # fail on a disk once it is full
KILL, KILL_CALLER, INTERRUPT = "killed", "caller killed", "interrupted"
SECOND = "another one runs"
ORDER = "in random order"
RANDOM = re.compile(
    r"(?<=tmp)[a-z0-9_]{8}|(?<=tmp/)[a-z0-9_]{8}$|[0-9a-f]{12,64}|(?<=-)[a-z0-9_]{8}(?=/|$)"
    r"|#?\d{4,}| \(deleted\)"
)
PATH_MAX = 4096
PATIENCE_S = 600.0
BLOCKED_S = 1.0  # after this time, a second command is taken to wait for what the first one holds
LONGEST_S = 300.0  # of a second command
QUIET_S = 0.003  # without a new call: then one of those that wait happens
TURN = 0.2  # probability that another process has precedence after it

# Source: include/uapi/linux/{seccomp,filter,audit,prctl}.h.
_MACHINES = {
    "x86_64": (0, 317, 0xC000003E),
    "aarch64": (1, 277, 0xC00000B7),
}  # column, seccomp, audit
_OPENS = {2: 1, 257: 2, 56: 2}  # number -> the argument that has the flags
_NEW_HOST_NAME, _NEW_IDS = 0x04000000, 0x20000000  # CLONE_NEWUTS and CLONE_NEWPID
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 38, 36
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_ALLOW, _NOTIFY, _CONTINUE = 0x7FFF0000, 0x7FC00000, 1
_RECEIVE, _SEND, _IS_VALID = 0xC0502100, 0xC0182101, 0x40082102
_NOTICE = struct.Struct(
    "QIIiIQ6Q"
)  # id, process, flags, then the call: number, machine, place, arguments
_ANSWER = struct.Struct("QqiI")  # id, result, error, flags
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06


@dataclass(frozen=True)
class Call:
    """A call that changes a file: kind, paths without their random parts, and how many came before."""

    kind: str
    path: str
    occurrence: int

    def __str__(self) -> str:
        return f"{self.kind} {self.path}" + (f" ({self.occurrence + 1})" if self.occurrence else "")


@dataclass(frozen=True)
class Fault:
    """What happens at one call: it fails with an error, or `KILL`, `KILL_CALLER`, `INTERRUPT`, `SECOND`.

    `ORDER` concerns no single call: several commands run, and `call.occurrence` is the seed of the order.
    """

    call: Call
    what: str | int

    def __str__(self) -> str:
        return errno.errorcode[self.what] if isinstance(self.what, int) else self.what


@dataclass
class Watched:
    """A process that was watched: the calls up to its end, whether the fault happened, and the status."""

    calls: list[Call] = field(default_factory=list)
    callers: list[bool] = field(
        default_factory=list
    )  # whether another process than the first one called
    met: bool = False
    status: int = 0  # exit status; the negative number of a signal
    hung: bool = False


class Second:
    """A second command, which runs while a first one waits at a call."""

    def __init__(self, command: Callable[[], object], printed: Path) -> None:
        self._command, self._printed, self._process = command, printed, 0
        self.status: int | None = None  # None: it did not run, or did not end

    def start(self) -> None:
        """Run it until it ends, or waits for what the first one holds."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._process = os.fork()
        if not self._process:
            run_and_exit(self._command)
        self._wait(BLOCKED_S)

    def end(self) -> None:
        """Wait for its end."""
        if self._process and self.status is None:
            self._wait(LONGEST_S)
            if self.status is None:
                os.kill(self._process, signal.SIGKILL)
                os.waitpid(self._process, 0)

    @property
    def printed(self) -> str:
        """What it printed."""
        return self._printed.read_text(errors="replace") if self._printed.exists() else ""

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.status is None and time.monotonic() < end:
            ended, status = os.waitpid(self._process, os.WNOHANG)
            if ended:
                self.status = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.005)


def run_together(
    commands: Sequence[Callable[[], object]], order: Random, statuses: Path, latest_s: float = 0.5
) -> None:
    """Run functions in forks of their own, and write their exit statuses; called in a fork.

    About half of them begin at once, the others at most `latest_s` later. In about half of the orders, they
    run as on several machines with the same files, if this user is root.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    forks = []
    is_apart = order.random() < 0.5 and os.geteuid() == 0
    for number, command in enumerate(commands):
        pause_s = order.choice((0.0, order.uniform(0, latest_s)))
        forks.append(os.fork())
        if not forks[-1]:
            time.sleep(pause_s)
            run_and_exit(partial(_on_a_machine, number, command) if is_apart else command)
    ended = [os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks]
    statuses.write_text(json.dumps(ended))


def _on_a_machine(number: int, command: Callable[[], object]) -> NoReturn:
    """Run a function in a fork with process ids and a host name of its own, as another machine has them."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_IDS | _NEW_HOST_NAME):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(f"machine-{number}")
    fork = os.fork()
    if not fork:
        run_and_exit(command)
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))


def why_not() -> str:
    """Return why processes cannot be watched here; empty: they can."""
    if not sys.platform.startswith("linux") or platform.machine() not in _MACHINES:
        return "system calls are watched on Linux only, on x86-64 and aarch64"
    try:
        watched(lambda: None, Path("/proc"))
    except OSError as error:
        return f"this kernel hands on no system calls: {error}"
    return ""


def watched(
    run: Callable[[], object],
    folder: Path,
    fault: Fault | None = None,
    patience_s: float = PATIENCE_S,
    second: Second | None = None,
    order: Random | None = None,
) -> Watched:
    """Run a function in a fork, and stop it at each call that changes something in a folder.

    Args:
        run: ends with `SystemExit` or returns; another exception is printed, and its status is 1.
        folder: calls that concern files elsewhere are not counted.
        fault: what happens at one of the calls. Default: None, nothing. A disk that is full stays full.
        patience_s: after this time, all processes are killed.
        second: runs at the call of a fault `SECOND`, which waits for it. Default: None.
        order: chooses which of the calls that wait happens next, if several processes call. Default: None,
            the first one.

    Raises:
        OSError: the kernel has no such filters, or does not allow them here.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # no orphan escapes
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of threads, which the fork does not need
        child = os.fork()
    if not child:
        _run(run, theirs)
    theirs.close()
    with ours:
        message, descriptors, _, _ = socket.recv_fds(ours, 1024, 1)
    if not descriptors:
        os.waitpid(child, 0)
        number = int(message or b"1")
        raise OSError(number, os.strerror(number))
    watch = _Watch(child, descriptors[0], Path(os.path.realpath(folder)), fault)
    watch.second, watch.order = second, order
    try:
        watch.follow(time.monotonic() + patience_s)
    finally:
        os.close(descriptors[0])
        processes.kill(processes.tree(child))
    if second:
        second.end()
    watch.found.status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return watch.found


def _run(run: Callable[[], object], ours: socket.socket) -> NoReturn:
    """Run the function in this process, which is a fork."""
    os.setsid()
    try:
        listener = _install()
    except OSError as error:
        ours.send(str(error.errno).encode())
        os._exit(1)
    socket.send_fds(ours, [b"0"], [listener])
    os.close(listener)
    ours.close()
    run_and_exit(run)


def run_and_exit(run: Callable[[], object]) -> NoReturn:
    """Run a function in this process, which is a fork, and end the process with its exit status."""
    status = 1
    try:
        run()
        status = 0
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))
    except BaseException:
        with suppress(OSError):
            traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _install() -> int:
    """Install the filter in this process; return the descriptor from which its calls are read."""
    column, number, audit = _MACHINES[platform.machine()]
    numbers = sorted(
        {on_aarch64 if column else on_x86 for _, on_x86, on_aarch64, _ in _CALLS} - {-1}
    )
    steps: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4),  # the machine: a call of another one has other numbers
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, 0),
    ]
    for one in numbers:
        if one in _OPENS:
            flags = 16 + 8 * _OPENS[one]
            steps += [
                (_EQUAL, 0, 4, one),
                (_LOAD, 0, 0, flags),
                (_ANY_BIT, 0, 1, _WRITING),
                (_RETURN, 0, 0, _NOTIFY),
                (_RETURN, 0, 0, _ALLOW),
            ]
        else:
            steps += [(_EQUAL, 0, 1, one), (_RETURN, 0, 0, _NOTIFY)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    packed = b"".join(struct.pack("HBBI", *step) for step in steps)
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(buffer))
    )
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    listener: int = libc.syscall(number, _SET_MODE_FILTER, _NEW_LISTENER, program)
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return listener


class _Watch:
    """The calls of one process and of its descendants, answered one after the other."""

    def __init__(self, child: int, listener: int, folder: Path, fault: Fault | None) -> None:
        self.child, self.fault, self.found = child, fault, Watched()
        self.second: Second | None = None
        self.order: Random | None = None
        self._held: list[tuple[int, int, Call]] = []  # calls that wait: id, thread, what
        self._ranks: dict[int, float] = {}  # of processes whose calls wait
        self._listener, self._folder = listener, os.fspath(folder)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
        self._occurrences: Counter[tuple[str, str]] = Counter()
        column = _MACHINES[platform.machine()][0]
        self._is_full = False
        self._kinds = {
            (on_aarch64 if column else on_x86): (kind, shape)
            for kind, on_x86, on_aarch64, shape in _CALLS
        }

    def follow(self, end: float) -> None:
        """Answer all calls until the last process with the filter has ended."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while True:
            left_s = max(0.0, end - time.monotonic())
            events = poll.poll(1000 * (min(left_s, QUIET_S) if self._held else left_s))
            if not events and (not self._held or not left_s):
                self.found.hung = True
                return
            if not events:
                self._release_one()
            elif events[0][1] & select.POLLIN:
                self._receive_one()
            elif events[0][1] & (select.POLLHUP | select.POLLERR):
                return

    def _receive_one(self) -> None:
        notice = ctypes.create_string_buffer(_NOTICE.size)
        if self._libc.ioctl(self._listener, _RECEIVE, notice) < 0:
            return  # its process was killed meanwhile
        id_, process, _, number, _, _, *arguments = _NOTICE.unpack(notice.raw)
        call = self._call(process, number, arguments)
        if call and self.order:
            self._held.append((id_, process, call))
        else:
            self._answer(id_, process, call)

    def _release_one(self) -> None:
        """Let a call happen: of those that wait, one of the process with the highest rank."""
        assert self.order is not None, "calls wait for an order only"
        if self.order.random() < TURN:
            self._ranks.clear()
        ranks = [
            self._ranks.setdefault(_process_of(thread), self.order.random())
            for _, thread, _ in self._held
        ]
        self._answer(*self._held.pop(ranks.index(max(ranks))))

    def _answer(self, id_: int, process: int, call: Call | None) -> None:
        failure, flags = 0, _CONTINUE
        if call:
            self.found.calls.append(call)
            caller = _process_of(process)
            self.found.callers.append(caller != self.child)
            if self.fault and call == self.fault.call:
                self.found.met = True
                what = self.fault.what
                if isinstance(what, int):
                    failure, flags = -what, 0
                    self._is_full = what == errno.ENOSPC
                elif what == KILL:  # nobody's call is answered any more, so nothing changes
                    processes.kill(processes.tree(self.child))
                    return
                elif what == KILL_CALLER:
                    processes.kill([caller])
                    return
                elif what == SECOND:
                    if self.second:
                        self.second.start()
                else:
                    with suppress(OSError):
                        os.killpg(self.child, signal.SIGINT)
            elif self._is_full and call.kind in GROWING:
                failure, flags = -errno.ENOSPC, 0
        answer = ctypes.create_string_buffer(_ANSWER.pack(id_, 0, failure, flags), _ANSWER.size)
        self._libc.ioctl(self._listener, _SEND, answer)  # fails if its process was killed meanwhile

    def _call(self, process: int, number: int, arguments: Sequence[int]) -> Call | None:
        """Return the call if it concerns a file in the folder."""
        kind, shape = self._kinds[number]
        try:
            paths = _paths(process, shape, arguments)
        except (OSError, ValueError):
            return None
        inside = [path for path in paths if (path + "/").startswith(self._folder + "/")]
        if not inside:
            return None
        names = [RANDOM.sub("*", path[len(self._folder) + 1 :]) or "." for path in inside]
        key = kind, " -> ".join(names)
        self._occurrences[key] += 1
        return Call(*key, self._occurrences[key] - 1)


def _process_of(thread: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{thread}/status").read_text().splitlines():
            if line.startswith("Tgid:"):
                return int(line.split()[1])
    return thread


def _paths(process: int, shape: str, arguments: Sequence[int]) -> list[str]:
    """Return the absolute paths that a call names.

    Raises:
        OSError, ValueError: the process has ended, or the path or descriptor is none.
    """
    found, base = [], f"/proc/{process}/cwd"
    for letter, value in zip(shape, arguments, strict=False):
        if letter == "D":
            is_descriptor = value & 0xFFFFFFFF < 1 << 31
            base = f"/proc/{process}/{f'fd/{value}' if is_descriptor else 'cwd'}"
        elif letter == "F":
            found.append(os.readlink(f"/proc/{process}/fd/{value & 0xFFFFFFFF}"))
        elif letter == "P":
            path = _text(process, value)
            absolute = path if path.startswith("/") else os.path.join(os.readlink(base), path)
            folder, name = os.path.split(os.path.normpath(absolute))
            found.append(os.path.join(os.path.realpath(folder), name))
    return found


def _text(process: int, address: int) -> str:
    """Read a path from the memory of a process."""
    with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        page = 4096 - address % 4096  # the next page may not be mapped
        raw = memory.read(page)
        if b"\0" not in raw:
            raw += memory.read(PATH_MAX)
    return os.fsdecode(raw.split(b"\0")[0])
