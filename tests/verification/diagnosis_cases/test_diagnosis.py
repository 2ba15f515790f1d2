"""The diagnosis on generated cases: precision and recall, on the embedded model and on random ones.

Files of 1,152,000 and 4,608,000 bytes are the outputs of an encoder of Whisper small in int8 and float32. A
bundle of Whisper small takes minutes to make: these tests use the embedded bundle with the sizes of Whisper
small, and random features, and run no program.
"""

import ast
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from whisperport.program.bundle import MANIFEST, SILENCE, Bundle, FileEntry
from whisperport.program.bundle.folder import file_sha256
from whisperport.program.signatures import expected_signature
from whisperport.verification.diagnosis.causes import CauseCode
from whisperport.verification.diagnosis.diagnosing import diagnose
from whisperport.verification.diagnosis.result import Diagnosis

from ...embedded import default_bundle
from ...extent import core_or_all
from .cases import CLEAN_SHARE, GATE_DB, PAIR_SHARE, Case, draw, is_within, one
from .device import INTEGERS
from .evaluation import CODES, Outcome, Score, answer, evaluate
from .faults import FAULTS
from .whisper import Spectrogram
from .worlds import CLIPS, Input, world

# The diagnosis on generated cases: precision and recall, on the embedded model and on random ones.

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


@pytest.mark.parametrize("model", core_or_all(["random-32"], ["random-32", "embedded"]))
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


# The cases themselves: their labels are true, and nothing of the package makes them.

GENERATED_SEED = 1
COUNT = core_or_all(40, 1000)
GENERATED_WORLDS: tuple[str, ...] = core_or_all(("random-32", "random-64", "random-96"), ())
_RANDOM = (("random-64", "random-72", "random-96"),)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [one(GENERATED_SEED, number, worlds=GENERATED_WORLDS) for number in range(COUNT)]


def _sqnr(true: np.ndarray, found: np.ndarray) -> float:
    noise = float(np.sum((true.astype(np.float64) - found) ** 2))
    signal = float(np.sum(true.astype(np.float64) ** 2))
    return 10 * float(np.log10(signal / noise)) if noise else float("inf")


def test_the_generator_shares_no_code_with_the_package() -> None:
    # given every module that makes cases
    modules = ("whisper", "worlds", "device", "faults", "cases")
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
        again = one(case.seed, case.number, worlds=GENERATED_WORLDS)
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
            # then the error, or the largest one, is larger than the tolerance
            assert not is_within(case.true.reshape(-1), values, case.precision), case.kinds


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


INT8_BYTES, FLOAT32_BYTES = 1_152_000, 4_608_000
T, WIDTH = 1500, 768


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle with the sizes of Whisper small."""
    folder = tmp_path_factory.mktemp("small") / "bundle"
    shutil.copytree(default_bundle(), folder)
    manifest = Bundle.open(default_bundle()).manifest
    sizes = {"n_audio_state": WIDTH, "n_text_state": WIDTH, "n_audio_head": 12, "n_text_head": 12}
    dims = replace(manifest.dims, **sizes, n_audio_ffn=4 * WIDTH, n_text_ffn=4 * WIDTH)
    changed = ["reference.npz", "embedding.npy", "positions.npy"]
    for name in changed[1:]:
        old = np.load(folder / name, mmap_mode="r")
        rows, dtype = old.shape[0], old.dtype
        (folder / name).unlink()
        np.lib.format.open_memmap(folder / name, "w+", dtype, (rows, WIDTH)).flush()
    _write_features(folder / changed[0])
    files = {name: _entry(folder / name) for name in changed}
    programs = tuple(
        replace(entry, spec=expected_signature(entry.spec, dims, None, _heads(entry.spec)))
        for entry in manifest.programs
    )
    (folder / SILENCE).unlink()
    kept = {name: entry for name, entry in manifest.files.items() if name != SILENCE}
    made = replace(
        manifest,
        name="small",
        dims=dims,
        programs=programs,
        files={**kept, **files},
        short_windows=None,
    )
    (folder / MANIFEST).write_bytes(made.to_bytes())
    return Bundle.open(folder)


def _write_features(path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = dict(np.load(path))
    for name in [name for name in arrays if name.startswith("features_")]:
        rows = len(arrays[name])
        channels = random.uniform(0.5, 3, WIDTH)
        arrays[name] = (channels * random.standard_normal((rows, WIDTH))).astype(np.float32)
    np.savez(path, **arrays)


def _entry(path: Path) -> FileEntry:
    return FileEntry(file_sha256(path), path.stat().st_size)


def _heads(spec: object) -> int:
    shapes = {tensor.name: tensor.shape for tensor in spec.outputs}  # type: ignore[attr-defined]
    return shapes["scores"][0] if "scores" in shapes else 0


@pytest.fixture(scope="module")
def int8_file(small: Bundle, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A file of 1.2 MB with the features in int8, and their scale; do not write to it."""
    path = tmp_path_factory.mktemp("int8") / "output.bin"
    values, scale = _in_int8(_features(small))
    values.tofile(path)
    return path, scale


