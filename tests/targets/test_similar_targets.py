"""A misspelt target, or a general word for a chip or a vendor, is answered with the targets it can mean."""

import pytest

from whisperport.errors import UsageError
from whisperport.targets import TARGETS, get_target, similar_targets


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("onxruntime", ["onnxruntime"]),
        ("OnnxRuntime", ["onnxruntime"]),
        ("hailo", ["hailo8", "hailo8l", "hailo10h"]),
        ("openvin", ["openvino"]),
        ("cpu", ["onnxruntime", "xnnpack", "litert", "openvino", "genio350"]),
        ("nothing-like-it", []),
    ],
)
def test_a_misspelt_target_has_suggestions(name: str, expected: list[str]) -> None:
    assert sorted(similar_targets(name, TARGETS)) == sorted(expected)


@pytest.mark.parametrize(
    ("word", "member"),
    [
        ("cpu", "onnxruntime"),
        ("snapdragon", "sm8650"),
        ("qualcomm", "sm8650"),
        ("genio", "genio720"),
        ("mediatek", "genio720"),
        ("rockchip", "rk3588"),
        ("inferentia", "aws-neuron"),
    ],
)
def test_a_general_word_names_the_targets_that_it_can_mean(word: str, member: str) -> None:
    with pytest.raises(UsageError) as unknown:
        get_target(word)

    assert member in unknown.value.why
    assert "`whisperport targets`" in unknown.value.hint
