"""LiteRT: which nodes the delegate took, and the whole; single nodes are said to be not measured."""

from pathlib import Path

import numpy as np
import pytest

from whisperport.errors import ProgramError, UsageError
from whisperport.inspection.profile import ProfileOptions
from whisperport.inspection.profile_tflite import NOT_TIMED, _replaced, profile_tflite

ONCE = ProfileOptions(repeat=2, threads=1)


def test_what_the_delegate_did_not_take_is_outside(cumsum_tflite: Path) -> None:
    profile = profile_tflite(cumsum_tflite, ONCE)

    assert profile.subgraphs == 2
    assert [(node.operator, node.where) for node in profile.undelegated] == [
        ("CUMSUM", "no delegate")
    ]
    assert [n.where for n in profile.nodes if n.delegated] == ["XNNPACK 1", "XNNPACK 2"]


def test_what_is_not_measured_is_said_to_be_not_measured(cumsum_tflite: Path) -> None:
    profile = profile_tflite(cumsum_tflite, ONCE)

    assert all(node.ms is None for node in profile.nodes)
    assert (profile.undelegated_share, profile.rest_ms) == (None, None)
    assert profile.total_ms == profile.run_ms > 0
    assert profile.notes[0] == NOT_TIMED
    assert "without its delegate takes" in profile.notes[1]


def test_inputs_of_the_wrong_shape_are_refused(cumsum_tflite: Path) -> None:
    given = {"x": np.zeros((4, 63), np.float32)}

    with pytest.raises(ProgramError, match="input `x` does not fit"):
        profile_tflite(cumsum_tflite, ProfileOptions(inputs=given))


def test_a_file_cut_short_is_refused(cumsum_tflite: Path, tmp_path: Path) -> None:
    whole, short = cumsum_tflite.read_bytes(), tmp_path / "short.tflite"

    for length in (8, 100, len(whole) // 2, len(whole) - 100):
        short.write_bytes(whole[:length])
        with pytest.raises(ProgramError, match=r"cannot run short\.tflite"):
            profile_tflite(short, ONCE)


def test_options_are_refused(cumsum_tflite: Path) -> None:
    with pytest.raises(UsageError, match="no run option `provider`"):
        profile_tflite(cumsum_tflite, ProfileOptions(options={"provider": "x"}))


def test_a_delegate_stands_for_the_nodes_between_its_tensors() -> None:
    def op(index: int, inputs: list[int], outputs: list[int]) -> dict[str, object]:
        return {"index": index, "inputs": inputs, "outputs": outputs}

    # 0 ─ a ─ 1 ─ b ─ 2 ─ c ─ 3, and d beside it: 1, 4 ─ 5
    original = [op(0, [0], [1]), op(1, [1], [2]), op(2, [2], [3]), op(3, [1, 4], [5])]

    assert _replaced(op(9, [1], [3]), original) == {1, 2}
    assert _replaced(op(9, [0, 4], [3, 5]), original) == {0, 1, 2, 3}
    assert _replaced(op(9, [4, 1], [5]), original) == {3}
