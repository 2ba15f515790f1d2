"""The attempts of a search: candidates are exported until one is accepted, and kept until it ends."""

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from whisperport.build.export.drafting import BUILD_PACKAGES
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.export.exported import Attempt
from whisperport.errors import BundleError, UsageError, VerificationError
from whisperport.program.bundle import Bundle
from whisperport.program.bundle.ownership import delete_listed
from whisperport.program.bundle.staging import clear_leftovers
from whisperport.system.atomic import clear_temporaries, write_atomic
from whisperport.verification import versions

C = TypeVar("C")
B = TypeVar("B", bound=Bundle)
SUFFIX = ".attempts"
INDEX = "attempts.json"


def first_accepted(
    candidates: Callable[[list[tuple[C, VerificationError]]], Iterable[C]],
    export: Callable[[C], B],
    judge: Callable[[C, B], Attempt],
) -> tuple[B, tuple[Attempt, ...]]:
    """Export candidates until one of them is accepted.

    Args:
        candidates: called once with a list, to which each candidate that is not verified is added; yields
            the candidates, best first.
        export: exports a candidate, or returns the verified bundle of an earlier run.
        judge: returns the attempt, with the reason if a verified candidate is rejected.

    Returns:
        The bundle, and all attempts in order.

    Raises:
        VerificationError: no candidate is left.
    """
    attempts: list[Attempt] = []
    failures: list[tuple[C, VerificationError]] = []
    for candidate in candidates(failures):
        try:
            bundle = export(candidate)
        except VerificationError as error:
            failures.append((candidate, error))
            attempts.append(Attempt(name=str(candidate), rejected=f"not verified: {error.why}"))
            continue
        attempts.append(judge(candidate, bundle))
        if not attempts[-1].rejected:
            return bundle, tuple(attempts)
    raise failures[-1][1]


class KeptAttempts:
    """Verified bundles and rejections of a search, in a folder beside the result.

    Attempts of another checkpoint, or with other options or versions of packages, are deleted; a file of
    the user beside them is not.
    """

    def __init__(self, out: Path, about: Any) -> None:
        """Find the attempts of an earlier run.

        Args:
            out: folder of the result.
            about: JSON of all that the attempts depend on.

        Raises:
            UsageError: the folder of attempts has other files.
        """
        self.folder = out.with_name(out.name + SUFFIX)
        self._key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        self._rejected: dict[str, str] = {}
        index = self._read()
        if index.get("key") == self._key:
            self._rejected = index["rejected"]
        else:
            if self.folder.exists():
                self.delete()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write()

    def bundle(self, name: str, make: Callable[[Path], Bundle]) -> Bundle:
        """Return the bundle of this name, which is made unless an earlier run has made it.

        Raises:
            VerificationError: it was rejected, now or then.
        """
        if name in self._rejected:
            raise VerificationError(f"{name} is not verified", why=self._rejected[name])
        try:
            return Bundle.open(self.folder / name)
        except BundleError:  # there is none, since bundles are written completely or not at all
            pass
        try:
            return make(self.folder / name)
        except VerificationError as error:
            self._rejected[name] = error.why
            self._write()
            raise

    def delete(self) -> None:
        """Delete all attempts; the index last, so that an interruption leaves a folder that is known.

        What killed exports left is deleted too. A file that whisperport did not write is kept.
        """
        for path in list(self.folder.iterdir()):
            if path.name.startswith("."):  # of a killed export: .NAME.partial-TOKEN and such
                clear_leftovers(self.folder / path.name[1:].rpartition(".")[0])
            elif path.is_dir():
                with suppress(BundleError, OSError):  # a file of the user is in it
                    delete_listed(path)
        clear_temporaries(self.folder)
        (self.folder / INDEX).unlink(missing_ok=True)
        with suppress(OSError):  # a file of the user is in it
            self.folder.rmdir()

    def _read(self) -> dict[str, Any]:
        if not self.folder.exists() or not any(self.folder.iterdir()):
            return {}
        try:
            index = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
            if isinstance(index, dict) and isinstance(index.get("rejected"), dict):
                return index
        except (OSError, ValueError):
            pass
        raise UsageError(
            f"{self.folder} is not a folder of attempts",
            why=f"it has no readable {INDEX}",
            hint="move or delete it, or choose another `--out`",
        )

    def _write(self) -> None:
        text = json.dumps({"key": self._key, "rejected": self._rejected}, indent=1)
        write_atomic(self.folder / INDEX, text.encode())


def dependencies(source: Any, target: str, options: ExportOptions) -> dict[str, Any]:
    """Return JSON of what an export depends on: checkpoint, options, files of audio, versions."""
    told = {
        field.name: _told(getattr(options, field.name))
        for field in fields(options)
        if field.name != "run"
    }
    return {
        "source": source,
        "target": target,
        "options": told,
        "versions": versions(BUILD_PACKAGES),
    }


def _told(value: Any) -> Any:
    """Return what stands for an option: files by name, size and time; clips by their samples."""
    if isinstance(value, Path):
        files = [value] if value.is_file() else sorted(value.rglob("*"))
        return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    if isinstance(value, list | tuple):
        return [
            (clip.text, clip.language, hashlib.sha256(clip.samples.tobytes()).hexdigest())
            for clip in value
        ]
    return repr(value)
