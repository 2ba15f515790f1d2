"""`onnxruntime` in the precision w8: what is stored in 8 bits, what it computes, and damaged scales."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from whisperport.bundle import Bundle, ProgramEntry
from whisperport.errors import BundleError
from whisperport.exporting import ExportOptions, export
from whisperport.programs import onnx_eight_bits
from whisperport.programs.onnx_eight_bits import in_blocks
from whisperport.programs.program import Program, trace
from whisperport.runner import Runner
from whisperport.targets import RunOptions, get_target
from whisperport.targets.onnxruntime import OPSETS, LowerOptions
from whisperport.verification.bundle_check import verify
from whisperport.verification.compare import compare
from whisperport.verification.tolerances import GATES

from ..conftest import micro_clips
from ..extent import EVERYTHING, core_or_all
from ..hostile_bundle import rehash
from ..outlier_checkpoints import NAMES, outlier_checkpoint

ORT = get_target("onnxruntime")
ONE_THREAD = RunOptions(threads=1)
X = np.random.default_rng(0).standard_normal((1, 3, 192)).astype(np.float32)


class Products(nn.Module):
    """A MatMul and a Gemm by large weights, by one whose rows no block divides, and by a small one."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((192, 256), (256, 300), (300, 96), (96, 8))
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        x = first(x)[0]  # of two axes from here on: a Gemm
        for layer in others:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    model = Products().eval()
    with torch.no_grad():
        for layer in model.layers:
            size = layer.weight.shape[0]
            layer.weight *= torch.logspace(-2, 1, size)[torch.randperm(size), None]
    return trace("products", model, (torch.from_numpy(X),), ["y"])


def lowered(program: Program, folder: Path, precision: str, opset: int = 20) -> ProgramEntry:
    target = ORT.configured(LowerOptions(opset=opset))
    folder.mkdir(exist_ok=True)
    (entry,) = target.with_precisions({"products": precision}).lower(
        [program], folder, lambda _: None
    )
    return entry


def run(folder: Path, entry: ProgramEntry) -> np.ndarray:
    runner: Runner = ORT.load(folder, [entry], ONE_THREAD)[entry.spec.name]
    return runner.run({"x": X})["y"]


def model_of(folder: Path, entry: ProgramEntry) -> onnx.ModelProto:
    return onnx.load(str(folder / entry.files[0]))


@pytest.mark.parametrize("opset", core_or_all(OPSETS[:1], OPSETS))
def test_large_weights_of_products_are_in_8_bits_in_every_opset(
    program: Program, opset: int, tmp_path: Path
) -> None:
    # given
    full = lowered(program, tmp_path / "fp32", "fp32", opset)
    expected = run(tmp_path / "fp32", full)

    # when
    entry = lowered(program, tmp_path / "w8", "w8", opset)
    found = run(tmp_path / "w8", entry)

    # then
    model = model_of(tmp_path / "w8", entry)
    assert entry.precision == "w8"
    assert {o.domain: o.version for o in model.opset_import} == {"": opset, "com.microsoft": 1}
    made = [
        {a.name: a.i for a in node.attribute}
        for node in model.graph.node
        if node.op_type == "MatMulNBits"
    ]
    assert [(a["K"], a["N"], a["block_size"]) for a in made] == [(192, 256, 64), (256, 300, 128)]
    assert all((a["bits"], a["accuracy_level"]) == (8, 4) for a in made)
    # One scale for a complete weight would lose the small channels: 0.01 to 10 here.
    assert compare("y", found, expected, GATES["w8"])


def test_programs_with_equal_weights_store_them_once(program: Program, tmp_path: Path) -> None:
    again = replace(program, spec=replace(program.spec, name="again"))
    target = ORT.with_precisions({"products": "w8", "again": "w8"})
    entries = target.lower([program, again], tmp_path, lambda _: None)

    size = (tmp_path / entries[0].files[1]).stat().st_size
    eight_bits = 192 * 256 + 256 * 300
    assert eight_bits < size < 1.2 * eight_bits + 4 * 300 * 96 + 8 * 4096


@pytest.mark.parametrize("block", [16, 128])
def test_no_weight_is_further_off_than_half_a_step(block: int) -> None:
    weight = np.random.default_rng(0).standard_normal((256, 5)).astype(np.float32)
    weight[:, 2] = 0  # a scale of 0 would divide by 0

    levels, scales = in_blocks(weight, block)

    found = ((levels.astype(np.float32) - 128) * scales[:, :, None]).reshape(5, 256).T
    step = np.repeat(scales, block, axis=1).T
    assert np.all(np.abs(found - weight) <= 0.501 * step)
    assert levels.min() >= 1  # symmetric: 255 levels


@pytest.fixture
def micro_w8(
    micro_checkpoint: Any, quick_tracing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Bundle:
    monkeypatch.setattr(onnx_eight_bits, "SMALLEST_WEIGHT", 1)  # its largest has 1,120 values
    how = ExportOptions(precision="w8", clips=micro_clips(), run=ONE_THREAD)
    return export(micro_checkpoint, "onnxruntime", tmp_path / "w8", how)


@pytest.mark.parametrize("value", [np.nan, 1e30, 0.0])
def test_a_bundle_with_a_damaged_scale_is_refused(micro_w8: Bundle, value: float) -> None:
    assert micro_w8.manifest.verified
    step = micro_w8.folder / micro_w8.manifest.program("step").files[0]

    def damage(scales: np.ndarray) -> np.ndarray:
        return np.full_like(scales, value)

    change_scales(step, damage)

    with pytest.raises(BundleError, match=r"step\.onnx"):
        Bundle.open(micro_w8.folder)
    rehash(micro_w8.folder)  # as someone would who wants it to be read
    report = verify(micro_w8.folder, run=replace(ONE_THREAD, trust=True))
    assert not report
    assert any("step" in failure for failure in report.failures())


def test_scales_of_another_shape_are_an_error_at_the_first_run(
    program: Program, tmp_path: Path
) -> None:
    entry = lowered(program, tmp_path, "w8")
    change_scales(tmp_path / entry.files[0], lambda scales: scales[:1])

    with pytest.raises(BundleError, match="cannot load"):
        run(tmp_path, entry)


def change_scales(path: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change the scales of all weights of an ONNX file, and store them in the graph."""
    model = onnx.load(str(path), load_external_data=False)
    names = {node.input[2] for node in model.graph.node if node.op_type == "MatMulNBits"}
    assert names
    for tensor in model.graph.initializer:
        if tensor.name in names:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
            changed = change(numpy_helper.to_array(tensor))
            tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))
    path.write_bytes(model.SerializeToString())


@pytest.mark.slow
@pytest.mark.skipif(not EVERYTHING, reason="exports a trained model in two precisions")
@pytest.mark.parametrize("name", ["default", *NAMES])
def test_trained_models_keep_their_words_in_smaller_files(name: str, tmp_path: Path) -> None:
    checkpoint = "default" if name == "default" else outlier_checkpoint(name, tmp_path)

    sizes = {}
    for precision in ("fp32", "w8"):
        how = ExportOptions(precision=precision, run=ONE_THREAD)
        bundle = export(checkpoint, "onnxruntime", tmp_path / precision, how)
        assert bundle.manifest.verified
        sizes[precision] = (bundle.folder / "onnxruntime/weights.bin").stat().st_size

    assert sizes["w8"] < 0.6 * sizes["fp32"]  # weights of float32 are stored in float16
    words = [c for c in bundle.manifest.verification["checks"] if c["level"] == "words"]
    assert [check["value"]["differ"] for check in words] == [0]
