"""What the command line is given: paths and names, looked at before anything is read or exported.

`Given` is the type of an argument such as AUDIO or BUNDLE. Something of another kind, as with swapped
arguments, is an error that says what it is, and which command is for it. `InputPath` is the type of an
option whose file or folder must exist.
"""

import errno
import os
import re
import shlex
from pathlib import Path
from typing import Any, Literal

import click
from click.shell_completion import CompletionItem

from whisperport.errors import UsageError
from whisperport.program.bundle import MANIFEST
from whisperport.program.dims import PUBLISHED, published_dims
from whisperport.speech.audio.load import AUDIO_SUFFIXES
from whisperport.speech.data import embedded_model

Kind = Literal["audio", "bundle", "layout", "checkpoint", "program", "collection"]

NOUNS: dict[Kind, str] = {
    "audio": "an audio file",
    "bundle": "a bundle",
    "layout": "the files of an app",
    "checkpoint": "a checkpoint",
    "program": "a program",
    "collection": "a folder or list of audio files",
}
PROGRAMS = (".pt2", ".onnx", ".tflite", ".pte")
CHECKPOINTS = (".pt", ".safetensors")
# The options with which verbs are given what is not their argument.
OPTIONS: dict[Kind | None, str] = {"bundle": "--bundle", "checkpoint": "--model"}
COMMANDS: dict[Kind, str] = {
    "audio": "transcribe {} --model NAME",
    "bundle": "verify {}",
    "checkpoint": "export {} --target NAME --out DIR",
    "program": "check {} --target NAME",
}
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_HUB = re.compile(r"https?://(?:www\.)?huggingface\.co/([\w.-]+/[\w.-]+)", re.IGNORECASE)


class Given(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """An argument that is of certain kinds; its value is a path or, with `as_text`, what was typed.

    What is not known, such as a file without a suffix, is left to the verb.

    Args:
        kinds: the kinds that the verb accepts.
        as_text: whether the verb takes a text.
        exists: whether the path must exist.
    """

    name = "path"

    def __init__(self, *kinds: Kind, as_text: bool = False, exists: bool = False) -> None:
        self.kinds, self._as_text, self._exists = kinds, as_text, exists

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | Path:
        text = os.fspath(value)
        if _ADDRESS.match(text):
            raise _address(text, "checkpoint" in self.kinds)
        if not self._as_text:
            _expect_possible(text)
        kind, why = kind_of(text)
        if "layout" in self.kinds:
            # Here: a transcription needs no layouts.
            from whisperport.build.layouts.record import is_layout

            if is_layout(Path(text)):  # which may be a checkpoint, too
                kind = "layout"
        if kind is not None and kind not in self.kinds:
            expected = " or ".join(NOUNS[expected_kind] for expected_kind in self.kinds)
            raise UsageError(
                f"`{text}` is {NOUNS[kind]}, not {expected}",
                why=why,
                hint=_hint(kind, text, ctx),
            )
        if self._exists:
            _expect_there(text)
        return text if self._as_text else Path(text)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        names = (embedded_model.NAME, *PUBLISHED) if "checkpoint" in self.kinds else ()
        paths = CompletionItem(incomplete, type="dir" if self.kinds == ("bundle",) else "file")
        return [paths, *(CompletionItem(name) for name in names if name.startswith(incomplete))]


class InputPath(click.Path):
    """The path of a file or folder that a verb reads; it must exist."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(path_type=Path, **settings)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        path = super().convert(value, param, ctx)
        _expect_there(os.fspath(value), max(param.opts, key=len) if param else "")
        return path


def kind_of(text: str) -> tuple[Kind | None, str]:
    """Return what a path or name is, and the sign that tells it; None: it is not known."""
    path = Path(text)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
        if is_folder and (path / "config.json").is_file():
            return "checkpoint", "it is a folder with a config.json"
        if is_folder and (path / MANIFEST).is_file():
            return "bundle", f"it is a folder with a {MANIFEST}"
    except (OSError, ValueError):  # too long, or a zero byte in the name
        return None, ""
    suffix = path.suffix.lower()
    if not is_folder and not is_file and is_model_name(text):
        return "checkpoint", "it is the name of a model"
    kinds: tuple[tuple[Kind, Any], ...] = (
        ("audio", AUDIO_SUFFIXES),
        ("program", PROGRAMS),
        ("checkpoint", CHECKPOINTS),
    )
    for kind, suffixes in kinds:
        if is_file and suffix in suffixes:
            return kind, f"its name ends in {suffix}"
    return None, ""


def is_model_name(text: str) -> bool:
    """Return whether a text is the name of a model, such as "tiny.en"."""
    return text == embedded_model.NAME or published_dims(text) is not None


def is_there(path: str) -> bool:
    """Return whether a path exists; a link to nothing does not."""
    return os.path.exists(path)


def _expect_there(path: str, option: str = "") -> None:
    if not is_there(path):
        raise UsageError(
            f"`{f'{option} ' if option else ''}{path}` does not exist", hint="check the path"
        )


def _expect_possible(path: str) -> None:
    """Raise an error for a path of a length that no file has: asking whether it is a folder fails too."""
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(
                f"`{path}` does not exist", why=error.strerror or "", hint="check the path"
            ) from error


def _hint(kind: Kind, text: str, ctx: click.Context | None) -> str:
    """How the same verb is given something of this kind, or the command of another verb for it."""
    option, path = OPTIONS.get(kind), shlex.quote(text)
    if ctx is not None and any(option in parameter.opts for parameter in ctx.command.params):
        return f"give it with `{option} {path}`"
    if kind == "program" and text.endswith(".pte"):
        return f"whisperport inspect {path}"
    return f"whisperport {COMMANDS[kind].format(path)}"


def _address(text: str, is_checkpoint: bool) -> UsageError:
    """The error for an address, as it was typed: nothing is downloaded but checkpoints by their names."""
    if text.lower().startswith("file://"):
        hint = f"give the path: {text[7:]}"
    elif is_checkpoint and (match := _HUB.match(text)):
        hint = f"give the hub id, which is downloaded: {match[1]}"
    else:
        hint = f"download it, for example with `curl -LO {shlex.quote(text)}`, and give the file"
    return UsageError(
        f"`{text}` is an address, not a file",
        why="whisperport opens no address: it downloads checkpoints only, by their names",
        hint=hint,
    )
