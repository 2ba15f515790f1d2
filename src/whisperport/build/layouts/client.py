"""Run an app on clips in its own environment, as a child process, and read what it returned."""

import errno
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from whisperport.build.layouts.environments import command_of, variable
from whisperport.build.layouts.layout import App
from whisperport.build.layouts.reference import Emitted, TimedText
from whisperport.errors import BundleError, MissingPackageError, VerificationError
from whisperport.program.strict_json import Field, parse
from whisperport.speech.audio.pcm import to_int16, write_wav
from whisperport.system.child import Child, exit_reason, is_killed, killed
from whisperport.system.locking import temporary_folder
from whisperport.system.system_error import NEARLY_FULL_BYTES, lack_of_space
from whisperport.verification.clips import Clip

RUN = Path(__file__).with_name("run_client.py")
TIMEOUT_S = 1800  # for all clips: a large model takes minutes for each on a slow CPU
MAX_LINE = 300  # characters of a client's message
MAX_PRINTED = 1 << 16  # bytes at the end of what a client printed, in which its message is
MAX_RESULT = 64 << 20  # bytes of a client's result: a clip has a few kB


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRun:
    """What an app returned for clips.

    Attributes:
        versions: package -> version.
        results: of each clip; `tokens` is empty if the app returns no ids.
        load_s: seconds from the start of the client to the loaded model.
        seconds: of each clip, on one thread.
        peak_mib: the client's peak memory in MiB.
    """

    versions: Mapping[str, str]
    results: tuple[Emitted, ...]
    load_s: float
    seconds: tuple[float, ...]
    peak_mib: float


def is_installed(app: App) -> bool:
    """Return whether the app's client can be run here."""
    return bool(app.module) and command_of(app) is not None


