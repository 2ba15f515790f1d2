"""`inspect`, `compare` and `sensitivity`: what the command prints and writes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper
from torch import nn

from whisperport.apps.cli.main import cli
from whisperport.model.trace.onnx_file import write_onnx_file
from whisperport.model.trace.program import Program, trace

from ...build.test_checking import net
from ...embedded import default_bundle

# `whisperport inspect`, as a person sees it.


def step() -> Path:
    return default_bundle() / "onnxruntime" / "step.onnx"


@pytest.fixture
def dynamic_onnx(tmp_path):
    """relu of x (n, 4)."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 4]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"], "relu")], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    path = tmp_path / "relu.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_the_summary_comes_first_and_the_most_expensive_nodes_after_it(run):
    ran = run("inspect", step(), "--top", "3", "--repeat", "2", "--threads", "1")

    lines = ran.out.splitlines()
    assert ran.code == 0
    assert re.fullmatch(
        r"step \(ONNX Runtime\): \d+ nodes on the CPU; \d+\.\d+ ms per run",
        " ".join(ran.out.split("\n\n")[0].split()),
    )
    times = [float(m[1]) for m in re.finditer(r"CPUExecutionProvider +(\d+\.\d+) ", ran.out)]
    assert len(times) == 3
    assert times == sorted(times, reverse=True)
    assert re.search(r"^\d+ more nodes are shown with --top \d+$", ran.out, re.MULTILINE)
    assert max(map(len, lines)) <= 100
    assert "next:" not in ran.err  # nothing is left to do


def test_what_stays_outside_is_explained_under_the_table(run):
    ran = run(
        *("inspect", step(), "--repeat", "1", "--top", "2"),
        *("--runtime-option", "provider=AzureExecutionProvider"),
    )

    assert re.search(
        r"0 subgraphs of AzureExecutionProvider, \d+ not delegated, which take", ran.out
    )
    assert "not delegated to AzureExecutionProvider" in ran.out


def test_in_json_every_node_is_there_with_its_share(run):
    ran = run("inspect", default_bundle(), "--program", "step", "--repeat", "1", "--json")

    data = json.loads(ran.out)
    (program,) = data["programs"]
    assert program["delegated_nodes"] == len(program["nodes"]) > 100
    shares = sum(node["time_share"] for node in program["nodes"])
    assert shares + program["overhead_ms"] / program["total_ms"] == pytest.approx(1)
    assert data["skipped"] == []


def test_a_dynamic_shape_asks_for_inputs_and_takes_them(run, dynamic_onnx, tmp_path):
    arrays = tmp_path / "arrays.npz"
    np.savez(arrays, x=np.ones((7, 4), np.float32))

    without = run("inspect", dynamic_onnx)
    given = run("inspect", dynamic_onnx, "--inputs", arrays)

    assert without.code == 1
    assert "--inputs" in without.lines[-1]
    assert given.code == 0
    assert "1 node on the CPU" in given.out


def test_a_rule_that_a_node_breaks_is_the_next_thing_to_read(run, naive_profile):
    ran = run("inspect", "naive.pte", "--trust")

    assert "which take 75.0% of the time; 4.000 ms per run" in " ".join(ran.out.split())
    assert re.search(r"^native_call_mm\.out \[3\] +no delegate +3\.000 +75\.0% +≈2\.000 +WP301$",
                     ran.out, re.MULTILINE)  # fmt: skip
    assert "gain: estimated time saved" in ran.out
    assert ran.lines[-1] == "next: whisperport explain WP301"


def test_a_rule_of_a_node_that_takes_no_time_is_not_the_next_thing_to_read(run, fixed_profile):
    ran = run("inspect", "fixed.pte", "--trust", "--top", "1")

    assert "1 not delegated, which take 0.0% of the time" in " ".join(ran.out.split())
    assert "gain" not in ran.out  # neither a column nor its legend
    assert "next:" not in ran.err


@pytest.fixture
def naive_profile(monkeypatch):
    """Stands for a run: one node outside, one inside."""
    _stand_in(monkeypatch, ms_outside=3.0)


@pytest.fixture
def fixed_profile(monkeypatch):
    """Stands for a run: the node outside takes 0.04 % of the time."""
    _stand_in(monkeypatch, ms_outside=0.0004)


def _stand_in(monkeypatch, *, ms_outside):
    from whisperport.model.inspection import lowered
    from whisperport.model.inspection.lowered import Inspected
    from whisperport.program.profiling import NodeProfile, Profile

    mm = NodeProfile(
        name="native_call_mm.out [3]",
        operator="aten::mm.out",
        where="no delegate",
        delegated=False,
        ms=ms_outside,
        rule="WP301",
        reason="its weight is computed",
        estimated_gain_ms=ms_outside * 2 / 3,
    )
    add = NodeProfile(
        name="Add #1", operator="Add", where="XnnpackBackend 1", delegated=True, ms=0.5
    )
    profile = Profile(
        program="forward",
        runtime="ExecuTorch",
        target="XnnpackBackend",
        subgraphs=1,
        nodes=tuple(sorted((mm, add), key=lambda node: -node.ms)),
        overhead_ms=0.5,
        run_ms=4.1,
        runs=5,
    )
    monkeypatch.setattr(lowered, "inspect_lowered", lambda *_, **__: Inspected((profile,), ()))


@pytest.mark.parametrize("contents", [b"", b"\0\0\0\0ET12" + b"\xff" * 99, b"no program"])
def test_what_is_no_program_exits_1_with_a_reason(run, tmp_path, contents):
    path = tmp_path / "program"
    path.write_bytes(contents)

    ran = run("inspect", path, "--trust")

    assert (ran.code, ran.out) == (1, "")
    assert ran.lines[0].startswith("error: program is ")
    assert ran.lines[1].startswith("  why: ")


