"""The stages of MediaTek's compiler: check, describe, compile. Run by `toolchain/driver.py`.

This script needs the program `ncc-tflite` of MediaTek's NeuroPilot SDK, and the standard library of
Python 3.9 or later. It does not import whisperport: a copy of it is the `stages.py` of a work folder. To
run it on another machine, set MTK_NEURON_SDK to the folder of the SDK, then start `python compile.py`.

    encoder.tflite ─check─► check.txt      --check-target-only: operators that the NPU does not support
                   ─describe─► io.txt      --show-io-info: inputs and outputs, as the compiler sees them
                   ─compile─► encoder.dla, plan.txt, built.json    --show-exec-plan --show-memory-summary
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

COMMAND = "ncc-tflite"
VARIABLES = ("WHISPERPORT_TOOLCHAIN_MEDIATEK", "MTK_NEURON_SDK")

# Folders of the program inside an SDK, and of its libraries beside it: neuropilot-sdk-basic-8.0.10 has
# neuron_sdk/host/bin and neuron_sdk/host/lib. Source: superLin006/MTK_model_zoo@942c4fb.
PLACES = ("neuron_sdk/host/bin", "host/bin", "bin", ".")
LIBRARIES = ("../lib", "../lib64")

QUERY_S = 120  # time limit of --version and --arch=?, which compile nothing
KEPT_BYTES = 4 * 2**20  # of the output of --arch=? that is examined
LONGEST_LINE = 300


class NccError(Exception):
    """`ncc-tflite` failed for a reason that is not known."""


class UnsupportedOperatorError(NccError):
    """The NPU does not support an operator."""


class UnsupportedTypeError(NccError):
    """The NPU does not support the type of a tensor."""


class UnknownFlagError(NccError):
    """This version of `ncc-tflite` does not have a flag."""


class MissingLibraryError(NccError):
    """The compiler cannot load one of its libraries."""


class MissingConfigurationError(NccError):
    """The compiler cannot read the vendor's configuration of this machine."""


# The first pattern that is found decides. Sources of the messages: the loader of Linux; reports of users of
# ncc-tflite: "MDLA: unsupported operation", "Can't open config file", "Getting configuration data failed".
PATTERNS: Sequence[tuple[str, type[Exception]]] = (
    (r"error while loading shared libraries|cannot open shared object file", MissingLibraryError),
    (r"can't open config file|getting configuration data failed", MissingConfigurationError),
    (
        r"(unknown|unrecogni[sz]ed|invalid|unexpected) (option|flag|argument|parameter)",
        UnknownFlagError,
    ),
    (r"bad_alloc|out of memory|cannot allocate memory|\boom\b", MemoryError),
    (
        r"(unsupported|not supported|does not support|doesn't support)[^\n]*\b(data ?)?type\b"
        r"|\btype\b[^\n]*(unsupported|not supported)",
        UnsupportedTypeError,
    ),
    (
        r"unsupported (operation|operator|op|layer)|unknown (operation|operator|op\b)|"
        r"(operation|operator|op|layer)[^\n]*(is|are) not supported|cannot find an execution plan",
        UnsupportedOperatorError,
    ),
)
OPERATOR = re.compile(r"^\s*(OP\[\d+\]:?\s*\w+)")


def command() -> Path:
    """Return the path of `ncc-tflite`.

    Raises:
        ImportError: it is not there. The driver then reports that the SDK is missing.
    """
    named = next(filter(None, map(os.environ.get, VARIABLES)), "")
    if not named:
        located = shutil.which(COMMAND)
        if located is None:
            raise ImportError(f"{COMMAND} is not in PATH, and {VARIABLES[1]} is not set")
        return Path(located)
    path = Path(named).expanduser()
    candidates = [path] if path.is_file() else [path / place / COMMAND for place in PLACES]
    for candidate in candidates:
        if candidate.is_file():
            if not os.access(str(candidate), os.X_OK):
                raise ImportError(f"{candidate} is not executable: run `chmod +x {candidate}`")
            return candidate
    raise ImportError(
        f"{named} has no {COMMAND}; looked in it and in {', '.join(PLACES[:-1])}"
        if path.is_dir()
        else f"{named} does not exist"
    )


def version() -> str:
    """Return the version that `ncc-tflite --version` prints, "" if it prints none.

    Raises:
        ImportError: the program is not there, or cannot be started.
    """
    code, output = _query("--version")
    if code in (126, 127) or re.search(PATTERNS[0][0], output, re.IGNORECASE):
        raise ImportError(
            f"{command()} cannot be started: {_problem(output) or f'exit status {code}'}; its libraries "
            "are expected in the folder lib beside its folder"
        )
    numbers = re.search(r"\b\d{1,4}(\.\d{1,6}){1,3}", output)
    return numbers.group() if numbers else ""


