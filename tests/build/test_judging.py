"""`judge` names what is wrong with an app's files: each case plants one fault in right files.

What an app's words lose against the checkpoint's is counted, and named as what it is.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("onnx")
import onnx
import pytest

from whisperport import fix, judge
from whisperport.apps.cli.explain import rules_about
from whisperport.apps.cli.judge import judge as judge_verb
from whisperport.apps.cli.judge_page import verdict_sentence
from whisperport.build.judge import layers, operations
from whisperport.build.judge.eight_bits import HALF_STEP, groups_of, steps_of
from whisperport.build.judge.graph_run import _of_type
from whisperport.build.judge.graphs import GRAPHS, _Comparison
from whisperport.build.judge.identity import ChangedWeight, Identity, identify
from whisperport.build.judge.judge import AppRun, Judgement, _in_halves, _is_far, stored_arrays
from whisperport.build.judge.verified import NamedWeights, keep_hashes
from whisperport.build.judge.words import ComparedWords, compare_words, longest_loop
from whisperport.build.layouts import all_layouts, all_rules, layout_of
from whisperport.build.layouts.checkpoint_rules import other_filters, token_setting
from whisperport.build.layouts.graph_pair import RULES as PAIR_RULES
from whisperport.build.layouts.onnx_graph.header import read_header, rename, wrong_convolutions
from whisperport.build.layouts.onnx_graph.stored import _Blocks
from whisperport.build.layouts.onnx_graph.stored import stored_arrays as onnx_arrays
from whisperport.build.layouts.openvino_genai.repairs import (
    EARLY,
    EditedIr,
    is_zero,
    position_chain,
)
from whisperport.build.layouts.openvino_genai.rules import _assigned
from whisperport.build.layouts.reading import Files, StoredArray
from whisperport.build.layouts.record import hashes
from whisperport.build.layouts.reference import Emitted, TimedText
from whisperport.build.layouts.rules import Draft, Problem
from whisperport.build.layouts.whisper_cpp.file import _blocks
from whisperport.build.layouts.whisper_cpp.rules import _blocks as block_settings
from whisperport.errors import CheckpointError, ProgramError, UsageError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.checkpoint.ggml import read_types
from whisperport.model.inspection.graph import Graph, Node, Value
from whisperport.program.checks import Check
from whisperport.speech.audio.mel import triangles
from whisperport.speech.text.byte_level import from_byte_characters
from whisperport.targets.cpu.openvino.ir import IrGraph, IrNode
from whisperport.targets.cpu.openvino.partitioner import ask
from whisperport.verification.clips import Clip
from whisperport.verification.diagnosis.differences import (
    half_error,
    value_difference,
    weight_difference,
)
from whisperport.verification.diagnosis.divergence import ComparedPrograms, ComparedValue
from whisperport.verification.diagnosis.recording import opened

APPS = (
    *("faster-whisper", "onnxruntime-genai", "openvino-genai", "sherpa-onnx", "transformers.js"),
    "whisper.cpp",
)
DECODER = "openvino_decoder_model.xml"


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    return load_checkpoint("default")


@pytest.fixture(scope="module")
def right_files(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """App -> files of the embedded model that have no fault."""
    paths = {}
    for app in APPS:
        layout = layout_of(app)
        path = tmp_path_factory.mktemp("right") / f"model{layout.suffix}"
        if not layout.suffix:
            path.mkdir()
        if app == "openvino-genai":
            write_openvino(checkpoint, path)
        else:
            layout.write(checkpoint, "fp16" if layout.suffix else "fp32", path)
        paths[app] = path
    return paths


def write_openvino(checkpoint: Any, folder: Path, precision: str = "fp32") -> None:
    """Write what `judge` reads of the folder; the app itself would make the graphs of the tokenizer."""
    pytest.importorskip("openvino")
    from whisperport.build.layouts import huggingface_files as files
    from whisperport.build.layouts.openvino_genai.folder import write_graphs

    write_graphs(checkpoint, precision, folder)
    write_tokenizer_graphs(checkpoint, folder)
    files.write_json(folder / "config.json", files.config(checkpoint))
    files.write_json(folder / "generation_config.json", files.generation_config(checkpoint))
    files.write_json(
        folder / "preprocessor_config.json", files.preprocessor_config(checkpoint.dims)
    )
    files.write_json(folder / "tokenizer.json", files.tokenizer_json(checkpoint))


def write_onnx(checkpoint: Any, folder: Path, precision: str) -> None:
    layout_of("onnxruntime-genai").write(checkpoint, precision, folder)


def write_tokenizer_graphs(checkpoint: Any, folder: Path) -> None:
    """Write the constants that `judge` reads in the graphs of openvino-tokenizers."""
    from whisperport.build.layouts import huggingface_files as files

    stored = json.loads(checkpoint.tokenizer_json)
    texts = files.text_tokens(checkpoint)
    tokens = [*texts, *(t.encode() for t in files.tokens_by_id(checkpoint)[len(texts) :])]
    merges = [m.split(" ") if isinstance(m, str) else m for m in stored["model"]["merges"]]
    parts = [[from_byte_characters(pair[i]) for pair in merges] for i in (0, 1)]
    special = {t["content"].encode(): t["id"] for t in stored["added_tokens"] if t["special"]}
    ids = np.array(list(special.values()), np.int32)
    nothing = np.zeros(1, np.int32)
    lists = [array for texts in (tokens, *parts, list(special)) for array in text_list(texts)]
    write_ir(folder / "openvino_tokenizer.xml", "BPETokenizer", [nothing] * 5 + [*lists, ids])
    write_ir(
        folder / "openvino_detokenizer.xml", "VocabDecoder", [nothing, *text_list(tokens), ids]
    )


def text_list(texts: list[bytes]) -> list[Any]:
    ends = np.cumsum([len(text) for text in texts], dtype=np.int32)
    begins = np.concatenate([[0], ends[:-1]]).astype(np.int32)
    return [begins, ends, np.frombuffer(b"".join(texts), np.uint8)]


def write_ir(path: Path, kind: str, arrays: list[Any]) -> None:
    """Write a graph with one operator, whose inputs are constants."""
    layers, edges, start = [], [], 0
    for i, array in enumerate(arrays):
        type_ = {"int32": "i32", "uint8": "u8"}[array.dtype.name]
        layers.append(
            f'<layer id="{i}" name="c{i}" type="Const"><data element_type="{type_}" offset="{start}" '
            f'size="{array.nbytes}"/><output><port id="0"><dim>{array.size}</dim></port></output></layer>'
        )
        edges.append(
            f'<edge from-layer="{i}" from-port="0" to-layer="{len(arrays)}" to-port="{i}"/>'
        )
        start += array.nbytes
    ports = "".join(f'<port id="{i}"/>' for i in range(len(arrays)))
    layers.append(
        f'<layer id="{len(arrays)}" name="o" type="{kind}"><input>{ports}</input></layer>'
    )
    text = f"<net><layers>{''.join(layers)}</layers><edges>{''.join(edges)}</edges></net>"
    path.write_text(text)
    path.with_suffix(".bin").write_bytes(b"".join(array.tobytes() for array in arrays))


def edit_json(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        change(content)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")

    return edit


def htk_edges(n_mels: int) -> Any:
    """Return the edges in Hz (n_mels + 2,) of filters on HTK's mel scale, up to 8 kHz."""
    high = 2595 * np.log10(1 + 8000 / 700)
    return 700 * (10 ** (np.linspace(0, high, n_mels + 2) / 2595) - 1)


def copied(source: str, target: str) -> Callable[[Path], None]:
    return lambda folder: Path(shutil.copyfile(folder / source, folder / target)) and None