def test_no_runs_and_no_rows_are_wrong_usage(run):
    assert run("inspect", step(), "--repeat", "0").code == 2
    assert run("inspect", step(), "--top", "0").code == 2


# `whisperport compare`, as a person sees it.


def test_the_first_layer_that_diverges_is_named_in_a_sentence(run, tmp_path):
    a, b = net(tmp_path / "a.onnx"), net(tmp_path / "b.onnx", "epsilon")

    ran = run("compare", a, b, "--trust")

    assert ran.code == 1
    text = " ".join(ran.out.split())
    assert "The programs diverge first at /blocks.0/norm" in text
    assert "6 values were matched, of 6" in text
    rows = [line.split() for line in ran.out.splitlines()]
    assert [row[1] for row in rows if row[:1] == ["first"]] == ["/blocks.0/norm"]
    assert max(map(len, ran.out.splitlines())) <= 100
    assert ran.err.splitlines()[-1] == f"next: whisperport compare {a} {b} --all"


def test_equal_programs_are_called_equal(run, tmp_path):
    a = net(tmp_path / "a.onnx")

    ran = run("compare", a, a, "--trust", "--all")

    assert ran.code == 0
    assert "The programs are equal: every matched value is identical." in ran.out


def test_in_json_every_value_is_there(run, tmp_path):
    a, b = net(tmp_path / "a.onnx"), net(tmp_path / "b.onnx", "NaN")

    ran = run("compare", a, b, "--trust", "--json")

    found = json.loads(ran.out)
    assert ran.code == 1
    assert found["first"]["layer"] == "/blocks.1/fc2"
    assert found["first"]["error"] == "inf"
    assert found["matched"] == len(found["values"]) == 6


# `whisperport sensitivity`: files, checkpoints, damaged and hostile programs.


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).eval()
    with torch.no_grad():
        module[0].weight[3] *= 2000
    return trace("some", module, (torch.zeros(1, 6, 8),), ["y"])


@pytest.fixture
def inputs(program: Program, tmp_path: Path) -> Path:
    """Two samples of the program's input."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    (name,) = (tensor.name for tensor in program.spec.inputs)
    for seed in range(2):
        values = np.random.default_rng(seed).standard_normal((1, 6, 8)).astype(np.float32)
        np.savez(folder / f"{seed}.npz", **{name: values})
    return folder


def run_sensitivity(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["sensitivity", *map(str, arguments)], catch_exceptions=True)
    return result.exit_code, result.output + str(result.exception or "")


def test_a_file_is_measured_in_a_child_process_and_the_worst_is_first(
    program: Program, inputs: Path, tmp_path: Path
) -> None:
    path = tmp_path / "some.onnx"
    write_onnx_file(program, path)

    status, text = run_sensitivity(path, "--inputs", inputs, "--top", "2")

    lines = text.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("activation"))
    assert status == 0
    assert {line.split("  ")[0] for line in lines[header + 1 : header + 3]} == {"0", "Gelu of 0"}
    assert "0: channel 3 reaches " in text
    assert "one 8-bit scale ruins " in text
    assert all(len(line) <= 100 for line in lines if not line.startswith("next: "))


def test_json_has_every_activation(program: Program, inputs: Path, tmp_path: Path) -> None:
    path = tmp_path / "some.onnx"
    write_onnx_file(program, path)

    status, text = run_sensitivity(path, "--inputs", inputs, "--json")

    rows = json.loads(text[text.index("{") :])["activations"]
    assert status == 0
    assert [row["typical_db"] for row in rows] == sorted(row["typical_db"] for row in rows)
    assert {row["activation"] for row in rows} == {"0", "Gelu of 0", "2"}
    assert all(row["alone_db"] is not None for row in rows)


def test_a_program_without_a_spectrogram_needs_inputs(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "some.onnx"
    write_onnx_file(program, path)

    status, text = run_sensitivity(path)

    assert status == 1
    assert "reads no spectrogram" in text


@pytest.mark.parametrize("content", [b"", b"ONNX", bytes(range(256)) * 40])
def test_a_damaged_file_is_an_error_of_its_own(
    content: bytes, inputs: Path, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.onnx"
    path.write_bytes(content)

    status, text = run_sensitivity(path, "--inputs", inputs)

    assert status == 1
    assert "damaged.onnx" in text
    assert "unexpected" not in text


def test_a_missing_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    status, text = run_sensitivity(tmp_path / "absent.onnx")

    assert status == 1
    assert "absent.onnx" in text


def test_the_page_shows_the_channel_and_contains_no_markup_of_the_file(
    program: Program, inputs: Path, tmp_path: Path
) -> None:
    path = tmp_path / "<script>.onnx"
    write_onnx_file(program, path)
    page = tmp_path / "page.html"

    status, _ = run_sensitivity(path, "--inputs", inputs, "--html", page)

    text = page.read_text()
    assert status == 0
    assert "<script" not in text
    assert "&lt;script&gt;.onnx" in text
    assert "channel 3 reaches " in text
    assert text.count('class="bar bad"') == text.count("<figure>") == text.count("<svg") > 0
    assert re.search(r"<td>0<br>.*channel 3<.*1 × 6 × 8", text)
    assert "whisperport compile" in text
    assert "--target NAME --precision w8a16" in text


def test_errors_name_the_file_that_was_given(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "some.pt2"
    torch.export.save(program.exported, path)

    status, text = run_sensitivity(path)

    assert status != 0
    assert "some.pt2 reads no spectrogram" in text
    assert ".onnx" not in text
