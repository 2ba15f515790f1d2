"""Whisper's own programs through a fake neuronrt: the order of their inputs and outputs is right."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from whisperport.program.bundle import Bundle
from whisperport.targets import RunOptions, get_target

from ....extent import core_or_all
from .test_programs import ALL, BOARD, PART

FAKE = Path(__file__).parent / "fake_neuronrt.py"
PROGRAMS = ("encoder", "cross_kv", "step")


@pytest.fixture(scope="module")
def bundle(exported: Callable[..., Bundle]) -> Bundle:
    return exported(BOARD, core_or_all("one layer", "tiny"), placement=core_or_all(PART, ALL))


def test_neuronrt_gives_every_program_what_the_emulation_gives(
    bundle: Bundle, tmp_path: Path
) -> None:
    # given: a fake .dla beside each .tflite
    shutil.copytree(bundle.folder / BOARD, tmp_path / BOARD)
    command = tmp_path / "neuronrt"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    command.chmod(0o755)
    entries = []
    for entry in bundle.manifest.programs:
        if entry.spec.name in PROGRAMS:
            (lowered,) = entry.files
            compiled = lowered.replace(".tflite", ".dla")
            content = b"FAKE DLA\n" + (tmp_path / lowered).read_bytes()
            (tmp_path / compiled).write_bytes(content)
            entries.append(replace(entry, files=(compiled, lowered)))
    target = get_target(BOARD)
    on_board = RunOptions(threads=1, options={f"{BOARD}.neuronrt": str(command)})
    emulated = RunOptions(threads=1, options={f"{BOARD}.emulate": "on"})

    runners = target.load(tmp_path, entries, on_board)
    expected = target.load(tmp_path, entries, emulated)

    random = np.random.default_rng(0)
    assert sorted(runners) == sorted(PROGRAMS)
    for name, runner in runners.items():
        inputs = {
            tensor.name: random.standard_normal(tensor.shape).astype(tensor.dtype)
            for tensor in runner.spec.inputs
        }
        found, wanted = runner.run(inputs), expected[name].run(inputs)
        for output, array in wanted.items():
            scale = np.abs(array).max()
            assert scale > 0
            assert np.abs(found[output] - array).max() <= 1e-5 * scale, (name, output)
