"""ONNX functions are parsed once, and exports are what torch writes alone."""

import pytest
import torch
from onnxscript._framework_apis import torch_2_11
from onnxscript._internal.values import TracedOnnxFunction
from torch import nn
from torch.onnx._internal.exporter import _registration, _schemas
from torch.onnx._internal.exporter._registration import ONNXRegistry

from whisperport.programs.onnx import OPSET
from whisperport.programs.onnx_functions import functions_parsed_once
from whisperport.programs.program import trace


def written(module: nn.Module) -> bytes:
    program = trace("some", module, (torch.zeros(1, 4),))
    made = torch.onnx.export(program.exported, (), dynamo=True, opset_version=OPSET, verbose=False)
    assert made is not None
    return made.model_proto.SerializeToString()


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of functions whose source was parsed."""
    found: list[str] = []
    original = TracedOnnxFunction.function_ir.fget
    assert original is not None

    def function_ir(function: TracedOnnxFunction) -> object:
        found.append(function.name)
        return original(function)

    monkeypatch.setattr(TracedOnnxFunction, "function_ir", property(function_ir))
    return found


def test_within_the_block_an_export_writes_the_bytes_that_torch_writes_without_it() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Softmax(-1)).eval()
    alone = written(module)

    with functions_parsed_once():
        assert [written(module) for _ in range(2)] == [alone] * 2


def test_the_second_export_parses_nothing(parsed: list[str]) -> None:
    with functions_parsed_once():
        written(nn.ReLU())
    parsed.clear()

    with functions_parsed_once():
        written(nn.ReLU())

    assert parsed == []


def test_an_operator_that_is_registered_after_an_export_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of `quantized_decomposed` are registered when something imports them."""
    find, early = _registration._get_overload, "aten::relu"
    with functions_parsed_once(), monkeypatch.context() as patch:
        patch.setattr(
            _registration, "_get_overload", lambda name: find(name) if name != early else None
        )
        assert early not in ONNXRegistry.from_torchlib(OPSET).functions

    with functions_parsed_once():
        assert early in ONNXRegistry.from_torchlib(OPSET).functions


def test_an_error_ends_the_block_too() -> None:
    before = torch_2_11.get_torchlib_ops, _schemas.op_signature_from_function

    with pytest.raises(RuntimeError), functions_parsed_once():
        raise RuntimeError

    assert (torch_2_11.get_torchlib_ops, _schemas.op_signature_from_function) == before
