"""`judge` on an encoder and a decoder as vendors' scripts export them: what they are, say, and lose."""

import json
import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
import onnx
from onnx import TensorProto, helper

from whisperport import judge
from whisperport.apps.cli.judge import judge as judge_verb
from whisperport.build.judge import graphs
from whisperport.errors import UsageError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.verification.clips import shipped_audio

from ..extent import EVERYTHING
from ..targets.vendors.rockchip.rknn_bytes import description, rknn_bytes
from . import pair_scripts

# Script -> the app, the codes of what it loses, and the frames and tokens that its graphs take.
SCRIPTS: dict[str, tuple[str, str, int, int]] = {
    "rockchip": ("rknn_model_zoo", "WP771 WP772 WP775", 2000, 12),
    "hailo": ("hailo-whisper", "WP771 WP772", 1000, 32),
    "ai_hub": ("ai-hub-models", "WP773 WP776", 3000, 200),
}
if EVERYTHING:  # its converter takes 16 s
    SCRIPTS["mediatek"] = ("MTK_model_zoo", "WP772", 3000, 48)


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    return load_checkpoint("default")


@pytest.fixture(scope="module")
def exported(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Script -> the folder that it wrote of the embedded model."""
    folders = {}
    for name in SCRIPTS:
        folders[name] = tmp_path_factory.mktemp(name)
        getattr(pair_scripts, name)(pair_scripts.model_of(checkpoint), folders[name])
    return folders


@pytest.fixture
def clip(tmp_path: Path) -> Callable[[int], Path]:
    """`clip(n)`: a folder with one clip that comes with whisperport."""

    def copied(number: int) -> Path:
        file = list(shipped_audio())[number]
        folder = tmp_path / "clip"
        folder.mkdir()
        shutil.copy(file.path, folder)
        (folder / file.path.name).with_suffix(".txt").write_text(file.text)
        return folder

    return copied


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs run here, and layers are not compared."""

    def run_limited(job: str, arguments: dict[str, Any], _limits: object) -> Any:
        module, _, function = job.partition(":")
        return json.loads(json.dumps(getattr(import_module(module), function)(**arguments)))

    monkeypatch.setattr(graphs, "run_limited", run_limited)
    monkeypatch.setattr("whisperport.build.judge.judge.compare_graphs", lambda *_: ())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_form_is_recognized_with_what_it_loses(script: str, exported: dict[str, Path]) -> None:
    # given what a script writes
    app, codes, n_frames, n_tokens = SCRIPTS[script]
    # when it is judged without a checkpoint
    judgement = judge(exported[script])
    # then it is named, with its sizes, and what is lost, but nothing is wrong
    assert judgement
    assert list(judgement.layout.apps) == [app]
    assert [problem.code for problem in judgement.problems] == codes.split()
    assert (judgement.layout.extent.n_frames, judgement.layout.extent.n_tokens) == (
        n_frames,
        n_tokens,
    )


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("script", SCRIPTS)
def test_right_graphs_are_the_checkpoint_and_say_its_words(
    script: str, exported: dict[str, Path], checkpoint: Any, clip: Any
) -> None:
    # when right graphs are compared with their checkpoint
    judgement = judge(exported[script], checkpoint, verify_with=clip(0))
    # then each weight is there, split, scaled or cut as it may be, and logits and words are equal
    if script != "mediatek":
        assert judgement.identity is not None
        assert judgement.identity
        assert len(judgement.identity.equal) == len(checkpoint.weights)
    run = judgement.runs[0]
    assert [check.level for check in run.checks] == ["arrays", "words"]
    assert run, [check.reason for check in run.checks]
    assert run.words is not None
    assert run.words.counts.between.errors == 0


@pytest.mark.usefixtures("in_this_process")
def test_a_loop_of_a_decoder_that_forgets_is_named(
    exported: dict[str, Path], checkpoint: Any, clip: Any
) -> None:
    # given a decoder of 12 tokens, and a text that is longer
    judgement = judge(exported["rockchip"], checkpoint, verify_with=clip(3))
    # then the graphs are right, and the loop is named
    arrays, words = judgement.runs[0].checks
    assert arrays.passed
    assert not words.passed
    assert "loop in 1 of 1 clips" in words.reason
    assert not judgement


def graph(
    nodes: Sequence[Any], inputs: dict[str, list[int]], outputs: dict[str, list[int]], path: Path
) -> None:
    """Write a graph whose `tokens` are integers."""

    def values(shapes: dict[str, list[int]]) -> list[Any]:
        kinds = {"tokens": TensorProto.INT64}
        return [
            helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), shape)
            for name, shape in shapes.items()
        ]

    made = helper.make_graph(list(nodes), "graph", values(inputs), values(outputs))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(made, opset_imports=opsets), path)


