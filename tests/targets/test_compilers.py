"""What the compilers of all vendors have in common: how failures are explained, and the stages' reports."""

from pathlib import Path

import pytest

from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets import TARGETS
from whisperport.targets.compiler import Compiler
from whisperport.targets.stage_report import (
    MAX_SHOWN,
    printable,
    printable_texts,
    read_json,
    read_report,
    read_text,
)
from whisperport.targets.toolchain import Failure

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
