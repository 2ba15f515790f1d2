"""The diagnosis on generated cases: precision and recall, on the embedded model and on random ones."""

from collections import Counter

import pytest

from whisperport.verification.diagnosis.causes import CauseCode

from ...extent import core_or_all
from .cases import Case, draw, one
from .evaluation import CODES, Outcome, Score, evaluate
from .faults import FAULTS
from .package import answer

SEED = 5
NUMBERS = core_or_all(range(14, len(FAULTS), 4), range(1000))
WORLDS: tuple[str, ...] = core_or_all(("random-32", "random-32", "random-96"), ())
NEEDED = core_or_all(0.95, 0.98)  # of precision and recall
FEWEST_CAUSES = 16  # that must be named on random models, and on the embedded one

# Cases that an earlier diagnosis missed: what they show -> kinds of mistakes.
MISSED: dict[str, tuple[str, ...]] = {
    "the signedness of 32 values": ("other signedness",),
    "clipped heads in another order": ("range too small", "blocks reordered"),
    "heads of another clip in another order": ("other clip", "blocks reordered"),
    "zeros at the end of a short float": ("half precision", "zeros at the end"),
    "a file of float16 that was cut": ("half precision", "file cut"),
}

# Mistakes that are found without running the encoder on wrong spectrograms, which takes seconds.
WITHOUT_ENCODER = (
    "frames shifted",
    "blocks reordered",
    "not dequantized",
    "zero point not subtracted",
    "wrong scale",
    "axes permuted",
    "axis padded",
    "channels in tiles",
    "zeros at the end",
    "constant",
    "not finite",
    "half precision",
    "double precision",
    "big endian",
    "bytes as numbers",
    "header",
    "file cut",
)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [evaluate(one(SEED, number, worlds=WORLDS), answer) for number in NUMBERS]


def _described(outcomes: list[Outcome]) -> str:
    """Return the cases that were not named exactly, one in a line."""
    return "\n".join(
        f"{o.case.number} {o.case.plan.world} {o.case.kinds}: {sorted(o.right)} was named "
        f"{sorted(o.answer.causes)}{', passed' if o.answer.passed else ''}"
        for o in outcomes
        if not o.exact
    )


def test_every_label_is_a_cause_and_every_cause_has_cases() -> None:
    # given the labels of all mistakes
    labels = {fault.label for fault in FAULTS.values()}
    # when they are translated to the package's names
    # then each has a name, and each name has a mistake
    assert labels == set(CODES)
    assert set(CODES.values()) == {cause.value for cause in CauseCode}


def test_causes_are_named_precisely_and_completely(outcomes: list[Outcome]) -> None:
    # given cases of all kinds, a third with two mistakes
    # when they are counted
    score = Score.of(outcomes)
    # then both shares are large enough
    assert score.cases == len(NUMBERS)
    assert score.precision >= NEEDED, _described(outcomes)
    assert score.recall >= NEEDED, _described(outcomes)


def test_single_mistakes_are_named_precisely_and_completely(outcomes: list[Outcome]) -> None:
    # given the cases with at most one mistake
    single = [outcome for outcome in outcomes if len(outcome.case.kinds) < 2]
    # when they are counted
    score = Score.of(single)
    # then both shares are large enough
    assert score.precision >= NEEDED, _described(single)
    assert score.recall >= NEEDED, _described(single)


def test_a_file_passes_only_if_nothing_is_wrong_with_it(outcomes: list[Outcome]) -> None:
    # given the cases
    passed = Counter((bool(o.case.labels), o.answer.passed) for o in outcomes)
    # when those that passed are compared with those without a visible mistake
    # then they are the same
    assert passed[True, True] == 0, _described(outcomes)
    assert passed[False, False] == 0, _described(outcomes)
    assert passed[False, True] > 0


@pytest.mark.parametrize("model", ["random-32", "embedded"])
def test_many_causes_are_named(model: str) -> None:
    # given one case of each mistake with the output of the model's encoder
    cases = [_of_encoder(kind, i, model) for i, kind in enumerate(WITHOUT_ENCODER)]
    # when they are diagnosed
    outcomes = [evaluate(case, answer) for case in cases]
    # then every one is named, alone
    assert all(outcome.exact for outcome in outcomes), _described(outcomes)
    assert len({cause for outcome in outcomes for cause in outcome.found}) >= FEWEST_CAUSES


@pytest.mark.usefixtures("outlier_model")
@pytest.mark.parametrize("kind", core_or_all(WITHOUT_ENCODER[::6], WITHOUT_ENCODER))
def test_a_cause_is_named_on_a_checkpoint_with_massive_activations(kind: str) -> None:
    # given the output of its encoder with one mistake
    case = _of_encoder(kind, 0, "outlier")
    # when it is diagnosed
    outcome = evaluate(case, answer)
    # then the cause is named, and no other
    assert outcome.exact, _described([outcome])


@pytest.mark.parametrize("shown", MISSED)
def test_a_case_that_was_missed_once_is_named_exactly(shown: str) -> None:
    # given a case of the kind that an earlier diagnosis did not name
    case = draw(6, 0, worlds=("random-32",), kinds=MISSED[shown])
    # when it is diagnosed
    outcome = evaluate(case, answer)
    # then all of its causes are named, and no other
    assert case.labels
    assert outcome.exact, _described([outcome])


@pytest.mark.parametrize("storage", ["float32", "float16", "int8", "uint8"])
def test_an_output_without_a_mistake_passes(storage: str) -> None:
    # given an output that was computed without a mistake
    number = 0
    while (case := draw(9, number, worlds=("embedded",), kinds=("clean",))).plan.storage != storage:
        number += 1
    # when it is diagnosed
    found = answer(case)
    # then it passes, and nothing is named
    assert found.passed
    assert not found.causes


def _of_encoder(kind: str, number: int, model: str) -> Case:
    """Return a case of the encoder's first clip whose mistake can be seen."""
    for attempt in range(200):
        case = draw(4, 1000 * number + attempt, worlds=(model,), kinds=(kind,))
        if case.labels and case.plan.program == "encoder" and case.plan.clip == 0:
            return case
    raise AssertionError(kind)
