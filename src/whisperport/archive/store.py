"""The rows on disk: Parquet files that are written completely or not at all.

    OUT/archive.json           the bundle and the options of all rows
    OUT/parts/NAME.parquet     finished rows
    OUT/subtitles, report.html, summary.json

A file of the archive has at most one row at any time: a row that is to be replaced is deleted before the
file is transcribed again. So a reader needs no rule to choose among rows, and an end of the process between
the two steps only means that the file has no row yet.
"""

import json
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.archive.identity import Identity
from whisperport.archive.rows import Row
from whisperport.archive.schema import schema
from whisperport.errors import UsageError, WhisperportError
from whisperport.system.atomic import clear_temporaries, write_atomic

if TYPE_CHECKING:
    import pyarrow

RECORD = "archive.json"
PART_ROWS = 2000  # of a part at most
_STATE = ("id", "size", "modified_ns", "error", "audio_sha256", "options_sha256")


@dataclass(frozen=True, slots=True)
class Finished:
    """What is known about a row without reading its text. Names are those of the columns."""

    part: Path
    size: int
    modified_ns: int
    failed: bool
    audio_sha256: str | None
    options_sha256: str


class Store:
    """The rows in a folder. One process writes at a time; the caller holds the lock.

    Args:
        folder: made if it does not exist.
        identity: of the bundle and options; those of the rows in the folder must be equal.
        save_every_s: seconds between two parts.

    Raises:
        UsageError: the rows in the folder were made with another bundle or other options.
        WhisperportError: the folder cannot be made or read.
        MissingPackageError: pyarrow is not installed.
    """

    def __init__(self, folder: Path, identity: Identity, save_every_s: float) -> None:
        self._schema, self._save_every_s = schema(), save_every_s
        self.folder, self._parts = folder, folder / "parts"
        self._waiting: list[Row] = []
        self._saved = time.monotonic()
        try:
            self._parts.mkdir(parents=True, exist_ok=True)
            clear_temporaries(self._parts)
            _check_identity(folder / RECORD, identity)
        except OSError as error:
            raise WhisperportError(
                f"cannot write to `{folder}`",
                why=error.strerror or str(error),
                hint="check the permissions and the free space",
            ) from error

    def finished(self) -> dict[str, Finished]:
        """Return what is known about each row, by id.

        Raises:
            WhisperportError: a part is damaged or no part.
        """
        return {
            row["id"]: Finished(
                part,
                row["size"],
                row["modified_ns"],
                row["error"] is not None,
                row["audio_sha256"],
                row["options_sha256"],
            )
            for part in self._part_files()
            for row in self._read(part, _STATE).to_pylist()
        }

    def delete(self, rows: dict[str, Finished]) -> None:
        """Delete rows, so that their files have none."""
        for part in {one.part for one in rows.values()}:
            kept = [row for row in self._read(part).to_pylist() if row["id"] not in rows]
            if kept:
                self._write(part, kept)
            else:
                part.unlink()

    def add(self, row: Row) -> None:
        """Add a row. It counts as finished when it is saved, which this does from time to time.

        Raises:
            WhisperportError: the disk is full, or writing is not permitted. Parts are complete.
        """
        self._waiting.append(row)
        is_due = time.monotonic() - self._saved >= self._save_every_s
        if is_due or len(self._waiting) >= PART_ROWS:
            self.save()

    def save(self) -> None:
        """Write the rows that are not saved yet. Raises: see `add`."""
        if self._waiting:
            self._write(self._parts / f"{secrets.token_hex(8)}.parquet", self._waiting)
        self._waiting, self._saved = [], time.monotonic()

    def rows(self, columns: Collection[str] | None = None) -> Iterator[Row]:
        """Yield all saved rows, with the rows of one part in memory at a time.

        Args:
            columns: names; None: all.
        """
        for part in self._part_files():
            yield from self._read(part, columns).to_pylist()

    def _part_files(self) -> list[Path]:
        return sorted(self._parts.glob("*.parquet"))

    def _write(self, part: Path, rows: Sequence[Row]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        sink = pa.BufferOutputStream()
        parquet.write_table(
            pa.Table.from_pylist(list(rows), self._schema), sink, compression="zstd"
        )
        write_atomic(part, sink.getvalue().to_pybytes())

    def _read(self, part: Path, columns: Collection[str] | None = None) -> "pyarrow.Table":
        from pyarrow import parquet

        why = "its columns are not those of an archive"
        try:
            with parquet.ParquetFile(part) as file:
                if file.schema_arrow.equals(self._schema):
                    return file.read(None if columns is None else list(columns))
        except (OSError, ValueError) as error:
            why = str(error)
        raise WhisperportError(
            f"`{part}` is damaged, or was written by another program",
            why=why,
            hint="move it away; its files are transcribed again by the next run",
        )


def _check_identity(path: Path, identity: Identity) -> None:
    """Record the bundle and the options at the first run, and compare them at every other one.

    Raises:
        UsageError: they differ, or the record is damaged.
    """
    wanted = {
        "bundle_sha256": identity.bundle_sha256,
        "options_sha256": identity.options_sha256,
    }
    if not path.exists():
        write_atomic(path, f"{json.dumps(wanted, indent=1)}\n".encode())
        return
    found = _json_object(path)
    for name, value in wanted.items():
        if found.get(name) != value:
            raise UsageError(
                f"`{path.parent}` has rows of {'another bundle' if 'bundle' in name else 'other options'}",
                why=f"{path.name} states {name} {found.get(name)!r:.20}; now it is {value!r:.20}",
                hint="choose another folder with `--out`, or repeat the command with the bundle and the "
                "options of the first run",
            )


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}
