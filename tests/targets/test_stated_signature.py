"""A runtime's stated signature is compared with the manifest's."""

import pytest

from whisperport.errors import BundleError
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets.stated_signature import expect_counts, expect_tensor

TENSOR = TensorSpec("mel", (1, 80, 3000))
SPEC = ProgramSpec("encoder", (TENSOR,), (TensorSpec("features", (1, 1500, 8)),))


@pytest.mark.parametrize("shape", [(1, 80, 3000), (1, None, 3000), ("batch", 80, "time")])
def test_an_axis_without_a_number_has_any_size(shape: tuple[int | str | None, ...]) -> None:
    expect_tensor("encoder.bin", TENSOR, shape, "float32", fits=True)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((1, 80, 2999), True),
        ((None, 80, 2999), True),
        ((1, 80), True),
        ((), True),
        ((1, 80, 3000, 1), True),
        ((1, 80, -1), True),
        ((1, 80, 3000), False),
    ],
)
def test_another_shape_or_dtype_is_an_error_that_names_both(
    shape: tuple[int | None, ...], fits: bool
) -> None:
    with pytest.raises(BundleError, match=r"encoder\.bin has another signature") as raised:
        expect_tensor("encoder.bin", TENSOR, shape, "f16", fits=fits)

    assert raised.value.why == f"'mel' is {list(shape)} f16; expected [1, 80, 3000] float32"
    assert raised.value.hint


@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_other_numbers_of_inputs_and_outputs_are_an_error(counts: tuple[int, int]) -> None:
    expect_counts("encoder.bin", SPEC, 1, 1)
    with pytest.raises(BundleError, match="another signature") as raised:
        expect_counts("encoder.bin", SPEC, *counts)

    assert "expected 1 and 1" in raised.value.why
