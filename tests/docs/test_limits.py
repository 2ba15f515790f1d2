"""The limits that pages state are those of the tables in the code."""

import math
import re

import pytest

from whisperport.verification.tolerances import (
    FLOOR_DB,
    GATES,
    MARGINS_DB,
    REWRITTEN,
    limit_of,
)
from whisperport.verification.word_check import max_change

from .pages import ROOT

VERIFICATION = "docs/explanation/verification.md"
HOW_TO = "docs/how-to"
W8A8 = GATES["w8a8"].min_sqnr_db
NUMBER = r"(\d[\de.-]*)"
# A page, a sentence of it with numbers, and these numbers.
STATED = (
    (
        VERIFICATION,
        f"In `fp32`, the cosine must be at least {NUMBER}, the SQNR {NUMBER} dB, and the largest error at "
        f"most {NUMBER} of",
        (GATES["fp32"].min_cosine, GATES["fp32"].min_sqnr_db, GATES["fp32"].max_relative),
    ),
    (VERIFICATION, f"at least {NUMBER} dB, and the words decide", (FLOOR_DB,)),
    (
        VERIFICATION,
        f"torch's own `w8` has {NUMBER} dB or less, the limit is {NUMBER} dB",
        (FLOOR_DB + MARGINS_DB["w8"], FLOOR_DB),
    ),
    (VERIFICATION, f"No limit is below {NUMBER} dB", (FLOOR_DB,)),
    (VERIFICATION, f"reference's features as its input, and must reach {NUMBER} dB", (60.0,)),
    (VERIFICATION, f"in 8 bits, the words decide, above {NUMBER} dB", (FLOOR_DB,)),
    (VERIFICATION, f"an encoder below {NUMBER} dB fails", (FLOOR_DB,)),
    (
        VERIFICATION,
        f"may be at most {NUMBER} percentage points above the WER of the reference",
        (100 * max_change("fp32"),),
    ),
    (
        VERIFICATION,
        f"than `fp32` and `fp16` the limit is {NUMBER} points",
        (100 * max_change("w8a8"),),
    ),
    (
        VERIFICATION,
        f"error rate may increase by {NUMBER} percentage points",
        (100 * max_change("w8a8"),),
    ),
    (
        "docs/explanation/third-party-programs.md",
        f"a cosine of at least {NUMBER}, an SQNR of at least {NUMBER} dB, and no error above {NUMBER} of",
        (
            REWRITTEN["float32"].min_cosine,
            REWRITTEN["float32"].min_sqnr_db,
            REWRITTEN["float32"].max_relative,
        ),
    ),
    (f"{HOW_TO}/compare-two-programs.md", rf"\({NUMBER} dB for a quantized program\)", (W8A8,)),
    (f"{HOW_TO}/ethos-u85.md", f"`prefill_4` 7.1 dB; the limit is {NUMBER} dB", (W8A8,)),
    (f"{HOW_TO}/raspberry-pi-hailo.md", f"from it, if it has at least {NUMBER} dB", (FLOOR_DB,)),
    (
        f"{HOW_TO}/mediatek-genio.md",
        f"which is rejected, because the limit is {NUMBER} dB",
        (FLOOR_DB,),
    ),
    ("docs/reference/targets/litert.md", f"`export` requires {NUMBER} dB", (FLOOR_DB,)),
)


def _text(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def _rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table whose first heading is `heading`."""
    after = (ROOT / page).read_text(encoding="utf-8").partition(f"\n| {heading} |")[2]
    lines = after.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(("page", "sentence", "limits"), STATED)
def test_the_limits_of_a_sentence_are_those_of_the_code(page, sentence, limits):
    # given the sentence on its page
    found = re.search(sentence, _text(page))
    # when its numbers are read
    assert found, sentence
    # then they are the limits
    assert [float(number) for number in found.groups()] == pytest.approx(limits)


def test_the_limits_for_the_vendor_are_those_of_a_verification():
    # given the table of the page
    rows = _rows(f"{HOW_TO}/mediatek-genio.md", "Precision of the encoder")
    # when the limits of an encoder are written in its form
    expected = []
    for precision in ("fp32", "fp16", "w8a16", "w8a8"):
        gate = limit_of(precision, None, encoder=True)
        expected.append(
            (
                precision,
                f"{gate.min_sqnr_db:g} dB",
                "no limit" if gate.min_cosine == -1 else f"{gate.min_cosine:g}",
                "no limit" if math.isinf(gate.max_relative) else f"{gate.max_relative:g}",
                f"{100 * max_change(precision):g} points",
            )
        )
    # then the table is the same
    assert [(row[0].split("`")[1], *row[1:]) for row in rows] == expected


def test_the_margins_against_torch_are_those_of_the_code():
    # given the table of the page, without the row of the precision that has no margin
    rows = _rows(VERIFICATION, "Precision")
    # when its margins are read by precision
    stated = {
        precision: float(row[1].removesuffix(" dB"))
        for row in rows
        for precision in re.findall(r"`(\w+)`", row[0])
        if row[1] != "none"
    }
    # then they are those of the code
    assert stated == MARGINS_DB
