"""What is known of written files: their hashes, their checkpoint, and how they were verified in an app.

It lies beside the files, in `whisperport.json` of a folder, or in `STEM.whisperport.json` beside a file. No
app reads it. It holds a hash of each of its own members, so that a change of one is found and named. Who
changes the hashes as well is believed: what the record says of a past run is not in the files.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from whisperport.build.layouts.parts import FileParts, changed_part
from whisperport.build.layouts.reference import Emitted, KnownLogits
from whisperport.errors import BundleError, UsageError
from whisperport.program.bundle.folder import file_sha256
from whisperport.program.bundle.ownership import RECORD, RECORD_FORMAT
from whisperport.program.checks import Check
from whisperport.program.json_records import from_json, members
from whisperport.program.strict_json import Field, parse
from whisperport.system.atomic import write_atomic
from whisperport.system.regular_file import other_kind

VERSION = 2
MEMBERS = "members"  # of the record -> SHA-256 of each
MAX_BYTES = 64 << 20
MAX_WINDOW_S = 3600.0  # Whisper has 30


@dataclass(frozen=True, slots=True)
class KnownClip:
    """A clip of the verification, and what the checkpoint emits for it under the app's profile.

    Attributes:
        name: of its file.
        path: of a file of the user; empty: it came with whisperport.
        text: its transcript; empty: not known.
        sha256: of its samples.
        expected: what the checkpoint emits in eager torch.
    """

    name: str
    path: str
    text: str
    sha256: Annotated[str, Field.sha256]
    expected: Emitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """One run of the app on clips.

    Attributes:
        versions: package of the client -> version.
        machine: description of the machine.
        date: in UTC.
        checks: the comparisons; at least one.
    """

    versions: Mapping[str, str]
    machine: Annotated[Mapping[str, Any], Field.json_object]
    date: str
    checks: tuple[Check, ...]

    def __bool__(self) -> bool:
        """Whether every comparison passed, and there is one."""
        return bool(self.checks) and all(check.passed for check in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRecord:
    """What is known of written files.

    Attributes:
        app: the app that they were written for.
        precision: of the weights.
        exact: whether the written weights are those of the checkpoint.
        language: of the clips, a code.
        chip: for which they were compiled; empty: they were not.
        window_s: length of the checkpoint's window in seconds; a clip is its first window.
        source: the checkpoint's origin.
        made_of: SHA-256 of the rest: of the tokenizer, and of each calibration file that was given.
        files: relative path -> SHA-256.
        parts: relative path -> what the file consists of.
        clips: those of the verification; none: the app did not run.
        logits: what the checkpoint computes for one of them; None: the files hold no graphs.
        without_app: comparisons of the files themselves: graphs that were run here, weights that were read.
        not_compared: why there are none; empty: there are.
        verification: None: the app did not run.
    """

    app: str
    precision: str
    exact: bool
    language: str
    window_s: float
    source: Annotated[Mapping[str, Any], Field.json_object]
    files: Mapping[str, Annotated[str, Field.sha256]]
    parts: Mapping[str, FileParts] = field(default_factory=dict)
    clips: tuple[KnownClip, ...] = ()
    logits: KnownLogits | None = None
    without_app: tuple[Check, ...] = ()
    not_compared: str = ""
    verification: Verification | None = None
    chip: str = ""
    made_of: tuple[Annotated[str, Field.sha256], ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.window_s <= MAX_WINDOW_S:
            raise ValueError(f"`window_s` is {self.window_s}; expected seconds")

    @property
    def is_verified(self) -> bool:
        """Whether the app returned what it must, and no other comparison failed."""
        return bool(self.verification) and all(check.passed for check in self.without_app)

    @property
    def checks(self) -> tuple[Check, ...]:
        """All comparisons."""
        return (*self.without_app, *(() if self.verification is None else self.verification.checks))

    def failures(self) -> list[str]:
        """Return a line for each comparison that failed."""
        return [f"{check.what}: {check.reason}" for check in self.checks if not check.passed]

    def difference(self, path: Path) -> str:
        """Return what differs between the files at a path and those that were written; empty: nothing.

        It names the file, and the part of it that has changed.
        """
        try:
            actual = hashes(path)
        except OSError as error:
            return str(error)
        for name, digest in self.files.items():
            if name not in actual:
                return f"{name} is missing"
            if actual[name] != digest:
                parts = self.parts.get(name)
                part = changed_part(file_of(path, name), parts) if parts else ""
                return f"{name} has changed{f': {part}' if part else ''}"
        return "".join(
            f"{name} was added" for name in sorted(actual.keys() - self.files.keys())[:1]
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"format": RECORD_FORMAT, "version": VERSION, **members(self)}


def file_of(path: Path, name: str) -> Path:
    """Return the path of one of the files of a layout, which is a file or a folder."""
    return path if path.is_file() else path / name


def hashes(path: Path) -> dict[str, str]:
    """Return relative path -> SHA-256 of a file, or of every file in a folder but for the record."""
    if path.is_file():
        return {path.name: file_sha256(path)}
    files = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*"))}
    return {
        name: file_sha256(file) for name, file in files.items() if file.is_file() and name != RECORD
    }


def check_name(path: str | os.PathLike[str]) -> None:
    """Check that a record can hold a path.

    Raises:
        UsageError: it has bytes that are not UTF-8, which JSON cannot hold.
    """
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"`{os.fspath(path)}` cannot be used here",
            why="its name is not UTF-8, and it is recorded in a file of JSON",
            hint="rename it",
        ) from error


def record_path(path: Path) -> Path:
    """Return the path of the record of a layout's folder or file."""
    return path.with_name(f"{path.stem}.{RECORD}") if path.is_file() else path / RECORD


