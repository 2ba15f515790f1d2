"""What is known of written files: their hashes, their checkpoint, and how they were verified in an app.

It lies beside the files, in `whisperport.json` of a folder, or in `STEM.whisperport.json` beside a file. No
app reads it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whisperport.build.layouts.reference import Emitted, TimedText
from whisperport.errors import BundleError
from whisperport.program.bundle.evidence_json import check_to_json, read_check
from whisperport.program.bundle.ownership import RECORD, RECORD_FORMAT
from whisperport.program.bundle.strict_json import Field
from whisperport.program.checks import Check
from whisperport.system.atomic import write_atomic

VERSION = 1
MAX_BYTES = 64 << 20


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
    sha256: str
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
    machine: Mapping[str, Any]
    date: str
    checks: tuple[Check, ...]

    def __bool__(self) -> bool:
        """Whether every comparison passed, and there is one."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def failures(self) -> list[str]:
        """Return a line for each comparison that failed."""
        return [f"{check.what}: {check.reason}" for check in self.checks if not check.passed]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRecord:
    """What is known of written files.

    Attributes:
        app: the app that they were written for.
        precision: of the weights.
        exact: whether the written weights are those of the checkpoint.
        language: of the clips, a code.
        window_s: length of the checkpoint's window in seconds; a clip is its first window.
        source: the checkpoint's origin.
        files: relative path -> SHA-256.
        clips: those of the verification.
        verification: None: the app did not run.
    """

    app: str
    precision: str
    exact: bool
    language: str
    window_s: float
    source: Mapping[str, Any]
    files: Mapping[str, str]
    clips: tuple[KnownClip, ...] = ()
    verification: Verification | None = None

    @property
    def is_verified(self) -> bool:
        """Whether the app returned what it must."""
        return bool(self.verification)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        data = {"format": RECORD_FORMAT, "version": VERSION, **asdict(self)}
        if self.verification:
            checks = [check_to_json(check) for check in self.verification.checks]
            data["verification"]["checks"] = checks
        return data

    @classmethod
    def from_json(cls, data: Any) -> "LayoutRecord":
        """Read a JSON object.

        Raises:
            KeyError, TypeError, ValueError: it is not what `to_json` returns.
        """
        data = dict(data)
        if (data.pop("format"), data.pop("version")) != (RECORD_FORMAT, VERSION):
            raise ValueError(f"it is not of the format {RECORD_FORMAT!r}, version {VERSION}")
        verification = data["verification"]
        if verification is not None:
            checks = tuple(
                read_check(Field(check, f"verification.checks[{i}]", RECORD))
                for i, check in enumerate(verification["checks"])
            )
            verification = Verification(**{**verification, "checks": checks})
        clips = tuple(
            KnownClip(**{**clip, "expected": _emitted(clip["expected"])}) for clip in data["clips"]
        )
        files = {str(name): str(digest) for name, digest in data["files"].items()}
        return cls(**{**data, "clips": clips, "files": files, "verification": verification})


def record_path(path: Path) -> Path:
    """Return the path of the record of a layout's folder or file."""
    return path.with_name(f"{path.stem}.{RECORD}") if path.is_file() else path / RECORD


def is_layout(path: Path) -> bool:
    """Return whether files of an app, with a record of whisperport, are at a path."""
    return record_path(path).is_file()


def read_record(path: Path) -> LayoutRecord:
    """Read the record of a layout's folder or file.

    Raises:
        BundleError: it is missing or damaged.
    """
    file = record_path(path)
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
        return LayoutRecord.from_json(json.loads(file.read_bytes()))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BundleError(
            f"{file} cannot be read",
            why=f"{type(error).__name__}: {error}",
            hint="write the files again with `whisperport convert`",
        ) from error


def write_record(file: Path, record: LayoutRecord) -> None:
    """Write a record, complete or not at all."""
    text = json.dumps(record.to_json(), ensure_ascii=False, indent=1)
    write_atomic(file, text.encode())


def _emitted(data: Mapping[str, Any]) -> Emitted:
    segments = tuple(TimedText(**segment) for segment in data["segments"])
    return Emitted(tuple(map(int, data["tokens"])), str(data["text"]), segments)
