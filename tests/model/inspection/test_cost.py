"""What a node costs, what it writes, and the line that it comes from."""

import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from whisperport.model.inspection.cost import Cost, cost_of
from whisperport.model.inspection.gain import compute_and_bytes, rates
from whisperport.model.inspection.graph import Graph, Node, SourceLine, Value, innermost_line
from whisperport.model.inspection.read import read_graphs
from whisperport.model.inspection.read_exported import read_exported
from whisperport.model.inspection.read_onnx import read_onnx
from whisperport.model.inspection.read_pt2 import read_pt2
from whisperport.model.inspection.rejections import check_graph
from whisperport.targets import get_target

from ...extent import core_or_all
from ..rewrites.conftest import Calls, Step, drawn_writes, function_of

# Costs are compared with counts by hand, and the cost of an encoder with its formula.


class CallsWith(nn.Module):
    """`function(x, …)`, with weights of the given shapes after the inputs."""

    def __init__(self, function: Callable[..., Tensor], *weights: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.rand(shape) for shape in weights)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.weights)


def counted(function: Callable[..., Any], inputs: list[Any], *weights: tuple[int, ...]) -> Cost:
    example = tuple(torch.rand(x) if isinstance(x, tuple) else x for x in inputs)
    exported = torch.export.export(CallsWith(function, *weights), example, strict=False)
    return cost_of(read_exported("it", exported))


# One multiplication, one addition or one function of an element counts as 1.
CASES = {
    # 5 rows, 4 columns, sums of 3: 60 multiplications and 60 additions
    "linear": (lambda x, w: F.linear(x, w), [(1, 5, 3)], [(4, 3)], 120),
    "linear with a bias": (F.linear, [(1, 5, 3)], [(4, 3), (4,)], 140),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), [(5, 3)], [(3, 4), (4,)], 140),
    # 2 heads of (5, 3) by (3, 4)
    "bmm": (torch.bmm, [(2, 5, 3), (2, 3, 4)], [], 240),
    "matmul of rank 4": (torch.matmul, [(1, 2, 5, 3), (1, 2, 3, 4)], [], 240),
    # 4 channels of 10 positions, each a sum of 2 · 3 multiplications; and 40 biases
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), [(1, 2, 10)], [(4, 2, 3), (4,)], 520),
    "conv1d by two": (
        lambda x, w: F.conv1d(x, w, padding=1, stride=2),
        [(1, 2, 10)],
        [(4, 2, 3)],
        240,
    ),
    "conv2d in groups": (
        lambda x, w: F.conv2d(x, w, groups=2),
        [(1, 2, 5, 5)],
        [(4, 1, 3, 3)],
        2 * 4 * 9 * 9,
    ),
    # scores 2 · 2 · 5 · 7 · 3, sums 2 · 2 · 5 · 7 · 3, and 6 for each of 70 scores
    "attention": (
        F.scaled_dot_product_attention,
        [(1, 2, 5, 3), (1, 2, 7, 3), (1, 2, 7, 3)],
        [],
        420 + 420 + 420,
    ),
    "softmax": (lambda x: x.softmax(-1), [(2, 6)], [], 60),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [(2, 6)], [(6,), (6,)], 96),
    # 12 values of 3 channels, each scaled and shifted
    "batch norm": (
        lambda x, m, v: F.batch_norm(x, m.detach(), v.detach(), training=False),
        [(1, 3, 4)],
        [(3,), (3,)],
        24,
    ),
    # 2 channels of 2 by 2 positions, each the largest of 4
    "pooling": (lambda x: F.max_pool2d(x, 2), [(1, 2, 4, 4)], [], 32),
    # 7 frames by 4 gates of 5 values that read 3 inputs and 5 states
    "lstm": (
        lambda x, h, c, w, v: torch.lstm(
            x,
            (h, c),
            [w, v],
            False,
            1,
            0.0,
            False,
            False,
            True,
        )[0],
        [(1, 7, 3), (1, 1, 5), (1, 1, 5)],
        [(20, 3), (20, 5)],
        2 * 7 * (60 + 100),
    ),
    "gelu": (F.gelu, [(2, 6)], [], 60),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), [(2, 6)], [], 108),
    "add": (torch.add, [(2, 6), (2, 6)], [], 12),
    "add of one row": (torch.add, [(2, 6), (6,)], [], 12),
    "mean": (lambda x: x.mean(-1), [(2, 6)], [], 12),
    "transpose": (lambda x: x.transpose(0, 1).contiguous(), [(2, 6)], [], 0),
    "lookup": (lambda i, w: F.embedding(i, w), [torch.tensor([[1, 2]])], [(50, 6)], 0),
}


