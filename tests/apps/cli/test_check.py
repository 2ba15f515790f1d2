"""`check` and `explain`: what they print, how they exit, and what they call the next step."""

import importlib.util
import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from whisperport.model.inspection.rules import RULES
from whisperport.model.trace.program import trace

# `check` and `explain`: what they print, how they exit, and what they call the next step.


class Tied(nn.Module):
    """Whisper's last two steps as openai-whisper writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.embedding = nn.Embedding(500, 16)

    def forward(self, x):
        return self.norm(x) @ torch.transpose(self.embedding.weight.to(x.dtype), 0, 1)


FORWARD = inspect.getsourcelines(Tied.forward)[1]


def saved(path: Path, module: nn.Module) -> Path:
    exported = torch.export.export(module.eval(), (torch.rand(1, 8, 16),), strict=False)
    torch.export.save(exported, path)
    return path


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("programs") / "tied.pt2", Tied())


def test_each_kind_has_a_row_and_the_costliest_comes_first(run, tied):
    ran = run("check", tied, "--target", "xnnpack")

    assert ran.code == 1
    rows = [line.split() for line in ran.out.splitlines() if line.startswith("WP")]
    assert rows[0] == ["WP301", "1", "matmul", "matmul", "99.2%", "42.7%", "matmul-by-linear"]
    assert rows[1][:4] == ["WP101", "1", "layer_norm", "layer_norm"]
    assert rows[1][-1] == "layer-norm-by-linear"
    assert "aten.mm (1, 8, 16) by (16, 500): its weight is computed by `transpose`" in ran.out
    assert "gemm_configs.py" in ran.out
    assert "tied: xnnpack rejects 2 of 3 nodes, 100.0% of 0.000129 GFLOP, " in ran.out
    assert all(len(line) <= 100 for line in ran.out.splitlines())


def test_the_module_and_the_python_line_of_the_costliest_nodes_are_shown(run, tied, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])

    ran = run("check", tied, "--target", "xnnpack")

    table = ran.out.split("rule   costliest node  module")[1].split("\n\n")[0]
    rows = [line.split() for line in table.splitlines()[1:]]
    assert rows == [
        ["WP301", "matmul", f"tests/apps/cli/test_check.py:{FORWARD + 1}"],
        ["WP101", "layer_norm", "norm", f"tests/apps/cli/test_check.py:{FORWARD + 1}"],
    ]


def test_long_paths_are_cut_at_their_beginning(run, tmp_path):
    path = tmp_path / "a_folder_with_a_long_name" / "another" / "model_of_mine.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import torch\nclass Long(torch.nn.Module):\n    def forward(self, x):\n"
        "        return torch.nn.functional.layer_norm(x, (16,))\n"
    )
    spec = importlib.util.spec_from_file_location("model_of_mine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    ran = run("check", saved(tmp_path / "long.pt2", module.Long()), "--target", "xnnpack")

    assert re.search(r"^WP101  layer_norm +…/another/model_of_mine.py:4$", ran.out, re.MULTILINE)
    assert all(len(line) <= 100 for line in ran.out.splitlines())


def test_all_lists_every_node(run, tied):
    ran = run("check", tied, "--target", "xnnpack", "--all")

    assert len([line for line in ran.out.splitlines() if line.startswith("WP101")]) == 3


def test_json_holds_what_the_tables_say(run, tied):
    ran = run("check", tied, "--target", "xnnpack", "--json")

    assert ran.code == 1
    (program,) = json.loads(ran.out)["programs"]
    first = program["findings"][0]
    assert (first["rule"], first["suggested_rewrite"]) == ("WP301", "matmul-by-linear")
    assert first["flops_share"] == pytest.approx(0.992, abs=1e-3)
    (node,) = first["occurrences"]
    assert node["module"] is None  # the program itself
    assert node["source"] == {
        "file": __file__,
        "line": FORWARD + 1,
        "code": "return self.norm(x) @ torch.transpose(self.embedding.weight.to(x.dtype), 0, 1)",
    }
    assert program["flops"] == 2 * 8 * 16 * 500 + 8 * 8 * 16
    assert program["rejected_nodes"] == 2


def test_a_bundle_is_checked_program_by_program(run, bundle):
    ran = run("check", bundle, "--target", "onnxruntime")

    assert ran.code == 0
    assert ran.out.count("onnxruntime rejects nothing") == 6


def test_a_folder_of_any_architecture_is_checked_and_only_a_bundle_is_verified_next(run, tmp_path):
    config = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 32}
    config |= {"num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))

    rejected = run("check", tmp_path, "--target", "xnnpack")
    accepted = run("check", tmp_path, "--target", "onnxruntime")

    assert rejected.code == 1
    assert "BertModel: xnnpack rejects" in rejected.out
    assert "next: whisperport explain WP" in rejected.err
    assert (accepted.code, "next: whisperport lower --help" in accepted.err) == (0, True)


@pytest.mark.parametrize("code", sorted(RULES))
def test_explain_prints_the_page_of_the_documentation(run, code):
    ran = run("explain", code.lower())

    page = Path(__file__).parents[3] / "docs" / "reference" / "rules.md"
    sections = page.read_text(encoding="utf-8").split("\n## ")
    assert ran.code == 0
    assert ran.out.strip().removeprefix("## ") in [section.strip() for section in sections]


def test_explain_lists_the_rules_and_rejects_an_unknown_code(run):
    listed, unknown = run("explain"), run("explain", "WP999")

    assert all(code in listed.out for code in RULES)
    assert unknown.code == 1
    assert "there is no rule `WP999`" in unknown.err


def test_a_program_that_nothing_is_rejected_of_may_be_lowered(run, tmp_path):
    path = saved(tmp_path / "plain.pt2", nn.Linear(16, 4))

    xnnpack, ort, unknown = (
        run("check", path, "--target", name) for name in ("xnnpack", "onnxruntime", "x")
    )

    assert f"next: whisperport lower {path} --target xnnpack --out {path.with_suffix('.pte')}" in (
        xnnpack.err
    )
    assert xnnpack.out.startswith("plain: xnnpack rejects nothing (1 nodes, 1.06e-06 GFLOP, ")
    assert f"--out {path.with_suffix('.onnx')}" in ort.err
    assert (xnnpack.code, ort.code) == (0, 0)
    assert unknown.code == 1


class Activation(nn.Module):
    def forward(self, x):
        return torch.relu(x)


def test_what_was_only_not_seen_to_compile_is_a_table_of_its_own_and_exits_0(run, tmp_path):
    path = saved(tmp_path / "relu.pt2", Activation())

    ran = run("check", path, "--target", "hailo8l")

    assert ran.code == 0
    assert ran.out.startswith("not seen in programs known to compile (not counted as rejected):\n")
    assert "WP104  relu was not seen in programs known to compile" in ran.out
    summary = ran.out.splitlines()[-1]
    assert summary.startswith("relu: hailo8l rejects nothing (1 nodes, ")
    assert summary.endswith("; 1 not seen in programs known to compile")
    assert f"next: whisperport lower {path} --target hailo8l --out {path.with_suffix('.onnx')}" in (
        ran.err
    )


def test_what_a_rewrite_helps_with_is_followed_by_the_command_that_fixes_it(run, tied):
    ran = run("check", tied, "--target", "xnnpack")

    fixed = tied.with_suffix(".fixed.pt2")
    assert ran.lines[-1] == f"next: whisperport fix {tied} --target xnnpack --out {fixed}"


class Masked(nn.Module):
    """Adds a position to two lookups of any number of tokens, and writes them to a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(500, 16), nn.Embedding(64, 16)
        self.cache = torch.zeros(1, 16)  # no buffer: torch.export makes it a constant

    def forward(self, ids):
        self.cache.add_(1)
        return self.embedding(ids) + self.positions(ids) + self.cache


