"""The precision `w8` of the target `onnxruntime`: weights in 8 bits, once in the file of all programs."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from whisperport.errors import BundleError
from whisperport.model.trace.program import Program, trace
from whisperport.program.bundle import ProgramEntry
from whisperport.targets import RunOptions, get_target
from whisperport.targets.cpu.onnxruntime import OPSETS, LowerOptions
from whisperport.verification.compare import compare
from whisperport.verification.tolerances import GATES

from ...extent import core_or_all

ORT = get_target("onnxruntime")
WEIGHTS = "onnxruntime/weights.bin"
X = np.random.default_rng(0).standard_normal((1, 3, 128)).astype(np.float32)


class Projections(nn.Module):
    """Linears with and without bias, and a product of two inputs, which has no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 256), nn.Linear(256, 128, bias=False)
        self.narrow = nn.Linear(128, 8)  # stays in float32: it is small

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.second(torch.relu(self.first(x)))
        return y @ x.transpose(1, 2), self.narrow(y)


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    """Two programs of the same weights, whose output channels have scales from 0.01 to 10."""
    torch.manual_seed(0)
    module = Projections().eval()
    with torch.no_grad():
        module.first.weight *= torch.logspace(-2, 1, 256)[:, None]
    return [
        trace(name, module, (torch.zeros(1, rows, 128),), ["scores", "narrow"])
        for name, rows in (("three", 3), ("seven", 7))
    ]


def lowered(
    programs: list[Program], folder: Path, precision: str, opset: int = OPSETS[-1]
) -> list[ProgramEntry]:
    target = ORT.configured(LowerOptions(opset=opset))
    chosen = target.with_precisions({program.name: precision for program in programs})
    return chosen.lower(programs, folder, lambda _: None)


def run(folder: Path, entry: ProgramEntry) -> dict[str, Any]:
    return ORT.load(folder, [entry], RunOptions(threads=1))[entry.spec.name].run({"x": X})


@pytest.mark.parametrize("opset", core_or_all(OPSETS[:1], OPSETS))
def test_every_opset_computes_what_float32_does_within_the_tolerance(
    opset: int, programs: list[Program], tmp_path: Path
) -> None:
    entries = lowered(programs, tmp_path, "w8", opset)

    found = run(tmp_path, entries[0])

    with torch.no_grad():
        expected = programs[0].exported.module(check_guards=False)(torch.from_numpy(X))
    for array, exact in zip(found.values(), expected, strict=True):
        assert compare("y", array, exact.numpy(), GATES["w8"])
    assert [entry.precision for entry in entries] == ["w8", "w8"]


def test_weights_are_stored_once_in_a_byte_and_an_eighth(
    programs: list[Program], tmp_path: Path
) -> None:
    (tmp_path / "8").mkdir()
    (tmp_path / "32").mkdir()

    entries = lowered(programs, tmp_path / "8", "w8")
    lowered(programs, tmp_path / "32", "fp32")

    # A byte per weight and 4 for each 32 of them; the narrow weight and the biases stay as they are.
    sizes = [(tmp_path / folder / WEIGHTS).stat().st_size for folder in ("8", "32")]
    assert sizes[0] < 0.32 * sizes[1]
    for entry in entries:
        nodes = [node.op_type for node in _model(tmp_path / "8", entry).graph.node]
        assert nodes.count("MatMulNBits") == 2


def test_float32_is_the_default_and_has_no_operator_of_onnx_runtime(
    programs: list[Program], tmp_path: Path
) -> None:
    (entry, _) = ORT.lower(programs, tmp_path, lambda _: None)

    assert entry.precision == "fp32"
    assert {opset.domain for opset in _model(tmp_path, entry).opset_import} == {""}


@pytest.mark.parametrize("part", ["_8bits", "_scales"])
def test_a_weight_or_scale_of_another_size_is_a_damaged_bundle(
    part: str, programs: list[Program], tmp_path: Path
) -> None:
    (entry, _) = lowered(programs, tmp_path, "w8")
    model = _model(tmp_path, entry)
    tensor = next(one for one in model.graph.initializer if one.name.endswith(part))
    tensor.dims[0] //= 2
    length = next(one for one in tensor.external_data if one.key == "length")
    length.value = str(int(length.value) // 2)
    (tmp_path / entry.files[0]).write_bytes(model.SerializeToString())

    with pytest.raises(BundleError):
        run(tmp_path, entry)


@pytest.mark.parametrize("value", [np.nan, 1e30, 0.0])
def test_scales_with_wrong_values_fail_the_comparison(
    value: float, programs: list[Program], tmp_path: Path
) -> None:
    (entry, _) = lowered(programs, tmp_path, "w8")
    exact = run(tmp_path, entry)["narrow"]
    model = _model(tmp_path, entry)
    for tensor in model.graph.initializer:
        if tensor.name.endswith("_scales"):
            damaged = np.full(tensor.dims, value, np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(damaged, tensor.name))
    (tmp_path / entry.files[0]).write_bytes(model.SerializeToString())

    found = run(tmp_path, entry)["narrow"]

    assert not compare("narrow", found, exact, GATES["w8"])


def _model(folder: Path, entry: ProgramEntry) -> Any:
    return onnx.load(str(folder / entry.files[0]), load_external_data=False)
