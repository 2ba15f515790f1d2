"""The host's steps of a program: files are read back as they were written, or rejected."""

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whisperport.errors import ProgramError
from whisperport.program.host_part import HostPart, Join, Lookup
from whisperport.program.spec import TensorSpec


@pytest.fixture
def written(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    host = HostPart(
        (
            Lookup(
                TensorSpec("tokens", (1, 3), "int64"),
                TensorSpec("embeddings", (1, 4, 3, 1)),
                random.standard_normal((7, 4)).astype(np.float32),
                random.standard_normal((3, 4)).astype(np.float32),
            ),
        ),
        (Join(TensorSpec("logits", (1, 3, 7)), ("logits_0", "logits_1")),),
    )
    for name, content in host.files("d").items():
        (tmp_path / name).write_bytes(content)
    return tmp_path / "d.host.json"


def test_it_is_read_back_and_computes_rows_plus_positions_and_joined_logits(written: Path) -> None:
    host = HostPart.read(written)
    table, positions = np.load(written.parent / "d.tokens.table.npy"), host.lookups[0].positions
    tokens, other = np.array([[6, 0, 2]]), np.ones(2, np.float32)
    pieces = {"logits_0": np.zeros((1, 3, 3)), "logits_1": np.ones((1, 3, 4)), "rest": other}

    inputs, outputs = host.inputs({"tokens": tokens, "x": other}), host.outputs(pieces)

    assert set(inputs) == {"embeddings", "x"}
    assert inputs["embeddings"].shape == (1, 4, 3, 1)
    assert np.array_equal(inputs["embeddings"][0, :, :, 0].T, table[[6, 0, 2]] + positions)
    assert set(outputs) == {"logits", "rest"}
    assert outputs["logits"].tolist() == [[[0, 0, 0, 1, 1, 1, 1]] * 3]


def test_nothing_is_written_where_the_host_computes_nothing() -> None:
    assert not HostPart()
    assert HostPart().files("d") == {}
    assert HostPart().inputs({"x": np.ones(1)}) == {"x": np.ones(1)}


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.pop("joins"),
        lambda entry: entry["lookups"][0].update(table="../d.tokens.table.npy"),
        lambda entry: entry["lookups"][0].update(table="/etc/passwd"),
        lambda entry: entry["lookups"][0].update(table="gone.npy"),
        lambda entry: entry["lookups"][0].update(table_shape=[8, 4]),
        lambda entry: entry["lookups"][0].update(table_shape=[7]),
        lambda entry: entry["lookups"][0].update(table="d.tokens.positions.npy"),
        lambda entry: entry["lookups"][0]["embeddings"].update(shape=[1, 3, 4, 1]),
        lambda entry: entry["lookups"][0]["tokens"].update(shape="many"),
    ],
)
def test_a_damaged_one_is_rejected(written: Path, change) -> None:
    entry = json.loads(written.read_text())
    change(entry)
    written.write_text(json.dumps(entry))

    with pytest.raises(ProgramError, match="cannot read the host part"):
        HostPart.read(written)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_what_is_none_is_rejected(written: Path, content: bytes) -> None:
    written.write_bytes(content)

    with pytest.raises(ProgramError, match="cannot read the host part"):
        HostPart.read(written)


def test_an_array_of_objects_is_not_unpickled(written: Path) -> None:
    np.save(written.parent / "d.tokens.table.npy", np.full((7, 4), None), allow_pickle=True)

    with pytest.raises(ProgramError, match="cannot read the host part"):
        HostPart.read(written)


def test_an_array_that_states_a_shape_of_terabytes_is_rejected(written: Path) -> None:
    path = written.parent / "d.tokens.table.npy"
    path.write_bytes(path.read_bytes().replace(b"(7, 4)", b"(99999999999, 4)", 1))

    with pytest.raises(ProgramError, match="cannot read the host part"):
        HostPart.read(written)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_with_changed_bytes_is_read_or_rejected(written: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(written.parent.iterdir())))
    valid = path.read_bytes()
    start = data.draw(st.integers(0, len(valid) - 1))
    path.write_bytes(valid[:start] + data.draw(st.binary(max_size=4)) + valid[start + 2 :])

    try:
        with suppress(ProgramError):
            HostPart.read(written)
    finally:
        path.write_bytes(valid)
