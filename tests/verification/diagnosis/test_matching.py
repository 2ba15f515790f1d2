"""Values of two programs are matched by names, modules, order and similarity."""

import math

import numpy as np
import pytest

from whisperport.verification.diagnosis.matching import NamedValue, aligned, error_of, matched

RANDOM = np.random.default_rng(0)


def values(count, shape=(1, 6, 8)):
    return [RANDOM.standard_normal(shape).astype(np.float32) for _ in range(count)]


def test_values_without_a_common_name_are_matched_by_similarity():
    arrays = values(5)
    a = [NamedValue(f"a{n}", one) for n, one in enumerate(arrays)]
    b = [NamedValue(f"b{n}", one + 1e-6) for n, one in enumerate(arrays)]
    b.insert(2, NamedValue("extra", values(1)[0]))

    assert matched(a, b) == [(0, 0), (1, 1), (2, 3), (3, 4), (4, 5)]


def test_values_in_another_layout_are_matched_and_aligned():
    (array,) = values(1, (1, 3, 4, 5))
    turned = np.ascontiguousarray(array.transpose(0, 2, 3, 1))

    assert matched([NamedValue("a", array)], [NamedValue("b", turned)]) == [(0, 0)]
    found = aligned(array, turned, layouts=True)
    assert found is not None
    assert error_of(array, found) == 0


def test_a_value_that_diverges_is_matched_by_its_name():
    first, second, wrong = values(3)
    a = [NamedValue("x", first, "linear", "fc1"), NamedValue("y", second, "linear", "fc2")]
    b = [NamedValue("x", first, "linear", "fc1"), NamedValue("y", 9 * wrong, "linear", "fc2")]

    assert matched(a, b) == [(0, 0), (1, 1)]


def test_values_in_another_order_are_matched_too():
    arrays = values(4)
    a = [NamedValue(f"a{n}", one) for n, one in enumerate(arrays)]
    b = [NamedValue(f"b{n}", arrays[n]) for n in (1, 0, 2, 3)]

    assert matched(a, b) == [(0, 1), (1, 0), (2, 2), (3, 3)]


def test_axes_of_one_shape_are_exchanged_only_between_layouts():
    (array,) = values(1, (1, 4, 4))
    turned = array.transpose(0, 2, 1)

    assert error_of(array, aligned(array, turned, layouts=False)) > 0.1
    assert error_of(array, aligned(array, turned, layouts=True)) == 0
    assert aligned(array, values(1, (1, 5, 4))[0], layouts=True) is None


def test_infinities_of_masks_are_equal_and_a_nan_is_not():
    x = np.array([1, 2, -np.inf], np.float32)

    assert error_of(x, x.copy()) == 0
    assert error_of(x, np.array([1, 2, 3], np.float32)) == math.inf
    assert error_of(x[:2], np.array([1, np.nan], np.float32)) == math.inf


def test_the_largest_number_of_a_mask_hides_no_error():
    lowest = np.finfo(np.float32).min
    x = np.array([1, 2, lowest], np.float32)

    assert error_of(x, np.array([1, 3, lowest], np.float32)) == pytest.approx(1 / 5**0.5)
    assert error_of(x, np.array([1, 2, -np.inf], np.float32)) == 0
    assert error_of(x, np.array([1, 2, np.inf], np.float32)) == math.inf
    assert error_of(x, np.array([1, lowest, 3], np.float32)) == math.inf