def test_a_dynamic_program_that_keeps_state_gets_its_reasons_and_no_advice_that_fails(
    run, tmp_path
):
    path = tmp_path / "masked.pt2"
    ids, tokens = torch.zeros(1, 8, dtype=torch.long), torch.export.Dim("tokens", min=2, max=64)
    shapes = ({1: tokens},)
    exported = torch.export.export(Masked(), (ids,), dynamic_shapes=shapes, strict=False)
    torch.export.save(exported, path)

    ran = run("check", path, "--target", "xnnpack")

    assert "embedding is not in the list of supported operators" in ran.out
    assert ran.out.count("partition/config/__init__.py") == 1  # each source is printed once
    assert "Symbol(" not in ran.out
    assert "unknown" in ran.out
    (summary,) = [line for line in ran.out.splitlines() if "xnnpack rejects" in line]
    assert summary == "masked: xnnpack rejects 3 of 5 nodes"  # no share: most costs are not known
    assert "add writes to the stored tensor" in ran.out
    assert ran.err.splitlines()[-1] == "next: whisperport explain WP604"


def test_dynamic_sizes_are_asked_for_and_kept_in_what_to_do_next(run, tmp_path):
    path, size = tmp_path / "norm.pt2", torch.export.Dim("tokens", min=2, max=64)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).eval()
    exported = torch.export.export(
        module, (torch.zeros(1, 8, 4),), dynamic_shapes={"input": {1: size}}
    )
    torch.export.save(exported, path)
    (symbol,) = map(str, exported.range_constraints)
    check = ("check", path, "--target", "xnnpack")

    asked, fixed = run(*check), run(*check, "--size", f"{symbol}=9")
    wrong = run(*check, "--size", f"{symbol}=nine")

    assert asked.err.splitlines()[-1].endswith(f"--target xnnpack --size {symbol}=NUMBER")
    assert f"--size {symbol}=9 --out" in fixed.err.splitlines()[-1]
    assert wrong.code == 2
    assert f"expected a whole number for `{symbol}`, got 'nine'" in wrong.err


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("received an input tensor that was unused", "WP602"),
        ("invalid unordered_map key", "WP733"),
        ("RuntimeError: Port for tensor name cache_position was not found.", "WP733"),
        ("Exception: data did not match any variant of untagged enum ModelWrapper at 1", "WP701"),
        ("infer_request.cpp:246: invalid unordered_map<K, T> key", "WP733"),
        (
            'Could not locate file: "https://host/onnx/decoder_model_merged_quantized.onnx".',
            "WP711",
        ),
        ('Could not locate file: "https://host/onnx/encoder_model.onnx".', "WP718"),
        ('Could not locate file: "https://host/tokenizer.json".', "WP710"),
        ("Error: Layer index 9 is out of bounds for cross attentions (length 4).", "WP706"),
        ("TypeError: Cannot read properties of undefined (reading 'slice')", "WP706"),
        ("native_call_mm.out", "WP777"),
        ("GGML_ASSERT(src0->type == GGML_TYPE_F16)", "WP751"),
        ("'n_text_layer' does not exist in the metadata", "WP721"),
    ],
)
def test_explain_finds_the_rule_by_the_message_of_a_program(run, message, code):
    # given a message of a compiler or an app, with another number or more around it than the rule has
    # when it is explained
    ran = run("explain", message)
    # then the only rule that mentions it is printed
    assert ran.code == 0
    assert f"## {code}" in ran.out


