"""`judge` on an encoder and a decoder as vendors' scripts export them: what they are, say, and lose."""

import json
import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from time import process_time
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
from whisperport.build.judge import graphs, layers
from whisperport.build.layouts.graph_pair.pair import read_pair
from whisperport.build.layouts.reading import Files
from whisperport.errors import ProgramError, UsageError, WhisperportError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.program.checks import Check
from whisperport.system.child import KilledError
from whisperport.verification.clips import shipped_audio

from ..extent import EVERYTHING, core_or_all
from ..targets.vendors.rockchip.rknn_bytes import description, rknn_bytes
from . import pair_scripts

JUDGE = "whisperport.build.judge.judge."
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

    for module in (graphs, layers):
        monkeypatch.setattr(module, "run_limited", run_limited)
    monkeypatch.setattr(JUDGE + "compare_graphs", lambda *_: ())


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
@pytest.mark.parametrize("script", core_or_all(["ai_hub"], [*SCRIPTS]))
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
    # and no layer is called wrong
    if script != "mediatek":
        (app,), sample = judgement.layout.apps.values(), judgement.clips[0]
        cut, known = graphs.taken(judgement.layout, app, checkpoint, sample)
        compared = layers.compare_graphs(exported[script], judgement.identity, cut, sample, known)
        assert [graph.part for graph in compared if graph] == ["encoder", "decoder"]


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


def test_graphs_whose_process_is_killed_are_not_called_wrong(
    exported: dict[str, Path], checkpoint: Any, clip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given right graphs, and a system that kills their process, as it does when memory runs out
    def killed(*_: object) -> Any:
        raise KilledError("running the graphs: the system killed the process")

    monkeypatch.setattr(graphs, "run_limited", killed)
    # then there is no verdict on them
    with pytest.raises(WhisperportError, match="nothing is known of its files") as caught:
        judge(exported["rockchip"], checkpoint, verify_with=clip(0))
    assert "memory" in caught.value.hint


@pytest.mark.usefixtures("in_this_process")
def test_layers_are_compared_with_as_many_tokens_as_the_decoder_reads(
    exported: dict[str, Path], checkpoint: Any, clip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given graphs of 12 tokens whose logits are wrong
    texts = dict.fromkeys(("program", "what", "rule", "reason"), "logits")
    wrong = Check(level="arrays", value={}, passed=False, **texts)
    monkeypatch.setattr(JUDGE + "check_computed", lambda *_, **__: wrong)
    monkeypatch.setattr(JUDGE + "check_words", lambda *_: (None, wrong))
    compared: list[Any] = []
    monkeypatch.setattr(JUDGE + "compare_graphs", lambda *given: compared.append(given) or ())
    # when they are judged, then the text with which their layers are compared is not longer
    judge(exported["rockchip"], checkpoint, verify_with=clip(0))
    *_, known = compared[0]
    assert len(known.tokens) == 12


def graph(
    nodes: Sequence[Any], inputs: dict[str, list[Any]], outputs: dict[str, list[Any]], path: Path
) -> None:
    """Write a graph whose `tokens` are integers."""

    def values(shapes: dict[str, list[Any]]) -> list[Any]:
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


def reading(
    folder: Path, more: dict[str, list[Any]], returned: dict[str, list[Any]], n_frames: Any = 3000
) -> None:
    """Write an encoder, and a decoder with more inputs and outputs than those of a text."""
    shapes = {"x": [1, 80, n_frames]}, {"audio": [1, 1500, 8]}
    node = helper.make_node("EPContext", ["x"], ["audio"], domain="com.microsoft")
    graph([node], *shapes, folder / "encoder.onnx")
    inputs = {"tokens": [1, 1], "audio": [1, 1500, 8], **more}
    outputs = {"logits": [1, 1, 2000], **returned}
    node = helper.make_node("EPContext", [*inputs], [*outputs], domain="com.microsoft")
    graph([node], inputs, outputs, folder / "decoder.onnx")


def test_an_encoder_of_any_length_takes_no_short_window(tmp_path: Path) -> None:
    # given an encoder of one spectrogram, whose length is a symbol
    reading(tmp_path, {}, {}, n_frames="frames")
    # when it is judged, then its window is not the size of the batch
    judgement = judge(tmp_path)
    assert judgement.layout.extent.n_frames == 0
    assert "any length" in judgement.layout.title
    assert "WP771" not in [problem.code for problem in judgement.problems]


def test_caches_of_symbolic_sizes_hold_any_number_of_tokens(tmp_path: Path) -> None:
    # given a cache that is returned in the same shape, of which only the heads are known
    shape = ["batch", 8, "length", 64]
    reading(tmp_path, {"past": shape}, {"present": shape})
    # when it is judged, then the cache has no limit
    assert "cache of any length" in judge(tmp_path).layout.title


def test_two_inputs_of_one_name_are_no_decoder(tmp_path: Path) -> None:
    # given a decoder that reads its tokens twice by one name
    reading(tmp_path, {}, {})
    model = onnx.load(tmp_path / "decoder.onnx")
    model.graph.input.append(model.graph.input[0])
    onnx.save(model, tmp_path / "decoder.onnx")
    # when it is judged, then it is not known
    with pytest.raises(UsageError, match="no app that is known"):
        judge(tmp_path)


@pytest.mark.parametrize(
    "table",
    [
        onnx.numpy_helper.from_array(np.zeros((1000, 0), np.float32), "positions"),
        helper.make_tensor("positions", TensorProto.STRING, [1000, 2], [b"a"] * 2000),
    ],
    ids=["without columns", "of texts"],
)
def test_a_table_that_holds_no_positions_is_not_taken_for_them(table: Any, tmp_path: Path) -> None:
    # given a short window, and a table with as many rows
    reading(tmp_path, {}, {}, n_frames=2000)
    model = onnx.load(tmp_path / "encoder.onnx")
    model.graph.initializer.append(table)
    onnx.save(model, tmp_path / "encoder.onnx")
    # when it is judged, then its positions are not known to be late
    assert judge(tmp_path).layout.extent.first_position == 0


def test_weights_beside_a_graph_are_not_taken_for_a_compiled_program(tmp_path: Path) -> None:
    # given a graph whose weights are in a file of their own, and a compiled program with the same suffix
    reading(tmp_path, {}, {})
    model = onnx.load(tmp_path / "encoder.onnx")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(8, np.float32), "table"))
    beside = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    onnx.save(model, tmp_path / "encoder.onnx", **beside)
    (tmp_path / "decoder.bin").write_bytes(b"a program of a chip")
    # when it is judged, then the compiled program alone is named, beside the graphs that hold one
    compiled = [problem.file for problem in judge(tmp_path).problems if problem.code == "WP778"]
    assert compiled == ["encoder.onnx", "decoder.onnx", "decoder.bin"]