def run_client(
    app: App,
    model: Path,
    clips: Sequence[Clip],
    precision: str,
    language: str,
    device: str = "",
    *,
    words: bool = False,
) -> ClientRun:
    """Run an app on clips.

    Args:
        model: the layout's folder or file.
        clips: their samples are rounded to 16 bits.
        precision: of the weights; some apps choose their arithmetic or file by it.
        language: code of the spoken language.
        device: one of the app's devices; empty: it has no others.
        words: whether word timestamps are computed.

    Raises:
        MissingPackageError: the app's client is not installed.
        VerificationError: the client failed, or its result is not what `run_client.py` describes.
        WhisperportError: the client was killed, or the disk of the temporary files is full, which tell
            nothing of the files.
    """
    with temporary_folder() as folder:
        names = [os.fspath(folder / f"{i}.wav") for i in range(len(clips))]
        for name, clip in zip(names, clips, strict=True):
            write_wav(name, to_int16(clip.samples))
        job = {
            "script": os.fspath(app.script),
            "app": app.name,
            "model": os.fspath(model.resolve()),
            "precision": precision,
            "language": language,
            "words": words,
            "device": device,
            "clips": names,
            "result": os.fspath(folder / "result.json"),
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        run_script(app, app.script if app.installer == "npm" else RUN, folder / "job.json")
        return _result(app, folder / "result.json", len(clips))


def run_script(app: App, script: Path, argument: Path) -> None:
    """Run a script with one argument in an app's environment, in that folder or the argument's folder.

    Raises:
        MissingPackageError: the app is not installed.
        VerificationError: the script failed, or did not end.
        WhisperportError: the script was killed, or the disk of the temporary files is full.
    """
    command = command_of(app)
    if command is None:
        raise MissingPackageError(
            f"{app.name} is not installed",
            why=f"its client needs {', '.join(app.packages)}",
            hint=f"whisperport apps --install {app.name}",
        )
    if app.installer == "npm":
        node, packages = command
        line = [node, os.fspath(script), os.fspath(argument), packages]
    else:  # -I: no folder beside a script, and no variable of the user, hides the app's packages
        line = [*command, "-I", os.fspath(script), os.fspath(argument)]
    folder = argument if argument.is_dir() else argument.parent
    with temporary_folder() as scratch:
        _run(app, line, folder, scratch)


def _run(app: App, line: Sequence[str], folder: Path, scratch: Path) -> None:
    """Run an app's command in a folder, with another one for its temporary files."""
    # Some libraries choose their threads by it; the results of one thread are the same on every machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), os.fspath(scratch))
    with tempfile.TemporaryFile() as printed:  # a pipe would be held open by what the app starts
        try:
            child = Child(line, cwd=folder, env=environment, stdout=printed, stderr=printed)
        except OSError as error:
            raise MissingPackageError(
                f"{app.name} cannot be started",
                why=f"{line[0]}: {error.strerror}",
                hint=f"install it: `whisperport apps --install {app.name}`; "
                f"or {variable(app)} can name its interpreter",
            ) from error
        try:
            code = child.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise VerificationError(
                f"{app.name} did not end within {TIMEOUT_S} s",
                hint="verify with fewer or shorter clips",
            ) from error
        finally:
            child.end()
        if is_killed(code):
            raise killed(app.name)
        if code and lack_of_space(scratch, NEARLY_FULL_BYTES):
            raise OSError(errno.ENOSPC, f"{app.name}: {_last_line(printed)}")
        if code:
            raise VerificationError(
                f"{app.name} failed with these files",
                why=f"{exit_reason(code)}: {_last_line(printed)}",
                hint=f"if the app is damaged, install it again: `whisperport apps --install {app.name}`",
            )


def _last_line(printed: IO[bytes]) -> str:
    """Return the last line that is not empty, cut to its first characters."""
    printed.seek(max(0, printed.seek(0, os.SEEK_END) - MAX_PRINTED))
    lines = printed.read().decode(errors="replace").split("\n")
    texts = (line.strip()[:MAX_LINE] for line in reversed(lines))
    return next((text for text in texts if text), "it printed nothing")


def _result(app: App, path: Path, n_clips: int) -> ClientRun:
    try:
        result = _read(path).mapping()
        clips = [clip.mapping() for clip in result["clips"].elements()]
        run = ClientRun(
            versions={name: field.text() for name, field in result["versions"].mapping().items()},
            results=tuple(map(_emitted, clips)),
            load_s=result["load_s"].number(),
            seconds=tuple(seconds.number() for seconds in result["seconds"].elements()),
            peak_mib=result["peak_mib"].number(),
        )
    except KeyError as error:
        raise _no_results(app, f"there is no {error}") from error
    except BundleError as error:
        raise _no_results(app, f"{error.what} {error.why}".strip()) from error
    except (OSError, ValueError) as error:
        raise _no_results(app, str(error)) from error
    if len(run.results) != n_clips:
        raise _no_results(app, f"it has {len(run.results)} clips; expected {n_clips}")
    return run


def _no_results(app: App, why: str) -> VerificationError:
    return VerificationError(
        f"the client of {app.name} returned something else than results", why=why
    )


def _read(path: Path) -> Field:
    if not path.is_file():  # a pipe could block, and a device has no end
        raise ValueError("it ended without a result")
    with path.open("rb") as file:
        raw = file.read(MAX_RESULT + 1)
    if len(raw) > MAX_RESULT:
        raise ValueError(f"it has more than {MAX_RESULT >> 20} MiB")
    return parse(raw, "the result")


def _emitted(clip: Mapping[str, Field]) -> Emitted:
    tokens = clip.get("tokens")
    ids = () if tokens is None else tuple(token.integer() for token in tokens.elements())
    segments, words = (_timed(clip.get(name)) for name in ("segments", "words"))
    return Emitted(ids, clip["text"].text(), segments, words=words)


def _timed(entries: Field | None) -> tuple[TimedText, ...]:
    rows = () if entries is None else (entry.elements() for entry in entries.elements())
    return tuple(TimedText(start.number(), end.number(), text.text()) for start, end, text in rows)
