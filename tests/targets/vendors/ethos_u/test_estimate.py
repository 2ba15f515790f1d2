"""Read the compiler's estimate: the columns of a real summary, and damaged ones."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whisperport.apps.cli.main import main
from whisperport.build.compile.artifacts import Artifact, put_artifacts
from whisperport.build.plan import PlanOptions, plan
from whisperport.program.bundle import Bundle
from whisperport.program.placement import Placement
from whisperport.targets import get_target
from whisperport.targets.vendors.ethos_u.estimate import read_estimate, summary

from ....embedded import default_bundle

COMPILER = get_target("ethos-u85").compiler

# Written by Vela 5.1.0 for the encoder of the embedded model in w8a16, without the columns of accesses.
NAMES = (
    "experiment,network,accelerator_configuration,system_config,memory_mode,core_clock,inference_time,"
    "sram_memory_used,dram_memory_used,on_chip_flash_memory_used,off_chip_flash_memory_used,nn_macs,"
    "cycles_total"
)
VALUES = (
    "default,out,Ethos_U85_256,Ethos_U85_SYS_DRAM_Mid,Sram_Only,1000000000.0,0.129062986,18469.75,0.0,"
    "1501.84375,0.0,3699024000,129062986"
)


def read(tmp_path, text):
    path = tmp_path / "estimate.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_estimate(path)


def test_an_estimate_is_in_seconds_and_bytes_and_says_for_which_memory(tmp_path):
    assert read(tmp_path, f"{NAMES}\n{VALUES}\n") == {
        "estimated_s": 0.129062986,
        "cycles": 129062986,
        "clock_hz": 1e9,
        "sram_bytes": 18469.75 * 1024,
        "dram_bytes": 0,
        "on_chip_flash_bytes": 1501.84375 * 1024,
        "off_chip_flash_bytes": 0,
        "macs": 3699024000,
        "system_config": "Ethos_U85_SYS_DRAM_Mid",
        "memory_mode": "Sram_Only",
    }


def test_users_read_an_estimate_with_its_memory_and_that_nothing_was_measured(tmp_path):
    text = summary(read(tmp_path, f"{NAMES}\n{VALUES}\n"))

    assert text == (
        "Vela estimates 129.1 ms at 1000 MHz, and 18.91 MB of SRAM, 1.538 MB of flash, with "
        "Ethos_U85_SYS_DRAM_Mid and Sram_Only; nothing was measured"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        NAMES,
        f"{NAMES}\n{VALUES}\n{VALUES}\n",
        f"{NAMES}\n{VALUES.replace('0.129062986', 'nan')}\n",
        f"{NAMES}\n{VALUES.replace('0.129062986', 'inf')}\n",
        f"{NAMES}\n{VALUES.replace('0.129062986', '-1')}\n",
        f"{NAMES}\n{VALUES.replace('0.129062986', 'fast')}\n",
        f"{NAMES.replace('cycles_total', 'cycles')}\n{VALUES}\n",
        f"{NAMES}\ndefault,out\n",
        b"\xff\x00" * 100,
        "x" * 200_000,
        f'{NAMES}\n"{VALUES}',
    ],
)
def test_a_damaged_summary_gives_no_estimate(tmp_path, text):
    assert read(tmp_path, text) == {}


def test_a_missing_summary_gives_no_estimate(tmp_path):
    assert read_estimate(tmp_path / "estimate.csv") == {}
    assert read_estimate(tmp_path) == {}


def test_the_plan_of_a_compiled_bundle_lists_what_the_compiler_estimated(
    tmp_path, capsys, monkeypatch
):
    """The bundle is the embedded one, as if its encoder was compiled."""
    bundle = estimated_bundle(tmp_path, read(tmp_path, f"{NAMES}\n{VALUES}\n"))

    made = plan(bundle)
    monkeypatch.setattr(sys, "argv", ["whisperport", "plan", str(bundle)])
    with pytest.raises(SystemExit) as ended:
        main()

    assert made
    assert not ended.value.code
    assert (made.target, made.precision, made.machines) == ("ethos-u85", "w8a16", ())
    (one,) = made.compiled
    assert (one.program, one.estimate.seconds, one.estimate.cycles) == (
        "encoder",
        0.129062986,
        129062986,
    )
    assert one.estimate.memory_bytes == {"SRAM": 18469.75 * 1024, "flash": 1501.84375 * 1024}
    assert "1000 MHz, Ethos_U85_SYS_DRAM_Mid, Sram_Only" in one.estimate.conditions
    printed = capsys.readouterr().out
    assert "estimates of ExecuTorch 1.5 with Vela 5.1; nothing was run or measured" in printed
    assert "encoder  129.1 ms  129.1 M  18.91 MB of SRAM, 1.538 MB of flash" in printed
    assert plan(
        bundle, PlanOptions(target="aws-neuron", batch=2)
    ).machines  # an option asks for a target's machines


@pytest.mark.parametrize(
    "estimate",
    [{}, [], 1, {"cycles": "many"}, "changed", {"estimated_s": -1}, {"estimated_s": 10**400}],
    ids=lambda value: str(value)[:24],
)
def test_a_manifest_with_another_estimate_has_none(tmp_path, estimate):
    whole = read(tmp_path, f"{NAMES}\n{VALUES}\n")
    changed = {**whole, **estimate} if isinstance(estimate, dict) and estimate else estimate

    assert COMPILER.estimate({"estimate": whole}) is not None
    assert COMPILER.estimate({"estimate": changed}) is None
    assert COMPILER.estimate({}) is None


def estimated_bundle(folder: Path, estimate: dict[str, Any]) -> Path:
    opened = Bundle.open(Path(shutil.copytree(default_bundle(), folder / "bundle")))
    file = folder / "encoder.pte"
    file.write_bytes(b"compiled")
    programs = tuple(
        replace(one, placement=Placement("ethos-u85", "w8a16"))
        if one.spec.name == "encoder"
        else one
        for one in opened.manifest.programs
    )
    placed = replace(opened, manifest=replace(opened.manifest, programs=programs))
    artifact = Artifact(path=file, suffix=".pte", facts={"estimate": estimate})
    return put_artifacts(placed, {"encoder": artifact}).folder