def is_layout(path: Path) -> bool:
    """Return whether files of an app, with a record of whisperport, are at a path."""
    return record_path(path).is_file()


def read_record(file: Path) -> LayoutRecord:
    """Read a record; `record_path` has its path.

    Raises:
        BundleError: it is missing or damaged.
    """
    if kind := other_kind(file):  # a pipe could block
        raise BundleError(f"{file} cannot be read", why=f"it is {kind}, and no file")
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise BundleError(f"{file} cannot be read", why=error.strerror or str(error)) from error
    if len(raw) > MAX_BYTES:
        raise BundleError(f"{file} is too large", why=f"it has more than {MAX_BYTES >> 20} MiB")
    fields = parse(raw, file.name).mapping()
    form = [fields[name].value for name in ("format", "version") if name in fields]
    if form != [RECORD_FORMAT, VERSION]:
        raise BundleError(
            f"{file} cannot be read",
            why=f"its format is {form}; this version of whisperport reads {[RECORD_FORMAT, VERSION]}",
            hint="write the files again with `whisperport convert`",
        )
    written = {name: field.value for name, field in fields.items()}
    content = {n: value for n, value in written.items() if n not in ("format", "version", MEMBERS)}
    record = from_json(LayoutRecord, Field(content, "", file.name))
    if why := _difference(written, raw):
        raise BundleError(
            f"{file} is not what whisperport wrote",
            why=f"{why} since",
            hint="write the files again with `whisperport convert`",
        )
    return record


def write_record(file: Path, record: LayoutRecord) -> None:
    """Write a record, complete or not at all."""
    write_atomic(file, _text(record.to_json()))


def _text(content: Mapping[str, Any]) -> bytes:
    """Return the text of a record with the hashes of its members."""
    with_hashes = {**content, MEMBERS: _member_hashes(content)}
    return json.dumps(with_hashes, ensure_ascii=False, indent=1).encode()


def _member_hashes(content: Mapping[str, Any]) -> dict[str, str]:
    return {name: sha256(json.dumps(value).encode()).hexdigest() for name, value in content.items()}


def _difference(written: Mapping[str, Any], raw: bytes) -> str:
    """Return what has changed in a record since it was written, as a sentence; empty: nothing."""
    content = {name: value for name, value in written.items() if name != MEMBERS}
    before, after = written.get(MEMBERS), _member_hashes(content)
    if not isinstance(before, dict) or before.keys() != after.keys():
        return f"`{MEMBERS}` has changed"
    if changed := [name for name in after if before[name] != after[name]]:
        return f"`{changed[0]}` has changed"
    return "" if _text(content) == raw else "the order of its members, or a space, has changed"
