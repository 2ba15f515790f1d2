"""The boards as data: every value has a source, and what is not MediaTek's own word is marked."""

import re

import pytest

from whisperport.inspection.vocabulary import TFLITE
from whisperport.targets.mediatek import limits
from whisperport.targets.mediatek.chips import (
    CHIPS,
    GENIO350,
    GENIO520,
    GENIO700,
    GENIO720,
    GENIO1200,
    Chip,
)
from whisperport.targets.mediatek.specs import spec_of


@pytest.fixture(params=CHIPS, ids=lambda chip: chip.name)
def chip(request: pytest.FixtureRequest) -> Chip:
    return request.param


def test_a_board_is_named_as_its_user_would_type_it(chip: Chip) -> None:
    assert chip.name == chip.board.lower().replace(" ", "")
    assert re.fullmatch(r"MT8\d{3}", chip.soc)
    assert len({one.soc for one in CHIPS}) == len(CHIPS)


def test_what_the_compiler_is_told_is_what_the_vendor_documents_for_each_board() -> None:
    told = {chip.name: (chip.soc, chip.npu.arch, chip.npu.l1_kb, chip.npu.cores) for chip in CHIPS}

    assert told == {
        "genio350": ("MT8365", "vpu", None, 1),
        "genio510": ("MT8370", "mdla3.0", None, 1),
        "genio520": ("MT8371", "mdla5.3,edma3.6", 256, 1),
        "genio700": ("MT8390", "mdla3.0", None, 1),
        "genio720": ("MT8391", "mdla5.3,edma3.6", 256, 1),
        "genio1200": ("MT8395", "mdla2.0", None, 2),
    }


def test_every_value_of_an_npu_has_a_source_that_says_whose_word_it_is(chip: Chip) -> None:
    sources = chip.npu.sources

    assert {"sdks", "per_channel", "w8a16", "transformer"} <= set(sources)
    for source in sources.values():
        first_hand = source.startswith("mediatek.gitlab.io")
        assert first_hand or "second-hand" in source or "inferred" in source, source
    if chip.npu.l1_kb is not None:
        assert "second-hand" in sources["l1_kb"]


def test_only_boards_with_an_mdla_of_version_3_or_later_have_16_bit_activations() -> None:
    assert {chip.name for chip in CHIPS if "w8a16" in spec_of(chip).precisions} == {
        "genio510",
        "genio520",
        "genio700",
        "genio720",
    }


def test_boards_with_one_npu_have_one_spec_but_for_their_name() -> None:
    first, second = spec_of(GENIO520), spec_of(GENIO720)

    assert first.limits == second.limits
    assert first.operators == second.operators
    assert first.name != second.name


def test_the_operators_have_the_names_that_the_check_gives_them() -> None:
    assert {name: TFLITE.get(name, name) for name in limits.OPERATORS} == dict(limits.OPERATORS)
    assert len(limits.OPERATORS) == 63  # as many as the list has, whose title counts 65


@pytest.mark.parametrize("name", ["GATHER", "SELECT", "TOPK_V2", "FILL", "LOG_SOFTMAX", "EQUAL"])
def test_an_operator_that_the_list_excludes_is_not_in_it(name: str) -> None:
    assert TFLITE.get(name, name) not in spec_of(GENIO720).operators


def test_what_is_not_known_of_a_board_is_not_claimed() -> None:
    assert spec_of(GENIO350).operators_observed
    assert GENIO700.npu.transformer is None
    assert GENIO1200.npu.transformer is False
    assert all(
        limit.kind == "not seen" for limit in spec_of(GENIO700).limits if limit.rule == "WP104"
    )
