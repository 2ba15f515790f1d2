"""neuronrt's calls, files and faults, with a fake that runs the same .tflite on the CPU."""

import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz.processes import has_ended

from whisperport.errors import BundleError, LoweringError, MissingPackageError, NumericalError
from whisperport.program.bundle import Bundle
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets import RunOptions, get_target
from whisperport.targets.vendors.mediatek import neuronrt
from whisperport.targets.vendors.mediatek.chips import CHIPS
from whisperport.targets.vendors.mediatek.device_io import DeviceIo, DeviceTensor
from whisperport.targets.vendors.mediatek.neuronrt import DeviceOptions, NeuronrtRunner

from ....extent import core_or_all
from .test_programs import ALL, BOARD, PART

litert = pytest.importorskip("ai_edge_litert.interpreter")

HERE = Path(__file__).parent
FAKE = HERE / "fake_neuronrt.py"
HEADER = b"FAKE DLA\n"
CHIP = CHIPS[0]
# The signature's order differs from the file's: y before x, and the softmax before the hidden values.
SPEC = ProgramSpec(
    "encoder",
    (TensorSpec("y", (3, 6)), TensorSpec("x", (1, 3, 8))),
    (TensorSpec("soft", (3, 4)), TensorSpec("hidden", (3, 4))),
)
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(1, 3, 8)
Y = np.linspace(1.5, -0.5, 18, dtype=np.float32).reshape(3, 6)
INPUTS = {"x": X, "y": Y}


def io_of(model: Path) -> DeviceIo:
    """Read the order and the quantization of the file; it names its tensors args_0, args_1, …"""
    interpreter = litert.Interpreter(str(model))

    def tensors(details: list[dict[str, Any]], names: tuple[str, ...]) -> tuple[DeviceTensor, ...]:
        return tuple(
            DeviceTensor(
                name=name,
                shape=tuple(map(int, one["shape"])),
                dtype=np.dtype(one["dtype"]).name,
                scale=float(one["quantization"][0]),
                zero_point=int(one["quantization"][1]),
            )
            for name, one in zip(names, details, strict=True)
        )

    return DeviceIo(
        tensors(interpreter.get_input_details(), ("x", "y")),
        tensors(interpreter.get_output_details(), ("hidden", "soft")),
    )