def compiled_by_a_vendor(folder: Path) -> None:
    shapes = {"x": [1, 80, 3000]}, {"out": [1, 1500, 8]}
    node = helper.make_node("EPContext", ["x"], ["out"], domain="com.microsoft")
    graph([node], *shapes, folder / "encoder.onnx")
    shapes = {"tokens": [1, 4], "audio": [1, 1500, 8]}, {"logits": [1, 4, 2000]}
    node = helper.make_node("EPContext", ["tokens", "audio"], ["logits"], domain="com.microsoft")
    graph([node], *shapes, folder / "decoder.onnx")


def of_two_sizes(folder: Path) -> None:
    compiled_by_a_vendor(folder)
    shapes = {"x": [1, 80, 3000]}, {"out": [1, 1500, 16]}
    node = helper.make_node("EPContext", ["x"], ["out"], domain="com.microsoft")
    graph([node], *shapes, folder / "encoder.onnx")


def eight_bits_beside(folder: Path) -> None:
    compiled_by_a_vendor(folder)
    (folder / "encoder.rknn").write_bytes(rknn_bytes(description(type="int8")))


@pytest.mark.parametrize(
    ("code", "plant", "is_wrong"),
    [
        ("WP774", eight_bits_beside, True),
        ("WP778", compiled_by_a_vendor, False),
        ("WP779", of_two_sizes, True),
    ],
)
def test_a_planted_fault_is_named(
    code: str, plant: Callable[[Path], None], is_wrong: bool, tmp_path: Path
) -> None:
    # given graphs with one fault
    plant(tmp_path)
    # when they are judged, then its rule is named
    judgement = judge(tmp_path)
    assert code in [problem.code for problem in judgement.problems]
    assert bool(judgement) != is_wrong


def rounded_to_8_bits(path: Path) -> None:
    """Round what each matrix product of a graph reads to 8 bits, with one scale, as w8a8 does."""
    model = onnx.load(path)
    stored = {tensor.name for tensor in model.graph.initializer}
    scale = onnx.numpy_helper.from_array(np.float32(0.2), "scale")
    zero = onnx.numpy_helper.from_array(np.int8(0), "zero")
    model.graph.initializer.extend([scale, zero])
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for number, node in enumerate(nodes):
        if node.op_type == "MatMul" and node.input[0] not in stored:
            source, ends = node.input[0], ("scale", "zero")
            rounded, real = f"rounded{number}", f"real{number}"
            model.graph.node.append(helper.make_node("QuantizeLinear", [source, *ends], [rounded]))
            model.graph.node.append(helper.make_node("DequantizeLinear", [rounded, *ends], [real]))
            node.input[0] = real
        model.graph.node.append(node)
    onnx.save(model, path)


@pytest.mark.usefixtures("in_this_process")
def test_activations_of_8_bits_are_the_answer_to_an_empty_text(
    exported: dict[str, Path], checkpoint: Any, clip: Any, tmp_path: Path
) -> None:
    # given the folder of a complaint: "small returns empty transcriptions, base garbage like (((((("
    folder = Path(shutil.copytree(exported["hailo"], tmp_path / "int8"))
    rounded_to_8_bits(next(folder.glob("*encoder*")))
    # when it is judged with its checkpoint
    arguments = [str(folder), "--checkpoint", "default", "--verify-with", str(clip(0))]
    result = CliRunner().invoke(judge_verb, arguments)
    # then the first screen names the cause, what happens to the words, and what to do
    screen = " ".join(result.stdout.split("\nrule ", 1)[0].split())
    assert result.exit_code == 1
    assert "Wrong: WP774 (Activations have 8 bits)" in screen
    assert "activations are rounded to 8 bits" in " ".join(result.stdout.split())
    assert "float16, or 16-bit activations" in screen


def test_inputs_of_integers_are_the_answer_to_other_tokens(exported: dict[str, Path]) -> None:
    # given the folder of a complaint: `qnn-net-run` returns other tokens than the demo
    result = CliRunner().invoke(judge_verb, [str(exported["ai_hub"])])
    # when it is judged, then the first screen says how its inputs must be given
    screen = " ".join(result.stdout.split("\nrule ", 1)[0].split())
    assert result.exit_code == 0
    assert "input_ids int32 [1, 1], position_ids int32 [1]" in screen
    assert "qnn-net-run --use_native_input_files" in screen


def test_an_app_that_does_not_load_graphs_is_an_error(exported: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="has no files of sherpa-onnx"):
        judge(exported["ai_hub"], app="sherpa-onnx")


def test_a_matmul_outside_of_the_delegate_is_named_in_a_pte(tmp_path: Path) -> None:
    # given the file of a complaint: `x @ token_embedding.weight.T` is not delegated
    pytest.importorskip("executorch")
    pair_scripts.executorch(tmp_path)
    # when it is judged, then the first screen names it, and what to do
    result = CliRunner().invoke(judge_verb, [str(tmp_path)])
    screen = " ".join(result.stdout.split("\nrule ", 1)[0].split())
    assert result.exit_code == 0
    assert "WP777: model.pte: aten.mm.out of [4, 2000] runs on the CPU" in screen
    assert "whisperport lower decoder.pt2 --target xnnpack" in screen
