"""The activations that 8 bits ruin are found and named, in our encoders and in third-party programs."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from whisperport.build.sensitivity import Sensitivity, sensitivities
from whisperport.errors import ProgramError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.network.whisper import build_model
from whisperport.model.trace.onnx_file import write_onnx_file
from whisperport.model.trace.program import trace
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.runner import Array
from whisperport.speech.audio import load_audio, log_mel
from whisperport.targets.onnx import activations
from whisperport.verification.clips import shipped_audio
from whisperport.verification.loss import loss_of

from ...extent import core_or_all
from ...outlier_checkpoints import NAMES, STORED, outlier_checkpoint, planted_in
from ...shared_exports import run_folder

CHANNEL, FRAME = 5, 7


class Residual(nn.Module):
    """Two linears and a sum. The second one's bias makes one channel massive where the input is large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        with torch.no_grad():
            self.second.weight[CHANNEL] = 0
            self.second.weight[CHANNEL, 0] = 3000
            self.first.weight[0] = 0
            self.first.weight[0, 0] = 1
            self.first.bias[0] = -50

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


def sample(seed: int) -> dict[str, Array]:
    x = np.random.default_rng(seed).standard_normal((1, 20, 16)).astype(np.float32)
    x[0, FRAME, 0] = 60
    return {"x": x}


@pytest.fixture(scope="module")
def residual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("residual") / "residual.onnx"
    write_onnx_file(trace("residual", Residual().eval(), (torch.zeros(1, 20, 16),), ["y"]), path)
    return path


def by_name(found: list[Sensitivity]) -> Mapping[str, Sensitivity]:
    return {one.activation.name: one for one in found}


def test_the_linear_with_the_massive_channel_is_first_and_says_where_it_is(residual: Path) -> None:
    found = sensitivities(residual, [sample(0), sample(1)])

    assert [one.activation.name for one in found[:2]] == ["second", "sum behind second"]
    assert all(one.is_ruined for one in found[:2])
    assert f"second: channel {CHANNEL} reaches 3" in str(found[0].activation)
    assert "in 2 of 40 frames" in str(found[0].activation)
    assert not by_name(found)["first"].is_ruined


def test_alone_is_what_rounding_this_tensor_in_numpy_gives(residual: Path) -> None:
    found = by_name(sensitivities(residual, [sample(0)]))["second"]
    module = Residual().eval()
    with torch.no_grad():
        x = torch.from_numpy(sample(0)["x"])
        made = module.second(torch.relu(module.first(x)))
        low, high = min(made.min().item(), 0), max(made.max().item(), 0)
        scale = (high - low) / 255
        zero = round(-low / scale)
        rounded = (torch.clamp(torch.round(made / scale) + zero, 0, 255) - zero) * scale

        expected = loss_of((x + rounded)[0].numpy(), (x + made)[0].numpy()).sqnr_db

    assert found.alone_db == pytest.approx(expected, abs=0.1)


def test_the_result_does_not_depend_on_how_many_activations_a_run_returns(
    residual: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = sensitivities(residual, [sample(0)])
    monkeypatch.setattr(activations, "MAX_BYTES", 1)

    apart = sensitivities(residual, [sample(0)])

    assert [(one.tensor, one.typical_db) for one in apart] == [
        (one.tensor, one.typical_db) for one in together
    ]


def test_only_the_worst_are_measured_alone(residual: Path) -> None:
    found = sensitivities(residual, [sample(0)], worst=1)

    assert [one.alone_db is not None for one in found] == [True] + [False] * (len(found) - 1)


def test_weights_behind_a_cast_are_no_activations(tmp_path: Path) -> None:
    half = numpy_helper.from_array(np.eye(32, dtype=np.float16), "proj.weight_half")
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["proj.weight_half"], ["w"], to=TensorProto.FLOAT),
            helper.make_node("MatMul", ["x", "w"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 32])],
        [half],
    )
    path = tmp_path / "cast.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)

    found = sensitivities(path, [{"x": np.ones((3, 32), np.float32)}])

    assert [(one.operator, one.activation.name) for one in found] == [("MatMul", "proj")]


def test_a_program_of_integers_has_no_activations(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.INT32, [3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [3, 4])],
    )
    path = tmp_path / "integers.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)

    with pytest.raises(ProgramError, match="no activations"):
        sensitivities(path, [{"x": np.ones((3, 4), np.int32)}])


@pytest.mark.parametrize("name", core_or_all(NAMES[:1], NAMES))
def test_the_planted_channel_of_an_encoder_is_named(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = load_checkpoint(outlier_checkpoint(name, run_folder(tmp_path_factory)))
    (encoder,) = whisper_programs(Parts(build_model(checkpoint), []), ["encoder"])
    write_onnx_file(encoder, tmp_path / "encoder.onnx")
    mel = log_mel(load_audio(shipped_audio()[0].path), 80, n_frames=3000)[None]
    planted = planted_in(STORED / f"{name}.xz")

    found = sensitivities(tmp_path / "encoder.onnx", [{"mel": mel}], worst=2)

    block = planted.name.removeprefix("encoder.")
    assert found[0].activation.name == f"{block}.mlp.2"
    assert f"channel {planted.channel} reaches" in str(found[0].activation)
    assert found[0].alone_db is not None
    assert found[0].alone_db < 12
    ruined = [one.activation.name for one in found if one.is_ruined]
    assert all(one.startswith(("sum behind", "Softmax of", "Gelu of")) for one in ruined[1:])
    assert math.isfinite(found[-1].typical_db)
