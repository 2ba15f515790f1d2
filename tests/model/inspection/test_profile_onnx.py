"""ONNX Runtime's trace gives the provider and time of every node."""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from whisperport.errors import LoweringError, ProgramError, UsageError
from whisperport.model.inspection.node_modules import module_of, onnx_modules
from whisperport.model.inspection.profile_onnx import CPU, _subgraphs, _trace, profile_onnx
from whisperport.program.profiling import VOCABULARY, ProfileOptions, block_of

from ...embedded import default_bundle

ONCE = ProfileOptions(repeat=2, threads=1)
AZURE = "AzureExecutionProvider"  # in every wheel; it takes no ordinary node


@pytest.fixture
def two_matmuls(tmp_path: Path) -> Callable[..., Path]:
    """`two_matmuls(rows="n")`: relu(x·w)·w for x (rows, 16)."""

    def make(rows: int | str = 4) -> Path:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, 16])
        out = helper.make_tensor_value_info("out", TensorProto.FLOAT, [rows, 16])
        weight = helper.make_tensor("w", TensorProto.FLOAT, [16, 16], np.eye(16).ravel())
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
            helper.make_node("Relu", ["a"], ["b"], "between"),
            helper.make_node("MatMul", ["b", "w"], ["out"], "second"),
        ]
        graph = helper.make_graph(nodes, "two", [x], [out], [weight])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        path = tmp_path / "two.onnx"
        path.write_bytes(model.SerializeToString())
        return path

    return make


def test_every_node_is_measured_where_it_ran(two_matmuls: Callable[..., Path]) -> None:
    profile = profile_onnx(two_matmuls(), ONCE)

    assert {node.name for node in profile.nodes} == {"first", "between", "second"}
    assert {node.where for node in profile.nodes} == {CPU}
    assert profile.undelegated == ()
    assert profile.subgraphs == 1
    assert profile.runs == 2
    assert profile.overhead_ms is not None
    total = sum(node.ms or 0 for node in profile.nodes) + profile.overhead_ms
    assert profile.total_ms == pytest.approx(total)


def test_a_provider_that_supports_no_node_delegates_nothing(
    two_matmuls: Callable[..., Path],
) -> None:
    options = ProfileOptions(repeat=1, threads=1, options={"provider": AZURE})

    profile = profile_onnx(two_matmuls(), options)

    assert profile.subgraphs == 0
    assert len(profile.undelegated) == len(profile.nodes) == 3
    assert all(
        node.reason == f"not delegated to {AZURE}; ONNX Runtime does not report why"
        for node in profile.nodes
    )
    assert all(node.estimated_gain_ms is None for node in profile.nodes)  # no rate to compare with


def test_a_built_in_program_runs_with_its_shared_weights() -> None:
    profile = profile_onnx(default_bundle() / "onnxruntime" / "step.onnx", ONCE)

    assert profile.program == "step"
    assert {node.operator for node in profile.nodes} >= {"MatMul", "Softmax", "Gelu"}


def test_nodes_have_the_modules_of_their_weights_and_the_vocabulary_projection_its_name() -> None:
    profile = profile_onnx(default_bundle() / "onnxruntime" / "step.onnx", ONCE)

    in_order = sorted(profile.nodes, key=lambda node: node.place)
    modules = [node.module for node in in_order]
    projection = [node for node in profile.nodes if node.module == VOCABULARY]
    assert profile.on_cpu
    assert [node.operator for node in projection] == ["MatMul"]
    assert {"blocks.0.attn_ln", "blocks.2.mlp.0", "blocks.2.mlp.2"} <= set(modules)
    softmax = [node.module for node in in_order if node.operator == "Softmax"]
    assert softmax[:2] == ["blocks.0.attn", "blocks.0.cross_attn"]
    blocks = [block for block, _ in groupby(map(block_of, modules)) if block]
    assert blocks == ["blocks.0", "blocks.1", "blocks.2"]  # no node is between those of one block


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("node_MatMul_1/MatMulAddFusion", "blocks.0"),
        ("node_MatMul_1", "blocks.0"),
        ("gemm_input_reshape", ""),
        ("/", ""),
        ("", ""),
    ],
)
def test_a_fused_node_has_the_module_of_the_node_that_it_is_named_after(
    name: str, module: str
) -> None:
    assert module_of(name, {"node_MatMul_1": "blocks.0"}) == module


