"""Run an app on clips in its own environment, as a child process, and read what it returned."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whisperport.build.layouts.environments import command_of
from whisperport.build.layouts.layout import App
from whisperport.build.layouts.reference import Emitted, TimedText
from whisperport.errors import MissingPackageError, VerificationError
from whisperport.speech.audio.pcm import to_int16, write_wav
from whisperport.system.child import exit_reason
from whisperport.verification.clips import Clip

RUN = Path(__file__).with_name("run_client.py")
TIMEOUT_S = 1800  # for all clips: a large model takes minutes for each on a slow CPU
MAX_LINE = 300  # characters of a client's message


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
    return command_of(app) is not None


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
    """
    with tempfile.TemporaryDirectory(prefix="whisperport-") as temporary:
        folder = Path(temporary)
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
    """Run a script with one argument in an app's environment, in the folder of the argument.

    Raises:
        MissingPackageError: the app is not installed.
        VerificationError: the script failed, or did not end.
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
    # Some libraries choose their threads by it; the results of one thread are the same on every machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(
            line,
            cwd=argument.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise VerificationError(
            f"{app.name} did not end within {TIMEOUT_S} s",
            hint="verify with fewer or shorter clips",
        ) from error
    if ended.returncode:
        messages = (ended.stderr + ended.stdout).decode(errors="replace").strip().split("\n")
        last = next((text for text in reversed(messages) if text.strip()), "it printed nothing")
        raise VerificationError(
            f"{app.name} failed with the files that were written",
            why=f"{exit_reason(ended.returncode)}: {last.strip()[:MAX_LINE]}",
            hint=f"if the app is damaged, install it again: `whisperport apps --install {app.name}`",
        )


def _result(app: App, path: Path, n_clips: int) -> ClientRun:
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        clips = data["clips"]
        run = ClientRun(
            versions={str(name): str(version) for name, version in data["versions"].items()},
            results=tuple(map(_emitted, clips)),
            load_s=float(data["load_s"]),
            seconds=tuple(float(seconds) for seconds in data["seconds"]),
            peak_mib=float(data["peak_mib"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VerificationError(
            f"the client of {app.name} returned something else than results", why=str(error)
        ) from error
    if len(run.results) != n_clips:
        raise VerificationError(
            f"the client of {app.name} returned {len(run.results)} results for {n_clips} clips"
        )
    return run


def _emitted(clip: dict[str, Any]) -> Emitted:
    tokens = tuple(int(token) for token in clip.get("tokens") or ())
    segments, words = (tuple(map(_timed, clip.get(name) or ())) for name in ("segments", "words"))
    return Emitted(tokens, str(clip["text"]), segments, words=words)


def _timed(entry: Sequence[Any]) -> TimedText:
    start_s, end_s, text = entry
    return TimedText(float(start_s), float(end_s), str(text))