def edit_text(name: str, pattern: str, text: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        old = (folder / name).read_text(encoding="utf-8")
        new = re.sub(pattern, text, old)
        assert new != old
        (folder / name).write_text(new, encoding="utf-8")

    return edit


def edit_onnx(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        model = onnx.load(folder / name)
        change(model)
        onnx.save(model, folder / name)

    return edit


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def pairs(content: dict[str, Any]) -> None:
    content["model"]["merges"] = [m.split(" ") for m in content["model"]["merges"]]


def without_metadata(model: Any) -> None:
    kept = [entry for entry in model.metadata_props if entry.key != "blank_id"]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)


def other_metadata(model: Any) -> None:
    next(entry for entry in model.metadata_props if entry.key == "n_mels").value = "128"


def swap_inputs(model: Any) -> None:
    values = list(model.graph.input)
    keys = [i for i, value in enumerate(values) if value.name.endswith("decoder.key")]
    values[keys[0]], values[keys[0] + 1] = values[keys[0] + 1], values[keys[0]]
    del model.graph.input[:]
    model.graph.input.extend(values)


def offset_first(model: Any) -> None:
    values = [model.graph.input.pop(), *model.graph.input]
    del model.graph.input[:]
    model.graph.input.extend(values)


def renamed_output(model: Any) -> None:
    rename(model, {"last_hidden_state": "features"})


def without_attention(model: Any) -> None:
    values = [v for v in model.graph.output if not v.name.startswith("cross_attentions.1")]
    del model.graph.output[:]
    model.graph.output.extend(values)


def numbered_past(model: Any) -> None:
    model.graph.input[2].type.tensor_type.shape.dim[2].dim_value = 448


def late_positions(folder: Path) -> None:
    """Compute positions as transformers 5.4 does: Range from 0, and then Add."""
    ir = EditedIr(folder / DECODER)
    zero = next(i for i, n in ir.graph.of_type("Const") if n.sizes == [[]] and is_zero(ir, i))
    for tile, _ in ir.graph.of_type("Tile"):
        unsqueeze, range_ = position_chain(ir.graph, tile, EARLY)
        start, end, step = ir.graph.nodes[range_].inputs
        length = ir.graph.nodes[end[0]].inputs[1]
        data = {"output_type": "i64"}
        new = ir.add("range", "opset4 Range", data, ((zero, 0), length, step), "I64")
        added = ir.add("add", "opset1 Add", {"auto_broadcast": "numpy"}, (new, start), "I64")
        ir.replace_input(unsqueeze, 0, added)
    ir.write()


def converted_mask(folder: Path) -> None:
    ir = EditedIr(folder / DECODER)
    for index, node in ir.graph.of_type("ScaledDotProductAttention"):
        mask = node.inputs[3]
        if ir.graph.nodes[mask[0]].type == "Select":
            data = {"destination_type": "f32"}
            ir.replace_input(index, 3, ir.add("same", "opset1 Convert", data, (mask,), "FP32"))
    ir.write()


def any_frames(folder: Path) -> None:
    edit_text("openvino_encoder_model.xml", r"(>80</dim>\s*<dim>)3000", r"\1-1")(folder)
    edit_text("openvino_encoder_model.xml", r'shape="\?,80,3000"', 'shape="?,80,?"')(folder)


def set_type_0(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[44:48] = bytes(4)
    path.write_bytes(raw)


def set_layers(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[36:40] = (2).to_bytes(4, "little")
    path.write_bytes(raw)


def set_vocabulary(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[4:8] = (51870).to_bytes(4, "little")
    path.write_bytes(raw)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def drop_last_tensor(path: Path) -> None:
    name, data = [*read_types(path)][-1].encode(), path.read_bytes()  # all are there
    path.write_bytes(data[: data.rfind(name) - 5 * 4])  # three numbers and two sizes are in front


def rename_tensor(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"decoder.ln.bias", b"decoder.ln.bios"))


GENERATION, ONNX_DECODER = "generation_config.json", "onnx/decoder_model_merged.onnx"
FAULTS: list[tuple[str, str, Callable[[Path], None]]] = [
    ("transformers.js", "WP701", edit_json("tokenizer.json", pairs)),
    (
        "transformers.js",
        "WP702",
        edit_json(GENERATION, lambda c: c.update(no_timestamps_token_id=50364)),
    ),
    ("openvino-genai", "WP702", edit_json(GENERATION, lambda c: c.update(eos_token_id=50256))),
    ("transformers.js", "WP703", edit_json(GENERATION, lambda c: c.pop("lang_to_id"))),
    (
        "openvino-genai",
        "WP704",
        edit_json("preprocessor_config.json", lambda c: c.update(feature_size=128)),
    ),
    ("transformers.js", "WP705", edit_json(GENERATION, lambda c: c.pop("alignment_heads"))),
    (
        "transformers.js",
        "WP706",
        edit_json(GENERATION, lambda c: c.update(alignment_heads=[[6, 0]])),
    ),
    ("openvino-genai", "WP707", edit_json("config.json", lambda c: c.update(vocab_size=51864))),
    ("transformers.js", "WP710", remove("preprocessor_config.json")),
    (
        "transformers.js",
        "WP710",
        edit_json("config.json", lambda c: c["transformers.js_config"].update(dtype="q8")),
    ),
    ("transformers.js", "WP711", remove(ONNX_DECODER)),
    ("transformers.js", "WP711", copied("onnx/encoder_model.onnx", ONNX_DECODER)),
    ("transformers.js", "WP712", edit_json("config.json", lambda c: c.update(decoder_layers=4))),
    ("optimum", "WP713", edit_onnx(ONNX_DECODER, swap_inputs)),
    ("transformers.js", "WP714", edit_onnx(ONNX_DECODER, numbered_past)),
    ("transformers.js", "WP715", edit_onnx(ONNX_DECODER, without_attention)),
    ("onnx-asr", "WP716", remove("added_tokens.json")),
    (
        "transformers.js",
        "WP717",
        edit_json("config.json", lambda c: c.update(num_mel_bins=128)),
    ),
    ("sherpa-onnx", "WP721", edit_onnx("encoder.onnx", without_metadata)),
    ("sherpa-onnx", "WP722", edit_onnx("encoder.onnx", other_metadata)),
    (
        "sherpa-onnx",
        "WP723",
        edit_onnx(
            "encoder.onnx",
            lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[2], "dim_value", 3000),
        ),
    ),
    ("sherpa-onnx", "WP725", edit_onnx("decoder.onnx", offset_first)),
    ("sherpa-onnx", "WP725", remove("tokens.txt")),
    ("transformers.js", "WP712", edit_onnx("onnx/encoder_model.onnx", renamed_output)),
    ("sherpa-onnx", "WP724", edit_text("tokens.txt", r"\n[^\n]+ 50000\n", "\n")),
    (
        "openvino-genai",
        "WP731",
        edit_text(DECODER, r"decoder\.layers\.\d\.encoder_attn\.(key|value)", r"attention.\1"),
    ),
    (
        "openvino-genai",
        "WP732",
        converted_mask,
    ),
    ("openvino-genai", "WP733", late_positions),
    ("openvino-genai", "WP734", edit_text(DECODER, r"(key|value)present\.", r"\1_present.")),
    ("openvino-genai", "WP735", edit_text(DECODER, r'type="ReadValue"', 'type="Identity"')),
    (
        "openvino-genai",
        "WP736",
        any_frames,
    ),
    ("openvino-genai", "WP737", remove("openvino_detokenizer.xml")),
    ("faster-whisper", "WP741", remove("tokenizer.json")),
    (
        "faster-whisper",
        "WP742",
        lambda folder: (folder / "vocabulary.json").write_text(json.dumps(["a"] * 51866)),
    ),
    (
        "faster-whisper",
        "WP742",
        edit_json("vocabulary.json", lambda tokens: tokens.__delitem__(slice(50364, None))),
    ),
    (
        "faster-whisper",
        "WP743",
        edit_json("preprocessor_config.json", lambda c: c.update(feature_size=128)),
    ),
    (
        "faster-whisper",
        "WP744",
        edit_json("config.json", lambda c: c.update(alignment_heads=[[7, 1]])),
    ),
    (
        "faster-whisper",
        "WP744",
        edit_json("config.json", lambda c: c.update(alignment_heads=[[0, 2]])),
    ),
    ("whisper.cpp", "WP751", set_type_0),
    ("whisper.cpp", "WP752", set_layers),
    ("whisper.cpp", "WP753", set_vocabulary),
    ("whisper.cpp", "WP754", cut_off),
    ("whisper.cpp", "WP754", drop_last_tensor),
    ("whisper.cpp", "WP754", rename_tensor),
    (
        "onnxruntime-genai",
        "WP761",
        edit_json("genai_config.json", lambda c: c["model"]["decoder"].update(num_hidden_layers=4)),
    ),
    (
        "onnxruntime-genai",
        "WP761",
        edit_json(
            "genai_config.json", lambda c: c["search"].update(past_present_share_buffer=True)
        ),
    ),
    (
        "onnxruntime-genai",
        "WP762",
        edit_json("genai_config.json", lambda c: c["model"]["decoder"].update(filename="d.onnx")),
    ),
    ("onnxruntime-genai", "WP762", remove("tokenizer.json")),
]


# With these, the app transcribes: it loses word timestamps, or an old version or another app fails.
WARNINGS = {"WP701", "WP705", "WP715", "WP716", "WP752"}


def planted(
    app: str, plant: Callable[[Path], None], right_files: dict[str, Path], folder: Path
) -> Path:
    """Return a copy of right files, in which one thing is changed."""
    source = right_files[next(name for name in layout_of(app).apps if name in right_files)]
    path = folder / source.name
    if source.is_dir():
        shutil.copytree(source, path)
    else:
        shutil.copy(source, path)
    plant(path)
    return path


@pytest.mark.parametrize("app", APPS)
def test_right_files_break_no_rule(app: str, right_files: dict[str, Path], checkpoint: Any) -> None:
    judgement = judge(right_files[app])
    assert judgement
    assert app in judgement.layout.apps
    assert judgement.problems == ()
    # nor beside the checkpoint
    files = Files(right_files[app], checkpoint)
    assert [p for rule in layout_of(app).rules for p in rule.problems(files)] == []


@pytest.mark.parametrize(
    ("app", "code", "plant"), FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_planted_fault_is_named(
    app: str,
    code: str,
    plant: Callable[[Path], None],
    right_files: dict[str, Path],
    tmp_path: Path,
) -> None:
    # given right files, in which one thing is changed
    path = planted(app, plant, right_files, tmp_path)
    # when they are judged
    judgement = judge(path)
    # then its rule is named, and what the user can do about it
    assert code in [problem.code for problem in judgement.problems]
    rule, apps = all_rules()[code]
    assert bool(judgement) == all(problem.is_warning for problem in judgement.problems)
    assert judgement.problems[0].is_warning == (code in WARNINGS)
    assert app in apps
    assert rule.what_to_do


def converted_positions(folder: Path) -> None:
    """Put a node, which changes nothing, between the Range of the positions and its Unsqueeze."""
    ir = EditedIr(folder / DECODER)
    for tile, _ in ir.graph.of_type("Tile"):
        unsqueeze, range_ = position_chain(ir.graph, tile, EARLY)
        data = {"destination_type": "i64"}
        ir.replace_input(
            unsqueeze, 0, ir.add("same", "opset1 Convert", data, ((range_, 0),), "I64")
        )
    ir.write()


@pytest.mark.parametrize(
    ("code", "plant"),
    [
        ("", lambda folder: None),
        ("", edit_text(DECODER, r"keypresent\.", "key_present.")),
        ("WP731", edit_text(DECODER, r"decoder\.layers\.\d\.encoder_attn\.", "attention.")),
        ("WP732", converted_mask),
        ("WP733", converted_positions),
        ("WP734", edit_text(DECODER, r"past_key_values(\.\d\.decoder)", r"past\1")),
        ("WP734", edit_text(DECODER, r"(key|value)present\.", r"\1_present.")),
    ],
)
def test_the_message_of_an_npus_plugin_leads_to_the_rule(
    code: str, plant: Callable[[Path], None], right_files: dict[str, Path], tmp_path: Path
) -> None:
    # given a right decoder, or one in which a pattern is broken
    path = planted("openvino-genai", plant, right_files, tmp_path) / DECODER
    # when the plugin is asked about it
    message = ask(model=str(path), weights=str(path.with_suffix(".bin")))["rejection"]
    # then its message is about the rule of the pattern, which is broken only if the plugin rejects it
    assert bool(message) == bool(code)
    assert [problem.code for problem in judge(path.parent).problems] == [code] * bool(code)
    assert not code or [rule.code for rule in rules_about(message)] == [code]


# What the repair of a rule before it has corrected, too.
OF_ANOTHER_REPAIR = {"WP705", "WP717", "WP722"}


@pytest.mark.parametrize(
    ("app", "codes"),
    [
        ("transformers.js", "701 702 703 712 713 714 716 704"),
        ("transformers.js", "717"),
        ("transformers.js", "705 706 715"),
        ("openvino-genai", "702 704 707 731 732 733 734 736"),
        ("openvino-genai", "735"),
        ("sherpa-onnx", "721 722 723"),
        ("sherpa-onnx", "724"),
        ("faster-whisper", "742 743 744"),
        ("faster-whisper", "741"),
        ("whisper.cpp", "751"),
    ],
)
def test_planted_faults_are_repaired(
    app: str, codes: str, right_files: dict[str, Path], checkpoint: Any, tmp_path: Path
) -> None:
    # given files with several faults
    names = [f"WP{code}" for code in codes.split()]
    plants = [plant for _, code, plant in FAULTS if code in names]
    path = planted(app, lambda folder: [plant(folder) for plant in plants], right_files, tmp_path)
    before = hashes(path)
    # when they are fixed, with the checkpoint only where a rule says so
    needs_it = any(all_rules()[name][0].remedy == "fix --checkpoint" for name in names)
    out = tmp_path / f"fixed{path.suffix}"
    fixed = fix(path, out=out, checkpoint=checkpoint if needs_it else None)
    # then each repair is named, no rule is broken, and the user's files are as they were
    assert fixed.judgement.problems == ()
    assert fixed
    assert set(names) <= OF_ANOTHER_REPAIR | fixed.changes.keys()
    assert hashes(path) == before
    assert bool(judge(out))


def test_a_number_of_layers_that_is_true_is_no_number(
    right_files: dict[str, Path], tmp_path: Path
) -> None:
    plant = edit_json("config.json", lambda c: c.update(decoder_layers=True))
    path = planted("transformers.js", plant, right_files, tmp_path)

    assert {problem.code for problem in judge(path).problems} == {"WP706"}


@pytest.mark.parametrize("code", ["WP711", "WP753"])
def test_what_no_repair_corrects_is_not_written(
    code: str, right_files: dict[str, Path], tmp_path: Path
) -> None:
    # given a fault without a repair
    app, _, plant = next(fault for fault in FAULTS if fault[1] == code)
    path = planted(app, plant, right_files, tmp_path)
    # when the files are fixed
    fixed = fix(path, out=tmp_path / f"fixed{path.suffix}")
    # then it is named, and nothing is written
    assert not fixed
    assert fixed.path is None
    assert code in [problem.code for problem in fixed.judgement.problems]
    assert not (tmp_path / f"fixed{path.suffix}").exists()


def test_a_rule_has_a_repair_if_its_remedy_is_one() -> None:
    rules = [rule for layout in all_layouts() for rule in layout.rules]
    wrong = [r.code for r in rules if (r.repair is not None) != r.remedy.startswith("fix")]
    assert wrong == []
    for rule in rules:  # `explain`, too, names the repair first
        if rule.repair is not None:
            assert f"What to do: `whisperport {rule.remedy}`. Else: " in rule.text


def test_a_tokenizer_without_a_token_is_replaced_by_the_checkpoints(
    right_files: dict[str, Path], checkpoint: Any, tmp_path: Path
) -> None:
    # given a tokenizer that lacks a token of the prompt, and no id that is too high
    path = planted(
        "transformers.js",
        edit_text("tokenizer.json", "startoftranscript", "start"),
        right_files,
        tmp_path,
    )
    rule, _ = all_rules()["WP707"]
    assert [problem.reason for problem in rule.problems(Files(path))] == [
        "it has no token <|startoftranscript|>"
    ]
    # when the rule's repair has the checkpoint
    assert rule.repair is not None
    change = rule.repair(Draft(Files(path), {}, checkpoint))
    # then the rule is not broken any more
    assert change == "tokenizer.json of the checkpoint"
    assert list(rule.problems(Files(path))) == []


def test_another_app_is_an_error_before_anything_is_copied(
    right_files: dict[str, Path], tmp_path: Path
) -> None:
    path = planted("onnx-asr", remove("added_tokens.json"), right_files, tmp_path)
    with pytest.raises(UsageError, match=re.escape(f"{path} has no files of sherpa-onnx")):
        fix(path, out=tmp_path / "fixed", app="sherpa-onnx")


def test_repaired_files_are_not_written_into_the_input(
    right_files: dict[str, Path], tmp_path: Path
) -> None:
    path = planted("onnx-asr", remove("added_tokens.json"), right_files, tmp_path)
    with pytest.raises(UsageError) as caught:
        fix(path, out=path / "inner" / "fixed")
    assert "which is copied as a whole" in caught.value.why
    assert not (path / "inner").exists()


def test_every_rule_has_a_planted_fault() -> None:
    in_a_test_of_its_own = {"WP708", "WP709", "WP718", *(rule.code for rule in PAIR_RULES)}
    of_pte = {f"WP{n}" for n in (781, 782, 783, 784, 786, 787)}  # layouts/test_executorch_apps.py
    of_npus = {"WP785"}  # layouts/test_on_npus.py
    in_a_test_of_its_own |= of_pte | of_npus
    assert {code for _, code, _ in FAULTS} == set(all_rules()) - in_a_test_of_its_own


def test_a_graph_beside_the_settings_is_named(right_files: dict[str, Path], tmp_path: Path) -> None:
    # given a folder as optimum writes it
    shutil.copytree(right_files["transformers.js"] / "onnx", tmp_path, dirs_exist_ok=True)
    for path in right_files["transformers.js"].glob("*.json"):
        shutil.copy(path, tmp_path)
    assert [problem.code for problem in judge(tmp_path).problems] == ["WP718"]


@pytest.mark.parametrize(
    ("app", "plant", "codes"),
    [
        (
            "transformers.js",
            edit_json(GENERATION, lambda c: c.update(forced_decoder_ids=[[1, [2]], [1, {}]])),
            set(),
        ),
        ("sherpa-onnx", edit_text("tokens.txt", r"\A", f"YQ== {'9' * 5000}\n"), {"WP724"}),
        ("openvino-genai", edit_text("openvino_detokenizer.xml", '"i32"', '"f32"'), {"WP708"}),
    ],
)
def test_files_with_anything_as_an_id_are_judged(
    app: str,
    plant: Callable[[Path], None],
    codes: set[str],
    right_files: dict[str, Path],
    checkpoint: Any,
    tmp_path: Path,
) -> None:
    # given files in which an id is a list, or too long for a number, or a place in a text is no integer
    files = Files(planted(app, plant, right_files, tmp_path), checkpoint)
    # when each rule reads them beside the checkpoint
    problems = [p.code for rule in layout_of(app).rules for p in rule.problems(files)]
    # then they are judged
    assert set(problems) == codes


@pytest.mark.parametrize(
    ("app", "plant", "codes"),
    [
        (  # the names of the fourth layer are missing, too
            "onnxruntime-genai",
            edit_json(
                "genai_config.json", lambda c: c["model"]["decoder"].update(num_hidden_layers=4)
            ),
            ["WP708", "WP761", "WP762"],
        ),
        (  # of two files that disagree, the other is wrong
            "transformers.js",
            edit_json(
                GENERATION,
                lambda c: c.update(no_timestamps_token_id=c["no_timestamps_token_id"] + 1),
            ),
            ["WP708", "WP702"],
        ),
        (
            "transformers.js",
            lambda folder: (folder / f"{ONNX_DECODER}_data").touch(),
            ["WP710"],
        ),
    ],
)
def test_the_first_of_several_problems_is_the_cause(
    app: str,
    plant: Callable[[Path], None],
    codes: list[str],
    right_files: dict[str, Path],
    checkpoint: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("whisperport.build.judge.judge._compared", lambda found, *_: found)
    judged = judge(planted(app, plant, right_files, tmp_path), checkpoint)
    assert list(dict.fromkeys(problem.code for problem in judged.problems)) == codes


def edit_bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        file = path / name if name else path
        file.write_bytes(change(file.read_bytes()))

    return edit


def number(variable: str, value: Any) -> Callable[[bytes], bytes]:
    """Change a number in model.bin of CTranslate2: name, no axes, dtype, size, and it."""

    def change(raw: bytes) -> bytes:
        start = raw.index(variable.encode() + b"\0") + len(variable) + 1 + 6
        return raw[:start] + bytes(value.tobytes()) + raw[start + value.nbytes :]

    return change


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda raw: raw.replace(old, new)


def of_two_texts(model: Any) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2


def of_type(place: int, kind: int) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        model.graph.input[place].type.tensor_type.elem_type = kind

    return edit


def filters_reversed(raw: bytes) -> bytes:
    begin, end = 14 * 4, 14 * 4 + 80 * 201 * 4
    filters = np.frombuffer(raw[begin:end], np.float32).reshape(80, 201)
    return raw[:begin] + filters[::-1].tobytes() + raw[end:]


def without_aliases(raw: bytes) -> bytes:
    """Drop the names that model.bin of CTranslate2 ends with: their number, and each with its length."""
    return raw[: raw.rindex(b"decoder/projection/weight") - 2 - 4] + bytes(4)


def without_last(tokens: list[str]) -> None:
    del tokens[-1]


def end_for_one(generation: dict[str, Any]) -> None:
    tokens = generation["suppress_tokens"]
    tokens[tokens.index(359)] = 50257


def exchanged_branches(model: Any) -> None:
    (node,) = (n for n in model.graph.node if n.op_type == "If")
    first, second = node.attribute
    first.name, second.name = second.name, first.name


def further_input(model: Any) -> None:
    model.graph.input.append(model.graph.input[0])
    model.graph.input[-1].name = "further"


def two_axes(model: Any) -> None:
    model.graph.input[0].type.tensor_type.shape.dim.pop()


def without_beams(folder: Path) -> None:
    """Let the last state that is read by `beam_idx` be read by a constant."""
    ir = EditedIr(folder / DECODER)
    gathers = [
        (index, node)
        for index, node in ir.graph.of_type("Gather")
        if ir.graph.nodes[node.inputs[0][0]].type == "ReadValue"
    ]
    index, node = gathers[-1]
    ir.replace_input(index, 1, node.inputs[2])
    ir.write()


def without_previous(tokenizer: Any) -> None:
    tokens = tokenizer["added_tokens"]
    tokenizer["added_tokens"] = [t for t in tokens if t["content"] != "<|startofprev|>"]


@pytest.mark.parametrize(
    ("app", "plants", "reasons"),
    [
        (
            "faster-whisper",
            [
                edit_bytes("model.bin", number("decoder/scale_embeddings", np.int8(1))),
                edit_bytes("model.bin", number("decoder/activation", np.int8(0))),
                edit_bytes("model.bin", number("encoder/num_heads", np.int16(4))),
                edit_bytes("model.bin", replaced(b"decoder/num_heads", b"decoder/num_beads")),
                edit_json("vocabulary.json", without_last),
                edit_json("preprocessor_config.json", lambda c: c.update(hop_length=200)),
                edit_json("config.json", lambda c: c.pop("suppress_ids")),
                edit_json("tokenizer.json", lambda c: c.update(truncation={"max_length": 8})),
            ],
            [
                "decoder/scale_embeddings is 1; the checkpoint has 0",
                "WP708: decoder/activation is ReLU; the checkpoint has GELU",
                "encoder/num_heads is 4; the checkpoint has 2",
                "decoder/num_heads is missing, which is 8; the checkpoint has 2",
                "it has 51,864 tokens; the checkpoint has 51,865",
                "hop_length is 200; the checkpoint has 160",
                "WP709: suppress_ids is missing; the checkpoint has [",
                "WP709: truncation is set max_length 8; the checkpoint has none",
            ],
        ),
        (
            "openvino-genai",
            [
                edit_bytes(
                    "openvino_detokenizer.bin", lambda raw: raw[:500_000] + b"\x01" + raw[500_001:]
                ),
                remove("openvino_tokenizer.xml"),
                edit_text(DECODER, "beam_idx", "beams"),
                edit_text("openvino_encoder_model.xml", r"\bERF\b", "TANH"),
                edit_json("preprocessor_config.json", lambda c: c.update(nb_max_frames=1500)),
                edit_json(GENERATION, lambda c: c.update(num_beams=5, prev_sot_token_id=50360)),
                edit_json(GENERATION, lambda c: c.pop("suppress_tokens")),
            ],
            [
                "tokens are not the checkpoint's, such as id 16041",
                "the file is missing: prompts and hotwords fail",
                "no tensor is called beam_idx, by which the pipeline finds it",
                "` is TANH, not ERF",
                "nb_max_frames is 1500; the checkpoint has 3000",
                "prev_sot_token_id is 50360; the checkpoint has 50361",
                "WP709: num_beams is 5; without it, it is 1",
                "suppress_tokens is missing; the checkpoint has [",
            ],
        ),
        (
            "openvino-genai",
            [
                edit_json("config.json", dict.clear),
                without_beams,
                edit_text("openvino_encoder_model.xml", 'strides="2"', 'strides="1"'),
                edit_text("openvino_encoder_model.xml", "<dim>3000</dim>", "<dim>2000</dim>"),
            ],
            [
                "frames of input_features is 2000; the checkpoint has 3000",
                "it states nothing",
                "is not ordered by beam_idx: beams read the cache of others",
                "strides of encoder.conv2, the Convolution `",
                "` is 1, not 2",
            ],
        ),
        (
            "faster-whisper",
            [
                edit_json("tokenizer.json", dict.clear),
                edit_bytes(
                    "model.bin", replaced(b"layer_1/ffn/linear_0/b", b"layer_1/ffn/linear_9/b")
                ),
            ],
            [
                "it states nothing",
                "the variable decoder/layer_1/ffn/linear_0/bias is missing",
                "the variable decoder/layer_1/ffn/linear_9/bias is none of Whisper",
            ],
        ),
        (
            "faster-whisper",
            [
                edit_bytes("model.bin", without_aliases),
                edit_json("config.json", lambda c: [c.clear(), c.update(model_type="whisper")]),
            ],
            [
                "WP708: the variable decoder/projection/weight is missing: it is another name of",
                "WP708: it has no setting of CTranslate2, such as alignment_heads, lang_ids,",
                "; it is transformers' own",
            ],
        ),
        (
            "openvino-genai",
            [
                copied("openvino_tokenizer.xml", "openvino_detokenizer.xml"),
                copied("openvino_tokenizer.bin", "openvino_detokenizer.bin"),
                edit_bytes("openvino_encoder_model.bin", lambda raw: raw + bytes(8)),
            ],
            [
                "WP708: it has no operator VocabDecoder",
                "bytes, of which openvino_encoder_model.xml reads",
            ],
        ),
        (
            "transformers.js",
            [
                edit_json("preprocessor_config.json", lambda c: c.update(mel_filters=[[0.5]])),
                edit_json("tokenizer.json", lambda c: c["added_tokens"][0].update(special=False)),
            ],
            [
                "WP708: mel_filters are not Whisper's: they are 1 bands of 1 frequencies; the",
                "WP708: `special` of 1 added tokens, such as <|endoftext|>, is not the checkpoint's",
            ],
        ),
        (
            "faster-whisper",
            [edit_json("tokenizer.json", lambda c: c["added_tokens"][0].update(special=False))],
            ["WP709: `special` of 1 added tokens, such as <|endoftext|>, is not the checkpoint's"],
        ),
        (
            "transformers.js",
            [edit_json("preprocessor_config.json", lambda c: c.update(mel_filters=[[0.5], ["a"]]))],
            ["WP708: mel_filters are not Whisper's: they are 0 bands of 0 frequencies; the"],
        ),
        (
            "onnxruntime-genai",
            [edit_json("genai_config.json", dict.clear), edit_onnx("decoder.onnx", of_two_texts)],
            [
                "model.type is missing; the checkpoint has 'whisper'",
                "input input_ids is of 2 texts; the app gives one",
            ],
        ),
        (
            "onnxruntime-genai",
            [
                edit_onnx("decoder.onnx", of_type(0, onnx.TensorProto.FLOAT)),
                edit_text("audio_processor_config.json", '"n_fft": 400', '"n_fft": 512'),
                edit_json("genai_config.json", lambda c: c["search"].update(min_length=100)),
            ],
            [
                "input input_ids is float32; the app gives int32",
                "search.min_length is 100; without it, it is 0",
                "WP708: n_fft of sequence[2] is 512; the checkpoint has 400",
            ],
        ),
        (
            "sherpa-onnx",
            [edit_onnx("decoder.onnx", of_type(5, onnx.TensorProto.INT32))],
            ["input offset is int32; the app gives int64"],
        ),
        (
            "sherpa-onnx",
            [edit_text("tokens.txt", r"IHRoZQ==", "xKB0aGU=")],
            ["'Ġthe', not ' the': they are written in the byte-level characters"],
        ),
        (
            "openvino-genai",
            [edit_text(DECODER, 'element_type="i64"', 'element_type="i32"')],
            ["input input_ids is i32; the app gives i64"],
        ),
        ("sherpa-onnx", [remove("decoder.onnx")], ["the file is missing"]),
        (
            "sherpa-onnx",
            [edit_onnx("decoder.onnx", further_input)],
            ["WP725: an input further, which the app does not give"],
        ),
        (
            "sherpa-onnx",
            [edit_onnx("encoder.onnx", two_axes)],
            ["WP725: input 1, mel, has 2 axes; the app takes one of 3 axes there"],
        ),
        (
            "whisper.cpp",
            [edit_bytes("", lambda raw: raw[:44] + b"\x05" + raw[45:])],
            ["ftype is 5, which is no type of the app's files"],
        ),
        (
            "whisper.cpp",
            [edit_bytes("", lambda raw: raw[:44] + b"\x07" + raw[45:])],
            ["has ggml's type 1; by the header's ftype 7 it is 8"],
        ),
        (
            "whisper.cpp",
            [edit_bytes("", lambda raw: raw[:12] + (64).to_bytes(4, "little") + raw[16:])],
            ["n_audio_state is 64; the checkpoint has 128"],
        ),
        (
            "whisper.cpp",
            [edit_bytes("", filters_reversed)],
            ["the mel filters are not those of the checkpoint: axis 0 is reversed"],
        ),
        (
            "transformers.js",
            [
                edit_json(GENERATION, end_for_one),
                edit_onnx(ONNX_DECODER, of_two_texts),
                edit_onnx(ONNX_DECODER, exchanged_branches),
                edit_json(
                    "tokenizer_config.json", lambda c: c.update(tokenizer_class="GPT2Tokenizer")
                ),
                edit_onnx("onnx/encoder_model.onnx", further_input),
                edit_json("tokenizer.json", without_previous),
                edit_json("vocab.json", lambda c: [c.pop(token) for token in [*c][:3]]),
            ],
            [
                "tokens are missing, such as '!', id 0",
                "its branches are exchanged: the first run reads the cache",
                "WP709: tokenizer_class is 'GPT2Tokenizer'; the checkpoint has 'WhisperTokenizer'",
                "WP712: an input further, which no app gives",
                "tokens are missing, such as '<|startofprev|>', id 50361",
                "input input_ids is of 2 texts; the app gives one",
                "suppress_tokens has [50257] and lacks [359], unlike the checkpoint's: 50257 ends a text",
            ],
        ),
    ],
)
def test_what_files_state_is_compared_with_what_is_written_for_the_checkpoint(
    app: str,
    plants: list[Callable[[Path], None]],
    reasons: list[str],
    right_files: dict[str, Path],
    checkpoint: Any,
    tmp_path: Path,
) -> None:
    # given a copy of right files, in which several things are changed
    path = planted(app, plants[0], right_files, tmp_path)
    for plant in plants[1:]:
        plant(path)
    # when each rule reads them beside the checkpoint
    files = Files(path, checkpoint)
    problems = [p for rule in layout_of(app).rules for p in rule.problems(files)]
    said = [f"{p.code}: {p.reason}" for p in problems]
    # then each change is named
    assert [reason for reason in reasons if not any(reason in text for text in said)] == []


@pytest.mark.parametrize(
    ("shift", "reason"), [(1, "their ids are 1 too high"), (-2, "their ids are 2 too low")]
)
def test_it_is_said_by_how_much_the_ids_of_tokens_are_moved(shift: int, reason: str) -> None:
    # given tokens, each with the id of another one, and one that the checkpoint lacks
    right = {i: f"token {i}" for i in range(40)}
    stated = {i + shift: token for i, token in right.items() if i + shift in right} | {7: "new"}
    # when they are compared, then it is said how far it is moved
    (setting,) = token_setting("tokens.txt", stated, right)
    assert setting.reason.endswith(reason)


def test_tokens_that_are_sorted_by_their_text_are_called_so() -> None:
    # given a vocabulary whose tokens are in the order of the alphabet
    right = dict(enumerate(["the", "cat", "sat", "on", "a", "mat", "and", "ate"]))
    stated = dict(enumerate(sorted(right.values())))
    # when it is compared, then the order is named
    (setting,) = token_setting("vocabulary.json", stated, right)
    assert setting.reason.endswith("are in another order: they are sorted by their text")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("YQ== 0\nYg== 1\nYw", "it is cut off: line 3 has no id"),
        ("YQ== 0\nYg== 1\nYw==", "it is cut off: line 3 has no id"),
        (
            "YQ== 0\nYg== 1\nYw== 2\nZA== 1",
            "it is cut off: it has 3 tokens; id 1 is in 2 lines; 'eot' is 5",
        ),
        ("YQ== 0\nYg== 1\n", "it ends early: it has 2 tokens; 'eot' is 50257"),
        ("YQ== 0\nYg== 9\n", "it has 2 tokens, and lacks id 1; 'eot' is 50257"),
        ("YQ== 0\nYg 1\nYw", "line 2 is not base64"),
    ],
)
def test_a_list_of_tokens_that_is_cut_off_is_called_so(
    text: str, reason: str, tmp_path: Path
) -> None:
    # given a list of tokens that ends early, beside an encoder that states where it must end
    (tmp_path / "tokens.txt").write_text(text)
    node, graph = onnx.helper.make_node("Identity", ["x"], ["y"]), onnx.helper.make_graph
    model = onnx.helper.make_model(graph([node], "graph", [], []))
    onnx.helper.set_model_props(model, {"eot": "50257"})
    onnx.save(model, tmp_path / "encoder.onnx")
    # when the rule of tokens reads it, then it says so
    rule = next(r for r in layout_of("sherpa-onnx").rules if r.code == "WP724")
    (problem,) = rule.problems(Files(tmp_path))
    assert problem.reason.startswith(reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda blocks: np.roll(blocks, -2, 1), "the scale is behind the integers"),
        (
            lambda blocks: blocks[:, [1, 0, *range(2, 34)]],
            "the two bytes of each scale are exchanged",
        ),
        (lambda blocks: blocks, ""),
    ],
)
def test_blocks_of_another_form_are_named(
    change: Callable[[Any], Any], reason: str, micro_checkpoint: Any
) -> None:
    # given the blocks of a tensor, as ggml or another program writes them
    name = "decoder.token_embedding.weight"
    blocks = change(_blocks(micro_checkpoint.weights[name].numpy()).view(np.uint8))
    files: Any = SimpleNamespace(path=Path("a.bin"), read=lambda *_: {name: blocks})
    # when they are compared with the weight, then their form is named
    reasons = [setting.reason for setting in block_settings(files, micro_checkpoint)]
    assert len(reasons) == bool(reason)
    assert all(text.startswith(f"{name}: in its blocks of 32, {reason}") for text in reasons)