def test_a_decoder_of_thousands_of_inputs_is_read_in_linear_time(tmp_path: Path) -> None:
    # given a decoder with 2,000 caches and as many outputs, all as long as logits
    names = [str(number) for number in range(2000)]
    outputs = {f"{name}.": [1, 1, 2000] for name in names}
    reading(tmp_path, {name: [2, 7, 8] for name in names}, outputs)
    # when the sizes are read, then no output is compared with each other
    graphs = read_pair(Files(tmp_path))
    assert graphs is not None
    start = process_time()
    assert graphs.cached == 0
    assert process_time() - start < 1


def test_a_file_that_is_larger_than_memory_is_an_error_of_the_file(tmp_path: Path) -> None:
    def whole(_: Path) -> bytes:
        raise MemoryError

    with pytest.raises(ProgramError, match="larger than memory"):
        Files(tmp_path).read("model.pte", whole)


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
    exported: dict[str, Path], clip: Any, tmp_path: Path
) -> None:
    # given the folder of a complaint: "small returns empty transcriptions, base garbage like (((((("
    folder = Path(shutil.copytree(exported["hailo"], tmp_path / "int8"))
    rounded_to_8_bits(next(folder.glob("*encoder*")))
    # when it is judged; in `make test-all` with its checkpoint, whose faults are tried for 6 s
    compared = ["--checkpoint", "default", "--verify-with", str(clip(0))]
    result = CliRunner().invoke(judge_verb, [str(folder), *core_or_all([], compared)])
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
    # and the file alone is the same
    assert judge(tmp_path / "model.pte").layout.target == judge(tmp_path).layout.target
