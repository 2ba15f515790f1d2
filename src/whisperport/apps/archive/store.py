"""The rows on disk: Parquet files that are written completely or not at all.

A file of the archive has at most one row at any time: a row that is to be replaced is deleted before the
file is transcribed again. So a reader needs no rule to choose among rows, and an end of the process between
the two steps only means that the file has no row yet.

Small parts are merged at the end of a run. An end of the process in the middle loses nothing either: the
merged rows are first written to `parts/.merging`, which readers of Parquet skip and which names the parts
that it replaces. Whoever finds it deletes these parts, and then gives it the name of a part.
"""

from typing import TYPE_CHECKING

from whisperport.errors import needs

if TYPE_CHECKING:
    import pyarrow

import json
import os
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.apps.archive.identity import Identity
from whisperport.apps.archive.output_folder import PARTS, record
from whisperport.apps.archive.rows import Row
from whisperport.errors import WhisperportError
from whisperport.system.atomic import clear_temporaries, flush_folder, write_atomic
from whisperport.system.regular_file import other_kind

if TYPE_CHECKING:
    import pyarrow


VERSION = b"2"  # of the schema, in its metadata


def schema() -> "pyarrow.Schema":
    """Return the schema of a part.

    Raises:
        MissingPackageError: pyarrow is not installed.
    """
    with needs("cannot write Parquet: pyarrow is not installed", extra="archive"):
        import pyarrow as pa
    text, number, texts = pa.string(), pa.float64(), pa.list_(pa.string())
    word = pa.struct({"word": text, "start": number, "end": number, "probability": number})
    times = {"start": number, "end": number}
    scores = ("avg_logprob", "no_speech_prob", "temperature", "compression_ratio")
    segment = pa.struct(
        times
        | {"text": text, "tokens": pa.list_(pa.int32())}
        | dict.fromkeys(scores, number)
        | {"seek": pa.int64(), "words": pa.list_(word), "logprobs": pa.list_(number)}
    )
    error = pa.struct({"code": text, "what": text, "why": text, "hint": text})
    columns = {
        "id": text,
        "path": text,
        "size": pa.int64(),
        "modified_ns": pa.int64(),
        "duration": number,
        "text": text,
        "segments": pa.list_(segment),
        "language": text,
        "language_probability": number,
        "avg_logprob": number,
        "confidence": number,
        "marks": texts,
        "warnings": texts,
        "seconds": number,
        "error": error,
        "audio_sha256": text,
        "transcribed_at": pa.timestamp("ms", "UTC"),
        "model": text,
        "bundle_sha256": text,
        "options_sha256": text,
        "versions": pa.map_(text, text),
    }
    return pa.schema(list(columns.items()), metadata={"whisperport.apps.archive": VERSION})


PART_ROWS = 2000  # of a part when it is written, at most
MERGED_BYTES = 16 * 2**20  # of a merged part, about; in memory it is several times as large
MERGING, REPLACES = ".merging", b"whisperport.replaces"
_STATE = (
    *("id", "path", "size", "modified_ns", "error"),
    *("audio_sha256", "bundle_sha256", "options_sha256"),
)