@pytest.mark.parametrize("case", CASES)
def test_operations_are_those_counted_by_hand(case: str) -> None:
    function, inputs, weights, expected = CASES[case]

    cost = counted(function, inputs, *weights)

    assert cost.flops == expected
    assert cost.uncounted == 0


def test_bytes_are_read_once_and_written_once() -> None:
    cost = counted(F.linear, [(1, 5, 3)], (4, 3), (4,))

    (node,) = cost.nodes
    assert node.weight_bytes == 4 * (12 + 4)
    assert node.activation_bytes == 4 * (15 + 20)
    assert cost.stored_bytes == node.weight_bytes


def test_a_lookup_reads_the_rows_it_takes_and_a_reshape_nothing() -> None:
    lookup = counted(lambda i, w: F.embedding(i, w), [torch.tensor([[1, 2]])], (50, 6))
    reshape = counted(lambda x: x.reshape(3, 4), [(2, 6)])

    assert lookup.bytes == 4 * 12 + (4 * 12 + 8 * 2)  # rows read, rows written, two indices
    assert lookup.stored_bytes == 4 * 50 * 6
    assert reshape.bytes == 0


def test_a_weight_read_twice_is_stored_once() -> None:
    cost = counted(lambda x, w: F.linear(F.linear(x, w), w), [(1, 3)], (3, 3))

    assert cost.stored_bytes == 36
    assert sum(node.weight_bytes for node in cost.nodes) == 72


def test_an_unknown_operator_is_not_counted_and_reported_as_uncounted() -> None:
    cost = counted(lambda x: torch.sort(x).values + x, [(2, 6)])

    assert cost.uncounted == 1
    assert cost.flops == 12


def test_a_value_of_unknown_size_has_none() -> None:
    assert Value("x", (1, "n"), "float32").size is None
    assert Value("x", None, "float32").n_bytes is None
    assert Value("x", (1, 2), "string").n_bytes is None
    assert Value("x", (), "float32").n_bytes == 4


def encoder_flops(t: int, d: int, ffn: int, mels: int, layers: int) -> int:
    """Of openai-whisper's encoder, from its definition: T = t positions, 2t frames of `mels`."""
    stem = 2 * (2 * t) * d * (3 * mels) + (2 * t) * d + 2 * t * d * (3 * d) + t * d
    gelus = 5 * (2 * t) * d + 5 * t * d
    positions = t * d
    projections = 4 * 2 * t * d * d + 3 * t * d  # keys have no bias
    attention = 2 * t * t * d + 2 * t * t * d
    feed_forward = 2 * 2 * t * d * ffn + t * ffn + t * d + 5 * t * ffn
    norms, sums = 2 * 8 * t * d, 2 * t * d
    block = projections + attention + feed_forward + norms + sums
    return stem + gelus + positions + layers * block + 8 * t * d


def test_an_encoder_costs_what_its_formula_says(random_openai_whisper: Any) -> None:
    """The formula without attention's softmax and scale, 6 per score and head, which are added here."""
    t, d, heads, layers = 50, 48, 3, 2
    model = random_openai_whisper(
        n_audio_ctx=t, n_audio_state=d, n_audio_head=heads, n_audio_layer=layers
    )
    exported = torch.export.export(model.encoder, (torch.zeros(1, 80, 2 * t),), strict=False)

    cost = cost_of(read_exported("encoder", exported))

    expected = encoder_flops(t, d, 4 * d, 80, layers) + layers * 6 * heads * t * t
    assert cost.flops == expected
    assert cost.stored_bytes == sum(4 * p.numel() for p in model.encoder.state_dict().values())


def test_an_operator_in_place_costs_what_its_other_form_does() -> None:
    separate = counted(lambda x: torch.relu(x * 2.0) + 1.0, [(4, 5)])
    in_place = counted(lambda x: torch.relu_(x * 2.0).add_(1.0), [(4, 5)])

    assert in_place.uncounted == 0
    assert (in_place.flops, in_place.bytes) == (separate.flops, separate.bytes)


# The estimated gain of delegation is compared with cases counted by hand.