def expected() -> dict[str, np.ndarray]:
    interpreter = litert.Interpreter(str(HERE / "data/small.tflite"))
    interpreter.allocate_tensors()
    for tensor, array in zip(interpreter.get_input_details(), (X[0], Y), strict=True):
        interpreter.set_tensor(tensor["index"], array)
    interpreter.invoke()
    hidden, soft = (interpreter.get_tensor(o["index"]) for o in interpreter.get_output_details())
    return {"hidden": hidden, "soft": soft}


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The fake as an executable file, and a folder for temporary files that is empty after each call."""
    path = tmp_path / "bin" / "neuronrt"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    path.chmod(0o755)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(neuronrt, "_parent", lambda needed: str(temporary))
    yield str(path)
    assert list(temporary.iterdir()) == []


def runner(command: str, tmp_path: Path, model: str = "small", **options: Any) -> Any:
    source = HERE / "data" / f"{model}.tflite"
    dla = tmp_path / "encoder.dla"
    dla.write_bytes(HEADER + source.read_bytes())
    chosen = DeviceOptions(neuronrt=command, **options)
    return NeuronrtRunner(CHIP.name, SPEC, dla, io_of(source), chosen)


def test_a_float_program_returns_what_the_tflite_returns(command, tmp_path):
    program = runner(command, tmp_path, boost=100)

    outputs = program.run(INPUTS)

    assert list(outputs) == ["soft", "hidden"]
    for name, array in expected().items():
        assert np.array_equal(outputs[name], array)
    assert program.last_inference_ms == 12.5


def test_a_quantized_program_gets_integers_and_returns_real_values(command, tmp_path):
    program = runner(command, tmp_path, "small_int8")

    outputs = program.run(INPUTS)

    # then: an error of a few steps of the outputs' scales, 1/256 of their ranges
    for name, array in expected().items():
        assert outputs[name].dtype == np.float32
        assert 0 < np.abs(outputs[name] - array).max() < 0.05


def test_the_hardware_is_always_chosen_since_the_default_executes_nothing(command, tmp_path):
    program = runner(command, tmp_path)

    words = program.arguments(Path("/w"))

    assert words[1:] == [
        *("-m", "hw", "-a", str(tmp_path / "encoder.dla")),
        *("-i", "/w/0.in", "-i", "/w/1.in", "-o", "/w/0.out", "-o", "/w/1.out"),
    ]


def test_a_device_that_executes_nothing_is_found(command, tmp_path, monkeypatch):
    program = runner(command, tmp_path)
    monkeypatch.setattr(neuronrt, "HARDWARE", ())  # as a user's own script does

    with pytest.raises(LoweringError, match="returned only zeros"):
        program.run(INPUTS)


@pytest.mark.parametrize(
    ("fault", "kind", "what", "why"),
    [
        ("crash", LoweringError, "neuronrt failed", "SIGSEGV"),
        (
            "denied",
            LoweringError,
            "device node cannot be opened",
            "exit status 3.*Permission denied",
        ),
        ("unknown", LoweringError, "neuronrt failed", "exit status 7: something went wrong"),
        ("missing", BundleError, "wrote no output `soft`", "No such file"),
        ("truncated", BundleError, "wrote 44 bytes for the output `soft`", "expected 48 bytes"),
        ("as-int8", BundleError, "wrote 12 bytes", "expected 48 bytes"),
    ],
)
def test_a_fault_is_an_error_that_names_it(command, tmp_path, monkeypatch, fault, kind, what, why):
    program = runner(command, tmp_path)
    monkeypatch.setenv("FAKE_NEURONRT", fault)

    with pytest.raises(kind, match=what) as caught:
        program.run(INPUTS)

    assert re.search(why, caught.value.why)
    assert caught.value.hint


def test_the_raw_files_are_kept_also_if_their_size_is_wrong(command, tmp_path, monkeypatch):
    kept = tmp_path / "kept" / "files"
    program = runner(command, tmp_path, files=kept)

    program.run(INPUTS)
    complete = {path.name: path.read_bytes() for path in kept.iterdir()}
    monkeypatch.setenv("FAKE_NEURONRT", "truncated")
    with pytest.raises(BundleError, match="44 bytes"):
        program.run(INPUTS)

    assert complete["encoder.x.in.bin"] == X.tobytes()
    assert complete["encoder.hidden.out.bin"] == expected()["hidden"].tobytes()
    assert len(complete) == 4
    assert (kept / "encoder.soft.out.bin").read_bytes() == complete["encoder.soft.out.bin"][:-4]


def test_a_file_of_another_neuropilot_version_is_named(command, tmp_path):
    program = runner(command, tmp_path)
    (tmp_path / "encoder.dla").write_bytes(b"DLA of another version")

    with pytest.raises(LoweringError, match="another version of NeuroPilot"):
        program.run(INPUTS)


def test_a_call_that_hangs_ends_with_all_its_processes(command, tmp_path, monkeypatch):
    program = runner(command, tmp_path, timeout=2)
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("FAKE_NEURONRT", "hangs")
    monkeypatch.setenv("FAKE_PID_FILE", str(pid_file))

    with pytest.raises(LoweringError, match="within 2 s"):
        program.run(INPUTS)

    assert has_ended(int(pid_file.read_text()), 1.0)


def test_a_missing_command_says_where_to_get_it(tmp_path):
    options = DeviceOptions(neuronrt=str(tmp_path / "absent"))

    with pytest.raises(MissingPackageError, match="is not installed") as caught:
        NeuronrtRunner(CHIP.name, SPEC, tmp_path / "x.dla", DeviceIo.of_spec(SPEC), options)
    assert f"{CHIP.name}.neuronrt=PATH" in caught.value.hint


def test_a_value_that_no_integer_stands_for_is_an_error(command, tmp_path):
    program = runner(command, tmp_path, "small_int8")

    with pytest.raises(NumericalError, match="`x` of `encoder` holds a NaN"):
        program.run({**INPUTS, "x": np.full_like(X, np.nan)})


def test_temporary_files_are_in_memory_if_it_has_room(monkeypatch, tmp_path):
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(neuronrt, "TMPFS", tmp_path)

    assert neuronrt._parent(10) == str(tmp_path)
    assert neuronrt._parent(2**62) is None
    monkeypatch.setenv("TMPDIR", os.fspath(tmp_path))
    assert neuronrt._parent(10) is None


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
