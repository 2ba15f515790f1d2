"""Kill writers of a bundle at each of their system calls, and report what the next writer finds.

    python killed_writers.py BUNDLE FOLDER      one JSON object a line

A process of its own, because it forks: every writer is a fork that kills itself, with SIGKILL, right
before or right after its Nth call of one function.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whisperport.errors import BundleError
from whisperport.program.bundle import Bundle
from whisperport.program.bundle.writing import writing_bundle
from whisperport.system import atomic

STEPS: tuple[tuple[Any, str], ...] = (
    (os, "mkdir"),
    (os, "open"),
    (os, "rename"),
    (os, "unlink"),
    (os, "rmdir"),
    (atomic, "_renameat2"),
)
NEW = b"new"


class GivenUpError(Exception):
    """Raised to end a writer that only deletes leftovers."""


def outcomes(template: Path, folder: Path, in_one_step: bool) -> Iterator[dict[str, Any]]:
    for owner, name in STEPS:
        for after in (False, True):
            number, killed = 0, True
            while killed:
                number += 1
                out = folder / f"{name}-{number}-{after}-{in_one_step}" / "nano"
                shutil.copytree(template, out)
                (out.parent / "notes.txt").write_text("mine")
                killed = _killed(out, owner, name, number, after, in_one_step)
                step = f"{'after' if after else 'before'} call {number} of {name}"
                yield {"step": step, "killed": killed, **_found(out)}


def _killed(out: Path, owner: Any, name: str, number: int, after: bool, in_one_step: bool) -> bool:
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    os.fsync = lambda _: None  # slow, and nothing is unplugged here
    if not in_one_step:
        atomic._renameat2 = lambda *_: False
    real, calls = getattr(owner, name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return real(*args, **kwargs)
        finally:
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, call)
    try:
        _write(out)
    finally:
        os._exit(0)


def _write(out: Path) -> None:
    old = Bundle.open(out)
    with writing_bundle(out) as writer:
        for name in old.manifest.files:
            (writer.folder / name).parent.mkdir(exist_ok=True)
            raw = NEW if name.endswith(".bin") else old.path(name).read_bytes()
            (writer.folder / name).write_bytes(raw)
        writer.commit(old.manifest)


def _found(out: Path) -> dict[str, Any]:
    killed = _program(out)
    left = sorted(path.name for path in out.parent.iterdir())
    try:
        with writing_bundle(out):
            raise GivenUpError
    except GivenUpError:
        pass
    cleared = sorted(path.name for path in out.parent.iterdir())
    return {"at once": killed, "left": left, "then": _program(out), "cleared": cleared}


def _program(out: Path) -> str:
    try:
        return Bundle.open(out).path("programs/encoder.bin").read_text()
    except BundleError as error:
        return error.what


if __name__ == "__main__":
    for in_one_step in (True, False):
        for outcome in outcomes(Path(sys.argv[1]), Path(sys.argv[2]), in_one_step):
            print(json.dumps({"in one step": in_one_step, **outcome}))
