"""The host's part of a program, what is bound to a runner, and records to JSON and back."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whisperport.errors import BundleError, ProgramError
from whisperport.program.host_part import HostPart, Join, Lookup
from whisperport.program.json_records import Member, from_json, members, to_json
from whisperport.program.runner import Array, Binding, Runner
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.program.strict_json import Field, plain

# The host's steps of a program: files are read back as they were written, or rejected.


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


# What is bound to a program is read in place, until something else is bound.

TENSORS = {"x": (2,), "self_k_0": (2, 2), "cross_k_0": (2, 2)}
SPEC = ProgramSpec(
    "step",
    tuple(TensorSpec(name, shape) for name, shape in TENSORS.items()),
    (TensorSpec("sum", (1,)),),
)


class Sums(Runner):
    """Adds up all of its inputs."""

    def __init__(self) -> None:
        super().__init__(SPEC)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        return [np.array([sum(array.sum() for array in inputs)], np.float32)]


def filled(name: str, value: float) -> Array:
    return np.full(TENSORS[name], value, np.float32)


def bound(runner: Runner, state: Array, constant: Array) -> Binding:
    binding = runner.binding()
    binding.bind("self_k_0", state)
    binding.bind("cross_k_0", constant)
    return binding


def total(binding: Binding, x: float = 0) -> float:
    return float(binding.run({"x": filled("x", x)})["sum"][0])


def test_a_run_needs_only_the_inputs_that_are_not_bound() -> None:
    state, constant = filled("self_k_0", 10), filled("cross_k_0", 100)
    binding = bound(Sums(), state, constant)

    assert [total(binding, 1), total(binding, 2)] == [442, 444]


def test_a_state_that_its_owner_changed_is_seen_by_the_next_run() -> None:
    state = filled("self_k_0", 0)
    binding = bound(Sums(), state, filled("cross_k_0", 0))
    before = total(binding)

    state[:, 1:] = 5
    binding.changed("self_k_0", np.s_[:, 1:])

    assert (before, total(binding)) == (0, 10)


def test_another_array_takes_the_place_of_the_first() -> None:
    binding = bound(Sums(), filled("self_k_0", 1), filled("cross_k_0", 0))

    binding.bind("self_k_0", filled("self_k_0", 2))

    assert total(binding) == 8


def test_bindings_of_one_program_do_not_see_each_other() -> None:
    runner = Sums()
    first = bound(runner, filled("self_k_0", 1), filled("cross_k_0", 0))
    second = bound(runner, filled("self_k_0", 2), filled("cross_k_0", 0))

    assert [total(first), total(second), total(first)] == [4, 8, 4]


def test_an_input_that_is_neither_bound_nor_given_is_named() -> None:
    binding = Sums().binding()
    binding.bind("self_k_0", filled("self_k_0", 0))

    with pytest.raises(ValueError, match=r"'cross_k_0' as \(2, 2\) float32, got nothing"):
        total(binding)


@pytest.mark.parametrize("name", ["x", "self_k_1", ""])
def test_only_constants_and_state_can_be_bound(name: str) -> None:
    with pytest.raises(ValueError, match=f"'step' has no constant or state input '{name}'"):
        Sums().binding().bind(name, filled("x", 0))


@pytest.mark.parametrize("array", [np.zeros((2, 3), "f4"), np.zeros((2, 2), "f2")])
def test_an_array_of_another_shape_or_dtype_is_not_bound(array: Array) -> None:
    with pytest.raises(ValueError, match=r"expects 'self_k_0' as \(2, 2\) float32, got"):
        Sums().binding().bind("self_k_0", array)


def test_a_state_in_another_memory_order_is_rejected_since_its_changes_would_be_missed() -> None:
    turned = np.asfortranarray(filled("self_k_0", 1))
    binding = Sums().binding()

    with pytest.raises(ValueError, match="the state input 'self_k_0' is not C-contiguous"):
        binding.bind("self_k_0", turned)

    binding.bind("cross_k_0", turned)  # a constant is copied into order
    binding.bind("self_k_0", filled("self_k_0", 0))
    assert total(binding) == 4


def test_outputs_are_written_to_the_arrays_that_are_given() -> None:
    inputs = {"x": filled("x", 1), "self_k_0": filled("self_k_0", 1)}
    given = np.full(1, np.nan, np.float32)

    Sums().run_into({**inputs, "cross_k_0": filled("cross_k_0", 0)}, {"sum": given})

    assert given[0] == filled("x", 1).size + filled("self_k_0", 1).size


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"sum": np.zeros(2, np.float32)},
        {"sum": np.zeros(1, np.float64)},
    ],
    ids=["missing", "shape", "dtype"],
)
def test_arrays_of_another_form_are_rejected_as_outputs(wrong: dict[str, Array]) -> None:
    inputs = {name: filled(name, 0) for name in TENSORS}

    with pytest.raises(ValueError, match="another form"):
        Sums().run_into(inputs, wrong)


# Records to JSON and back: each kind of field, and what a hostile document is told.


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    name: Annotated[str, Field.non_empty_text]
    sizes: tuple[Annotated[int, Field.positive], ...] = ()

    def __post_init__(self) -> None:
        if self.name == "forbidden":
            raise ValueError("the name is forbidden")


@dataclass(frozen=True, kw_only=True)
class Outer:
    kind: Literal["a", "b"]
    inner: Inner
    number: float
    count: int
    right: bool
    pair: tuple[int, str]
    hashes: Mapping[str, Annotated[str, Field.sha256]]
    by_name: Mapping[str, Inner] = field(default_factory=dict)
    absent: Inner | None = None
    free: Mapping[str, Any] = field(default_factory=dict)
    usual: Annotated[int, Member(is_omitted=True)] = 7
    renamed: Annotated[str, Member("other name")] = ""


RECORD = Outer(
    kind="a",
    inner=Inner("x", (1, 2)),
    number=math.inf,
    count=3,
    right=True,
    pair=(1, "two"),
    hashes={"file": "a" * 64},
    by_name={"y": Inner("y")},
    free={"anything": [None, {"deep": 1}]},
)


def read(document: Any) -> Outer:
    return from_json(Outer, plain(document, "a.json"))


def test_a_record_survives_the_round_trip_in_the_order_of_its_class() -> None:
    document = json.loads(json.dumps(to_json(RECORD), allow_nan=False))

    assert [*document] == [
        *("kind", "inner", "number", "count", "right", "pair", "hashes", "by_name", "absent"),
        *("free", "other name"),  # `usual` has its default
    ]
    assert document["number"] == "inf"
    assert read(document) == RECORD
    assert read({**document, "usual": 8}).usual == 8


def test_values_that_only_python_has_become_json() -> None:
    values = [Path("a") / "b", Colour.RED, np.float32(0.5), np.int64(3), -math.inf, (True, None)]

    assert to_json(values) == ["a/b", "red", 0.5, 3, "-inf", [True, None]]


def test_a_record_with_more_than_its_fields_says_so_itself_wherever_it_is() -> None:
    @dataclass(frozen=True)
    class Counted:
        items: tuple[str, ...]

        def to_json(self) -> dict[str, Any]:
            return {**members(self), "count": len(self.items)}

    assert to_json({"counted": Counted(("a", "b"))}) == {
        "counted": {"items": ["a", "b"], "count": 2}
    }


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "c"}, "`kind` is 'c'; expected one of a, b"),
        ({"kind": None}, "`kind` is null; expected a string"),
        ({"inner": None}, "`inner` is null; expected an object"),
        ({"inner": {}}, "`inner` has no `name`"),
        ({"inner": {"name": "", "sizes": []}}, r"`inner.name` is empty"),
        (
            {"inner": {"name": "x", "sizes": [1, 0]}},
            r"`inner.sizes\[1\]` is 0; expected at least 1",
        ),
        ({"inner": {"name": "x", "sizes": {}}}, "`inner.sizes` is an object; expected an array"),
        ({"inner": {"name": "forbidden", "sizes": []}}, "`inner` is not valid: the name is forb"),
        ({"inner": {"name": "x", "sizes": [], "y": 1}}, "`inner` has an unknown member 'y'"),
        ({"number": "1.5"}, "`number` is a string; expected a number"),
        ({"number": True}, "`number` is a boolean; expected a number"),
        ({"count": 1.0}, "`count` is a number; expected an integer"),
        ({"count": -1}, "`count` is -1; expected at least 0"),
        ({"count": True}, "`count` is a boolean"),
        ({"right": 1}, "`right` is an integer; expected true or false"),
        ({"pair": [1]}, "`pair` has 1 elements; expected 2"),
        ({"pair": ["one", "two"]}, r"`pair\[0\]` is a string; expected an integer"),
        ({"hashes": {"file": "b"}}, "`hashes.file` is not a SHA-256"),
        ({"by_name": {"y": 1}}, "`by_name.y` is an integer; expected an object"),
        ({"absent": 1}, "`absent` is an integer; expected an object"),
        ({"free": []}, "`free` is an array; expected an object"),
        ({"usual": None}, "`usual` is null; expected an integer"),
        ({"renamed": ""}, "has an unknown member 'renamed'"),
    ],
)
def test_a_wrong_member_is_named_with_what_was_expected(change: Any, why: str) -> None:
    document = to_json(RECORD) | change

    with pytest.raises(BundleError, match=f"a.json is not valid: (field|the top level) {why}"):
        read(document)


@pytest.mark.parametrize("name", list(to_json(RECORD)))
def test_a_missing_member_is_named(name: str) -> None:
    document = {member: value for member, value in to_json(RECORD).items() if member != name}

    with pytest.raises(BundleError, match=f"has no `{name}`"):
        read(document)