def check(version: str, settings: Mapping[str, Any]) -> str:
    """Return why this SDK does not compile for the board; "" if it does, or if it does not tell.

    Args:
        settings: `board`, its name; `arch`, the default of `--arch`; `sdks`, versions of NeuroPilot that
            are known to compile for it.
    """
    engine = settings["arch"].split(",")[0]
    supported = architectures(_query("--arch=?")[1])
    if not supported or engine in supported:
        return ""
    known = " or ".join(str(major) for major in settings["sdks"])
    return (
        f"{settings['board']} needs the architecture {engine}; {COMMAND} {version} has "
        f"{', '.join(supported[:20])}; NeuroPilot {known} is known to have it"
    )


def architectures(output: str) -> list[str]:
    """Read the output of `--arch=?`, which lists an architecture per line, as `- mdla3.0`."""
    return re.findall(
        r"^[ \t]*-[ \t]*([A-Za-z][\w.]{0,40})[ \t]*\r?$", output[:KEPT_BYTES], re.MULTILINE
    )


def _check(job: Any, kit: Any) -> None:
    output = _ncc(job, kit, "check", ["--check-target-only"])
    (job.folder / "check.txt").write_bytes(output.encode("utf-8", "replace"))


def _describe(job: Any, kit: Any) -> None:
    output = _ncc(job, kit, "describe", ["--show-io-info"])
    (job.folder / "io.txt").write_bytes(output.encode("utf-8", "replace"))


def _compile(job: Any, kit: Any) -> None:
    folder, own = job.folder, job.settings
    with kit.written(folder / own["artifact"]) as partial:
        printed = ["--show-exec-plan", "--show-memory-summary"]
        output = _ncc(job, kit, "compile", [*printed, "-d", partial.name])
    (folder / "plan.txt").write_bytes(output.encode("utf-8", "replace"))
    kit.write_json(folder / "built.json", {"version": version(), "flags": list(own["flags"])})


def _ncc(job: Any, kit: Any, stage: str, stage_flags: Sequence[str]) -> str:
    """Run the compiler in a program's folder, and return the first part of its output.

    All of its output is in the log of the stage, to which the driver leads it.

    Raises:
        NccError: it failed; the class tells why, and the message is its own line about it.
    """
    own = job.settings
    arguments = [own["model"], *own["flags"], *stage_flags]
    print("$", COMMAND, *arguments, flush=True)
    completed = subprocess.run(
        [str(command()), *arguments],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        cwd=str(job.folder),
        env=_environment(),
    )
    _, _, output = kit.read_log(job.folder / f"{stage}.log").partition("\n")
    if completed.returncode:
        raise _error(completed.returncode, output)
    return str(output)


def _error(code: int, output: str) -> Exception:
    if code == -signal.SIGKILL:
        return MemoryError("the system ended it, most likely because memory ran out")
    last = ""
    for line in output.splitlines():
        operator = OPERATOR.match(line)
        last = operator.group(1).strip() if operator else last
        for pattern, kind in PATTERNS:
            if re.search(pattern, line[:2000], re.IGNORECASE):
                where = f"{last}: " if last and kind in _ABOUT_AN_OPERATOR else ""
                return kind(_short(where + line.strip()))
    if code < 0:
        return NccError(
            f"it crashed with {signal.Signals(-code).name}; {_problem(output)}".rstrip("; ")
        )
    return NccError(_problem(output) or f"it ended with exit status {code} and printed nothing")


_ABOUT_AN_OPERATOR = (UnsupportedOperatorError, UnsupportedTypeError)


def _problem(output: str) -> str:
    """Return the line that most likely names the problem: the first with an error, else the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"error|fail|fatal", line[:2000], re.IGNORECASE)]
    return _short((named or lines[-1:] or [""])[0])


def _short(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:LONGEST_LINE]).strip()


@functools.cache
def _query(flag: str) -> tuple[int, str]:
    """Run the compiler with one flag; return its exit status, 127 if it cannot be started, and output."""
    try:
        completed = subprocess.run(
            [str(command()), flag],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(),
            timeout=QUERY_S,
        )
    except OSError as error:  # such as "Exec format error": a program for the board's processor
        return 127, f"error: {error.strerror}"
    except subprocess.TimeoutExpired:
        return 127, f"error: `{COMMAND} {flag}` took longer than {QUERY_S} s"
    return completed.returncode, completed.stdout.decode("utf-8", "replace")


def _environment() -> dict[str, str]:
    """Return the environment with the SDK's own libraries first."""
    folder = command().resolve().parent
    libraries = [
        str((folder / place).resolve()) for place in LIBRARIES if (folder / place).is_dir()
    ]
    before = os.environ.get("LD_LIBRARY_PATH", "")
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, [*libraries, before]))}


STAGES: Mapping[str, Callable[[Any, Any], None]] = {
    "check": _check,
    "describe": _describe,
    "compile": _compile,
}