def node(op: str, *shapes: tuple[int, ...]) -> Node:
    """Inputs, and the output last; all float32."""
    *inputs, output = (Value(f"{n}", shape, "float32") for n, shape in enumerate(shapes))
    return Node(op, op, op, tuple(inputs), (output,))


MM = node("mm", (4, 8), (8, 16), (4, 16))  # 2·4·8·16 = 1024 operations
ADD = node("add", (10,), (10,), (10,))  # 3·10·4 = 120 bytes


def test_a_matmul_is_counted_in_operations_and_the_rest_in_bytes() -> None:
    assert compute_and_bytes([MM, ADD, MM]) == (2048, 120)


def test_the_gain_is_the_time_less_the_same_work_at_the_delegated_rate() -> None:
    rate = rates(compute=(2048, 4.0), memory=(240, 1.0))  # 512 operations, 240 bytes a ms

    assert rate.estimated_gain_ms(MM, 10.0) == pytest.approx(10 - 1024 / 512)
    assert rate.estimated_gain_ms(ADD, 10.0) == pytest.approx(10 - 120 / 240)


def test_a_node_faster_than_the_delegate_would_gain_nothing() -> None:
    rate = rates(compute=(1024, 100.0), memory=(0, 0.0))

    assert rate.estimated_gain_ms(MM, 10.0) == 0


def test_without_a_delegated_node_of_its_kind_there_is_no_estimate() -> None:
    rate = rates(compute=(0, 0.0), memory=(120, 1.0))

    assert rate.estimated_gain_ms(MM, 10.0) is None
    assert rate.estimated_gain_ms(ADD, 10.0) is not None


def test_sizes_that_are_not_known_give_no_estimate() -> None:
    dynamic = Node("x", "mm", "mm", (Value("a", ("n", 8), "float32"),), (Value("b"),))

    assert rates((1024, 1.0), (120, 1.0)).estimated_gain_ms(dynamic, 10.0) is None


def test_a_reshape_that_runs_as_a_node_is_a_copy() -> None:
    rate = rates(compute=(0, 0.0), memory=(80, 1.0))

    assert rate.estimated_gain_ms(node("reshape", (10,), (10,)), 3.0) == pytest.approx(2.0)


# The line of a model's own code in a node's stack trace, and the module that the node is in.

