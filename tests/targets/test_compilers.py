"""What all vendors have in common: tables of chips, compilers and their failures, a missing SDK."""

import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from whisperport.build.compile.compile import CompileOptions, compile
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.export.placing import PlacementRequest, place
from whisperport.errors import BundleError, LoweringError, MissingPackageError, UsageError
from whisperport.model.inspection.vocabulary import TFLITE
from whisperport.program.bundle import Bundle
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets import TARGETS, RunOptions, get_target
from whisperport.targets.compiled_file import (
    MAX_SHOWN,
    printable,
    printable_texts,
    read_json,
    read_report,
    read_text,
)
from whisperport.targets.compiler import Compiler
from whisperport.targets.toolchain import Failure, variable
from whisperport.targets.vendors.ethos_u.chips import NPUS
from whisperport.targets.vendors.mediatek import specs
from whisperport.targets.vendors.mediatek.chips import CHIPS as GENIOS
from whisperport.targets.vendors.qualcomm.chips import CHIPS as SNAPDRAGONS
from whisperport.targets.vendors.rockchip.chips import CHIPS as ROCKCHIPS
from whisperport.verification import GATES

# What the compilers of all vendors have in common: how failures are explained, and the stages' reports.

COMPILERS = {one.spec.name: one.compiler for one in TARGETS if one.compiler is not None}


@pytest.fixture(params=COMPILERS)
def compiler(request: pytest.FixtureRequest) -> Compiler:
    return COMPILERS[request.param]


def explained(compiler: Compiler, *classes: str, stage: str = "") -> tuple[str, str]:
    return compiler.explain(
        Failure(kind="failed", message="", program="step", stage=stage, classes=classes)
    )


def test_every_known_failure_has_words_and_a_hint_without_blanks(compiler: Compiler) -> None:
    known = [explained(compiler, name) for name in (*compiler.failures, "MemoryError", "NoSuch")]
    known += [explained(compiler, stage=stage) for stage in ("simulate", "emulate")]

    for happened, hint in known:
        assert happened
        assert hint
        assert "{" not in happened + hint


def test_hints_name_the_target(compiler: Compiler) -> None:
    (name,) = [name for name, one in COMPILERS.items() if one is compiler]

    assert compiler.target == name


def test_a_derived_error_is_explained_as_the_error_that_is_known(compiler: Compiler) -> None:
    assert explained(compiler, "NoSuch", "MemoryError") == explained(compiler, "MemoryError")


def test_a_vendors_own_words_come_before_the_general_ones() -> None:
    assert "finetune=off" in explained(COMPILERS["hailo8"], "MemoryError")[1]
    assert "smaller checkpoint" in explained(COMPILERS["rk3588"], "MemoryError")[1]


def test_arrays_of_an_emulator_are_named_after_its_kind() -> None:
    inputs = (TensorSpec("x", (1, 1, 8)), TensorSpec("mask", (1, 9)))
    spec = ProgramSpec("step", inputs, (TensorSpec("logits", (1, 20)),))

    compiler = COMPILERS["rk3588"]

    need = compiler.emulation(spec, compiler.options(emulate=3))

    assert need is not None
    assert need.inputs == ("simulated_x", "simulated_mask")
    assert need.outputs == ("simulated_output_logits",)
    assert (need.kind, need.clips, need.decides) == ("simulated", 3, False)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '"text"', "null", "\x00", "[" * 100_000, "1" * 5000]
)
def test_a_damaged_report_is_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "built.json"
    path.write_text(text)

    assert read_report(path) == {}


def test_a_missing_report_is_empty(tmp_path: Path) -> None:
    assert read_text(tmp_path / "absent") == ""
    assert read_json(tmp_path / "absent") is None
    assert read_report(tmp_path) == {}


def test_a_report_is_read_although_bytes_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "built.json"
    path.write_bytes(b'{"version": "2.5\xff"}')

    assert read_report(path) == {"version": "2.5\ufffd"}


def test_what_a_report_shows_has_no_control_characters_and_an_end() -> None:
    assert printable("a\x1b[31mb\n") == "a [31mb"
    assert len(printable("x" * 1000)) == MAX_SHOWN
    assert printable_texts(["a", 1]) == ["a", "1"]
    assert printable_texts("abc") == []


# What the tables of all vendors' chips have in common, and placements on them.