def test_explain_names_the_rules_if_several_mention_a_message(run):
    ran, repeated = run("explain", "tokenizer"), run("explain", "(" * 15)
    assert ran.code == repeated.code == 1
    assert "these rules mention it: " in ran.err
    assert "WP772 " in repeated.err
    assert "WP774 " in repeated.err


# `whisperport fix`: what it prints, what it writes, and what it does not change.


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A program like the end of openai-whisper's decoder: a norm, and a matmul with the embedding table."""

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(8)
            self.table = torch.nn.Embedding(50, 8)

        def forward(self, x):
            return self.norm(x) @ self.table.weight.t()

    path = tmp_path_factory.mktemp("programs") / "head.pt2"
    torch.export.save(trace("head", Head(), (torch.zeros(1, 4, 8),)).exported, path)
    return path


def test_what_was_fixed_is_written_and_checked(run, head, tmp_path):
    out = tmp_path / "fixed.pt2"

    ran = run("fix", head, "--target", "xnnpack", "--out", out)

    assert ran.code == 0
    assert ran.out.splitlines()[-1] == f"{out}: 2 nodes replaced; xnnpack rejects no node"
    assert ran.lines[-1].startswith(f"next: whisperport lower {out} --target xnnpack --out ")
    assert run("check", out, "--target", "xnnpack").code == 0


