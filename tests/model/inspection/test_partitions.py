"""Lowered files: their format, their delegation, their subgraphs and inputs for them."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.errors import BundleError, ProgramError, UsageError
from whisperport.model.inspection.graph import Format, Value
from whisperport.model.inspection.inputs import hint_for, inputs_for, read_inputs
from whisperport.model.inspection.lowered import inspect_lowered
from whisperport.model.inspection.partitions import partitions_of
from whisperport.model.inspection.rejections import check_graph
from whisperport.program.bundle import Bundle
from whisperport.program.profiling import ProfileOptions, Subgraph, border_bytes
from whisperport.program.spec import Limit, Support, TargetSpec
from whisperport.system.progress import reporting
from whisperport.targets import PROFILERS
from whisperport.targets.cpu.xnnpack.lowering import Delegation, read_delegation

from ...extent import core_or_all
from .conftest import graph, node, value, weight

# The predicted subgraphs of a program, and the bytes that cross their borders.

X, A, B, C, D = (value(name, 4, 8) for name in "xabcd")
SIZE = 4 * 8 * 4  # bytes of each
# d needs a, and c, which needs b: with b on the host, a and d are not in one subgraph, but c and d are.
NODES = (
    node("relu", [X], A),
    node("cumsum", [A], B),
    node("add", [B, X], C),
    node("linear", [C, weight("w", 8, 8), A], D),
)


@pytest.mark.parametrize("format", ["torch", "onnx"])
def test_a_node_on_the_host_splits_the_program(format: Format) -> None:
    found = partitions_of(graph(*NODES, format=format), {NODES[1].name: (False,)})

    assert found.subgraphs == (Subgraph(1, SIZE, SIZE), Subgraph(2, 3 * SIZE, SIZE))
    assert found.splitting == (NODES[1].name,)


@pytest.mark.parametrize("format", ["torch", "onnx"])
def test_a_program_without_rejected_nodes_is_one_subgraph(format: Format) -> None:
    found = partitions_of(graph(*NODES, format=format), {})

    assert found.subgraphs == (Subgraph(4, SIZE, SIZE),)
    assert found.splitting == ()
    assert border_bytes(found.subgraphs) == 2 * SIZE


def test_parts_of_a_decomposed_node_are_delegated_alone_or_with_its_neighbours() -> None:
    parts = {NODES[1].name: (False, True, False, True)}

    found = partitions_of(graph(*NODES), parts)

    assert [one.nodes for one in found.subgraphs] == [1, 1, 3]


def test_a_node_beside_the_path_joins_the_last_subgraph_that_needs_it() -> None:
    """Backward, `a` is taken by the subgraph of its reader; forward, it runs as soon as it can."""
    nodes = (node("relu", [X], B), node("cumsum", [X], A), node("add", [A, B], C))
    parts = {nodes[1].name: (False,)}

    assert [one.nodes for one in partitions_of(graph(*nodes), parts).subgraphs] == [2]
    assert [s.nodes for s in partitions_of(graph(*nodes, format="onnx"), parts).subgraphs] == [1, 1]


def test_forward_begins_as_the_first_node_is() -> None:
    nodes = (node("cumsum", [X], A), node("relu", [X], B), node("add", [A, B], C))

    found = partitions_of(graph(*nodes, format="onnx"), {nodes[0].name: (False,)})

    assert [one.nodes for one in found.subgraphs] == [2]


def test_a_program_whose_nodes_are_all_rejected_has_no_subgraph() -> None:
    assert partitions_of(graph(*NODES), {one.name: (False,) for one in NODES}).subgraphs == ()


def test_check_predicts_the_subgraphs_of_what_it_rejects() -> None:
    limit = Limit(rule="WP101", value=frozenset({"relu", "add", "linear"}), source="a test")
    spec = TargetSpec(
        name="test",
        summary="",
        supports=Support(limits=(limit,)),
    )

    found = check_graph(graph(*NODES), spec).to_json()["predicted_partitions"]

    assert [one["nodes"] for one in found["subgraphs"]] == [1, 2]
    assert found["splitting_nodes"] == [NODES[1].name]
    assert found["border_bytes"] == 6 * SIZE


def test_the_size_of_a_dynamic_border_is_unknown() -> None:
    dynamic = value("x", 4, "rows")

    found = partitions_of(graph(node("relu", [dynamic], A)), {})

    assert found.subgraphs == (Subgraph(1, None, SIZE),)
    assert border_bytes(found.subgraphs) is None


# The delegation of a .pte is read; other files are rejected.

NOISE = random.Random(0).randbytes(10_000)


def test_every_method_of_a_bundle_is_read(exported: object) -> None:
    bundle: Bundle = exported("xnnpack")  # type: ignore[operator]
    file = bundle.folder / bundle.manifest.programs[0].files[0]

    found = read_delegation(file.read_bytes())

    assert set(found) == {entry.method for entry in bundle.manifest.programs}
    for entry in bundle.manifest.programs:
        assert entry.facts.delegated > 0
        assert found[entry.method] == Delegation(entry.method, 1, ())


@pytest.mark.parametrize(
    "data",
    [b"", b"ET12", b"\0" * 100, NOISE, b"no program " * 99, b"\0\0\0\0ET12" + b"\xff" * 99],
    ids=["empty", "short", "zeros", "noise", "text", "right identifier"],
)
def test_what_is_no_program_is_rejected(data: bytes) -> None:
    with pytest.raises(BundleError, match="not an ExecuTorch program"):
        read_delegation(data)


# The content of a file determines its format.

ONCE = ProfileOptions(repeat=1, threads=1)


def nothing(_: object) -> list[Any]:
    return []


def test_every_format_is_known_by_its_bytes_whatever_its_name(
    naive_pte: Path, step_xml: Path, cumsum_tflite: Path, tmp_path: Path
) -> None:
    runtimes = {naive_pte: "ExecuTorch", cumsum_tflite: "LiteRT"}
    renamed = {}
    for number, (path, runtime) in enumerate(runtimes.items()):
        copy = tmp_path / f"program{number}.bin"
        copy.write_bytes(path.read_bytes())
        renamed[copy] = runtime
    renamed[step_xml] = "OpenVINO"  # its weights are found by its name

    for path, runtime in renamed.items():
        assert inspect_lowered(path, ONCE, nothing, PROFILERS).profiles[0].runtime == runtime


@pytest.mark.parametrize(
    "target",
    core_or_all(["onnxruntime", "xnnpack"], ["onnxruntime", "xnnpack", "litert", "openvino"]),
)
def test_the_programs_of_a_bundle_are_measured_in_its_order(target: str, exported: Any) -> None:
    bundle: Bundle = exported(target)
    messages: list[str] = []

    with reporting(messages.append):
        inspected = inspect_lowered(bundle.folder, ONCE, nothing, PROFILERS)

    names = [entry.spec.name for entry in bundle.manifest.programs]
    assert [profile.program for profile in inspected.profiles] == names
    assert inspected.skipped == ()
    assert messages[0].startswith("running encoder")


def test_one_program_of_a_bundle_may_be_chosen(exported: Any) -> None:
    options = ProfileOptions(repeat=1, threads=1, programs=("step",))
    bundle: Bundle = exported("onnxruntime")

    inspected = inspect_lowered(bundle.folder, options, nothing)

    assert [profile.program for profile in inspected.profiles] == ["step"]
    with pytest.raises(BundleError, match="no program 'stop'"):
        inspect_lowered(bundle.folder, ProfileOptions(programs=("stop",)), nothing)


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        (b"", "the file is empty"),
        (b"PK\x03\x04" + b"\0" * 60, "the file is a zip archive"),
        (b"import torch\n", "the file begins with b'import t'"),
        (b"\0" * 100, "the file begins with"),
    ],
)
def test_what_is_no_compiled_program_is_rejected(contents: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_bytes(contents)

    with pytest.raises(ProgramError) as raised:
        inspect_lowered(path, ONCE, nothing)

    assert raised.value.why.startswith(why)
    assert raised.value.hint


def test_a_file_that_is_not_there_and_a_folder_that_is_no_bundle_are_rejected(
    tmp_path: Path,
) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ProgramError):
            inspect_lowered(path, ONCE, nothing)


def test_a_program_is_chosen_only_where_there_are_several(cumsum_tflite: Path) -> None:
    with pytest.raises(ProgramError, match="`--program` does not apply"):
        inspect_lowered(cumsum_tflite, ProfileOptions(programs=("main",)), nothing)


def test_no_runs_are_rejected() -> None:
    with pytest.raises(UsageError, match="`repeat` is 0"):
        ProfileOptions(repeat=0)


# Random inputs have the right shape and dtype and are valid token ids; given inputs are checked.

DTYPES = ["float32", "float16", "float64", "int64", "int32", "uint8", "int8", "bool"]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 4), max_size=4), st.sampled_from(DTYPES)), max_size=4
    )
)
def test_random_inputs_have_the_shapes_and_dtypes_asked_for(
    wanted: list[tuple[list[int], str]],
) -> None:
    values = [Value(f"x{n}", tuple(shape), dtype) for n, (shape, dtype) in enumerate(wanted)]

    arrays = inputs_for(values, None)

    assert [(array.shape, array.dtype.name) for array in arrays] == [
        (tuple(shape), dtype) for shape, dtype in wanted
    ]
    assert all(np.isfinite(array).all() for array in arrays)
    integers = [array for array in arrays if array.dtype.kind in "iu" and array.size]
    assert all(array.min() >= 0 and array.max() <= 99 for array in integers)


def test_random_inputs_are_the_same_each_time() -> None:
    values = [Value("x", (3, 4), "float32"), Value("tokens", (1, 8), "int64")]

    first, second = inputs_for(values, None), inputs_for(values, None)

    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("shape", [None, (1, "n"), (-1, 4)])
def test_a_shape_that_is_not_static_is_rejected(shape: tuple[int | str, ...] | None) -> None:
    with pytest.raises(ProgramError, match="no static shape") as raised:
        inputs_for([Value("x", shape, "float32")], None)

    assert "--inputs" in raised.value.hint


@pytest.mark.parametrize("dtype", ["", "bfloat16", "string", "complex64"])
def test_a_dtype_that_numpy_does_not_have_is_rejected(dtype: str) -> None:
    with pytest.raises(ProgramError, match="input `x` is of dtype"):
        inputs_for([Value("x", (1,), dtype)], None)


def test_given_inputs_are_taken_in_the_programs_order() -> None:
    values = [Value("a", (1,), "float32"), Value("b", ("n", 2), "int64")]
    b, a = np.ones((5, 2), np.int64), np.ones(1, np.float32)

    arrays = inputs_for(values, {"b": b, "a": a})

    assert [array.shape for array in arrays] == [(1,), (5, 2)]


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.ones((2, 3), np.float32), "wrong shape or dtype"),
        (np.ones((1, 2), np.float64), "wrong shape or dtype"),
        (np.ones(2, np.float32), "wrong shape or dtype"),
    ],
)
def test_a_given_input_that_does_not_fit_is_rejected(array: np.ndarray, match: str) -> None:
    with pytest.raises(ProgramError, match=match):
        inputs_for([Value("x", (1, 2), "float32")], {"x": array})


def test_a_name_that_is_missing_or_too_many_is_rejected() -> None:
    for given_arrays in ({}, {"x": np.ones(1, "f4"), "y": np.ones(1, "f4")}):
        with pytest.raises(ProgramError, match="do not match the inputs"):
            inputs_for([Value("x", (1,), "float32")], given_arrays)


def test_inputs_are_read_from_an_archive_and_nothing_else(tmp_path: Path) -> None:
    good, pickled, text = tmp_path / "a.npz", tmp_path / "b.npz", tmp_path / "c.npz"
    np.savez(good, x=np.arange(3))
    np.savez(pickled, x=np.array([object()]))
    text.write_text("not an archive", encoding="utf-8")

    assert read_inputs(good)["x"].tolist() == [0, 1, 2]
    for path in (pickled, text, tmp_path / "absent.npz"):
        with pytest.raises(ProgramError, match="cannot read inputs"):
            read_inputs(path)


def test_the_hint_about_integers_is_given_where_there_are_any() -> None:
    assert hint_for([np.zeros(1, np.float32)]) == ""
    assert "0 to 99" in hint_for([np.zeros(1, np.float32), np.zeros(1, np.int64)])
