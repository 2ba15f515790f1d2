"""Random inputs have the right shape and dtype and are valid token ids; given inputs are checked."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.errors import ProgramError
from whisperport.model.inspection.graph import Value
from whisperport.model.inspection.inputs import hint_for, inputs_for, read_inputs

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
