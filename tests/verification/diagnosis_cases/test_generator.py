"""The cases themselves: their labels are true, and nothing of the package makes them."""

import ast
from pathlib import Path

import numpy as np
import pytest

from ...embedded import default_bundle
from ...extent import core_or_all
from .cases import CLEAN_SHARE, GATE_DB, PAIR_SHARE, Case, draw, one
from .device import INTEGERS
from .faults import FAULTS
from .spectrogram import Spectrogram
from .worlds import CLIPS, Input, world

SEED = 1
COUNT = core_or_all(40, 1000)
WORLDS: tuple[str, ...] = core_or_all(("random-32", "random-64", "random-96"), ())
_RANDOM = (("random-64", "random-72", "random-96"),)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [one(SEED, number, worlds=WORLDS) for number in range(COUNT)]


def _sqnr(true: np.ndarray, found: np.ndarray) -> float:
    noise = float(np.sum((true.astype(np.float64) - found) ** 2))
    signal = float(np.sum(true.astype(np.float64) ** 2))
    return 10 * float(np.log10(signal / noise)) if noise else float("inf")


def test_the_generator_shares_no_code_with_the_package() -> None:
    # given every module that makes cases
    modules = ("whisper", "spectrogram", "worlds", "device", "faults", "cases")
    # when their imports are read
    imported = set()
    for name in modules:
        tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                imported.add("." * node.level + (node.module or ""))
    # then they are numpy, the standard library, and each other
    assert not [name for name in imported if name.split(".")[0] == "whisperport"]
    assert {name for name in imported if name.startswith(".")} <= {f".{name}" for name in modules}


def test_the_numpy_model_computes_the_features_of_the_embedded_model() -> None:
    # given the reference that torch computed
    stored = np.load(default_bundle() / "reference.npz")
    # when the generator computes the same clip
    found = world("embedded").outputs("encoder", Input(0))["features"][0]
    # then float32's order of summation is the only difference
    assert _sqnr(stored["features_0"], found) > 100


def test_the_numpy_model_computes_the_logits_of_the_embedded_model() -> None:
    # given the logits that torch computed after the prompt
    stored = np.load(default_bundle() / "reference.npz")
    assert [*stored["prompt_1"]] == [50258, 50259, 50359, 50363]
    # when the generator runs its prefill
    found = world("embedded").outputs("prefill_4", Input(1))["logits"][1]
    # then both agree
    assert _sqnr(stored["logits_1"][0], found) > 80


@pytest.mark.parametrize("bins", [80, 128])
def test_the_spectrogram_without_mistakes_is_that_of_the_package(bins: int) -> None:
    # given a clip
    from whisperport.speech.audio import log_mel

    samples = world("embedded").clips[2]
    # when both compute its spectrogram
    found = Spectrogram().of(samples, bins, 1000)
    # then both agree
    assert _sqnr(log_mel(samples[:160_000], bins, n_frames=1000), found) > 100


def test_a_case_is_the_same_for_the_same_seed(cases: list[Case]) -> None:
    # given a few cases
    for case in cases[::17]:
        # when they are drawn again
        again = one(case.seed, case.number, worlds=WORLDS)
        # then bytes and labels are the same
        assert (again.file, again.labels, again.plan) == (case.file, case.labels, case.plan)


@pytest.mark.parametrize("kind", FAULTS)
def test_every_kind_of_mistake_occurs_and_can_be_seen(kind: str) -> None:
    # given one kind of mistake
    for worlds in core_or_all(_RANDOM, (*_RANDOM, ("embedded",))):
        # when cases of this kind are drawn
        found = [draw(2, number, worlds=worlds, kinds=(kind,)) for number in range(4)]
        # then it can be seen in at least one, and nothing else can
        assert {label for case in found for label in case.labels} == {FAULTS[kind].label}


def test_a_file_without_a_visible_mistake_holds_the_expected_output(cases: list[Case]) -> None:
    # given the cases without labels
    clean = [case for case in cases if not case.labels]
    # when their numbers are compared with the expected output
    # then they are within the tolerance of their precision
    assert all(case.sqnr_db > GATE_DB[case.precision] for case in clean)
    # and the bytes of those that were made without a mistake are the expected output
    for case in (case for case in clean if not case.kinds):
        values = np.frombuffer(case.file, "<f4").astype(np.float64)
        assert _sqnr(case.true.reshape(-1), values) > GATE_DB[case.precision]
    assert len(clean) >= COUNT * CLEAN_SHARE / 2


def test_a_file_with_a_visible_mistake_does_not_hold_the_expected_output(
    cases: list[Case],
) -> None:
    # given the cases with labels
    for case in (case for case in cases if case.labels):
        right = case.true.size * 4
        if len(case.file) != right:
            continue
        # when the file is read as float32
        with np.errstate(all="ignore"):
            values = np.frombuffer(case.file, "<f4").astype(np.float64)
            # then the error is larger than the tolerance
            assert not _sqnr(case.true.reshape(-1), values) > GATE_DB[case.precision], case.kinds


def test_a_third_of_the_cases_has_two_mistakes(cases: list[Case]) -> None:
    # given the cases
    pairs = [case for case in cases if len(case.kinds) == 2]
    # when they are counted
    share = len(pairs) / len(cases)
    # then a third was drawn with two, and in most of them both can be seen
    assert abs(share - PAIR_SHARE) < 0.12
    assert sum(len(case.labels) == 2 for case in pairs) > 0.85 * len(pairs)


def test_integers_are_stored_with_the_range_of_all_clips(cases: list[Case]) -> None:
    # given the cases whose device stores integers, without a mistake
    stored = [c for c in cases if c.plan.storage in INTEGERS and not c.labels]
    # when all clips are considered
    assert stored
    # then the quantization keeps at least 18 dB
    assert all(c.sqnr_db > 18 for c in stored if np.isfinite(c.sqnr_db) and not c.kinds)
    assert len(world("embedded").clips) == CLIPS
