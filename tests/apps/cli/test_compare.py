"""`whisperport compare`, as a person sees it."""

import json

from ...build.test_comparing import net


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