PROGRAMS = ("encoder", "cross_kv", "prefill_4", "prefill_64", "step", "align")
CHIPS = (*NPUS, *SNAPDRAGONS, *ROCKCHIPS)


@pytest.fixture(params=CHIPS, ids=lambda chip: chip.name)
def chip(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=["rk3588", "sm8650", "ethos-u85", "genio720"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_value_has_a_source(chip: Any) -> None:
    facts = {field.name for field in fields(chip)} - {"name", "sources"}

    assert set(chip.sources) == facts
    assert all(chip.sources.values())


def test_every_precision_can_be_verified(chip: Any) -> None:
    precisions = get_target(chip.name).spec.runs.precisions

    assert precisions
    assert set(precisions) <= set(GATES)


def test_a_precision_that_a_chip_does_not_have_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match="bf16") as refused:
        place(PlacementRequest(target=name, precision="bf16"), PROGRAMS)

    assert ", ".join(get_target(name).spec.runs.precisions) in refused.value.hint


@pytest.mark.parametrize("on_npu", [("encoder",), ("encoder", "cross_kv"), PROGRAMS])
def test_the_encoder_alone_with_cross_kv_and_everything_are_placements(
    name: str, on_npu: tuple[str, ...]
) -> None:
    request = PlacementRequest(target="onnxruntime", programs=dict.fromkeys(on_npu, name))

    placed = place(request, PROGRAMS)

    found = {program for program, one in placed.placements.items() if one.target == name}
    assert found == set(on_npu)


@pytest.mark.parametrize(
    ("name", "precisions"),
    [
        ("rk3588", {"fp16": "fp32", "w8a8": "fp32", "w16a16": "fp32"}),  # `compile` quantizes
        ("sm8650", {"fp16": "fp32", "w8a16": "w8a16"}),  # `export` quantizes
    ],
)
def test_emulation_has_the_precision_of_the_lowered_file(
    name: str, precisions: dict[str, str]
) -> None:
    target = get_target(name)

    assert {
        one: target.emulated_precision(one) for one in target.spec.runs.precisions
    } == precisions


PLACED = {"placement": {"step": "genio1200"}}


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("rk3588", {"precision": "w8a16"}, ("encoder", "rejects it for this chip", "w16a16")),
        ("rk3562", {"precision": "w8a16"}, ("encoder", "munmap_chunk", "fp16, w8a8")),
        ("qcm6490", {"precision": "fp16"}, ("encoder", "v68", "fp16", "--precision w8a16")),
        ("sm8450", {"precision": "w8a16"}, ("v69", "fewer than 6 rows")),
        ("genio1200", {}, ("encoder", "transformer", "MDLA 2.0", "--target litert")),
        ("genio1200", {"precision": "w8a16"}, ("16-bit", "16x8", "MT8395", "--target litert")),
        ("genio350", {}, ("no MDLA", "MT8365", "Genio 350", "--target litert")),
        ("onnxruntime", PLACED, ("`step`", "attention", "MDLA 2.0", "--target litert")),
    ],
)
def test_what_a_chip_cannot_run_is_rejected_before_the_checkpoint_is_read(
    target: str, options: dict[str, Any], words: tuple[str, ...], tmp_path: Any
) -> None:
    with pytest.raises(LoweringError, match="does not support") as refused:
        export(tmp_path / "no-checkpoint", target, tmp_path / "out", ExportOptions(**options))

    said = f"{refused.value.what} {refused.value.why} {refused.value.hint}"
    assert [word for word in words if word not in said] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "precision", "on_the_npu"),
    [
        ("qcm6490", "w8a16", set(PROGRAMS)),  # it has no floating point
        ("sm8450", "fp16", set(PROGRAMS)),
        ("ethos-u85", "w8a16", set(PROGRAMS)),
        ("ethos-u55", "w8a8", set(PROGRAMS)),  # its matrix multiplications have 8 bits
        ("genio720", "fp16", {"encoder", "cross_kv"}),
        ("hailo8", "w8a8", {"encoder"}),
    ],
)
def test_a_chip_has_a_precision_and_programs_by_default(
    target: str, precision: str, on_the_npu: set[str]
) -> None:
    placed = place(PlacementRequest(target=target), PROGRAMS).placements

    assert {name for name, one in placed.items() if one.target == target} == on_the_npu
    assert {placed[name].precision for name in on_the_npu} == {precision}


