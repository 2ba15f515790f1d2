"""Static graphs are traced as programs; other graphs are rejected."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whisperport.errors import LoweringError
from whisperport.model.trace.program import as_program, trace
from whisperport.program.spec import TensorSpec


class Named(nn.Module):
    def forward(self, x: Tensor, caches: list[Tensor]) -> tuple[Tensor, Tensor]:
        return x + caches[0], x - caches[1]


def test_the_signature_is_read_off_the_graph() -> None:
    x = torch.zeros(1, 3)

    program = trace("named", Named(), (x, [x, x]), ["sum", "difference"])

    assert [t.name for t in program.spec.inputs] == ["x", "caches_0", "caches_1"]
    assert program.spec.outputs == (
        TensorSpec("sum", (1, 3), "float32"),
        TensorSpec("difference", (1, 3), "float32"),
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int64", "bool"])
def test_dtypes_have_numpys_names(dtype: str) -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(3)

    program = trace("same", Same(), (torch.zeros(1, 3, dtype=getattr(torch, dtype)),))

    assert program.spec.inputs[0].dtype == dtype


def test_too_few_names_are_rejected() -> None:
    x = torch.zeros(1, 3)

    with pytest.raises(ValueError, match="returns 2 tensors; 1 names"):
        trace("named", Named(), (x, [x, x]), ["sum"])


def test_a_graph_that_depends_on_values_is_rejected() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(LoweringError, match="could not trace `branch`") as raised:
        trace("branch", Branch(), (torch.zeros(3),))

    assert raised.value.why
    assert "values" in raised.value.hint


def test_a_dynamic_shape_is_rejected() -> None:
    batch = torch.export.Dim("batch")
    exported = torch.export.export(
        nn.Linear(3, 2), (torch.zeros(4, 3),), dynamic_shapes={"input": {0: batch}}
    )

    with pytest.raises(LoweringError, match="dynamic shape"):
        as_program("linear", exported)


@pytest.mark.parametrize("constant", [3, None], ids=["number", "nothing"])
def test_an_output_that_is_no_tensor_is_rejected(constant: Any) -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Any]:
            return x + 1, constant

    with pytest.raises(LoweringError, match="is not a tensor"):
        trace("constant", Constant(), (torch.zeros(3),))


def test_an_input_handed_through_is_an_output() -> None:
    class Through(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x, x + y

    program = trace("through", Through(), (torch.zeros(3), torch.zeros(3)), ["x_again", "sum"])

    assert [t.name for t in program.spec.outputs] == ["x_again", "sum"]