def test_what_a_rewrite_did_not_replace_is_no_remaining_problem_of_a_fixed_program(
    run, head, tmp_path
):
    ran = run("fix", head, "--target", "xnnpack", "--out", tmp_path / "fixed.pt2")

    assert "remaining problem" not in ran.out
    (row,) = [line for line in ran.out.splitlines() if line.startswith("fold-constants  t ")]
    assert "the constant is a transposed stored weight" in row
    assert "xnnpack rejects none of these nodes: they need no change" in ran.out


def test_a_remaining_problem_names_module_and_line(run, tmp_path):
    module = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.LayerNorm(8))
    path = tmp_path / "lookup.pt2"
    torch.export.save(trace("lookup", module, (torch.arange(4)[None],)).exported, path)

    ran = run("fix", path, "--target", "xnnpack", "--out", tmp_path / "fixed.pt2")

    assert ran.code == 0  # a lookup computes nothing
    assert re.search(r"also stored for the host \(0,\s+torch/nn/", ran.out)


def test_json_says_what_was_done(run, head, tmp_path):
    out = tmp_path / "fixed.pt2"

    report = json.loads(run("fix", head, "--target", "xnnpack", "--out", out, "--json").out)

    assert report["written"] == str(out)
    assert report["changed_nodes"] == 2
    assert report["remaining"] == []
    kept = {one["rewrite"] for one in report["rewrites"] if one["kept"]}
    assert kept == {"matmul-by-linear", "layer-norm-by-linear"}


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_the_program_itself_is_not_overwritten(run, head, overwrite):
    before = head.read_bytes()

    ran = run("fix", head, "--target", "xnnpack", "--out", head, *overwrite)

    assert ran.code == 1
    assert "it is the input" in ran.err
    assert head.read_bytes() == before


def test_a_fixed_program_has_nothing_to_fix(run, head, tmp_path):
    once, twice = tmp_path / "once.pt2", tmp_path / "twice.pt2"
    run("fix", head, "--target", "xnnpack", "--out", once)

    ran = run("fix", once, "--target", "xnnpack", "--out", twice)

    assert ran.code == 0
    assert "nothing to fix" in ran.out
    assert not twice.exists()


def test_without_a_file_to_write_nothing_is_fixed(run, head):
    ran = run("fix", head, "--target", "xnnpack")

    assert ran.code == 2
    assert "--out" in ran.err


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and nothing", b"\x08\x07onnx"])
def test_a_file_that_is_not_a_program_is_an_error_and_nothing_is_written(run, tmp_path, content):
    (tmp_path / "a.pt2").write_bytes(content)

    ran = run("fix", tmp_path / "a.pt2", "--target", "xnnpack", "--out", tmp_path / "b")

    assert ran.code == 1
    assert "error: " in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt2"]


def test_a_file_of_the_hosts_does_not_replace_given_inputs(run, tmp_path):
    module = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.LayerNorm(8))
    program = trace("lookup", module, (torch.arange(4)[None],))
    path, inputs = tmp_path / "lookup.pt2", tmp_path / "fixed.host.json"
    torch.export.save(program.exported, path)
    with inputs.open("wb") as file:
        np.savez(file, **{program.spec.inputs[0].name: np.arange(4)[None]})
    before = inputs.read_bytes()

    arguments = ("--target", "hailo8l", "--out", tmp_path / "fixed.pt2", "--overwrite")
    ran = run("fix", path, *arguments, "--inputs", inputs)

    assert ran.code == 1
    assert "it is the input" in ran.err
    assert inputs.read_bytes() == before