def test_a_file_of_ggml_that_ends_in_zeros_names_the_last_tensor(
    right_files: dict[str, Path], checkpoint: Any, tmp_path: Path
) -> None:
    path = tmp_path / "model.bin"
    raw = right_files["whisper.cpp"].read_bytes()
    path.write_bytes(raw[:-200_000] + bytes(200_000))
    (problem,) = (each for each in judge(path, checkpoint).problems if each.code == "WP754")
    assert "zeros follow the tensor `encoder.blocks.3" in problem.reason
    assert "cut off" in problem.reason


def test_weights_are_found_under_any_name(checkpoint: Any, right_files: dict[str, Path]) -> None:
    # given the files of each layout; ggml's and CTranslate2's are read as checkpoints
    for app in APPS:
        layout, files = layout_of(app), Files(right_files[app])
        precision = layout.reader.precisions(files)[0]
        # when the checkpoint's weights are looked for
        identity = identify(checkpoint, stored_arrays(layout, files, precision))
        # then each is there, to the bit: the checkpoint's weights are of float16
        assert identity, app
        assert len(identity.equal) == len(checkpoint.weights)


@pytest.mark.parametrize(
    ("change", "kind", "status"),
    [
        (edit_json(GENERATION, lambda c: c.pop("alignment_heads")), "warning", 0),
        (edit_json(GENERATION, lambda c: c.pop("lang_to_id")), "wrong", 1),
    ],
)
def test_the_verb_says_what_is_wrong(
    change: Callable[[Path], None],
    kind: str,
    status: int,
    right_files: dict[str, Path],
    tmp_path: Path,
) -> None:
    # given a folder in which a setting is missing
    folder = tmp_path / "web"
    shutil.copytree(right_files["transformers.js"], folder)
    change(folder)
    # when the verb judges it
    page = tmp_path / "page.html"
    result = CliRunner().invoke(judge_verb, [str(folder), "--html", str(page)])
    as_json = CliRunner().invoke(judge_verb, [str(folder), "--json"])
    # then it is listed with its rule, and what is lost alone does not fail
    assert (result.exit_code, as_json.exit_code) == (status, status), result.output
    assert "WP70" in result.stdout
    assert kind in result.stdout
    assert json.loads(as_json.stdout)["passed"] == (status == 0)
    assert ("Wrong: " in page.read_text(encoding="utf-8")) == bool(status)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "w8"])
@pytest.mark.parametrize(
    "app", ["faster-whisper", "transformers.js", "sherpa-onnx", "onnxruntime-genai"]
)
def test_files_tell_the_precision_in_which_they_were_written(
    app: str, precision: str, checkpoint: Any, micro_checkpoint: Any, tmp_path: Path
) -> None:
    small = checkpoint if app == "sherpa-onnx" else micro_checkpoint  # it needs OpenAI's tokens
    layout_of(app).write(small, precision, tmp_path)
    assert layout_of(app).reader.precisions(Files(tmp_path)) == [precision]


def test_one_precision_of_several_is_judged_and_named(
    right_files: dict[str, Path], checkpoint: Any, tmp_path: Path
) -> None:
    # given a folder with graphs in two precisions
    folder = tmp_path / "web"
    shutil.copytree(right_files["transformers.js"], folder)
    for path in (folder / "onnx").glob("*.onnx"):
        shutil.copy(path, path.with_name(f"{path.stem}_fp16.onnx"))
    # when it is judged, without and with a choice
    first, chosen = judge(folder), judge(folder, precision="fp16")
    # then both are known, and one is judged
    assert (first.precision, chosen.precision) == ("fp32", "fp16")
    assert first.precisions == ("fp32", "fp16")
    with pytest.raises(UsageError, match="no files of the precision `w8`"):
        judge(folder, precision="w8")


