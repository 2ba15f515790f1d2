"""Bundles compiled by the vendor's compiler and run in its simulator. Nothing is faked.

The model is the embedded one. The tests need rknn-toolkit2 2.5.0 in an interpreter of its own, which the
variable WHISPERPORT_TOOLCHAIN_ROCKCHIP names; they take some minutes.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whisperport.build.compile.compile import Compiled, CompileOptions, compile
from whisperport.errors import VerificationError
from whisperport.program.bundle import Bundle
from whisperport.system.progress import reporting
from whisperport.targets import get_target
from whisperport.targets.vendors.rockchip.compiler import MISCOMPILING_RULE

COMPILER = get_target("rk3588").compiler
PLACED = {"encoder": "rk3588", "step": "rk3588"}

pytestmark = pytest.mark.skipif(
    COMPILER.installed({}) is None,
    reason="rknn-toolkit2 is not installed; WHISPERPORT_TOOLCHAIN_ROCKCHIP names its interpreter",
)


@pytest.fixture
def copied(exported: Callable[..., Bundle], tmp_path: Path) -> Callable[..., Path]:
    """Return `copied(placement, precisions)`: a bundle of the embedded model, exported once."""

    def copy(placement: dict[str, str], **options: Any) -> Path:
        made = exported("onnxruntime", "default", placement=placement, **options)
        return Path(shutil.copytree(made.folder, tmp_path / "bundle"))

    return copy


def run(bundle: Path, **options: Any) -> Compiled:
    # The few shipped recordings are enough for a test.
    return compile(bundle, CompileOptions(threads=1, force=True, **options))


def smallest_db(compiled: Compiled) -> dict[str, float]:
    """Return program -> the smallest SQNR of its outputs, in dB."""
    return {
        program.name: min(c.value["sqnr_db"] for c in program.emulation if c.level == "arrays")
        for program in compiled.programs
    }


def test_encoder_and_step_in_float16_lose_little_and_the_words_are_equal(copied):
    bundle = copied(PLACED)

    made = run(bundle)

    assert all(decibels >= 60 for decibels in smallest_db(made).values()), smallest_db(made)
    manifest = Bundle.open(bundle).manifest
    for program in made.programs:
        assert manifest.status(program.name) == "simulated here"
        assert manifest.program(program.name).files[0] == f"rk3588/{program.name}.rknn"
        assert manifest.program(program.name).facts.target_facts["disabled_rules"] == [
            MISCOMPILING_RULE
        ]
    assert {c.level for c in made.programs[0].emulation} == {"arrays", "tokens", "words"}
    assert all(c.passed for program in made.programs for c in program.emulation)

    seen: list[str] = []
    with reporting(seen.append):
        compile(bundle, CompileOptions(threads=1))
    assert "rk3588: all stages are already finished" in seen


def test_with_the_rule_left_on_the_simulator_shows_it_and_the_bundle_is_not_written(copied):
    bundle = copied({"step": "rk3588"})
    before = Bundle.open(bundle).manifest

    with pytest.raises(VerificationError, match="disagree with their reference") as refused:
        run(bundle, options={"rk3588.disable-rules": "none"})

    assert re.search(
        r"step, \w+, simulated \(arrays\): SQNR -?\d+\.\d dB is below \d", refused.value.why
    )
    assert Bundle.open(bundle).manifest == before
    assert not list(bundle.rglob("*.rknn"))


def test_integers_of_16_bits_lose_little(copied):
    placement = {"encoder": "rk3576", "step": "rk3576"}
    bundle = copied(placement, precisions=dict.fromkeys(placement, "w16a16"))

    made = run(bundle)

    assert all(decibels >= 50 for decibels in smallest_db(made).values()), smallest_db(made)
    assert all(c.passed for program in made.programs for c in program.emulation)
    assert {program.samples for program in made.programs} == {32}


def test_an_encoder_of_8_bits_is_accepted_only_with_what_they_ruin_in_float16(copied):
    bundle = copied({"encoder": "rk3568"}, precisions={"encoder": "w8a8"})
    before = Bundle.open(bundle).manifest

    with pytest.raises(VerificationError) as refused:
        run(bundle, options={"rk3568.hybrid": "off"})

    assert re.search(r"encoder, .*, simulated \(arrays\): .* dB is below \d", refused.value.why)
    assert Bundle.open(bundle).manifest == before

    made = run(bundle)

    assert smallest_db(made)["encoder"] > 20
    (note, *_) = Bundle.open(bundle).manifest.program("encoder").facts.notes
    assert note.startswith("in float16 instead")
