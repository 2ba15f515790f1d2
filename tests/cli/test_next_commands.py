"""The command that a verb suggests at its end is safe: it replaces nothing, and does not lead back."""

import pytest

from ..embedded import default_bundle


def test_check_of_a_bundle_suggests_nothing_that_replaces_it(run):
    ran = run("check", default_bundle(), "--target", "onnxruntime")

    assert ran.lines[-1] == f"next: whisperport verify {default_bundle()}"


@pytest.mark.needs("torch")
def test_targets_with_a_device_are_not_said_to_run(run):
    rows = [line.split("  ") for line in run("targets").out.splitlines()]

    last = {row[0]: row[-1].strip() for row in reversed(rows) if row[0] in ("rk3588", "xnnpack")}

    assert last["rk3588"] in ("emulated", "no: [rockchip]")
    assert last["xnnpack"] == "yes"


def test_an_occupied_folder_is_rejected_before_a_process_starts(run, tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr("whisperport.cli.export.run_watched", lambda *_, **__: 1 / 0)

    ran = run("export", "default", "--target", "onnxruntime", "--out", tmp_path)

    assert ran.code == 1
    assert "ZeroDivisionError" not in ran.err
    assert (tmp_path / "mine.txt").read_text() == "mine"
