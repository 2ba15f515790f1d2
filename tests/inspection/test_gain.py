"""The estimated gain of delegation is compared with cases counted by hand."""

import pytest

from whisperport.model.inspection.gain import compute_and_bytes, rates
from whisperport.model.inspection.graph import Node, Value


def node(op: str, *shapes: tuple[int, ...]) -> Node:
    """Inputs, and the output last; all float32."""
    *inputs, output = (Value(f"{n}", shape, "float32") for n, shape in enumerate(shapes))
    return Node(op, op, op, tuple(inputs), (output,))


MM = node("mm", (4, 8), (8, 16), (4, 16))  # 2·4·8·16 = 1024 operations
ADD = node("add", (10,), (10,), (10,))  # 3·10·4 = 120 bytes


def test_a_matmul_is_counted_in_operations_and_the_rest_in_bytes() -> None:
    assert compute_and_bytes([MM, ADD, MM]) == (2048, 120)


def test_the_gain_is_the_time_less_the_same_work_at_the_delegated_rate() -> None:
    rate = rates(compute=(2048, 4.0), others=(240, 1.0))  # 512 operations, 240 bytes a ms

    assert rate.estimated_gain_ms(MM, 10.0) == pytest.approx(10 - 1024 / 512)
    assert rate.estimated_gain_ms(ADD, 10.0) == pytest.approx(10 - 120 / 240)


def test_a_node_faster_than_the_delegate_would_gain_nothing() -> None:
    rate = rates(compute=(1024, 100.0), others=(0, 0.0))

    assert rate.estimated_gain_ms(MM, 10.0) == 0


def test_without_a_delegated_node_of_its_kind_there_is_no_estimate() -> None:
    rate = rates(compute=(0, 0.0), others=(120, 1.0))

    assert rate.estimated_gain_ms(MM, 10.0) is None
    assert rate.estimated_gain_ms(ADD, 10.0) is not None


def test_sizes_that_are_not_known_give_no_estimate() -> None:
    dynamic = Node("x", "mm", "mm", (Value("a", ("n", 8), "float32"),), (Value("b"),))

    assert rates((1024, 1.0), (120, 1.0)).estimated_gain_ms(dynamic, 10.0) is None


def test_a_reshape_that_runs_as_a_node_is_a_copy() -> None:
    rate = rates(compute=(0, 0.0), others=(80, 1.0))

    assert rate.estimated_gain_ms(node("reshape", (10,), (10,)), 3.0) == pytest.approx(2.0)
