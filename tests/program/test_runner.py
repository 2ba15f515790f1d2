"""What is bound to a program is read in place, until something else is bound."""

from collections.abc import Sequence

import numpy as np
import pytest

from whisperport.program.runner import Array, Binding, Runner
from whisperport.program.spec import ProgramSpec, TensorSpec

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
