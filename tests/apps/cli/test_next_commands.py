"""The command that a verb suggests at its end is safe: it replaces nothing, and does not lead back."""

import re

import pytest

from ...embedded import default_bundle


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
    monkeypatch.setattr("whisperport.apps.cli.export.run_watched", lambda *_, **__: 1 / 0)

    ran = run("export", "default", "--target", "onnxruntime", "--out", tmp_path)

    assert ran.code == 1
    assert "ZeroDivisionError" not in ran.err
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("vocabulary", "following"),
    [
        (51865, "next: whisperport export CHECKPOINT --target aws-neuron --out DIR"),
        (50, "next: whisperport explain WP601"),
    ],
)
def test_a_decoder_that_projects_audio_again_is_replaced_and_not_lowered(
    run, tmp_path, vocabulary, following
):
    # given the decoder of openai-whisper, with Whisper's vocabulary or another one
    import torch
    from whisper.model import TextDecoder

    decoder = TextDecoder(vocabulary, 16, 16, 2, 1).eval()
    inputs = (torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 1500, 16))
    path = tmp_path / "naive.pt2"
    torch.export.save(torch.export.export(decoder, inputs), path)

    # when a target that rejects none of its nodes checks it
    ran = run("check", path, "--target", "aws-neuron")

    # then the warning has no exit status, and the next command solves what was found
    assert ran.code == 0
    assert re.search(r"^WP601 .* split \(`export`\)$", ran.out, re.MULTILINE)
    assert re.search(r"; [\d.]+% of the FLOPs repeat for every token \(WP601\)$", ran.out, re.M)
    assert ran.lines[-1] == following
