"""Options of the compiler become arguments that AWS's reference has; what is verified cannot be changed."""

import itertools
import json
from pathlib import Path

import pytest

from whisperport.errors import UsageError
from whisperport.targets.options import parse_options
from whisperport.targets.vendors.aws_neuron.chips import (
    CHIPS,
    FIGURES,
    GIB,
    INSTANCES,
    RELEASE,
    machines,
)
from whisperport.targets.vendors.aws_neuron.codes import CODES, code_in, explained
from whisperport.targets.vendors.aws_neuron.flags import CompileOptions, arguments_of

RECORDED = json.loads(Path(__file__).with_name("signatures.json").read_text(encoding="utf-8"))


def parsed(**given: object) -> CompileOptions:
    texts = {name.replace("_", "-"): str(value) for name, value in given.items()}
    options: CompileOptions = parse_options(CompileOptions, texts, "aws-neuron")
    return options


@pytest.mark.parametrize("chip", CHIPS)
def test_every_choice_becomes_arguments_of_the_compilers_reference(chip):
    known = RECORDED["compiler_arguments"]
    for optlevel, model_type in itertools.product((1, 2, 3), ("transformer", "generic")):
        arguments = arguments_of(parsed(chip=chip, optlevel=optlevel, model_type=model_type))
        pairs = dict(zip(arguments[::2], arguments[1::2], strict=True))
        assert all(value in known[name] for name, value in pairs.items())
        assert pairs["--target"] == chip
        assert pairs["--auto-cast"] == "none"
        assert ("--logical-nc-config" in pairs) == (chip in RECORDED["lnc_targets"])


@pytest.mark.parametrize(("chip", "default"), [("inf2", 1), ("trn1", 1), ("trn2", 2), ("trn3", 2)])
def test_the_size_of_a_logical_core_is_the_chips_default_or_the_users(chip, default):
    assert parsed(chip=chip).chosen_lnc() == default
    assert parsed(chip=chip, lnc=1).chosen_lnc() == 1
    if default == 2:
        assert parsed(chip=chip, lnc=2).chosen_lnc() == 2
        return
    with pytest.raises(UsageError, match="cannot combine 2") as raised:
        arguments_of(parsed(chip=chip, lnc=2))
    assert "trn2, trn3" in raised.value.hint


def test_further_arguments_are_split_as_in_a_shell():
    flags = "--verbose info --implicit-integer-downcast='dot,pow'"
    assert arguments_of(parsed(flags=flags))[-3:] == [
        *("--verbose", "info"),
        "--implicit-integer-downcast=dot,pow",
    ]


@pytest.mark.parametrize(
    "flags",
    [
        *("--target trn2", "--target=trn2", "-lnc 2", "--lnc=2", "--logical-nc-config 1", "-O3"),
        *("--optlevel=1", "--model-type generic", "--auto-cast all", "--auto-cast-type=bf16"),
        *("--verbose 'info", "--logfile /tmp/x", "--output=a.neff", "--framework XLA"),
    ],
)
def test_further_arguments_cannot_set_what_an_option_sets_or_change_what_was_verified(flags):
    with pytest.raises(UsageError, match=r"aws-neuron\.flags"):
        arguments_of(parsed(flags=flags))


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_every_figure_of_a_chip_has_a_source_of_one_commit(chip):
    assert {*FIGURES, "lncs", "compiler_target"} <= set(chip.sources)
    for field, source in chip.sources.items():
        assert hasattr(chip, field)
        assert source.startswith(RELEASE)
    assert "@81ce03a" in RELEASE
    assert chip.compiler_target in RECORDED["compiler_arguments"]["--target"]
    assert chip.cores % max(chip.lncs) == 0


def test_totals_of_instances_are_those_of_awss_tables():
    # Source: inf2-arch.rst, trn1-arch.rst, trn2-arch.rst, trn3-arch.rst; per UltraServer 4 or 36 servers.
    totals = {
        "inf2.48xlarge": (384, 2280, 570),
        "trn1.32xlarge": (512, 3040, 760),
        "trn2.48xlarge": (1536, 10_700, 2900),
        "trn3 server, Gen1": (9216 / 4, 42_944 / 4, 11_712 / 4),
        "trn3 server, Gen2": (20_736 / 36, 96_624 / 36, 26_352 / 36),
    }
    found = {one.name: one for one in INSTANCES}
    for name, (memory, bf16, fp32) in totals.items():
        one = found[name]
        assert one.chips * one.chip.memory_bytes == memory * GIB
        assert one.chips * one.chip.flops["bf16"] / 1e12 == pytest.approx(bf16, rel=0.005)
        assert one.chips * one.chip.flops["fp32"] / 1e12 == pytest.approx(fp32, rel=0.005)


def test_a_logical_core_of_trn2_has_one_bank_of_memory():
    found = {one.name: one for one in machines()}
    assert found["trn2.48xlarge, lnc=2"].cores == 64  # "presents 64 available NeuronCores"
    assert found["trn2.48xlarge, lnc=1"].cores == 128
    assert found["trn2.48xlarge, lnc=2"].memory_bytes == 24 * GIB
    assert found["inf2.xlarge"].cores == 2


def test_every_code_says_what_happened_and_what_to_do():
    for code in CODES:
        assert code_in(f"2026-01-01 ERROR [NCC_{code}] words") == code
        what, hint = explained(code, "step") or ("", "")
        assert what.endswith(f"(NCC_{code})")
        assert hint
        assert "{program}" not in hint


@pytest.mark.parametrize("text", ["", "NCC_", "XNCC_EVRF001", "NCC_EVRF0011", "ncc_evrf001"])
def test_a_text_without_a_code_has_none(text):
    assert code_in(text) == ""
    assert explained("EZZZ999", "step") is None