@pytest.mark.parametrize("soc", SNAPDRAGONS, ids=lambda one: one.name)
def test_numbers_are_those_of_the_vendors_own_table(soc: Any) -> None:
    schema = pytest.importorskip("executorch.backends.qualcomm.serialization.qc_schema")
    info = schema._soc_info_table[schema.QcomChipset[soc.name.upper()]]

    assert (soc.soc_model, soc.architecture.number, soc.vtcm_mib) == (
        int(info.soc_model),
        int(info.htp_info.htp_arch),
        info.htp_info.vtcm_size_in_mb,
    )


@pytest.mark.parametrize("board", GENIOS, ids=lambda one: one.name)
def test_what_is_not_the_vendors_own_word_is_marked(board: Any) -> None:
    sources = board.npu.sources

    assert {"sdks", "per_channel", "w8a16", "transformer"} <= set(sources)
    for source in sources.values():
        first_hand = source.startswith("mediatek.gitlab.io")
        assert first_hand or "second-hand" in source or "inferred" in source, source


def test_operators_of_a_list_have_the_names_that_the_check_gives_them() -> None:
    assert {name: TFLITE.get(name, name) for name in specs.OPERATORS} == dict(specs.OPERATORS)


# What `compile` and `load` say where a vendor's SDK is missing, or is another one.

PROGRAM = "cross_kv"  # the smallest
# Target -> what the user must install, and the lowered file.
SDKS = {
    "rk3588": ("pip install rknn-toolkit2", ".onnx"),
    "sm8650": ('pip install "whisperport[qualcomm]"', ".onnx"),
    "genio720": ("NeuroPilot SDK", ".tflite"),
}


@pytest.fixture(scope="module", params=SDKS)
def bundle(request: pytest.FixtureRequest, micro_bundle_on: Callable[[str, str], Path]) -> Path:
    return micro_bundle_on(request.param, PROGRAM)


@pytest.fixture
def placed(bundle: Path) -> str:
    return Bundle.open(bundle).manifest.program(PROGRAM).target


@pytest.fixture
def nothing_is_installed(placed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = get_target(placed).compiler
    assert compiler is not None
    for name in (variable(compiler.toolchain), *compiler.variables):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, compiler.sdk, None)


@pytest.mark.usefixtures("nothing_is_installed")
def test_a_work_folder_is_prepared_and_the_error_says_what_to_do(
    bundle: Path, placed: str, tmp_path: Path
) -> None:
    before, work = (bundle / "manifest.json").read_bytes(), tmp_path / "work"
    how, suffix = SDKS[placed]

    with pytest.raises(MissingPackageError, match="not compiled yet") as missing:
        compile(bundle, CompileOptions(work=work, threads=1))

    assert variable(get_target(placed).compiler.toolchain) in missing.value.hint
    assert how in missing.value.hint
    assert (work / placed / PROGRAM / f"{PROGRAM}{suffix}").is_file()
    assert (work / placed / "compile.py").is_file()
    assert (bundle / "manifest.json").read_bytes() == before


@pytest.mark.usefixtures("nothing_is_installed")
def test_an_sdk_that_is_none_is_named_before_anything_is_computed(
    bundle: Path, placed: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    python.chmod(0o755)
    compiler = get_target(placed).compiler
    given = tmp_path if compiler.is_command else python
    options = CompileOptions(toolchains={compiler.toolchain: str(given)}, work=tmp_path / "work")

    with pytest.raises(LoweringError, match="cannot be used") as missing:
        compile(bundle, options)

    assert missing.value.why
    assert f"--toolchain {compiler.toolchain}=" in missing.value.hint
    assert not (tmp_path / "work").exists()


@pytest.mark.usefixtures("nothing_is_installed")
def test_a_bundle_that_is_not_compiled_says_so(bundle: Path, placed: str) -> None:
    manifest = Bundle.open(bundle).manifest

    with pytest.raises(BundleError, match=f"is not compiled for `{placed}` yet") as missing:
        get_target(placed).load(bundle, [manifest.program(PROGRAM)], RunOptions())

    assert "whisperport compile BUNDLE" in missing.value.hint
    assert f"{placed}.emulate=on" in missing.value.hint
    assert {one.kind for one in manifest.evidence(PROGRAM)} <= {"emulated", "partitioned"}
