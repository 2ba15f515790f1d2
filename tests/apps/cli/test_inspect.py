"""`whisperport inspect`, as a person sees it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from ...embedded import default_bundle


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