@pytest.fixture(scope="module")
def int8_diagnosis(small: Bundle, int8_file: tuple[Path, float]) -> Diagnosis:
    """The diagnosis of this file."""
    return diagnose(small, int8_file[0])


def _features(bundle: Bundle) -> np.ndarray:
    return np.asarray(bundle.reference()["features_0"])


def _in_int8(x: np.ndarray) -> tuple[np.ndarray, float]:
    scale = float(np.abs(x).max()) / 127
    return np.clip(np.rint(x / scale), -128, 127).astype(np.int8), scale


def test_the_small_file_is_the_output_in_int8(
    int8_file: tuple[Path, float], int8_diagnosis: Diagnosis
) -> None:
    # given a file of 1.2 MB with the features in int8
    path, scale = int8_file
    assert path.stat().st_size == INT8_BYTES
    # when it is diagnosed
    found = int8_diagnosis
    # then it is named, and its scale is found
    (finding,) = found.outputs[0].findings
    assert finding.cause is CauseCode.INTEGERS_READ_AS_FLOATS
    assert "int8" in finding.sentence
    assert found.outputs[0].after
    assert f"{scale:.3f}" in found.outputs[0].fix


def test_the_fix_of_the_small_file_restores_the_features(
    small: Bundle,
    int8_file: tuple[Path, float],
    int8_diagnosis: Diagnosis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # given a file of 1.2 MB with the features in int8, and its diagnosis
    path, scale = int8_file
    fix = int8_diagnosis.outputs[0].fix
    # when the printed numpy program runs in the folder of a copy of the file
    shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(fix, "fix", "exec"), {})
    # then its file holds the features within one step of the integers
    restored = np.fromfile(tmp_path / "corrected.bin", np.float32).reshape(T, WIDTH)
    assert np.abs(restored - _features(small)).max() <= 0.51 * scale


def test_the_command_line_explains_the_small_file(
    small: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a file of 1.2 MB with the features in int8
    path = tmp_path / "output.bin"
    values, _ = _in_int8(_features(small))
    values.tofile(path)
    # when `whisperport diagnose` is called with it
    code, printed = _diagnose(capsys, small.folder, path)
    # then the exit status is 1, and dtype, size and scale are printed
    assert code == 1
    assert "1,152,000 bytes; expected 4,608,000" in printed
    assert "integers-read-as-floats" in printed
    assert "int8" in printed
    assert "corrected: SQNR" in printed


def test_the_command_line_passes_the_large_file(
    small: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a file of 4.6 MB with the features in float32
    path = tmp_path / "output.bin"
    _features(small).tofile(path)
    # when `whisperport diagnose` is called with it
    code, printed = _diagnose(capsys, small.folder, path)
    # then it passes
    assert code == 0
    assert "encoder, clip 01-espeak.wav: pass" in printed


def test_the_command_line_passes_the_small_file_if_its_quantization_is_stated(
    small: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a file of 1.2 MB with the features in int8, and a file that says so
    path, stated = tmp_path / "output.bin", tmp_path / "quantization.json"
    values, scale = _in_int8(_features(small))
    values.tofile(path)
    stated.write_text(json.dumps({"features": {"dtype": "int8", "scale": scale, "zero_point": 0}}))
    options = ("--quantization", stated, "--device-precision", "w8a8")
    # when `whisperport diagnose` is called with both
    code, printed = _diagnose(capsys, small.folder, path, *options)
    # then it passes
    assert code == 0, printed


def _diagnose(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Call `whisperport diagnose`; return its exit status and what it printed."""
    from whisperport.apps.cli.main import cli

    capsys.readouterr()
    code = 0
    try:
        cli(["diagnose", *map(str, arguments)], prog_name="whisperport", standalone_mode=False)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    captured = capsys.readouterr()
    return code, captured.out + captured.err