PACKAGES = "/venv/lib/python3.11/site-packages"
TRACE = f"""File "/home/me/model.py", line 12, in forward
    y = self.block(x)
  File "{PACKAGES}/whisper/model.py", line 46, in forward
    return F.linear(
  File "{PACKAGES}/torch/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x @ x.transpose(0, 1)  # the line of the matmul


INPUT = (torch.zeros(3, 4),)
LINE = inspect.getsourcelines(Model.forward)[1] + 3


def test_the_innermost_line_that_is_not_of_torch_is_found() -> None:
    found = innermost_line(TRACE)

    assert found == SourceLine(f"{PACKAGES}/whisper/model.py", 46, "return F.linear(")
    assert found.package_path == "whisper/model.py"


def test_a_trace_of_torch_alone_gives_its_innermost_line() -> None:
    found = innermost_line(TRACE[TRACE.index(f'File "{PACKAGES}/torch') :])

    assert found is not None
    assert (found.package_path, found.line) == ("torch/nn/modules/linear.py", 134)


def test_frames_without_code_and_paths_of_windows_are_read() -> None:
    trace = 'File "<stdin>", line 7, in forward\n  File "C:\\a\\site-packages\\b\\c.py", line 3, in forward'

    found = innermost_line(trace)

    assert found is not None
    assert (found.package_path, found.line, found.code) == ("b/c.py", 3, "")


@pytest.mark.parametrize(
    "trace", ["", "no frame", 'File "a", line 99999999999, in f', 'File "' * 9999]
)
def test_what_is_no_trace_has_no_line(trace: str) -> None:
    assert innermost_line(trace) is None


def test_nodes_of_a_pt2_and_of_an_exported_program_know_module_and_line(tmp_path: Path) -> None:
    exported = torch.export.export(Model().eval(), INPUT, strict=False)
    torch.export.save(exported, tmp_path / "model.pt2")

    (stored,) = read_pt2(tmp_path / "model.pt2")

    for graph in (stored, read_exported("model", exported)):
        norm, *_, matmul = graph.nodes
        assert norm.module == "blocks.0.norm"
        assert matmul.module == ""
        assert matmul.source == SourceLine(
            __file__, LINE, "return x @ x.transpose(0, 1)  # the line of the matmul"
        )


@pytest.mark.parametrize("dynamo", [True, False])
def test_nodes_of_an_onnx_file_know_their_scope(dynamo: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    torch.onnx.export(Model().eval(), INPUT, path, dynamo=dynamo, external_data=False)

    norm, *_, matmul = read_onnx(path).nodes

    assert norm.module == ("blocks.0.norm" if dynamo else "/blocks.0/norm")
    assert matmul.module == ""
    assert matmul.source is None or matmul.source.line == LINE
    assert (matmul.source is not None) == dynamo  # TorchScript's exporter stores no line


# Writes in place through views: what they change is read, and costs what it costs.

X, Y = torch.randn(1, 8, 8), torch.randn(1, 8, 8)


def part(x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(x)
    z[:, :2] += torch.sigmoid(y[:, :2])
    return z * 2.0


def all_of_it(x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(x)[:, :100]
    z += torch.sigmoid(y)
    return z * 2.0


def reshaped(x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(x)
    z.view(1, 64).mul_(torch.sigmoid(y).reshape(1, 64))
    return z


def sibling(x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(x)
    rows, column = z[:, 2:4], z[:, :, 1]
    rows.add_(torch.sigmoid(y[:, 2:4]))
    return column * 2.0


def view_of_a_view(x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(x)
    z.transpose(1, 2)[0][3].copy_(torch.sigmoid(y)[0, 0])
    return z + 1.0


def twice(x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(x)
    rows = z[:, :2]
    rows.add_(torch.sigmoid(y[:, :2])).mul_(3.0)
    return z + rows.sum()


def not_a_view(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x).add_(torch.sigmoid(y))


def forgotten(x: Tensor, y: Tensor) -> Tensor:
    torch.relu(x)[:, :2].add_(torch.sigmoid(y[:, :2]))
    return x + y


FUNCTIONS = (part, all_of_it, reshaped, sibling, view_of_a_view, twice, not_a_view, forgotten)
COMPUTED = {"relu", "sigmoid", "add", "mul", "sum"}


def exported(function: Callable[[Tensor, Tensor], Any]) -> torch.export.ExportedProgram:
    return torch.export.export(Calls(function), (X, Y))


def computed(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes if node.op in COMPUTED)


def functional(program: torch.export.ExportedProgram) -> Counter[str]:
    """The operators that torch's own functional form has, without those whose results are not read."""
    done = program.run_decompositions({})
    done.graph.eliminate_dead_code()
    return computed(read_exported("functional", done))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_operators_that_the_result_depends_on_are_those_of_torchs_functional_form(
    function: Callable[[Tensor, Tensor], Any],
) -> None:
    program = exported(function)

    assert computed(read_exported("x", program)) == functional(program)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_a_file_is_read_as_the_program_is(
    function: Callable[[Tensor, Tensor], Any], tmp_path: Path
) -> None:
    program = exported(function)
    torch.export.save(program, tmp_path / "x.pt2")

    (found,) = read_graphs(tmp_path / "x.pt2")

    expected = read_exported("x", program)
    assert [(n.name, n.inputs, n.outputs) for n in found.nodes] == [
        (n.name, n.inputs, n.outputs) for n in expected.nodes
    ]


@pytest.mark.parametrize(
    ("function", "codes"),
    [
        (part, ["WP310"]),
        (all_of_it, ["WP310"]),
        (reshaped, []),
        (not_a_view, []),
        (twice, ["WP310", "WP310"]),
    ],
)
def test_writes_to_a_part_of_a_tensor_are_copies_that_xnnpack_does_not_run(
    function: Callable[[Tensor, Tensor], Any], codes: list[str]
) -> None:
    graph = read_exported("x", exported(function))

    rejected = check_graph(graph, get_target("xnnpack").spec).rejected

    assert [group.rule for group in rejected if group.rule == "WP310"] == codes


@given(drawn_writes())
@settings(max_examples=core_or_all(12, 200), deadline=None)
def test_any_order_of_views_and_writes_depends_on_what_torch_says(drawn: list[Step]) -> None:
    program = exported(function_of(drawn))

    assert computed(read_exported("x", program)) == functional(program)
