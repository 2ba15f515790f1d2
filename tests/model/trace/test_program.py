"""Static graphs become programs; nodes keep their history; variants are in one table."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.fx.traceback import NodeSource

from whisperport.build.check import check
from whisperport.errors import LoweringError, ProgramError
from whisperport.model.inspection.graph import Graph
from whisperport.model.inspection.read import read_graphs
from whisperport.model.inspection.read_exported import read_exported
from whisperport.model.trace.program import as_program, trace
from whisperport.model.trace.pt2 import read_pt2
from whisperport.model.trace.shared_copies import shared_node_history
from whisperport.model.trace.trial import eager_outputs, random_inputs
from whisperport.model.trace.variants import VARIANTS, whisper_programs
from whisperport.model.trace.whisper import Parts, uncached_decoder
from whisperport.program.spec import TensorSpec
from whisperport.targets import TARGETS, Target

# Static graphs are traced as programs; other graphs are rejected.


class Named(nn.Module):
    def forward(self, x: Tensor, caches: list[Tensor]) -> tuple[Tensor, Tensor]:
        return x + caches[0], x - caches[1]


def test_the_signature_is_read_off_the_graph() -> None:
    x = torch.zeros(1, 3)

    program = trace("named", Named(), (x, [x, x]), ["sum", "difference"])

    assert [t.name for t in program.spec.inputs] == ["x", "caches_0", "caches_1"]
    assert program.spec.outputs == (
        TensorSpec("sum", (1, 3), "float32"),
        TensorSpec("difference", (1, 3), "float32"),
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int64", "bool"])
def test_dtypes_have_numpys_names(dtype: str) -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(3)

    program = trace("same", Same(), (torch.zeros(1, 3, dtype=getattr(torch, dtype)),))

    assert program.spec.inputs[0].dtype == dtype


def test_too_few_names_are_rejected() -> None:
    x = torch.zeros(1, 3)

    with pytest.raises(ValueError, match="returns 2 tensors; 1 names"):
        trace("named", Named(), (x, [x, x]), ["sum"])


def test_a_graph_that_depends_on_values_is_rejected() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(LoweringError, match="could not trace `branch`") as raised:
        trace("branch", Branch(), (torch.zeros(3),))

    assert raised.value.why
    assert "values" in raised.value.hint


def test_a_dynamic_shape_is_rejected() -> None:
    batch = torch.export.Dim("batch")
    exported = torch.export.export(
        nn.Linear(3, 2), (torch.zeros(4, 3),), dynamic_shapes={"input": {0: batch}}
    )

    with pytest.raises(LoweringError, match="dynamic shape"):
        as_program("linear", exported)


@pytest.mark.parametrize("constant", [3, None], ids=["number", "nothing"])
def test_an_output_that_is_no_tensor_is_rejected(constant: Any) -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Any]:
            return x + 1, constant

    with pytest.raises(LoweringError, match="is not a tensor"):
        trace("constant", Constant(), (torch.zeros(3),))


def test_an_input_handed_through_is_an_output() -> None:
    class Through(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x, x + y

    program = trace("through", Through(), (torch.zeros(3), torch.zeros(3)), ["x_again", "sum"])

    assert [t.name for t in program.spec.outputs] == ["x_again", "sum"]


# Programs that turn gradients off inside: torch.export gives that part a graph of its own.


class Rotated(nn.Module):
    """As transformers computes rotary embeddings: without gradients, and within it once more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("frequencies", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            angles = y.sum() * self.frequencies
            with torch.enable_grad():
                angles = torch.relu(angles)
            sine, cosine = angles.sin(), angles.cos()
        return self.linear(y * sine + cosine)


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("no grad") / "rotated.pt2"
    exported = torch.export.export(Rotated().eval(), (torch.randn(1, 8),))
    assert any("wrap_with_set_grad_enabled" in str(node.target) for node in exported.graph.nodes)
    torch.export.save(exported, path)
    return path


def operators(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


def test_it_is_read_as_one_graph_and_computes_the_same(rotated: Path) -> None:
    program = read_pt2(rotated)

    inputs = random_inputs(program, 0)
    expected = torch.export.load(rotated).module()(*inputs)
    torch.testing.assert_close(eager_outputs(program, inputs)[0], expected)
    targets = {str(n.target) for n in program.exported.graph.nodes if n.op == "call_function"}
    assert all(target.startswith("aten.") for target in targets)


def test_check_reads_what_lower_reads(rotated: Path) -> None:
    (graph,) = read_graphs(rotated)

    assert operators(graph) == operators(read_exported("x", read_pt2(rotated).exported))
    assert {"sin", "cos", "relu", "linear"} <= operators(graph).keys()
    made = {output.name for node in graph.nodes for output in node.outputs}
    read = {tensor.name for node in graph.nodes for tensor in node.tensors if not tensor.constant}
    assert read <= made | {value.name for value in graph.inputs}


def test_nodes_inside_are_checked_too(rotated: Path) -> None:
    rejected = {group.operator for group in check(rotated, "xnnpack").programs[0].rejected}

    assert "sum" in rejected


def test_a_custom_operator_inside_is_not_run(tmp_path: Path) -> None:
    ran = []

    @torch.library.custom_op("whisperport_test::hidden", mutates_args=())
    def hidden(x: Tensor) -> Tensor:
        ran.append(1)
        return x.clone()

    hidden.register_fake(torch.empty_like)

    class Hidden(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = hidden(x)
            return y + 1.0

    exported = torch.export.export(Hidden(), (torch.randn(2, requires_grad=True),))
    torch.export.save(exported, tmp_path / "hidden.pt2")
    ran.clear()

    with pytest.raises(ProgramError, match="not a standard operator"):
        read_pt2(tmp_path / "hidden.pt2")
    assert ran == []


# Records of where a node comes from are shared by copies, and only inside the block.


def record() -> NodeSource:
    graph = symbolic_trace(torch.nn.ReLU()).graph
    return NodeSource(next(iter(graph.nodes)), "a pass")


def test_copies_share_a_record_inside_the_block_and_not_after_it() -> None:
    first = record()

    with shared_node_history():
        with shared_node_history():
            inner = copy.deepcopy(first)
        outer = copy.deepcopy(first)
    after = copy.deepcopy(first)

    assert inner is first
    assert outer is first
    assert after is not first
    assert after == first


# The table of variants, and the targets that choose from it.


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.spec.name)
def test_every_target_chooses_variants_that_exist(target: Target) -> None:
    assert set(target.spec.lowering.variants.items()) <= set(VARIANTS)


@pytest.mark.parametrize(
    ("variants", "shape"),
    [({}, (1, 8, 20)), ({"encoder": "sequence"}, (1, 8, 20)), ({"encoder": "nchw"}, (1, 8, 1, 20))],
)
def test_a_program_is_traced_in_the_variant_that_is_chosen_or_else_the_default(
    micro: Any, variants: dict[str, str], shape: tuple[int, ...]
) -> None:
    (encoder,) = whisper_programs(Parts(micro, []), ["encoder"], variants)

    assert encoder.spec.inputs[0].shape == shape


def test_the_decoder_without_a_cache_is_not_traced_without_its_form(micro: Any) -> None:
    with pytest.raises(ValueError, match="uncached"):
        uncached_decoder(Parts(micro, []))