@pytest.fixture
def without_apps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No app is installed, and layers are compared in this process."""
    monkeypatch.setattr("whisperport.build.judge.judge.is_installed", lambda app: False)

    def run_limited(_job: str, arguments: dict[str, Any], _limits: object) -> Any:
        return json.loads(json.dumps(layers.in_child(**arguments)))

    monkeypatch.setattr(layers, "run_limited", run_limited)


@pytest.mark.usefixtures("without_apps")
def test_files_are_hashed_only_if_an_app_runs(
    right_files: dict[str, Path], checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whisperport.build.judge.judge.hashes", None)
    judgement = judge(right_files["sherpa-onnx"], checkpoint)
    assert judgement
    assert not judgement.graphs
    _graphs, *apps = judgement.runs
    assert [run.reason for run in apps] == ["not installed, so it did not run"] * 2


@pytest.mark.usefixtures("without_apps")
def test_the_first_layer_that_diverges_is_named(
    right_files: dict[str, Path], checkpoint: Any, tmp_path: Path
) -> None:
    # given an encoder whose weight is permuted, and a decoder whose weights are right, but not its scale
    folder = tmp_path / "web"
    shutil.copytree(right_files["transformers.js"], folder)

    def change(name: str, edited: Callable[[Any], Any]) -> Callable[[Any], None]:
        def plant(model: Any) -> None:
            (tensor,) = (t for t in model.graph.initializer if t.name == name)
            array = np.ascontiguousarray(edited(onnx.numpy_helper.to_array(tensor)))
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, name))

        return plant

    weight = "encoder.blocks.1.attn.value.weight"
    edit_onnx("onnx/encoder_model.onnx", change(f"{weight}.T", lambda a: a[::-1]))(folder)
    edit_onnx(ONNX_DECODER, change("float32_0d_0.125", lambda a: a * 2))(folder)
    # when it is judged
    judgement = judge(folder, checkpoint)
    # then the layer of each graph is named, and that all before it is right
    assert not judgement
    firsts = [graph["layers"]["first"] for graph in judgement.to_json()["graphs"]]
    assert [first["name"] for first in firsts] == [
        "encoder.blocks.1.attn.value",
        "the input of decoder.blocks.0.attn.out",
    ]
    assert max(first["before"] for first in firsts) < 1e-5
    assert judgement.graphs[0].computed == f"{weight} differs"  # and not what is computed
    cause = judgement.graphs[1].cause
    assert "the scores are multiplied by 2" in cause  # and in which nodes
    assert "Softmax " in cause
    assert judgement.identity is not None
    assert [changed.name for changed in judgement.identity.changed] == [weight]


def with_halves(model: Any) -> None:
    """Let a graph take and return float16, and compute in float32."""
    graph, float32, float16 = model.graph, onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
    for values, is_input in ((graph.input, True), (graph.output, False)):
        for value in values:
            if value.type.tensor_type.elem_type == float32:
                value.type.tensor_type.elem_type = float16
                for node in graph.node:
                    for names in (node.input, node.output):
                        names[:] = [f"{n}.32" if n == value.name else n for n in names]
                ends = [value.name, f"{value.name}.32"][:: 1 if is_input else -1]
                cast = onnx.helper.make_node(
                    "Cast", ends[:1], ends[1:], to=float32 if is_input else float16
                )
                graph.node.insert(0 if is_input else len(graph.node), cast)


def test_graphs_that_take_float16_are_run_in_it(micro_checkpoint: Any, tmp_path: Path) -> None:
    # given right graphs, and the same that take and return float16
    app, dims = layout_of("onnxruntime-genai"), micro_checkpoint.dims
    mel = np.random.default_rng(0).standard_normal((dims.n_mels, dims.n_frames)).astype(np.float32)
    write_onnx(micro_checkpoint, tmp_path, "fp32")
    name = "encoder.blocks.0.attn.query.weight"
    identity = Identity(equal=[name], places={name: [("encoder.onnx", name)]})
    is_rounded, logits = [], []
    for change in (lambda _model: None, with_halves):
        for file in ("encoder.onnx", "decoder.onnx"):
            edit_onnx(file, change)(tmp_path)
        # when they are run
        assert app.logits is not None
        logits.append(app.logits(tmp_path, "fp32", mel, [1, 2, 3, 4], 3, {}))
        is_rounded.append(_in_halves(Files(tmp_path), identity))
    # then both compute the same, up to rounding
    assert is_rounded == [False, True]
    assert np.abs(logits[1] - logits[0]).max() < 1e-2 * np.abs(logits[0]).max()
    # and an input is given in its type, if numpy has it
    assert _of_type(Value("x", (2,), "float16"), np.ones(2), "a.onnx").dtype == np.float16
    with pytest.raises(ProgramError, match=r"its input x is bfloat16, which numpy lacks"):
        _of_type(Value("x", (2,), "bfloat16"), np.ones(2), "a.onnx")


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("form", ["initializer", "Constant"])
@pytest.mark.parametrize(("to", "in_halves"), [(onnx.TensorProto.FLOAT, False), (10, True)])
def test_a_graph_that_multiplies_in_float16_is_told_from_one_that_stores_it(
    tmp_path: Path, to: int, in_halves: bool, form: str, is_inner: bool
) -> None:
    # given a weight in float16, and a product in the type to which it is converted
    helper, weight = onnx.helper, onnx.numpy_helper.from_array(np.ones((4, 4), np.float16), "w")
    is_constant = form == "Constant"
    nodes = [helper.make_node("Constant", [], ["w"], value=weight)] * is_constant + [
        helper.make_node("Cast", ["w"], ["cast"], to=to),
        helper.make_node("Cast", ["x"], ["y"], to=to),
    ]
    product = helper.make_node("MatMul", ["y", "cast"], ["z"])
    if is_inner:
        inner = helper.make_graph(
            [product], "branch", [], [helper.make_empty_tensor_value_info("z")]
        )
        product = helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner)
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 4])
    graph = helper.make_graph([*nodes, product], "g", [x], [x], [weight] * (not is_constant))
    onnx.save(helper.make_model(graph), tmp_path / "a.onnx")
    # then its precision is that of the product
    assert read_header(tmp_path / "a.onnx").computes_in_halves == in_halves


@pytest.mark.parametrize(
    ("first", "second", "reasons"),
    [
        ({"pads": [1, 1]}, {"pads": [1, 1], "strides": [2], "group": 1}, []),
        ({"auto_pad": "SAME_LOWER"}, {"pads": [1, 1], "strides": [2], "dilations": [1]}, []),
        (
            {"pads": [2, 0]},
            {"auto_pad": "SAME_UPPER", "strides": [2]},
            [
                "pads of encoder.conv1: 2, 0, and not 1, 1",
                "pads of encoder.conv2: 0, 1, and not 1, 1",
            ],
        ),
        (
            {"pads": [1, 1], "dilations": [2]},
            {"pads": [1, 1], "group": 2},
            [
                "dilations of encoder.conv1: 2, and not 1",
                "strides of encoder.conv2: 1, and not 2",
                "group of encoder.conv2: 2, and not 1",
            ],
        ),
        ({"pads": [0, 1, 0, 1]}, {"pads": [0, 1, 0, 1], "strides": [1, 2]}, []),  # over two axes
    ],
)
def test_attributes_of_convolutions_that_are_not_whispers_are_named(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], reasons: list[str]
) -> None:
    # given the two convolutions of an encoder
    nodes = [
        onnx.helper.make_node("Conv", [source, weight], [result], **attributes)
        for source, weight, result, attributes in (("x", "v", "y", first), ("y", "w", "z", second))
    ]
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 4, 8])
    onnx.save(
        onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [value], [value])),
        tmp_path / "a.onnx",
    )
    # then each attribute that is another is named
    assert list(wrong_convolutions(read_header(tmp_path / "a.onnx"))) == reasons


@pytest.mark.parametrize(
    ("states", "reasons"),
    [
        (("a", "b"), []),
        (
            ("b", "a"),
            ["the state a is assigned to the state b", "the state b is assigned to the state a"],
        ),
    ],
)
def test_states_that_are_assigned_to_each_other_are_named(
    states: tuple[str, str], reasons: list[str]
) -> None:
    # given a state to which new keys are joined that depend on the other state, which is only kept
    nodes = {
        0: IrNode("", "ReadValue", attributes={"variable_id": "a"}),
        1: IrNode("", "ReadValue", attributes={"variable_id": "b"}),
        2: IrNode("", "MatMul", inputs=[(1, 0)]),
        3: IrNode("", "Concat", inputs=[(0, 0), (2, 0)]),
        4: IrNode("", "Assign", attributes={"variable_id": states[0]}, inputs=[(3, 0)]),
        5: IrNode("", "Assign", attributes={"variable_id": states[1]}, inputs=[(1, 0)]),
    }
    # then each that is assigned to another is named
    assert [setting.reason for setting in _assigned(IrGraph(nodes, {}))] == reasons


def test_a_cache_that_holds_the_keys_in_place_of_the_values_is_named_though_weights_are_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # given the right keys and values (H, n, D) of a layer, and what rounded weights compute (n, d)
    random = np.random.default_rng(0)
    right = {f"0.decoder.{part}": random.standard_normal((2, 3, 4)) for part in ("key", "value")}
    rounded = {
        name: (array + 0.1 * random.standard_normal(array.shape)).transpose(1, 0, 2).reshape(3, 8)
        for name, array in right.items()
    }
    comparison = object.__new__(_Comparison)
    monkeypatch.setattr(_Comparison, "_right_caches", lambda _self: right)
    # then what the values are is said if they are the keys
    assert comparison.exchanged(rounded) == ""
    attention = "of self-attention in decoder layer 0"
    assert comparison.exchanged({**rounded, "0.decoder.value": rounded["0.decoder.key"]}) == (
        f"in place of the values {attention}, the first run returns the keys {attention}"
    )


def test_what_only_rounding_differs_in_is_not_explained_by_another_order() -> None:
    # given values that are right but for rounding, and others of one row that are wrong
    right = np.random.default_rng(0).standard_normal((1, 8, 4)).astype(np.float32)
    # then no axis is called reversed, of one row or of many that are alike
    assert value_difference(right, right * (1 + 3e-4), 4) == ""
    assert "reversed" not in value_difference(right, right + 1, 4)
    alike = np.ones((64, 64), np.float32)
    alike[0, 0] = 2
    assert "reversed" not in weight_difference(alike, np.ones_like(alike), alike * 1e-6)


@pytest.mark.parametrize(("right", "names"), [([], ["b", "a"]), (["y"], ["b"])])
def test_what_computes_a_value_begins_behind_right_values(
    right: list[str], names: list[str]
) -> None:
    # given a graph of two nodes, x -> y -> z
    nodes = tuple(
        Node(name, "relu", "Relu", (Value(source),), (Value(result),))
        for name, source, result in (("a", "x", "y"), ("b", "y", "z"))
    )
    graph = Graph("", "onnx", nodes, (Value("x"),), (Value("z"),))
    located = layers._Located(graph, {}, {}, operations.Explanation({}, 1), is_exact=True)
    # then the nodes are those that compute z, the nearest first
    assert [node.name for node in located._making(["z"], right)] == names


@pytest.mark.parametrize(
    ("app", "precision"),
    [("openvino-genai", "fp16"), ("openvino-genai", "w8"), ("onnxruntime-genai", "fp16")],
)
def test_a_weight_behind_a_conversion_is_read(
    app: str, precision: str, micro_checkpoint: Any, tmp_path: Path
) -> None:
    # given graphs whose weights are converted and multiplied before they are read
    write = write_openvino if app == "openvino-genai" else write_onnx
    write(micro_checkpoint, tmp_path, precision)
    stored = stored_arrays(layout_of(app), Files(tmp_path), precision)
    places = identify(micro_checkpoint, stored).places
    name = "openvino_encoder_model.xml" if app == "openvino-genai" else "encoder.onnx"
    file = tmp_path / name
    names = {weight: [n for f, n in found if f == file.name] for weight, found in places.items()}
    with opened(str(file)) as program:
        graph = program.graph
    # when the nodes that read them are looked for, then each has one
    arrays = layers._with_folded(graph, names)
    read = {tensor.name for node in graph.nodes for tensor in node.tensors}
    weights = [name for name in names if name.startswith("encoder.") and name.endswith("weight")]
    assert weights
    assert [name for name in weights if not read.intersection(arrays[name])] == []


def test_a_bias_that_another_weights_matmul_gets_names_the_exchange() -> None:
    # given the weights of a key and a value at each other's place: the value's bias is added to the key's
    nodes = tuple(
        Node(name, op, op, tuple(map(Value, sources)), (Value(name),))
        for name, op, *sources in (
            ("k", "matmul", "x", "w.value"),
            ("product", "matmul", "x", "w.key"),
            ("v", "add", "product", "b.value"),
        )
    )
    graph = Graph("", "onnx", nodes, (Value("x"),), (Value("k"), Value("v")))
    arrays = {f"attn.{part}.weight": [f"w.{part}"] for part in ("key", "value")}
    arrays["attn.value.bias"] = ["b.value"]
    row, product = np.ones(4, np.float32), np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    expected = {"attn.value.bias": row, "attn.value": product + row}
    explanation = operations.Explanation(expected, 2)
    values = {"k": product, "product": product * 3, "v": product * 3 + row}
    located = layers._Located(graph, values, arrays, explanation, is_exact=True)
    # when the value's layer is explained, then the key's weight is named
    (compared,) = located.compared("logits")
    cause = located.computed([compared], compared)
    assert "its bias is added to the matmul with attn.key.weight: the two are exchanged" in cause


def test_a_weight_that_is_used_in_place_of_another_one_is_named() -> None:
    # given two blocks whose matmuls read the weight of the first
    nodes = tuple(
        Node(name, "matmul", "matmul", (Value("x"), Value("w.0")), (Value(name),)) for name in "ab"
    )
    graph = Graph("", "onnx", nodes, (Value("x"),), (Value("a"), Value("b")))
    arrays = {f"decoder.blocks.{n}.attn.out.weight": [f"w.{n}"] for n in (0, 1)}
    located = layers._Located(graph, {}, arrays, operations.Explanation({}, 1), is_exact=False)
    # when it is asked which is used in place of the other, then it is said
    assert located._another_weight() == (
        "decoder.blocks.0.attn.out.weight is used in place of decoder.blocks.1.attn.out.weight, which no "
        "node reads"
    )


@pytest.mark.parametrize(
    ("layers_of", "sentence"),
    [
        (
            {"w.key": "x"},
            "b.attn.key reads the input of b.attn_ln, and not the output of b.attn_ln",
        ),
        ({"w.key": "y"}, ""),
        ({"w.mlp_ln": "x"}, "b.mlp_ln reads the input of b.attn_ln: the two are exchanged"),
        ({"w.mlp_ln": "z"}, ""),
    ],
    ids=["not the norm", "right", "another norm's", "right norm"],
)
def test_what_a_weight_is_used_with_is_named(layers_of: dict[str, str], sentence: str) -> None:
    # given the input and the output of a norm, and the input of another one, which nothing else is
    random = np.random.default_rng(0)
    x, y, z, wrong = (random.standard_normal((1, 3, 4)).astype(np.float32) for _ in range(4))
    norm, other = f"{operations.INPUT}b.attn_ln", f"{operations.INPUT}b.mlp_ln"
    expected = {norm: x, "b.attn_ln": y, other: z, "b.attn.key": z + y}
    # when a weight reads one of them
    ((array, source),) = layers_of.items()
    op = "matmul" if array == "w.key" else "layer_norm"
    node = Node("n", op, op, (Value(source), Value(array)), (Value("out"),))
    graph = Graph("", "onnx", (node,), (), (Value("out"),))
    arrays = {"b.attn.key.weight": ["w.key"], "b.mlp_ln.weight": ["w.mlp_ln"]}
    values = {"x": x, "y": y, "z": z, "out": wrong}
    explanation = operations.Explanation(expected, 2)
    located = layers._Located(graph, values, arrays, explanation, is_exact=True)
    # then it is said if that is the wrong one
    name = "b.attn.key" if op == "matmul" else other
    assert located._misread(name).startswith(sentence)
    assert bool(located._misread(name)) == bool(sentence)


@pytest.mark.parametrize("n_swapped", [0, 1])
def test_a_square_weight_that_alone_is_transposed_is_odd(
    n_swapped: int, micro_checkpoint: Any
) -> None:
    # given matrices straight, those of keys transposed, and perhaps a value's as well
    name = "decoder.blocks.1.attn.value.weight"
    arrays = [
        StoredArray("a", str(i), w.T if ".key." in key or (key == name and n_swapped) else w)
        for i, (key, w) in enumerate(
            (key, w.float().numpy()) for key, w in micro_checkpoint.weights.items()
        )
    ]
    # then that alone is stored in another way than its kind
    assert identify(micro_checkpoint, arrays).odd == [name] * n_swapped


@pytest.mark.parametrize("app", ["faster-whisper", "whisper.cpp"])
def test_weights_of_8_bits_are_found(checkpoint: Any, app: str, tmp_path: Path) -> None:
    # given files of 8 bits, whose reader multiplies the integers by their steps
    layout = layout_of(app)
    path = tmp_path / f"model{layout.suffix}"
    if not layout.suffix:
        path.mkdir()
    layout.write(checkpoint, "w8", path)
    # when they are compared with the checkpoint
    identity = identify(checkpoint, stored_arrays(layout, Files(path), "w8"))
    # then each weight is there, and the matrices are within half a step
    assert identity, identity.changed[:3]
    assert len(identity.eight_bits) > 50


def test_a_scale_of_8_bits_is_not_taken_for_a_bias_of_zeros(
    micro_checkpoint: Any, tmp_path: Path
) -> None:
    # given graphs of 8 bits, of a checkpoint whose biases are 0, which an exporter may leave out
    zeros = {
        name: w * 0 if name.endswith("bias") else w for name, w in micro_checkpoint.weights.items()
    }
    untrained = replace(micro_checkpoint, weights=zeros)
    write_openvino(untrained, tmp_path, "w8")
    stored = stored_arrays(layout_of("openvino-genai"), Files(tmp_path), "w8")
    # when the weights are looked for among the arrays that are not 0
    identity = identify(untrained, (array for array in stored if array.values.any()))
    # then nothing is missing
    assert identity, identity.changed
    assert identity.neutral


@pytest.mark.parametrize("form", ["swapped", "float16", "8 bits", "scaled"])
def test_a_rounded_or_swapped_weight_is_found(form: str, micro_checkpoint: Any) -> None:
    # given every weight as a converter may store it
    def stored(name: str, array: Any) -> Any:
        if form == "scaled" and ".query." in name:
            return array * np.float32(micro_checkpoint.dims.text_head_width**-0.5)
        if form == "float16":
            return array.astype(np.float16)
        if form == "8 bits" and array.ndim == 2:
            return np.rint(array / np.abs(array).max(1, keepdims=True) * 127).astype(np.int8)
        return array.T if form == "swapped" and array.ndim == 2 else array

    arrays = [
        StoredArray("file", str(i), stored(name, weight.float().numpy()))
        for i, (name, weight) in enumerate(micro_checkpoint.weights.items())
    ]
    # when they are looked for
    identity = identify(micro_checkpoint, arrays)
    # then each is found, and what it was rounded to is known
    assert identity, identity.changed
    assert bool(identity.half) == (form == "float16")
    assert bool(identity.eight_bits) == (form == "8 bits")


@pytest.mark.parametrize(
    ("app", "precision"), [("transformers.js", "fp32"), ("faster-whisper", "fp16")]
)
def test_files_of_a_verified_checkpoint_are_named_without_it(
    app: str,
    precision: str,
    micro_checkpoint: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # given files, and a cache with the hashes of another checkpoint and with a file that is damaged
    folder, cache = tmp_path / "model", tmp_path / "cache"
    folder.mkdir()
    layout_of(app).write(micro_checkpoint, precision, folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    weights = micro_checkpoint.weights
    doubled = replace(micro_checkpoint, weights={name: 2 * w for name, w in weights.items()})
    keep_hashes("tiny", doubled)
    keep_hashes("small", micro_checkpoint).write_text('{"name": "small", "hashes": 5}')
    before = judge(folder).named
    # when the hashes of their checkpoint are kept, as by `make test-official`
    keep_hashes("base", micro_checkpoint)
    # then the files are those of the checkpoint, which is not given
    assert before is None
    assert judge(folder).named == NamedWeights("base", len(weights), len(weights))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (0.01, "1 of 512 values differ in 1 rows, such as 0"),
        (1e-6, "1 of 512 values differ, by up to"),
    ],
    ids=["much", "less than a rounding"],
)
def test_one_changed_value_is_named(micro_checkpoint: Any, change: float, reason: str) -> None:
    # given all weights, in one of which a single value differs
    name = "decoder.blocks.0.mlp.0.weight"
    arrays = []
    for key, weight in micro_checkpoint.weights.items():
        array = weight.float().numpy().copy()
        if key == name:
            array[0, 0] += change
        arrays.append(StoredArray("decoder.onnx", f"onnx::{key}", array))
    # when they are looked for
    (changed,) = identify(micro_checkpoint, arrays).changed
    # then that weight is named, with how many values differ
    assert changed.name == name
    assert changed.reason.startswith(reason)
    assert changed.stored == f"decoder.onnx: onnx::{name}"


@pytest.mark.parametrize("form", [np.float16, np.float32])
def test_bytes_in_reversed_order_are_named(form: Any, micro_checkpoint: Any) -> None:
    # given a weight whose bytes are those of a machine with the other order
    name = "decoder.blocks.1.attn.query.weight"
    values = micro_checkpoint.weights[name].float().numpy().astype(form).byteswap()
    # when it is looked for, also under a name that does not tell its axes, then it is said
    for array in (name, f"{name}.T"):
        stored = [StoredArray("a.bin", array, values if array == name else values.T)]
        (changed,) = (c for c in identify(micro_checkpoint, stored).changed if c.stored)
        assert changed.reason == "the bytes of each value are in reversed order: big-endian"


def test_rows_of_another_weight_name_it(micro_checkpoint: Any) -> None:
    # given keys and values of which one half is exchanged, as if they were joined head by head
    key, value = (f"decoder.blocks.0.cross_attn.{part}.weight" for part in ("key", "value"))
    arrays = {name: w.float().numpy().copy() for name, w in micro_checkpoint.weights.items()}
    n = len(arrays[key]) // 2
    arrays[key][n:], arrays[value][:n] = arrays[value][:n].copy(), arrays[key][n:].copy()
    stored = [StoredArray("decoder.onnx", name, array) for name, array in arrays.items()]
    # when they are looked for
    reasons = {weight.name: weight.reason for weight in identify(micro_checkpoint, stored).changed}
    # then each says whose rows it holds
    assert reasons[key].startswith(f"rows {n} to {2 * n - 1} are rows 0 to {n - 1} of {value}")
    assert reasons[value].startswith(f"rows 0 to {n - 1} are rows {n} to {2 * n - 1} of {key}")


def test_a_weight_in_float16_is_found_by_any_rule_of_rounding(micro_checkpoint: Any) -> None:
    # given weights that another rule than the nearest even number rounds, and none below 1e-7
    def rounded(weight: Any) -> Any:
        toward_zero = (weight.numpy().view(np.int32) & ~np.int32(0x1FFF)).view(np.float32)
        return np.where(np.abs(toward_zero) < 1e-7, 1e-7, toward_zero).astype(np.float16)

    arrays = [
        StoredArray("model.onnx", f"onnx::{i}", rounded(weight))
        for i, weight in enumerate(micro_checkpoint.weights.values())
    ]
    # when they are looked for, then each is found
    assert identify(micro_checkpoint, arrays)


def test_a_column_with_a_step_for_each_row_is_found(micro_checkpoint: Any) -> None:
    # given a bias as a column of 8 bits, in which each row has a step of its own
    name = "decoder.blocks.0.mlp.0.bias"
    bias = micro_checkpoint.weights[name].float().numpy()[:, None]
    step = (np.abs(bias) / 100 + 1e-6).astype(np.float32)
    column = StoredArray("a.onnx", name, np.rint(bias / step) * step, step=step)
    # when weights are looked for
    identity = identify(micro_checkpoint, [column])
    # then it is found
    assert identity.eight_bits == [name]


def test_a_wrong_step_of_one_row_is_named(micro_checkpoint: Any) -> None:
    # given 8 bits whose step is right but for one row
    name = "decoder.blocks.0.mlp.0.weight"
    weight = micro_checkpoint.weights[name].numpy()
    step = (np.abs(weight).max(axis=1, keepdims=True) / 127).astype(np.float32)
    integers = np.rint(weight / step)
    step[3] *= 3
    arrays = [StoredArray("a.onnx", name, integers * step, step=step)]
    # when they are looked for, then the row is named
    (changed,) = (c for c in identify(micro_checkpoint, arrays).changed if c.name == name)
    assert "the scales of 1 of 32 rows are wrong: 3; they are multiplied by 3" in str(changed)


@pytest.mark.parametrize(
    ("is_right", "reason"),
    [(True, "its size is 64 × 32, not 62 × 32: its first 62 rows are right, and it has 2 more"),
     (False, "its size is 64 × 32, not 62 × 32")],
)  # fmt: skip
def test_a_weight_with_more_rows_is_named(
    is_right: bool, reason: str, micro_checkpoint: Any
) -> None:
    # given a table that was extended by two tokens
    name = "decoder.token_embedding.weight"
    table = micro_checkpoint.weights[name].numpy()
    rows = table if is_right else table[::-1]
    extended = np.concatenate([rows, rows[:2]])
    reason = reason.replace("64", str(len(extended))).replace("62", str(len(table)))
    # when weights are looked for, then it is said how many more rows it has
    found = identify(micro_checkpoint, [StoredArray("a.onnx", name, extended)]).changed
    (changed,) = (change for change in found if change.name == name)
    assert changed.reason == reason.replace(" 32", f" {table.shape[1]}")


def test_scales_that_are_those_of_another_weight_are_named(micro_checkpoint: Any) -> None:
    # given 8 bits with the scales of another weight of their shape
    name, other = (f"decoder.blocks.0.attn.{part}.weight" for part in ("key", "value"))
    weight, right = (micro_checkpoint.weights[n].numpy() for n in (name, other))
    own, step = (
        (np.abs(a).max(axis=1, keepdims=True) / 127).astype(np.float32) for a in (weight, 3 * right)
    )
    step = step / 3
    arrays = [StoredArray("a.onnx", name, np.rint(weight / own) * step, step=step)]
    # when they are looked for, then it is said whose they are
    (changed,) = (c for c in identify(micro_checkpoint, arrays).changed if c.name == name)
    assert f"they are those of {other}: multiplied by" in str(changed)


@pytest.mark.parametrize("rounded", [1, 2])
def test_integers_that_wrapped_around_at_128_are_named(rounded: int) -> None:
    # given blocks of 8 bits whose largest value is 128, which int8 holds as -128
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    blocks = weight.reshape(-1, 32)
    if rounded == 2:  # they were 8 bits before
        old = np.abs(blocks).max(axis=1, keepdims=True) / 127
        blocks = (np.rint(blocks / old) * old).astype(np.float32)
    step = np.abs(blocks).max(axis=1, keepdims=True) / 128
    values = np.rint(blocks / step).astype(np.int16).astype(np.int8) * step
    (groups,) = groups_of(values.reshape(64, 64))
    steps = np.broadcast_to(steps_of(groups), groups.shape).reshape(64, 64)
    # when they are compared, then the overflow is named
    allowed = 0.75 * steps
    reason = weight_difference(values.reshape(64, 64), weight, allowed, 4, steps)
    assert re.fullmatch(r"\d+ of 4,096 integers are -128 in place of 128, .*", reason)
    # and of integers that were clipped at 127, nothing is wrong
    clipped = np.minimum(np.rint(blocks / step), 127) * step
    assert (np.abs(clipped.reshape(64, 64) - weight) <= 1.25 * steps).all()


@pytest.mark.parametrize("stored", ["nothing", "other values"])
def test_weights_that_change_nothing_may_be_left_out(micro_checkpoint: Any, stored: str) -> None:
    # given the arrays of an untrained model's graph: the exporter dropped sums with 0 and products with 1
    weights = dict(micro_checkpoint.weights)
    bias, scale = "encoder.blocks.0.mlp.2.bias", "encoder.blocks.0.attn_ln.weight"
    weights[bias], weights[scale] = weights[bias] * 0, weights[scale] * 0 + 1
    untrained = replace(micro_checkpoint, weights=weights)
    arrays = [
        StoredArray("encoder.onnx", str(i), weight.float().numpy())
        for i, (name, weight) in enumerate(weights.items())
        if name not in (bias, scale)
    ]
    if stored == "other values":
        arrays.append(StoredArray("encoder.onnx", "a", np.full(len(weights[bias]), 0.25, "f4")))
    # when they are looked for
    identity = identify(untrained, arrays)
    # then nothing is missing, unless an array has other values in their place
    if stored == "nothing":
        assert identity, identity.changed
        assert sorted(identity.neutral) == sorted([bias, scale])
    else:
        assert [changed.name for changed in identity.changed] == [bias]
    # and of the checkpoint whose values have an effect, both are missing
    missing = [changed.name for changed in identify(micro_checkpoint, arrays).changed]
    assert {bias, scale} <= set(missing)


def test_a_row_of_8_bits_whose_step_is_0_is_named(micro_checkpoint: Any) -> None:
    # given 8 bits that are already multiplied by their step, which is 0 in one of many rows
    name = "decoder.token_embedding.weight"
    weight = micro_checkpoint.weights[name].numpy()
    step = np.abs(weight).max(axis=1, keepdims=True) / 127
    values = (np.rint(weight / step) * step).astype(np.float32)
    values[9] = 0
    # when they are looked for, then the row is named
    (changed,) = (
        c for c in identify(micro_checkpoint, [StoredArray("a", name, values)]).changed if c.stored
    )
    assert "rows 9, of head 1, are 0" in str(changed)


@pytest.mark.parametrize(
    ("module", "change", "sentence"),
    [
        ("attn", {"mask": np.triu(np.full((5, 5), -65504.0))}, "the mask hides the token itself, too"),
        ("cross_attn", {"keys": "decoder.blocks.0.cross_attn.key"}, "the keys are those of decoder.b"),
        ("cross_attn", {"values": "decoder.blocks.1.cross_attn.key"}, "the keys are used in place of"),
        ("attn", {"keys": "decoder.blocks.1.attn.value"}, "the values are used in place of the keys"),
        ("attn", {"is_late": True}, "the mask is behind the softmax, not before it"),
        ("attn", {"axis": (0, 1, 2)}, "the softmax is over all heads, queries and keys"),
    ],
)  # fmt: skip
def test_what_attention_reads_is_named(module: str, change: dict[str, Any], sentence: str) -> None:
    # given a decoder of two blocks, and the joined heads of another attention in the second
    random = np.random.default_rng(0)
    expected = {
        f"decoder.blocks.{i}.{module}.{part}": random.standard_normal((1, 5, 8)).astype(np.float32)
        for i in range(2)
        for part in ("query", "key", "value")
    }
    name = f"decoder.blocks.1.{module}"
    mask = np.triu(np.full((5, 5), -1e30), 1) if module == "attn" else None
    right: dict[str, Any] = {"scale": 0.5, "mask": mask, "head_width": 4}
    for part, argument in (("query", "queries"), ("key", "keys"), ("value", "values")):
        right[argument] = expected[f"{name}.{part}"]
    expected[f"{operations.INPUT}{name}.out"] = operations._attention(**right)
    changed = {k: expected[v] if isinstance(v, str) else v for k, v in change.items()}
    # when it is explained, then it is said what differs
    value = operations._attention(**{**right, **changed}).astype(np.float32)
    explanation = operations.Explanation(expected, 4)
    assert explanation.of(f"{operations.INPUT}{name}.out", [value]).startswith(sentence)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x, _norm, _branch: x, "the output of b.blocks.1.attn.out is missing"),
        (lambda _x, norm, branch: norm + branch, "the residual is the output of b.blocks.1.attn_ln, not"),
        (
            lambda x, _norm, branch: x + 2 * branch,
            "the output of b.blocks.1.attn.out is multiplied by 2, or added twice",
        ),
        (lambda x, _norm, branch: x + branch + 1, "the same row is added to each of its rows"),
        (lambda x, _norm, branch: x + branch + np.arange(8), "b.blocks.1.attn.out.bias is added to it"),
        (lambda x, _norm, branch: x[:, ::-1] + branch, "the residual beside the output of b.blocks.1."),
    ],
    ids=["no branch", "norm", "twice", "a row", "a bias", "reversed"],
)  # fmt: skip
def test_what_is_added_in_place_of_a_residual_is_named(
    change: Callable[[Any, Any, Any], Any], sentence: str
) -> None:
    # given what a norm reads: a residual and a branch, one of which is another
    random = np.random.default_rng(0)
    x, norm, branch = (random.standard_normal((1, 5, 8)).astype(np.float32) for _ in range(3))
    name = f"{operations.INPUT}b.blocks.1.mlp_ln"
    expected = {
        name: x + branch,
        "b.blocks.1.attn_ln": norm,
        "b.blocks.1.attn.out": branch,
        "b.blocks.1.attn.out.bias": np.arange(8, dtype=np.float32),
    }
    explanation = operations.Explanation(expected, 4)
    # then it is said which
    array = change(x, norm, branch).astype(np.float32)
    found = explanation.of(name, [array]) or explanation.difference(name, [array])
    assert found.startswith(sentence)


@pytest.mark.parametrize(
    ("places", "noise", "sentence"),
    [
        ([0, 1, 2], 0.0, "the positions are 0, 1, 2, in place of 3, 4, 5"),
        ([0, 1, 2], 0.05, "the positions are 0, 1, 2, in place of 3, 4, 5"),
        ([4, 5, 6], 0.05, "the positions are one too late"),
        ([3, 4, 5], 0.05, ""),
    ],
)
def test_other_positions_are_named_also_beside_embeddings_of_8_bits(
    places: list[int], noise: float, sentence: str
) -> None:
    # given the last three of six tokens, whose embeddings are rounded, and other positions
    random = np.random.default_rng(0)
    table = random.standard_normal((9, 16)).astype(np.float32)
    tokens = random.standard_normal((1, 6, 16)).astype(np.float32)
    name = f"{operations.INPUT}decoder.blocks.0.attn_ln"
    expected = {name: tokens + table[:6], "decoder.positional_embedding": table}
    rounding = noise * random.standard_normal((1, 3, 16)).astype(np.float32)
    # when the sum is explained, then it is said which positions were added
    explanation = operations.Explanation(expected, 4, slice(3, None))
    assert explanation._positions(name, tokens[:, 3:] + table[places] + rounding) == sentence


def test_a_spectrogram_that_is_normalized_twice_is_named() -> None:
    mel = np.random.default_rng(0).standard_normal((1, 4, 6)).astype(np.float32)
    name = f"{operations.INPUT}encoder.conv1"
    explanation = operations.Explanation({"mel": mel, name: mel}, 2)
    sentence = "the spectrogram is multiplied by 0.25, and 1 is added"
    assert explanation.of(name, [(mel + 4) / 4]) == sentence


def test_the_weight_and_bias_of_another_layer_norm_are_named() -> None:
    # given the input of a layer norm, and what two others would return for it
    random = np.random.default_rng(0)
    names = [f"encoder.blocks.0.{name}" for name in ("attn_ln", "mlp_ln")] + ["encoder.ln_post"]
    x = random.standard_normal((1, 5, 8)).astype(np.float32)
    expected = {f"{operations.INPUT}{name}": x for name in names} | dict.fromkeys(names, x)
    for name in names:
        for kind in ("weight", "bias"):
            expected[f"{name}.{kind}"] = random.standard_normal(8).astype(np.float32)
    normalized = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    own, other, _ = (
        normalized * expected[f"{name}.weight"] + expected[f"{name}.bias"] for name in names
    )
    # then the other is named, and its own is not
    explanation = operations.Explanation(expected, 4)
    assert explanation.norm_of_another(names[0], other) == names[1]
    assert explanation.norm_of_another(names[0], own) == ""


def test_a_value_whose_width_is_not_that_of_whole_heads_is_compared_all_the_same() -> None:
    # given a few frames behind a convolution, where a head is 4 wide
    x = np.random.default_rng(0).standard_normal((1, 3, 6)).astype(np.float32)
    name = f"{operations.INPUT}encoder.conv2"
    explanation = operations.Explanation({"encoder.conv1": x, name: x / (1 + np.exp(-1.6 * x))}, 4)
    # then another activation is named, and noise is not
    assert explanation.of(name, [np.maximum(x, 0)]) == "ReLU is computed in place of GELU"
    assert explanation.of(name, [x[..., ::-1].copy()]) == ""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda x, _: x["cross_attn_ln"] + x["mlp.2"],
            "the residual is the input of decoder.blocks.0.cross_attn_ln, and not of decoder.blocks.0.mlp",
        ),
        (
            lambda x, right: right - x["mlp.2"] + x["attn.out"],
            "decoder.blocks.0.attn.out is added in place of decoder.blocks.0.mlp.2",
        ),
    ],
)
def test_another_residual_and_another_branch_are_named(
    change: Callable[[dict[str, Any], Any], Any], sentence: str
) -> None:
    # given what the second block reads: a residual and a branch, one of which is another layer's
    random = np.random.default_rng(0)
    norms, outputs = ("attn_ln", "cross_attn_ln", "mlp_ln"), ("attn.out", "mlp.2")
    x = {n: random.standard_normal((1, 5, 8)).astype(np.float32) for n in (*norms, *outputs)}
    expected = {f"{operations.INPUT}decoder.blocks.0.{name}": x[name] for name in norms}
    expected |= {f"decoder.blocks.0.{name}": x[name] for name in outputs}
    name = f"{operations.INPUT}decoder.blocks.1.attn_ln"
    expected[name] = x["mlp_ln"] + x["mlp.2"]
    # then it is said which
    found = operations.Explanation(expected, 4).of(name, [change(x, expected[name])])
    assert found.startswith(sentence)


@pytest.mark.parametrize(
    ("hidden", "factor", "sentence"),
    [
        ((2, 4), 1, "the last token sees tokens 0, 1, 3, 5, and not 0 to 5"),
        ((), 0.5, "what attention gives all tokens is 0.5, and not 1"),
        ((), 1, ""),
    ],
)
def test_what_a_token_sees_follows_from_the_result_of_attention(
    hidden: tuple[int, ...], factor: float, sentence: str
) -> None:
    # given attention in which the last token does not see some others, or all of it is scaled
    random = np.random.default_rng(0)
    module = "decoder.blocks.0.attn"
    arrays = [0.3 * random.standard_normal((1, 6, 16)).astype(np.float32) for _ in range(3)]
    expected = dict(
        zip([f"{module}.{part}" for part in ("query", "key", "value")], arrays, strict=True)
    )
    settings = dict(zip(("queries", "keys", "values"), arrays, strict=True))
    mask = operations._causal(6)
    other = mask.copy()
    other[5, list(hidden)] = operations.LOWEST
    expected[f"{operations.INPUT}{module}.out"], wrong = (
        operations._attention(**settings, scale=8**-0.5, mask=m, head_width=8)
        for m in (mask, other)
    )
    # then it is said which, or how much it is
    assert operations.Explanation(expected, 8)._seen(module, factor * wrong) == sentence


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda own, keys, _: np.concatenate([keys[:, :, :3], own[:, :, 3:]], 2),
            "it holds the keys in place of what the cache held",
        ),
        (
            lambda own, keys, _: np.concatenate([own[:, :, :3], keys[:, :, 3:]], 2),
            "it holds the keys in place of the new ones",
        ),
        (
            lambda own, _, is_second: np.where(is_second, own[::-1], own),
            "in layers 1, it holds the values of decoder layer 0",
        ),
        (lambda own, _, is_second: np.where(is_second, own[:, :, ::-1], own), ""),
    ],
)
def test_what_a_cache_of_all_layers_holds_is_named_by_its_rows_and_layers(
    change: Callable[[Any, Any, Any], Any], sentence: str
) -> None:
    # given the cache of two layers, in which three of four tokens were before the last run
    random = np.random.default_rng(0)
    expected = {
        f"decoder.blocks.{layer}.attn.{part}": random.standard_normal((1, 4, 8)).astype(np.float32)
        for layer in (0, 1)
        for part in ("key", "value")
    } | {"tokens": np.zeros((1, 4), np.int64)}
    keys, values = (
        np.stack([expected[f"decoder.blocks.{layer}.attn.{part}"] for layer in (0, 1)])
        for part in ("key", "value")
    )
    is_second = np.arange(2).reshape(2, 1, 1, 1) == 1
    explanation = operations.Explanation(expected, 4, slice(3, None))
    located = layers._Located(Graph("", "onnx", (), (), ()), {}, {}, explanation, is_exact=True)
    # when it returns other values, then it is said which
    wrong = change(values, keys, is_second).astype(np.float32)
    found = located.wrong_cache({"out_self_v_cache": wrong}, of_audio=False)
    assert found.startswith(f"out_self_v_cache: {sentence}")
    assert located.wrong_cache({"out_self_v_cache": values}, of_audio=False) == ""


def test_a_cache_in_another_order_is_called_so() -> None:
    right = np.random.default_rng(0).standard_normal((1, 2, 5, 4)).astype(np.float32)
    apart = right.transpose(0, 2, 1, 3).reshape(1, 2, 5, 4)
    assert "without their order of axes" in layers._reordered(right, apart)
    assert (
        layers._reordered(right, right[:, :, [0, 2, 1, 4, 3]]) == "its values are in another order"
    )
    assert layers._reordered(right, right + 1) == ""


def test_frames_that_cross_attention_does_not_see_are_named() -> None:
    # given cross-attention that sees the first of some frames only
    random = np.random.default_rng(0)
    name = "decoder.blocks.0.cross_attn"
    queries, keys, values = (
        random.standard_normal((1, n, 8)).astype(np.float32) for n in (5, 60, 60)
    )
    expected = dict(
        zip((f"{name}.query", f"{name}.key", f"{name}.value"), (queries, keys, values), strict=True)
    )
    right = {"queries": queries, "keys": keys, "values": values, "scale": 0.5, "head_width": 4}
    mask = np.where(np.arange(60)[None] < 25, 0, operations.LOWEST)
    output = f"{operations.INPUT}{name}.out"
    expected[output], wrong = (operations._attention(**right, mask=m) for m in (None, mask))
    # then it is said how many
    sentence = operations.Explanation(expected, 4).of(output, [wrong])
    assert sentence == "a token sees the first 25 frames only"


def test_what_some_heads_alone_compute_is_named() -> None:
    # given attention of two heads, in the second of which the scores have the wrong sign
    random = np.random.default_rng(0)
    expected = {
        f"decoder.blocks.1.cross_attn.{part}": random.standard_normal((1, 5, 8)).astype(np.float32)
        for part in ("query", "key", "value")
    }
    queries, keys, values = expected.values()
    right = {"queries": queries, "keys": keys, "values": values, "mask": None, "head_width": 4}
    name = f"{operations.INPUT}decoder.blocks.1.cross_attn.out"
    expected[name], wrong = (operations._attention(**right, scale=s) for s in (0.5, -0.5))
    wrong[..., :4] = expected[name][..., :4]
    # then it is said in which
    sentence = operations.Explanation(expected, 4).of(name, [wrong])
    assert sentence == "in head 1 only, the scores have the wrong sign"


@pytest.mark.parametrize(("factor", "is_named"), [(1, True), (2, False)])
def test_rows_are_in_another_order_only_if_they_are_as_long(factor: int, is_named: bool) -> None:
    # given a weight of which two rows are exchanged, and perhaps doubled
    weight = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    values = weight.copy()
    values[[3, 5]] = factor * weight[[5, 3]]
    # then it is called an exchange if it is nothing else
    reason = weight_difference(values, weight, np.full_like(weight, 1e-3), 4)
    assert (reason == "rows 3, 5 are in another order") == is_named


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda w: np.where(np.abs(w) < 0.05, np.copysign(0.05, w), w),
            "values nearer to 0 than 0.05 are replaced by it: ",
        ),
        (lambda w: np.clip(w, -1.5, 1.5), "values farther from 0 than 1.5 are replaced by it: "),
    ],
)
def test_values_that_are_limited_in_magnitude_are_named(
    change: Callable[[Any], Any], reason: str
) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    values = change(weight).astype(np.float32)
    count = f"{np.count_nonzero(values != weight):,} of 4,096"
    assert weight_difference(values, weight, np.full_like(weight, 1e-6)) == reason + count


def test_integers_that_are_moved_by_a_row_are_named_though_the_last_is_anothers() -> None:
    # given 8 bits that are read a row too late, and the scales as they were
    weight = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    step = np.abs(weight).max(axis=1, keepdims=True) / 127
    integers = np.roll(np.rint(weight / step), -1, axis=0)
    integers[-1] = np.random.default_rng(1).integers(-127, 128, 32)
    steps = np.broadcast_to(step, weight.shape)
    # then it is said by how much
    reason = weight_difference(integers * step, weight, 0.75 * steps, 0, steps)
    moved = "its integers are moved by a place, and their scales are not: "
    assert reason == moved + "row 0 holds the integers of row 1"


@pytest.mark.parametrize(
    ("axis", "shift", "is_cut", "reason"),
    [
        (0, 2, False, "its rows are moved by 2 places: row 2 holds row 0"),
        (0, -2, True, "its rows are moved by 2 places: row 0 holds row 2"),
        (1, 3, True, "its columns are moved by 3 places: column 3 holds column 0"),
        (1, -1, False, "its columns are one too early"),
    ],
)
def test_it_is_said_by_how_many_places_a_weight_is_moved(
    axis: int, shift: int, is_cut: bool, reason: str
) -> None:
    # given a weight whose rows or columns are moved, and what is at its end is 0 or what was there
    weight = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    values = np.roll(weight, shift, axis)
    if is_cut:
        np.moveaxis(values, axis, 0)[slice(shift) if shift > 0 else slice(shift, None)] = 0
    # then it is said by how many places
    assert weight_difference(values, weight, np.full_like(weight, 1e-4), 4) == reason


@pytest.mark.parametrize("form", [np.float16, np.float32])
@pytest.mark.parametrize(("rank", "is_named"), [(1, True), (4, True), (40, False)])
def test_an_adapter_that_was_merged_into_a_weight_is_named_with_its_rank(
    rank: int, is_named: bool, form: type
) -> None:
    # given a weight to which a matrix of some rank is added, smaller than the weight
    random = np.random.default_rng(0)
    weight = random.standard_normal((128, 96)).astype(np.float16).astype(np.float32)
    added = random.standard_normal((128, rank)) @ random.standard_normal((rank, 96)) / 10
    values = (weight + added).astype(form).astype(np.float32)
    allowed = half_error(weight)
    # then it is named if its rank is low
    reason = weight_difference(values, weight, allowed, 4)
    named = f"a matrix of rank {rank} is added to it, as where an adapter was merged"
    assert (reason == named) == is_named
    # and one row is no adapter
    assert "rank" not in weight_difference(weight + added[:1], weight, allowed, 4)


def test_the_weights_into_which_an_adapter_was_merged_are_listed_by_kind() -> None:
    names = [f"decoder.blocks.{i}.attn.{end}.weight" for i in (0, 1) for end in ("query", "value")]
    identity = Identity(changed=[ChangedWeight(n, reason="a matrix of rank 4 is…") for n in names])
    assert identity.adapted == (
        "an adapter of low rank was merged into 4 weights: decoder.blocks.N.attn.query.weight, "
        "decoder.blocks.N.attn.value.weight"
    )


@pytest.mark.parametrize("is_rounded_before", [False, True])
def test_a_weight_that_was_transposed_before_its_blocks_were_rounded_is_named(
    is_rounded_before: bool,
) -> None:
    # given rows of different sizes, that became columns, in blocks of 32 with a step each
    random = np.random.default_rng(0)
    weight = random.standard_normal((64, 64)) * np.exp(random.standard_normal((64, 1)))
    weight = weight.astype(np.float32)

    def rounded(values: Any) -> tuple[Any, Any]:
        blocks = values.reshape(-1, 32)
        step = np.abs(blocks).max(axis=1, keepdims=True) / 127
        steps = np.broadcast_to(step, blocks.shape).reshape(values.shape)
        return (np.rint(blocks / step) * step).reshape(values.shape), steps

    values, steps = rounded((rounded(weight)[0] if is_rounded_before else weight).T)
    # then it is said that its axes are swapped
    reason = weight_difference(values, weight, 0.75 * steps, 4, steps)
    assert reason == "it is transposed: its axes are swapped"


@pytest.mark.parametrize(("scale", "reason"), [("htk", "of HTK's mel"), ("bark", "values differ")])
def test_a_bank_of_other_mel_filters_is_named_and_none_is_called_rounded(
    scale: str, reason: str
) -> None:
    # given triangles with the peak 1 on another scale
    edges = htk_edges(80)
    if scale == "bark":
        edges = 600 * np.sinh(np.linspace(0, 21.3, 82) / 6)
    # then it is said which they are, or how far from Whisper's
    sentence = other_filters(triangles(edges, is_normalized=False), 80)
    assert reason in sentence
    assert "rounded" not in sentence


def test_columns_of_positions_in_another_order_are_named() -> None:
    # given sines and cosines, the slowest of which are all alike, one after the other by turns
    angles = np.arange(1500)[:, None] * np.exp(-np.log(10_000) / 63 * np.arange(64))[None]
    table = np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)
    values = table.reshape(1500, 2, 64).transpose(0, 2, 1).reshape(table.shape)
    # then it is said that only their order differs
    reason = weight_difference(values, table, np.full_like(table, 1e-4), 4)
    assert reason == "columns 1 to 126 are in another order"


@pytest.mark.parametrize(
    ("begin", "base", "reason"),
    [
        (0.5, 10_000, "its sines begin at position 0.5, not 0"),
        (0, 1000, "its slowest sine is 6,283 rows long, not 62,832"),
    ],
)
def test_sines_of_other_positions_are_named(begin: float, base: int, reason: str) -> None:
    # given a table of positions that was computed again, in another way
    def table(begin: float, base: int) -> Any:
        angles = begin + np.arange(1500)[:, None]
        angles = angles * np.exp(-np.log(base) / 63 * np.arange(64))[None]
        return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)

    # then it is said in which
    right = table(0, 10_000)
    allowed = np.full_like(right, 1e-4)
    assert weight_difference(table(begin, base), right, allowed, 4) == reason


def test_noise_in_every_row_is_no_other_order() -> None:
    # given a weight whose rows are at their places, and a little noise
    random = np.random.default_rng(0)
    weight = random.standard_normal((8, 16)).astype(np.float32)
    values = weight + 0.01 * random.standard_normal((8, 16)).astype(np.float32)
    # then the values differ, not their order
    reason = weight_difference(values, weight, np.full_like(weight, 1e-4), 4)
    assert "values differ" in reason


def one_byte(integers: Any, step: Any) -> tuple[Any, Any]:
    """Flip the highest bit of a byte."""
    integers[3, 2] += 128 if integers[3, 2] < 0 else -128
    return integers, step


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, step: (q, step / 2), "of 16 rows are wrong: 0 to 15; they are multiplied by 0.5"),
        (lambda q, step: (q, step[::-1]), "the scales of 16 of 16 rows are wrong"),
        (lambda q, step: (q, 1 / step), "are wrong: 0 to 15; they are 1 divided by the right ones"),
        (lambda q, step: (q, np.roll(step, 1)), "0 to 15; they are those of the row before"),
        (lambda q, step: (q, np.roll(step, -3)), "they are those of the row 3 places after"),
        (lambda q, step: (q, step * 0 + 1), "are wrong: 0 to 15; they are 1: the right ones are lost"),
        (lambda q, step: (q - 3, step), "its zero point is off by -3"),
        (
            lambda q, step: (q + 128, step),
            "its zero point is off by 128, as where it is missing",
        ),
        (lambda q, step: (np.where(q < 0, q + 128, q - 128), step), "the sign of each is read wrongly"),
        (lambda q, step: (np.where(q < 0, q + 256, q), step), "with a sign are read without one"),
        (lambda q, step: (np.roll(q, 1, 0), step), "rows 0 to 15 are in another order, and their"),
        (lambda q, step: (np.concatenate([q[:12], q[:4]]), step), "hold the integers of rows 0, 1, 2, 3"),
        (lambda q, step: (q.T, step), "its axes or those of its scales are swapped"),
        (lambda q, step: (q, step.T), "its axes or those of its scales are swapped"),
        (lambda q, step: (np.clip(q * 4, -127, 127), step / 4), "its scales are too small: "),
        (lambda q, step: (np.rint(q / 18) * 18, step), "15 levels only: it was rounded to 4 bits"),
        (lambda q, step: (np.clip(q, -64, 63), step), "its integers end at 64: "),
        (one_byte, "1 of 256 values differ in 1 rows, such as 3, by up to"),
    ],
    ids=["half a scale", "other scales", "reciprocals", "row before", "row after", "lost", "zero point",
         "no zero", "sign", "no sign", "other rows", "copied rows", "other axes", "other axis of scales",
         "clipped", "4 bits", "7 bits", "a byte"],
)  # fmt: skip
def test_it_is_said_how_a_quantized_weight_differs(
    change: Callable[[Any, Any], tuple[Any, Any]], reason: str, micro_checkpoint: Any
) -> None:
    # given integers of 8 bits and their scales, one of which is changed
    name = "decoder.blocks.1.attn.value.weight"
    is_same_transposed = "rows" not in reason or "scales of" in reason
    weight = micro_checkpoint.weights[name].numpy()
    step = (np.abs(weight).max(axis=1, keepdims=True) / 127).astype(np.float32)
    integers, step = change(np.rint(weight / step), step)
    # when they are looked for, also with their axes as exporters store them, then it is said what is wrong
    values = (integers * step).astype(np.float32)
    straight = StoredArray("a.onnx", name, values, step=step)
    exported = StoredArray("a.onnx", f"{name}.T.int8", values.T, step=step.T)
    for stored in (straight, exported) if is_same_transposed else (straight,):
        (changed,) = (c for c in identify(micro_checkpoint, [stored]).changed if c.stored)
        assert reason in changed.reason


@pytest.mark.parametrize(
    ("shape", "change", "reason"),
    [
        ((6, 6, 3), lambda a: a.transpose(1, 0, 2), "its axes 0, 1 are swapped"),
        ((6, 4, 3), lambda a: a.transpose(2, 1, 0).reshape(a.shape), "its axes 0, 2 are swapped"),
        ((6, 4), lambda a: a.T.reshape(a.shape), "it is transposed: its axes are swapped"),
        ((6,), lambda a: a - 1, "each value is 1 too small"),
        ((32, 4), lambda a: np.where(np.arange(32)[:, None] < 9, a, 0), "23 of 32 rows are 0: 9 to 31"),
        ((32, 8), lambda a: a[[*range(30), 3, 31]], "row 30 holds row 3"),
        ((32, 8), lambda a: a[[*range(16), *range(16)]], "rows 16 to 31 hold rows 0 to 15"),
        ((32, 8), lambda a: np.where(np.arange(256).reshape(32, 8) // 37 == 3, 0, a),
         "37 of 256 values are 0, in rows 13 to 18"),
        ((32, 8), lambda a: np.roll(a, 5), "256 of 256 values are at another place: those from 0 to 255 are"
         " those 5 places before"),
        ((32, 8), lambda a: np.where(np.arange(32)[:, None] == 9, -a, a), "row 9 is multiplied by -1: the"
         " sign is wrong"),
        ((32, 8), lambda a: a * np.arange(1, 9), "columns 1 to 7 are multiplied, each by a number of"
         " its own, from 2 to 8"),
        ((32, 8), lambda a: (a.view("u4") & 0xFFFF0000).astype("u4").view("f4"),
         "each value is rounded to 7 bits of its mantissa: bfloat16"),
        ((32, 80), lambda a: np.rint(a * 2) / 2, "each row has at most 12 levels: it was rounded to 4"
         " bits"),
        ((32, 8), lambda a: np.where(np.arange(256).reshape(32, 8) == 77, -a, a), "1 of 256 values differ"
         " in 1 rows, such as 9, by up to 1.8 standard deviations: the value at 9, 5 is -0.9351, not"
         " 0.9351, of the wrong sign"),
    ],
    ids=["axes", "unequal axes", "a matrix", "an offset", "rows of 0", "a row twice", "rows twice",
         "a part of 0", "data moved", "a row's sign", "columns", "bfloat16", "4 bits", "a sign"],
)  # fmt: skip
def test_axes_and_rows_of_a_weight_are_named(
    shape: tuple[int, ...], change: Callable[[Any], Any], reason: str
) -> None:
    # given a weight whose axes were exchanged, or whose last rows are 0, as those of lost tokens
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    # then it is said which
    values = np.ascontiguousarray(change(weight))
    assert weight_difference(values, weight, np.full_like(weight, 1e-4), 4) == reason


@pytest.mark.parametrize(
    ("is_named", "instead", "reason"),
    [
        (False, "decoder.blocks.1.mlp.0.weight", "holds decoder.blocks.1.mlp.0.weight, which is st"),
        (True, "", "it is missing: no array has its name"),
        (False, "", "no array is near it"),
    ],
    ids=["another layer's", "missing", "missing without names"],
)  # fmt: skip
def test_what_is_in_place_of_a_weight_is_named(
    is_named: bool, instead: str, reason: str, micro_checkpoint: Any
) -> None:
    # given all weights but one, in whose place is another layer's, or nothing
    name = "decoder.blocks.0.mlp.0.weight"
    weights = {key: tensor.float().numpy() for key, tensor in micro_checkpoint.weights.items()}
    arrays = [
        StoredArray("decoder.onnx", key if is_named else f"onnx::{i}", weights[key])
        for i, key in enumerate(weights)
        if key != name
    ]
    if instead:
        arrays.append(StoredArray("decoder.onnx", "onnx::last", weights[instead]))
    # when they are looked for, then it is said
    (changed,) = identify(micro_checkpoint, arrays).changed
    assert changed.name == name
    assert reason in changed.difference


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (("encoder.", "decoder."), "no matrix is the checkpoint's: it is another checkpoint's, or"),
        (("encoder.",), "no matrix of the encoder is the checkpoint's: it is another checkpoint's"),
        (("encoder.conv",), ""),
    ],
)
def test_a_part_of_another_checkpoint_is_named(
    parts: tuple[str, ...], sentence: str, micro_checkpoint: Any
) -> None:
    # given the weights of a checkpoint, some of which have learned further
    random = np.random.default_rng(0)
    weights = {name: tensor.numpy().copy() for name, tensor in micro_checkpoint.weights.items()}
    for name, values in weights.items():
        if name.startswith(parts) and values.ndim > 1:
            values += 0.02 * random.standard_normal(values.shape).astype(np.float32) * values.std()
    # when they are looked for, then it is said which part has no matrix of it
    arrays = [StoredArray("a.onnx", name, values) for name, values in weights.items()]
    assert identify(micro_checkpoint, arrays).replaced.startswith(sentence)
    assert bool(sentence) == bool(identify(micro_checkpoint, arrays).replaced)


def test_a_file_of_another_checkpoint_is_named(micro_checkpoint: Any) -> None:
    # given an encoder that also holds keys of the decoder, and a decoder that has learned further
    random = np.random.default_rng(0)
    arrays = []
    for name, tensor in micro_checkpoint.weights.items():
        values = tensor.numpy().copy()
        is_right = name.startswith("encoder.") or ".cross_attn.key." in name
        if not is_right and values.ndim > 1:
            values += 0.02 * random.standard_normal(values.shape).astype("f4") * values.std()
        arrays.append(StoredArray(f"{'en' if is_right else 'de'}coder.onnx", name, values))
    # when the weights are looked for, then it is said which file is another checkpoint's
    replaced = identify(micro_checkpoint, arrays).replaced
    assert replaced.startswith("no matrix in decoder.onnx is the checkpoint's: it is another")


def test_what_graphs_compute_is_named_before_a_form_that_only_an_npu_needs() -> None:
    # given graphs whose positions are wrong, and whose form an NPU's plugin does not find
    texts = {"program": GRAPHS, "what": "logits", "rule": ""}
    reason = "positions begin at 0"
    check = Check(level="arrays", value={}, passed=False, reason=reason, **texts)
    judgement = Judgement(
        path=Path("a"),
        layout=layout_of("openvino-genai"),
        precision="fp32",
        precisions=("fp32",),
        problems=(Problem("WP733", "a.xml", "unordered_map::at"),),
        checkpoint="b",
        identity=Identity(equal=["c"]),
        runs=(AppRun(app=GRAPHS, checks=(check,)),),
    )
    # then the cause is named first; where only the layers tell it, with the part
    assert verdict_sentence(judgement).startswith("Wrong: positions begin at 0; WP733 (")
    vague = AppRun(app=GRAPHS, checks=(replace(check, reason="the first run is wrong"),))
    graph = layers.ComparedGraph(part="decoder", file="a.xml", computed="a bias is missing")
    judgement = replace(judgement, runs=(vague,), graphs=(graph,))
    assert verdict_sentence(judgement).startswith("Wrong: decoder: a bias is missing; WP733 (")


def test_files_at_each_others_place_are_named(micro_checkpoint: Any) -> None:
    # given files named after a part, in which the weights of the other one are
    arrays = [
        StoredArray("decoder.onnx" if name.startswith("enc") else "encoder.onnx", name, w.numpy())
        for name, w in micro_checkpoint.weights.items()
    ]
    # when the weights are looked for, then it is said, though each is there
    identity = identify(micro_checkpoint, arrays)
    assert not identity
    assert "encoder.onnx holds the weights of the decoder" in identity.exchanged_files
    assert "decoder.onnx holds the weights of the encoder" in identity.exchanged_files


@pytest.mark.parametrize("has_graphs", [True, False])
def test_queries_may_be_scaled_only_if_a_graph_may_scale_less(
    has_graphs: bool, micro_checkpoint: Any
) -> None:
    # given a query that is already multiplied by the root of a head's width
    name = "decoder.blocks.0.attn.query.weight"
    factor = np.float32(micro_checkpoint.dims.text_head_width**-0.5)
    arrays = [
        StoredArray("model.bin", key, w.numpy() * (factor if key == name else 1))
        for key, w in micro_checkpoint.weights.items()
    ]
    # when it is looked for, then an app that scales by itself makes it wrong
    changed = identify(micro_checkpoint, arrays, has_graphs=has_graphs).changed
    assert [c.name for c in changed] == ([] if has_graphs else [name])
    assert has_graphs or "it is multiplied by" in changed[0].reason


def test_why_a_graph_without_known_weights_is_not_compared_is_said() -> None:
    # given files in which no weight was found
    nothing: Any = None
    graphs = list(layers.compare_graphs(Path(), Identity(), nothing, nothing, nothing))
    # then neither graph is compared, and it is said why
    reason = "none of its weights was found, which would tell its layers"
    assert [(graph.part, graph.reason) for graph in graphs] == [
        ("encoder", reason),
        ("decoder", reason),
    ]


@pytest.mark.parametrize(
    ("first", "changed", "sentence"),
    [
        (1, ChangedWeight("encoder.ln_post.weight"), "encoder.ln_post.weight is missing; it is x"),
        (1, ChangedWeight("encoder.b.weight", "a.onnx: b", "0"), "encoder.b.weight differs"),
        (
            1,
            ChangedWeight("encoder.first.weight", "a.onnx: c", "0"),
            "encoder.first.weight differs",
        ),
        (1, ChangedWeight("encoder.a.weight", "a.onnx: a", "all values are 0"), "it is x"),
        (1, ChangedWeight("decoder.c.weight", "a.onnx: c", "all values are 0"), "it is x"),
        (None, ChangedWeight("encoder.b.weight"), "it is x"),
    ],
)
def test_a_weight_explains_the_layer_that_it_changes(
    first: int | None, changed: ChangedWeight, sentence: str
) -> None:
    # given two layers, before and between which are others that no node of the graph shows
    texts = dict.fromkeys(("other", "operator", "other_operator", "module", "line"), "")
    values = tuple(
        ComparedValue(name=name, error=0.9, before=0.0, **texts)
        for name in ("encoder.a", "encoder.b")
    )
    programs = ComparedPrograms(
        a="", b="", values=values, kept=(2, 2), outputs=(), first=first, worst=None
    )
    # when it is asked what explains the second, then it is what changed, but for what is right
    identity = Identity(equal=["c"], changed=[changed])
    order = ["decoder.c", "encoder.first", "encoder.a", "encoder.ln_post", "encoder.b"]
    explained = layers._changed_weight(identity, programs, order)
    assert layers._cause(explained, "it is x") == sentence


def test_a_wrong_copy_of_a_right_weight_is_named(micro_checkpoint: Any) -> None:
    # given the embedding twice, once as a matrix of the projection that was not trained
    name = "decoder.token_embedding.weight"
    right = micro_checkpoint.weights[name].numpy()
    wrong = np.random.default_rng(0).standard_normal(right.shape).astype(np.float32)
    arrays = [StoredArray("a.onnx", n, v) for n, v in ((name, right), ("proj_out.weight", wrong))]
    # when it is looked for, then it is said that one of them is right
    (changed,) = (c for c in identify(micro_checkpoint, arrays).changed if c.stored)
    assert changed.stored == "a.onnx: proj_out.weight"
    assert changed.reason.startswith("of two copies, one is right: ")


def test_a_bias_of_keys_is_named(micro_checkpoint: Any) -> None:
    # given files in which the keys and values of an attention are exchanged
    name = "decoder.blocks.0.cross_attn"
    weights = {key: tensor.float().numpy() for key, tensor in micro_checkpoint.weights.items()}
    weights[f"{name}.key.bias"] = weights[f"{name}.value.bias"]
    weights[f"{name}.value.bias"] = weights[f"{name}.value.bias"] * 0
    key, value = f"{name}.key.weight", f"{name}.value.weight"
    weights[key], weights[value] = weights[value], weights[key]
    arrays = [StoredArray("model.bin", key, array) for key, array in weights.items()]
    # when they are looked for, then the exchange is named
    changed = " ".join(map(str, identify(micro_checkpoint, arrays).changed))
    assert f"{key}: its place holds {value}: the two are exchanged" in changed
    assert (
        f"{name}.key.bias: it is not 0, and keys have no bias: it is {name}.value.bias" in changed
    )


def test_each_zero_point_of_a_matrix_is_read(tmp_path: Path) -> None:
    # given a matrix of 8 bits, to which two nodes state other zero points, and a third none
    integers = np.arange(8, dtype=np.uint8).reshape(2, 4)
    stored = {
        "w": integers,
        "w_scale": np.float32(2),
        "a": np.uint8(3),
        "b": np.uint8(1),
        "no": np.uint8(0),
    }
    nodes = [
        onnx.helper.make_node("MatMulInteger", ["x", "w", "no", zero], [f"y{zero}"])
        for zero in ("a", "b")
    ]
    nodes.append(onnx.helper.make_node("MatMulInteger", ["x", "w", "no"], ["y"]))
    tensors = [onnx.numpy_helper.from_array(np.array(v), k) for k, v in stored.items()]
    graph = onnx.helper.make_graph(nodes, "graph", [], [], tensors)
    onnx.save(onnx.helper.make_model(graph), tmp_path / "a.onnx")
    # when its arrays are read, then it is read with each of them
    arrays = [a for a in onnx_arrays(Files(tmp_path), ["a.onnx"]) if a.name == "w"]
    assert [array.values[0, 0] for array in arrays] == [0, -6, -2]


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_few_bits_are_read_as_onnx_runtime_does(
    bits: int, is_symmetric: bool, tmp_path: Path
) -> None:
    # given a matrix of 80 rows and 3 columns in blocks of 32, as ONNX Runtime's tool writes it
    import onnxruntime
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    matrix = np.random.default_rng(0).standard_normal((80, 3)).astype(np.float32)
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    ends = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, size])
        for name, size in (("x", 80), ("y", 3))
    )
    given, returned = ([end] for end in ends)
    graph = onnx.helper.make_graph(
        [node], "graph", given, returned, [onnx.numpy_helper.from_array(matrix, "w")]
    )
    opset = [onnx.helper.make_opsetid("", 20)]
    model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=10)
    quantizer = MatMulNBitsQuantizer(model, bits=bits, block_size=32, is_symmetric=is_symmetric)
    quantizer.process()
    quantizer.model.save_model_to_file(str(tmp_path / "a.onnx"), False)
    # when its arrays are read
    arrays = onnx_arrays(Files(tmp_path), ["a.onnx"])
    array = next(array for array in arrays if array.step is not None)
    # then they are what ONNX Runtime multiplies by, and as near to the matrix as 8 bits must be
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    product = session.run(None, {"x": np.eye(80, dtype=np.float32)})[0]
    np.testing.assert_allclose(array.values.T, product, atol=1e-6)  # of up to 3: one rounding
    assert (np.abs(array.values.T - matrix) <= HALF_STEP * array.step.T).all()


def test_zero_points_of_blocks_may_be_packed_or_numbers() -> None:
    # given two rows of three blocks of 4 bits, and zero points in half bytes or in float32
    bytes_of = np.random.default_rng(0).integers(0, 256, (2, 3, 8), np.uint8)
    arrays = {
        "scale": np.arange(1, 7, dtype=np.float32),
        "packed": np.array([0x21, 0x03, 0x54, 0x06], np.uint8),
        "numbers": np.array([1, 2, 3, 4, 5, 6], np.float32),
    }
    # then both are read alike, and the end of the last block is left out
    packed, numbers = (
        _Blocks("scale", zeros, 40, 16, 4).multiplied(bytes_of, arrays)[0]
        for zeros in ("packed", "numbers")
    )
    assert packed.shape == (2, 40)
    np.testing.assert_array_equal(packed, numbers)
    assert packed[1, 0] == ((bytes_of[1, 0, 0] & 15) - 4.0) * 4


@pytest.mark.parametrize(("max_relative", "is_far"), [(0.05, False), (0.16, True)])
def test_logits_farther_away_than_8_bits_round_are_looked_at_layer_by_layer(
    max_relative: float, is_far: bool
) -> None:
    value = {"max_relative": max_relative}
    check = Check(level="arrays", program="", what="", value=value, rule="", passed=True)
    run = AppRun(app="the graphs", checks=(check,))
    assert _is_far(Identity(eight_bits=["a"]), [run]) == is_far


@pytest.mark.parametrize(("attribute", "column"), [({}, 4), ({"axis": 0}, 2), ({"axis": -2}, 2)])
def test_the_scales_of_a_square_matrix_are_read_along_the_axis_that_its_node_states(
    attribute: dict[str, int], column: int, tmp_path: Path
) -> None:
    # given a square matrix of 8 bits, and a node that states the axis of its scales, or leaves it out
    stored = {"w.T.int8": np.ones((2, 2), np.int8), "s": np.array([2, 4], np.float32)}
    node = onnx.helper.make_node("DequantizeLinear", [*stored], ["y"], **attribute)
    tensors = [onnx.numpy_helper.from_array(v, k) for k, v in stored.items()]
    graph = onnx.helper.make_graph([node], "graph", [], [], tensors)
    onnx.save(onnx.helper.make_model(graph), tmp_path / "a.onnx")
    # when its arrays are read, then rows or columns are multiplied by the scales
    array = next(a for a in onnx_arrays(Files(tmp_path), ["a.onnx"]) if a.name == "w.T.int8")
    assert array.values[0, 1] == column


def test_integers_of_an_unknown_step_are_not_called_a_wrong_weight(micro_checkpoint: Any) -> None:
    # given integers by the name of a weight, which no step makes it
    name = "decoder.blocks.0.mlp.0.weight"
    shape = micro_checkpoint.weights[name].shape
    integers = np.random.default_rng(0).integers(-127, 128, shape, np.int8)
    # when it is looked for, then no array is said to differ from it
    changed = identify(micro_checkpoint, [StoredArray("decoder.onnx", name, integers)]).changed
    assert f"{name}: no array is near it" in map(str, changed)


def test_a_permuted_weight_is_not_found(micro_checkpoint: Any) -> None:
    # given a matrix whose rows are in another order
    name = "decoder.blocks.0.attn.out.weight"
    arrays = [
        StoredArray("file", key, weight.float().numpy()[:: -1 if key == name else 1])
        for key, weight in micro_checkpoint.weights.items()
    ]
    assert [changed.name for changed in identify(micro_checkpoint, arrays).changed] == [name]


@pytest.mark.parametrize(
    ("text", "state"),
    [("", "empty"), ('{"model": {', "cut off"), ("[1]", "damaged"), ("{1}", "damaged")],
)
def test_settings_that_end_early_are_an_error(text: str, state: str, tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_text(text)
    with pytest.raises(ProgramError, match=rf"genai_config\.json is {state}"):
        judge(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<net/>",
        "<net><layers><layer id='0'",
        "<!DOCTYPE net [<!ENTITY a 'b'>]><net/>",
        "<net><layers><layer id='0' name='a' type='b'/></layers><edges><edge from-layer='0' "
        "from-port='0' to-layer='0' to-port='0'/></edges></net>",
    ],
)
def test_a_damaged_openvino_file_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "openvino_encoder_model.xml").write_text(text)
    (tmp_path / DECODER).write_text(text)
    state = "damaged" if text.endswith(("/>", "</net>")) else "cut off"
    with pytest.raises(ProgramError, match=state if text else "empty"):
        judge(tmp_path)


def test_a_part_of_the_files_is_an_error_that_names_their_folder(
    right_files: dict[str, Path],
) -> None:
    folder = right_files["openvino-genai"]
    with pytest.raises(UsageError, match="part of what an app loads") as caught:
        judge(folder / DECODER)
    assert str(folder) in caught.value.hint


@pytest.mark.parametrize("kind", ["link", "folder link", "loop", "pipe"])
def test_what_leads_out_of_the_folder_is_not_read(
    kind: str, right_files: dict[str, Path], tmp_path: Path
) -> None:
    # given a downloaded folder in which one entry is no file of it
    folder = Path(shutil.copytree(right_files["transformers.js"], tmp_path / "model"))
    private = tmp_path / "private"
    private.mkdir()
    (private / "config.json").write_text("{}")
    path = folder / ("onnx" if kind == "folder link" else "config.json")
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(
            {"link": private / "config.json", "folder link": private, "loop": path}[kind]
        )
    # when it is judged, then nothing is read through it
    with pytest.raises(ProgramError, match="is not read"):
        judge(folder)


def test_the_links_of_a_hugging_face_cache_are_followed(
    right_files: dict[str, Path], tmp_path: Path
) -> None:
    # given a folder of links, as the hub's cache has it
    folder, store = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    (folder / "onnx").mkdir(parents=True)
    store.mkdir()
    for number, path in enumerate(sorted(right_files["transformers.js"].rglob("*.*"))):
        (store / str(number)).hardlink_to(path)
        (folder / path.relative_to(right_files["transformers.js"])).symlink_to(store / str(number))
    assert judge(folder)


def test_a_file_that_cannot_be_read_is_an_error(
    right_files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a disk with a fault
    def fails(_: Path) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("whisperport.model.checkpoint.ctranslate2_file.read_model_bin", fails)
    with pytest.raises(ProgramError, match="cannot read"):
        judge(right_files["faster-whisper"])


def test_a_folder_of_anything_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whisperport.build.layouts.reading.MAX_FILES", 2)
    for name in "abc":
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="more than 2 files"):
        judge(tmp_path)


def test_a_checkpoint_is_an_error_with_the_command_that_writes_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UsageError, match="is a checkpoint") as caught:
        judge(tmp_path)
    assert f"whisperport convert {tmp_path} --for APP" in caught.value.hint


def test_files_of_no_app_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no app that is known"):
        judge(tmp_path)
    with pytest.raises(UsageError, match="there is no file"):
        judge(tmp_path / "missing")
    pointer = tmp_path / "ggml-model.bin"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\nsize 17650000\n")
    with pytest.raises(CheckpointError, match=r"ggml-model\.bin") as caught:
        judge(pointer)
    assert "git lfs pull" in caught.value.hint


SPOKEN = "turn off the light in the kitchen please"


def emitted(text: str, *, timed: bool = True, words: bool = False) -> Emitted:
    end_s = 2.0 if timed else 0.0
    times = TimedText(0.0, end_s, text)
    return Emitted((), text, (times,), words=(times,) if words else ())


def compared(
    text: str, spoken: str = SPOKEN, language: str = "en", *, timed: bool = True
) -> ComparedWords:
    clip = Clip("a.wav", "", np.zeros(16, np.float32), language)
    return compare_words([clip], [emitted(spoken)], [emitted(text, timed=timed)], timed=True)


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("", "no text", "the checkpoint emits 8 words"),
        ("Turn off the", "early stop", "after 3 of 8 words"),
        ("Turn off the light in the", "lost ending", "the last 2 of 8 words are missing"),
        ("Turn " + "off the " * 5, "loop", "`off the` 5 times in a row"),
    ],
)
def test_what_is_lost_is_named(text: str, kind: str, reason: str) -> None:
    losses = compared(text).losses
    assert (losses[0].kind, losses[0].reason) == (kind, reason)
    assert losses[0].clip == "a.wav"


@pytest.mark.parametrize(
    "text", [SPOKEN, SPOKEN.upper() + ".", SPOKEN.replace("please", "peas"), "so " + SPOKEN]
)
def test_other_words_alone_are_no_loss(text: str) -> None:
    assert not compared(text).losses


def test_a_loop_of_the_checkpoint_is_no_loss_of_the_app() -> None:
    text = "no " * 9
    assert not compared(text, text).losses


def test_characters_are_counted_where_no_spaces_are_written() -> None:
    words = compared("今日は", "今日は雨が降る", "ja")
    assert [loss.reason for loss in words.losses] == ["after 3 of 7 characters"]
    assert "characters" in str(words)


def test_lost_timestamps_are_wrong_although_no_word_differs() -> None:
    words = compared(SPOKEN, timed=False)
    assert [loss.kind for loss in words.losses] == ["lost timestamps"]
    assert not words
    assert compared(SPOKEN)


def test_the_bound_of_the_error_rate_is_part_of_the_result() -> None:
    # given two words of eight that differ
    words = compared("turn on the light in the kitchen now")
    # then counts, rate and bound are there, and lost words alone are no failure: the weights decide
    result = words.to_json()
    assert (result["differ"], result["length"], result["error_rate"]) == (2, 8, 0.25)
    assert result["increase_at_most"] >= 0.25
    assert words


@pytest.mark.parametrize(
    ("text", "phrase", "repeats"),
    [("a b a b a b c", "a b", 3), ("a a a a", "a", 4), ("a b c", "a", 1), ("", "", 0)],
)
def test_the_longest_loop_is_found(text: str, phrase: str, repeats: int) -> None:
    words, count = longest_loop(text.split())
    assert (" ".join(words), count) == (phrase, repeats)
