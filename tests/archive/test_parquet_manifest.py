"""Manifests in Parquet that would fill the memory or never end."""

import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from whisperport.apps.archive import parquet_manifest
from whisperport.apps.archive.manifest import read_source
from whisperport.errors import UsageError
from whisperport.system.child import Limits


def one_text_in_millions_of_rows(path: Path) -> None:
    """A few KB: each row is the same word of a dictionary."""
    indices = pa.array(np.zeros(5_000_000, np.int32))
    words = pa.DictionaryArray.from_arrays(indices, ["a.wav"])
    parquet.write_table(pa.table({"path": words}), path, compression="zstd")


def a_text_of_many_megabytes(path: Path) -> None:
    """A few KB: a text of 50 MB, which compresses well."""
    parquet.write_table(pa.table({"path": ["a" * 50_000_000]}), path, compression="zstd")


def one_large_text_in_each_row(path: Path) -> None:
    """64 MB that 4096 rows of a batch share: 256 GB if each had its own."""
    words = pa.DictionaryArray.from_arrays(pa.array([0] * 4096, pa.int32()), ["a" * 2**26])
    parquet.write_table(pa.table({"path": words}), path, compression="zstd")


def many_columns(path: Path) -> None:
    table = pa.table({f"column {number}": ["x"] for number in range(5_000)})
    parquet.write_table(table, path)


def nested(path: Path) -> None:
    kind, value = pa.string(), "a.wav"
    for _ in range(30):
        kind, value = pa.list_(kind), [value]
    parquet.write_table(pa.table({"path": pa.array([value], kind)}), path)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (one_text_in_millions_of_rows, "more than 100,000 rows"),
        (a_text_of_many_megabytes, "characters"),
        (one_large_text_in_each_row, "cannot read"),
        (many_columns, "no column `path`"),
        (nested, "nested"),
    ],
)
def test_a_hostile_manifest_is_an_error_within_limited_memory_and_time(
    write: Callable[[Path], None], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_manifest, "MAX_ROWS", 100_000)
    monkeypatch.setattr(parquet_manifest, "LIMITS", Limits(2**30, 60))
    path = tmp_path / "list.parquet"
    write(path)
    assert path.stat().st_size < 2_000_000
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()

    with pytest.raises(UsageError) as error:
        read_source(path)

    assert says in str(error.value)
    assert time.monotonic() - started < 120
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


def test_a_column_with_a_dictionary_is_read(tmp_path: Path) -> None:
    words = pa.array(["a.wav", "b.wav", "c.wav", "a.wav"]).dictionary_encode()
    path = tmp_path / "list.parquet"
    parquet.write_table(pa.table({"id": [1, 2, 3, 4], "path": words}), path)

    found = {job.id: Path(job.path).name for job in read_source(path)}

    assert found == {"1": "a.wav", "2": "b.wav", "3": "c.wav", "4": "a.wav"}
