"""Costs are compared with counts by hand, and the cost of an encoder with its formula."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whisperport.model.inspection.cost import Cost, cost_of
from whisperport.model.inspection.gain import compute_and_bytes, rates
from whisperport.model.inspection.graph import Node, Value
from whisperport.model.inspection.read_exported import read_exported


class Calls(nn.Module):
    """`function(x, …)`, with weights of the given shapes after the inputs."""

    def __init__(self, function: Callable[..., Tensor], *weights: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.rand(shape) for shape in weights)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.weights)


def counted(function: Callable[..., Any], inputs: list[Any], *weights: tuple[int, ...]) -> Cost:
    example = tuple(torch.rand(x) if isinstance(x, tuple) else x for x in inputs)
    exported = torch.export.export(Calls(function, *weights), example, strict=False)
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
