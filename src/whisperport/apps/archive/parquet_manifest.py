"""Read a manifest in Parquet. A small file can state billions of rows, or one text of many gigabytes.

It is therefore read in a child process with limits of memory and time, which writes it as JSON lines.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from whisperport.errors import UsageError, needs
from whisperport.system.child import Limits, StoppedError, run_limited
from whisperport.system.progress import begin_stage

LIMITS = Limits(memory_bytes=2 * 2**30, seconds=600)
MAX_ROWS = 10_000_000
MAX_BYTES = 4 * 2**30  # of all values, as JSON
BATCH_ROWS = 4096  # in memory at a time
COLUMNS = ("id", "path", "language", "prompt", "phrases", "duration")


def read_parquet(path: Path, max_text: int) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a manifest, with those of its columns that `COLUMNS` names.

    Args:
        path: a regular file.
        max_text: characters of one value.

    Raises:
        UsageError: it has no column `path`, too many rows, too long texts, or values that are no text or
            numbers.
        ValueError: it is no Parquet file, is damaged, or needs more memory or time than the limits.
        MissingPackageError: pyarrow is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="whisperport-") as folder:
        rows = Path(folder, "rows.jsonl")
        limits = {"max_text": max_text, "max_rows": MAX_ROWS}
        arguments = {"path": str(path.absolute()), "out": str(rows), **limits}
        try:
            run_limited("whisperport.apps.archive.parquet_manifest:convert", arguments, LIMITS)
        except StoppedError as error:
            raise ValueError(str(error)) from error
        with rows.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def convert(*, path: str, out: str, max_text: int, max_rows: int) -> int:
    """Write the rows as JSON lines, and return their number; runs in the child process."""
    with needs("cannot read Parquet: pyarrow is not installed", extra="archive"):
        import pyarrow as pa
        from pyarrow import parquet
    begin_stage("reading the manifest")
    n_rows = n_bytes = 0
    with (
        open(path, "rb") as opened,  # pyarrow reads a path as UTF-8
        parquet.ParquetFile(opened) as file,
        open(out, "w", encoding="ascii") as lines,
    ):
        columns = [name for name in file.schema_arrow.names if name in COLUMNS]
        if "path" not in columns:
            shown = ", ".join(file.schema_arrow.names[:50])
            _wrong(path, f"it has no column `path`; its columns: {shown}"[:2000])
        for name in columns:
            if pa.types.is_nested(file.schema_arrow.field(name).type):
                _wrong(path, f"`{name}` is nested; expected text, or a number for `duration`")
        too_many = f"it has more than {max_rows:,} rows or {MAX_BYTES / 1e9:.0f} GB of text"
        if file.metadata.num_rows > max_rows:  # as it states
            _wrong(path, too_many)
        for batch in file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
            for row in _rows(batch):
                line = json.dumps(row, default=_other)
                n_rows, n_bytes = n_rows + 1, n_bytes + len(line)
                longest = max(
                    (len(value) for value in row.values() if isinstance(value, str)), default=0
                )
                if longest > max_text:
                    _wrong(
                        path,
                        f"row {n_rows} has a text of {longest} characters, more than {max_text}",
                    )
                if n_rows > max_rows or n_bytes > MAX_BYTES:
                    _wrong(path, too_many)
                lines.write(f"{line}\n")
    return n_rows


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch. Values of a dictionary are decoded first: one by one is slow."""
    columns = [
        column.dictionary_decode() if hasattr(column, "dictionary_decode") else column
        for column in batch.columns
    ]
    values = zip(*(column.to_pylist() for column in columns), strict=True)
    return (dict(zip(batch.schema.names, row, strict=True)) for row in values)


def _other(value: Any) -> float | list[str]:
    """Return what JSON cannot hold: a number, or what is an error in every column."""
    return float(value) if isinstance(value, Decimal) else [repr(value)[:50]]


def _wrong(path: str, why: str) -> None:
    raise UsageError(
        f"`{path}` is not a source of audio files", why=why, hint="split or correct it"
    )