@dataclass(frozen=True, slots=True)
class Finished:
    """What is known about a row without reading its text. Names are those of the columns."""

    part: Path
    path: str
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
        self._schema, self._save_every_s, self._identity = schema(), save_every_s, identity
        self.folder, self._parts = folder, folder / PARTS
        # A part and its rows, which are not saved yet. Both change in one step: after an interrupt between
        # writing and that step, the same part is written again.
        self._next: tuple[Path, list[Row]] = (self._new_part(), [])
        self._saved = time.monotonic()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            clear_temporaries(folder)
            record(folder, identity)  # first: without it, the folder is no archive
            self._parts.mkdir(exist_ok=True)
            clear_temporaries(self._parts)
            self._finish_merge()
        except OSError as error:
            raise WhisperportError(
                f"cannot write to `{folder}`",
                why=error.strerror or str(error),
                hint="check the permissions and the free space",
            ) from error

    def finished(self) -> dict[str, Finished]:
        """Return what is known about each row, by id.

        Raises:
            WhisperportError: a part is damaged or no part, or has rows of another bundle, or two have a
                row of one file.
        """
        rows = dict[str, Finished]()
        for part, row in self._rows(self._part_files(), _STATE):
            if row["bundle_sha256"] != self._identity.bundle_sha256:
                raise _damaged(part, f"the row of `{row['id']}` is that of another bundle")
            rows[row["id"]] = Finished(
                part,
                row["path"],
                row["size"],
                row["modified_ns"],
                row["error"] is not None,
                row["audio_sha256"],
                row["options_sha256"],
            )
        return rows

    def change(self, old: Mapping[str, Finished], values: Mapping[str, Mapping[str, Any]]) -> None:
        """Delete rows, so that their files have none, and change values of others.

        Args:
            old: rows to delete, by id.
            values: id -> column -> new value.
        """
        parts = {row.part for row in old.values()}
        if values:  # rare: a collection has moved
            parts |= {*self._part_files()}
        for part in sorted(parts):
            rows = self._read(part).to_pylist()
            kept = [row | values.get(row["id"], {}) for row in rows if row["id"] not in old]
            if not kept:
                part.unlink()
            elif kept != rows:
                self._write(part, kept)

    def add(self, row: Row) -> None:
        """Add a row. It counts as finished when it is saved, which this does from time to time.

        Raises:
            WhisperportError: the disk is full, or writing is not permitted. Parts are complete.
        """
        _, rows = self._next
        rows.append(row)
        is_due = time.monotonic() - self._saved >= self._save_every_s
        if is_due or len(rows) >= PART_ROWS:
            self.save()

    def save(self) -> None:
        """Write the rows that are not saved yet. Raises: see `add`."""
        part, rows = self._next
        if rows:
            self._write(part, rows)
            self._next = (self._new_part(), [])
        self._saved = time.monotonic()

    def merge(self) -> None:
        """Merge small parts, so that a run of many hours does not leave thousands of them.

        Raises: see `finished` and `add`. All rows are kept.
        """
        self._finish_merge()  # if the user put one there during the run, it is not replaced
        self.finished()  # a part that the user copied there is not merged
        group, size = list[Path](), 0
        for part in sorted(self._part_files(), key=lambda path: path.stat().st_size):
            size += part.stat().st_size
            if size > MERGED_BYTES:
                self._merge(group)
                group, size = [], part.stat().st_size
            group.append(part)
        self._merge(group)

    def _merge(self, parts: Sequence[Path]) -> None:
        if len(parts) < 2:
            return
        import pyarrow as pa

        table = pa.concat_tables(self._read(part) for part in parts)
        names = json.dumps([part.name for part in parts]).encode()
        metadata = {**(self._schema.metadata or {}), REPLACES: names}
        self._write_table(self._parts / MERGING, table.replace_schema_metadata(metadata))
        self._finish_merge()

    def _finish_merge(self) -> None:
        """Delete the parts that a merged one replaces, and then give it the name of a part."""
        if not os.path.lexists(merged := self._parts / MERGING):
            return
        names = _replaced(merged, self._read(merged, ()).schema.metadata or {})
        for part in self._part_files():
            if part.name in names:
                part.unlink()
        flush_folder(self._parts)
        merged.rename(self._new_part())
        flush_folder(self._parts)

    def rows(
        self, columns: Collection[str] | None = None, only: Mapping[str, Finished] | None = None
    ) -> Iterator[Row]:
        """Yield saved rows, with the rows of one part in memory at a time.

        Args:
            columns: names, with `id`; None: all.
            only: rows, by id; None: all.

        Raises:
            WhisperportError: a part is damaged or no part, or two have a row of one file.
        """
        parts = self._part_files() if only is None else {row.part for row in only.values()}
        for _, row in self._rows(parts, columns):
            if only is None or row["id"] in only:
                yield row

    def _rows(
        self, parts: Iterable[Path], columns: Collection[str] | None
    ) -> Iterator[tuple[Path, Row]]:
        """Yield each row with its part. Raises: see `rows`."""
        part_of = dict[str, Path]()
        for part in parts:
            for row in self._read(part, columns).to_pylist():
                if earlier := part_of.get(row["id"]):
                    raise _damaged(part, f"it has a row of `{row['id']}`, as `{earlier}` has")
                part_of[row["id"]] = part
                yield part, row

    def _part_files(self) -> list[Path]:
        return sorted(self._parts.glob("*.parquet"))

    def _new_part(self) -> Path:
        return self._parts / f"{secrets.token_hex(8)}.parquet"

    def _write(self, part: Path, rows: Sequence[Row]) -> None:
        import pyarrow as pa

        self._write_table(part, pa.Table.from_pylist(list(rows), self._schema))

    def _write_table(self, part: Path, table: "pyarrow.Table") -> None:
        import pyarrow as pa
        from pyarrow import parquet

        if self._parts.is_symlink():
            raise WhisperportError(
                f"`{self._parts}` is a link",
                why="it was none when the run began; rows would be written to where it leads",
                hint="put the folder back, and repeat the command",
            )
        sink = pa.BufferOutputStream()
        parquet.write_table(table, sink, compression="zstd")
        write_atomic(part, sink.getvalue().to_pybytes())

    def _read(self, part: Path, columns: Collection[str] | None = None) -> "pyarrow.Table":
        from pyarrow import parquet

        why = "its columns are not those of an archive"
        try:
            if part.is_symlink():  # changed rows would be written to where it leads
                raise ValueError("it is a link")
            if kind := other_kind(part):
                raise ValueError(f"it is {kind}")
            # A file and not its path, which pyarrow reads as UTF-8.
            with part.open("rb") as file, parquet.ParquetFile(file) as rows:
                if rows.schema_arrow.equals(self._schema):
                    return rows.read(None if columns is None else list(columns))
        except (OSError, ValueError) as error:  # pyarrow's have no number
            why = str(error)
            if isinstance(error, OSError) and error.strerror:
                raise WhisperportError(
                    f"cannot read `{part}`",
                    why=error.strerror,
                    hint="check the permissions and the disk, and repeat the command",
                ) from error
        raise _damaged(part, why)


def _replaced(merged: Path, metadata: Mapping[bytes, bytes]) -> list[str]:
    """Return the names of the parts that a merged one replaces."""
    try:
        names = json.loads(metadata.get(REPLACES, b"[]"))
    except (ValueError, RecursionError) as error:
        raise _damaged(merged, str(error)) from error
    if not isinstance(names, list):
        raise _damaged(merged, f"it replaces {names!r:.50}; expected names of parts")
    return names


def _damaged(part: Path, why: str) -> WhisperportError:
    return WhisperportError(
        f"`{part}` is damaged, or was written by another program",
        why=why,
        hint="move it away; its files are transcribed again by the next run",
    )