def test_a_file_that_onnx_cannot_read_has_no_modules(tmp_path: Path) -> None:
    path = tmp_path / "damaged.onnx"
    path.write_bytes(b"\x08damaged")

    assert onnx_modules(path) == {}


def test_a_dynamic_shape_is_rejected_until_an_array_settles_it(
    two_matmuls: Callable[..., Path],
) -> None:
    path = two_matmuls(rows="n")

    with pytest.raises(ProgramError, match="`x` has no static shape") as raised:
        profile_onnx(path, ONCE)
    settled = profile_onnx(path, ProfileOptions(repeat=1, inputs={"x": np.ones((3, 16), "f4")}))

    assert "(n, 16)" in raised.value.why
    assert "--inputs" in raised.value.hint
    assert len(settled.nodes) == 3


@pytest.mark.parametrize("contents", [b"", b"\x08\x08nonsense", b"\x08" + b"\xff" * 500])
def test_what_is_no_model_is_rejected(contents: bytes, tmp_path: Path) -> None:
    path = tmp_path / "no.onnx"
    path.write_bytes(contents)

    with pytest.raises(ProgramError, match=r"cannot run no\.onnx"):
        profile_onnx(path, ONCE)


def test_an_unknown_provider_and_an_unknown_option_are_rejected(
    two_matmuls: Callable[..., Path],
) -> None:
    for options, error, match in (
        ({"provider": "NoSuchProvider"}, LoweringError, "no execution provider"),
        ({"threads": "1"}, UsageError, "no runtime option `threads`"),
    ):
        with pytest.raises(error, match=match):
            profile_onnx(two_matmuls(), ProfileOptions(options=options))


def test_subgraphs_are_counted_by_how_often_one_enters() -> None:
    def events(providers: str) -> list[dict[str, object]]:
        return [{"args": {"provider": provider}} for provider in providers]

    counts = {run: _subgraphs("N", events(run)) for run in ("", "CC", "NN", "NCN", "CNNCNC")}

    assert counts == {"": 0, "CC": 0, "NN": 1, "NCN": 2, "CNNCNC": 2}


def test_the_time_of_a_loops_body_is_counted_once(tmp_path: Path) -> None:
    def number(name: str, shape: list[int], kind: int = TensorProto.FLOAT) -> object:
        return helper.make_tensor_value_info(name, kind, shape)

    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["a", "w"], ["b"], "inside"),
            helper.make_node("Identity", ["go"], ["on"]),
        ],
        "body",
        [
            number("i", [], TensorProto.INT64),
            number("go", [], TensorProto.BOOL),
            number("a", [64, 64]),
        ],
        [number("on", [], TensorProto.BOOL), number("b", [64, 64])],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Loop", ["times", "", "x"], ["y"], "loop", body=body),
            helper.make_node("Relu", ["y"], ["out"], "after"),
        ],
        "g",
        [number("x", [64, 64])],
        [number("out", [64, 64])],
        [
            helper.make_tensor("times", TensorProto.INT64, [], [20]),
            helper.make_tensor("w", TensorProto.FLOAT, [64, 64], np.eye(64).ravel()),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    (tmp_path / "loop.onnx").write_bytes(model.SerializeToString())

    profile = profile_onnx(tmp_path / "loop.onnx", ONCE)

    assert {node.name for node in profile.nodes} == {"loop", "after"}


def test_a_trace_that_a_full_disk_cut_is_not_a_fault_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('[{"cat": "Node", "na')

    with pytest.raises(ProgramError) as raised:
        _trace(tmp_path / "trace.json")

    assert "full disk" in str(raised.value.why)
    assert "TMPDIR" in str(raised.value.hint)
