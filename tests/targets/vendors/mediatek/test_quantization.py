"""Quantized .tflite files for the NPU: written at export, checked against the limits, run on the CPU."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from whisperport.model.inspection.read_tflite import read_tflite
from whisperport.model.inspection.rejections import check_graph
from whisperport.model.trace.program import Program, trace
from whisperport.program.bundle import ProgramEntry
from whisperport.program.placement import Placement
from whisperport.targets import RunOptions, Target, get_target
from whisperport.targets.vendors.mediatek.target import DEVICE_IO, LowerOptions

BOARD = "genio720"
WIDTH, SAMPLES = 16, 12

Quantize = Callable[[str, str], tuple[Path, ProgramEntry, Target]]


@pytest.fixture(scope="module")
def samples() -> np.ndarray:
    random = np.random.default_rng(0)
    return random.standard_normal((SAMPLES, 1, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 8))
    return trace("encoder", module, (torch.zeros(1, WIDTH),), ["features"])


@pytest.fixture(scope="module")
def lowered(
    program: Program, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ProgramEntry]:
    """The program in float32. Do not write to its folder: copy it."""
    folder = tmp_path_factory.mktemp("lowered")
    (entry,) = get_target(BOARD).lower([program], folder)
    return folder, entry


@pytest.fixture
def quantize(lowered: tuple[Path, ProgramEntry], samples: np.ndarray, tmp_path: Path) -> Quantize:
    """`quantize(precision, operators)`: quantize a copy of the program with the samples."""

    def make(precision: str, operators: str) -> tuple[Path, ProgramEntry, Target]:
        target = get_target(BOARD).configured(LowerOptions(static=operators))  # type: ignore[arg-type]
        folder = shutil.copytree(lowered[0], tmp_path / "quantized")
        entry = replace(lowered[1], placement=Placement(BOARD, precision))
        need = target.calibration(entry.spec, precision)
        assert need is not None
        assert need.names == ("input",)
        np.save(tmp_path / "input.npy", samples)
        entry = target.quantize(entry, folder, {"input": tmp_path / "input.npy"})
        return folder, entry, target

    return make


def dtypes_of(path: Path) -> set[str]:
    (graph,) = read_tflite(path)
    return {value.dtype for node in graph.nodes for value in (*node.tensors, *node.outputs)}


@pytest.mark.parametrize(
    ("precision", "activations", "min_db"), [("w8a16", "int16", 35), ("w8a8", "int8", 20)]
)
def test_a_quantized_file_is_within_the_limits_and_close_to_float32(
    quantize: Quantize,
    program: Program,
    samples: np.ndarray,
    precision: str,
    activations: str,
    min_db: float,
) -> None:
    folder, entry, target = quantize(precision, "linear")

    # then: weights of 8 bits limit the SQNR to about 40 dB
    (graph,) = read_tflite(folder / entry.files[0])
    assert {activations, "int8"} <= dtypes_of(folder / entry.files[0])
    assert not check_graph(graph, target.spec).rejected
    options = RunOptions(threads=1, options={f"{BOARD}.emulate": "on"})
    found = target.load(folder, [entry], options)["encoder"].run({"input": samples[0]})["features"]
    wanted = program.exported.module(check_guards=False)(torch.from_numpy(samples[0]))
    wanted = wanted.detach().numpy()
    assert 10 * np.log10((wanted**2).mean() / ((found - wanted) ** 2).mean()) > min_db
    assert target.emulated_precision(precision) == precision


@pytest.mark.parametrize(("operators", "dtype"), [("linear", "float32"), ("all", "int16")])
def test_the_entry_tells_the_device_which_numbers_go_in_and_out(
    quantize: Quantize, operators: str, dtype: str
) -> None:
    _, entry, _ = quantize("w8a16", operators)

    (given,), (returned,) = (
        entry.facts.target_facts[DEVICE_IO][side] for side in ("inputs", "outputs")
    )
    if operators == "all":
        assert (given["dtype"], returned["dtype"]) == (dtype, dtype)
        assert given["scale"] > 0
        assert given["zero_point"] == 0
    assert entry.spec.inputs[0].dtype == "float32"  # the host passes real numbers in both cases


def test_a_board_without_16_bit_activations_rejects_such_a_file(quantize: Quantize) -> None:
    folder, entry, _ = quantize("w8a16", "all")
    (graph,) = read_tflite(folder / entry.files[0])

    found = check_graph(graph, get_target("genio1200").spec).rejected

    assert ("WP214", "linear") in {(group.rule, group.operator) for group in found}


def test_8_bits_for_an_encoder_is_a_warning_that_names_the_vendors_own_choice(
    quantize: Quantize, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        quantize("w8a8", "linear")

    (warning,) = [record.getMessage() for record in caplog.records]
    assert "outliers" in warning
    assert "MediaTek's own export of Whisper uses w8a16 by default" in warning
