"""Outputs of a vendor's emulator or simulator: what of them is compared."""

import numpy as np
import pytest

from whisperport.build.compile.bundle_source import _output_checks, tokens_of
from whisperport.build.compile.source import Emulation, Examples
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets.compiler import EmulationNeed
from whisperport.verification import GATES

X = TensorSpec("x", (1, 4, 8))
OUTPUTS = (
    TensorSpec("new_k_0", (2, 3, 4)),
    TensorSpec("new_v_0", (2, 4, 3)),
    TensorSpec("logits", (2, 9)),
)
SPEC = ProgramSpec("prefill_4", (X,), OUTPUTS)
NEED = EmulationNeed(inputs=("x",), outputs=("k", "v", "logits"), kind="simulated")


def emulation(tokens: tuple[int, ...]) -> Emulation:
    random = np.random.default_rng(0)
    expected = tuple(random.standard_normal((2, *t.shape)).astype(np.float32) for t in OUTPUTS)
    return Emulation(
        spec=SPEC,
        need=NEED,
        examples=Examples(names=(), inputs=(), tokens=tokens),
        expected=expected,
    )


def test_the_tokens_of_a_sample_end_where_the_padding_begins() -> None:
    x = np.ones((1, 4, 8), np.float32)
    x[0, 3:] = 0
    y = np.ones((1, 4, 8), np.float32)
    y[0, 1] = 0  # an embedding of zeros that is no padding

    assert tokens_of(SPEC, [[x], [y], [np.zeros_like(x)]]) == (3, 4, 0)


def test_a_program_that_reads_one_token_has_no_padding() -> None:
    step = ProgramSpec("step", (TensorSpec("x", (1, 1, 8)),), OUTPUTS)

    assert tokens_of(step, [[np.zeros((1, 1, 8), np.float32)]]) == ()


def test_what_was_computed_from_padding_is_not_compared() -> None:
    made = emulation((3, 4))
    keys, values, logits = (array.copy() for array in made.expected)
    keys[0, :, :, 3] += 9
    values[0, :, 3] += 9

    checks = list(_output_checks(made, [keys, values, logits], GATES["fp16"]))

    assert [check.what for check in checks] == [f"{tensor.name}, simulated" for tensor in OUTPUTS]
    assert all(check.passed for check in checks)


@pytest.mark.parametrize("output", [0, 1, 2])
def test_a_wrong_value_of_a_token_or_a_logit_is_found(output: int) -> None:
    made = emulation((3, 4))
    outputs = [array.copy() for array in made.expected]
    outputs[output][1, 0, 0] += 9

    failed = [check for check in _output_checks(made, outputs, GATES["fp16"]) if not check.passed]

    assert [check.what for check in failed] == [f"{OUTPUTS[output].name}, simulated"]
