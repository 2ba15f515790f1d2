"""Export: a verified bundle is written, or nothing; a rejection says which words a precision costs."""

import errno
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from whisperport.build.export import drafting, placing
from whisperport.build.export import export as module
from whisperport.build.export.export import export, not_verified
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.export.placing import place_programs
from whisperport.errors import (
    BundleError,
    CheckpointError,
    LoweringError,
    UsageError,
    VerificationError,
)
from whisperport.model.trace import variants
from whisperport.model.trace.whisper import Parts
from whisperport.program.bundle import Bundle
from whisperport.program.checks import Check
from whisperport.program.window import WindowOptions
from whisperport.runtime import load_engine
from whisperport.system.progress import reporting
from whisperport.targets import TARGETS, RunOptions, get_target
from whisperport.verification import LEVELS, Report
from whisperport.verification.alignment_heads import with_alignment_heads
from whisperport.verification.bundle_check import verify
from whisperport.verification.clips import Clip
from whisperport.verification.eager import EagerRunner
from whisperport.verification.reference import Reference, ReferenceClip

from ...extent import EVERYTHING
from ...micro import whisper_dims
from ...shared_exports import SharedExports

ONE_THREAD = RunOptions(threads=1)


def noise(seed: int, seconds: float) -> np.ndarray:
    samples = 0.1 * np.random.default_rng(seed).standard_normal(round(16_000 * seconds))
    return samples.astype(np.float32)


CLIPS = (Clip("hiss", "so they say", noise(0, 0.1)), Clip("more hiss", "", noise(1, 0.2)))
OPTIONS = ExportOptions(clips=CLIPS, run=ONE_THREAD)


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


# With the real compilers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", [target.spec.name for target in TARGETS if not target.spec.runs.fallback]
)
def test_a_bundle_is_complete_and_verified(target: str, exported: SharedExports) -> None:
    bundle, checkpoint = Bundle.open(exported(target).folder), exported.checkpoint(target)

    manifest, report = bundle.manifest, Report.from_json(bundle.manifest.verification)
    assert manifest.verified
    assert report
    assert {check.level for check in report.checks} == set(LEVELS)
    assert manifest.dims == checkpoint.dims
    assert manifest.source["sha256"] == dict(checkpoint.source.sha256)
    assert {entry.target for entry in manifest.programs} == {target}
    spec = get_target(target).spec
    runtime = spec.software.emulation_runtime or spec.software.runtime
    assert {"torch", "whisperport", runtime} <= set(manifest.versions)
    assert bundle.embedding().shape == (51865, 64)
    assert set(manifest.rewrites) == {entry.spec.name for entry in manifest.programs}


def test_the_packages_of_a_bundle_are_those_of_its_targets() -> None:
    every = {"whisperport", "torch", "onnx", "onnxscript", "numpy"}

    assert set(drafting.build_packages(["xnnpack"])) == every | {"executorch"}
    assert set(drafting.build_packages(["hailo8l", "onnxruntime"])) == every | {"onnxruntime"}
    # The converter and the quantizer of .tflite files are packages of another target's spec.
    tflite = {"litert-torch", "ai-edge-quantizer", "tflite", "ai-edge-litert"}
    assert set(drafting.build_packages(["genio720"])) == every | tflite


# In the core, an encoder for a chip and the rest on the CPU: hailo/test_hybrid_bundle.py.
@pytest.mark.skipif(not EVERYTHING, reason="an export takes 10 s; see `make test-all`")
def test_the_encoder_on_one_target_and_the_rest_on_another(
    micro_checkpoint: Any, quick_tracing: None, tmp_path: Path
) -> None:
    options = replace(OPTIONS, placement={"encoder": "xnnpack"})

    bundle = export(micro_checkpoint, "onnxruntime", tmp_path / "hybrid", options)

    placed = {entry.spec.name: entry.target for entry in bundle.manifest.programs}
    assert placed.pop("encoder") == "xnnpack"
    assert set(placed.values()) == {"onnxruntime"}
    assert bundle.manifest.verified
    assert verify(tmp_path / "hybrid", run=ONE_THREAD)
    assert load_engine(bundle, ONE_THREAD).encode(np.zeros((8, 20), np.float32)).shape == (10, 16)


# With a target that compiles nothing --------------------------------------------------------------


@pytest.fixture
def write(
    micro_checkpoint: Any, fake_targets: Any, quick_tracing: None, tmp_path: Path
) -> Callable[..., Bundle]:
    """`write(options)`: export the micro checkpoint to tmp_path/"bundle"."""

    def write(options: ExportOptions = OPTIONS) -> Bundle:
        return export(micro_checkpoint, "fake", tmp_path / "bundle", options)

    return write


def test_every_stage_is_reported(write: Any) -> None:
    stages: list[str] = []

    with reporting(stages.append):
        write()

    for word in (
        "torch",
        "traced encoder",
        "rewriting step",
        "align to fake",
        "comparing",
        "moving the bundle",
    ):
        assert any(word in stage for stage in stages), word


def test_a_checkpoint_that_knows_no_english_is_verified_in_what_it_knows(
    micro_checkpoint: Any,
    fake_targets: Any,
    quick_tracing: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting, "shipped_clips", lambda: CLIPS)
    german = replace(micro_checkpoint.generation, languages={"de": 52})

    bundle = export(
        replace(micro_checkpoint, generation=german),
        "fake",
        tmp_path / "bundle",
        ExportOptions(run=ONE_THREAD),
    )

    assert bundle.manifest.verified


def test_a_checkpoint_without_alignment_heads_gets_the_upper_half(write: Any) -> None:
    assert write().manifest.generation.alignment_heads == ((1, 0), (1, 1))


def test_alignment_heads_of_the_checkpoint_are_kept(micro_checkpoint: Any) -> None:
    generation = replace(micro_checkpoint.generation, alignment_heads=((0, 1),))

    assert with_alignment_heads(generation, micro_checkpoint.dims) is generation


def scaled(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: array * np.float32(factor)


def spoiled(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flat[0] = np.nan
    return array


WRONG = {
    "features a percent too large": {"encoder": {"features": scaled(1.01)}},
    "one NaN among the features": {"encoder": {"features": spoiled}},
    "cross-attention values of layer 1": {"cross_kv": {"cross_v_1": scaled(0.9)}},
    "logits of a step": {"step": {"logits": scaled(0.98)}},
    "new keys of a step": {"step": {"new_k_0": scaled(0.5)}},
    "new values of a prompt": {"prefill_4": {"new_v_1": scaled(-1)}},
    "the longer prompt": {"prefill_64": {"logits": scaled(1.01)}},
    "rows of words' times": {"align": {"rows": scaled(1.01)}},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_program_is_found_and_nothing_is_written(
    wrong: Any, write: Any, fake_targets: Any, tmp_path: Path
) -> None:
    fake_targets["fake"].wrong = wrong

    with pytest.raises(VerificationError) as rejected:
        write()

    assert rejected.value.why
    assert "--allow-unverified" in rejected.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_rejection_by_words_reads_the_checkpoint_once(
    micro_checkpoint: Any,
    fake_targets: Any,
    quick_tracing: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    # given: arrays that are wrong, words that show no loss, and a checkpoint that is given by its name
    import whisperport.model.checkpoint

    reads: list[object] = []
    monkeypatch.setattr(
        whisperport.model.checkpoint,
        "load_checkpoint",
        lambda source, **_: reads.append(source) or micro_checkpoint,
    )
    counts: list[int | None] = []

    def clips(count: int | None = len(CLIPS)) -> list[Clip]:
        counts.append(count)
        return CLIPS if count else [*CLIPS, *CLIPS, *CLIPS, *CLIPS]

    monkeypatch.setattr(drafting, "shipped_clips", clips)
    target = fake_targets["fake"]
    target.spec = replace(target.spec, runs=replace(target.spec.runs, precisions=("w8",)))
    target.wrong = {"align": {"rows": scaled(1.2)}}

    # when
    with pytest.raises(VerificationError):
        export("micro.pt", "fake", tmp_path / "bundle", replace(OPTIONS, clips=None))

    # then: the further clips ran in the model that was read first
    assert reads == ["micro.pt"]
    assert counts == [len(CLIPS), None]


@pytest.fixture
def with_length(
    micro: Any, fake_targets: Any, quick_tracing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let exports with `windows` have one of 4 positions: the micro model has less than 1 s."""
    parts = Parts(micro, [(0, 0)])
    short = {p.name: p for p in variants.untraced_programs(parts, ["encoder_4", "cross_kv_4"])}
    runners = {name: EagerRunner(program) for name, program in short.items()}
    traced = variants.whisper_programs
    monkeypatch.setattr(
        variants,
        "whisper_programs",
        lambda parts, names, *rest: (
            short[name].traced() if name in short else next(iter(traced(parts, [name], *rest)))
            for name in names
        ),
    )
    monkeypatch.setattr(placing, "shorter_lengths", lambda seconds: (4,) if seconds else ())
    fake_targets["fake"].runners = {**fake_targets["fake"].runners, **runners}


def test_programs_for_a_length_are_verified_and_run_if_short_windows_are_on(
    with_length: None, write: Any, tmp_path: Path
) -> None:
    bundle = write(replace(OPTIONS, windows=(1.0,)))

    manifest = bundle.manifest
    assert manifest.lengths == (4,)
    assert manifest.verified
    assert manifest.short_windows is None  # no clip is as short
    checks = {check.program for record in manifest.evidence("encoder_4") for check in record.checks}
    assert "encoder_4" in checks
    assert manifest.status("cross_kv_4") == "run here"
    short, full = (
        load_engine(bundle, replace(ONE_THREAD, short_windows=on)) for on in (True, None)
    )
    assert short.short_windows is not None
    assert short.short_windows.positions == (4,)
    assert full.short_windows is None
    assert short.encode(np.zeros((8, 8), np.float32)).shape == (4, 16)
    with pytest.raises(ValueError, match="mel"):
        full.encode(np.zeros((8, 8), np.float32))


@pytest.mark.parametrize(
    "wrong",
    [{"encoder_4": {"features": scaled(1.01)}}, {"cross_kv_4": {"cross_k_1": scaled(1.01)}}],
)
def test_a_wrong_program_for_a_length_is_found_and_nothing_is_written(
    wrong: Any, with_length: None, write: Any, fake_targets: Any, tmp_path: Path
) -> None:
    fake_targets["fake"].wrong = wrong

    with pytest.raises(VerificationError, match="does not agree"):
        write(replace(OPTIONS, windows=(1.0,)))

    assert list(tmp_path.iterdir()) == []


def test_a_length_that_the_checkpoints_window_does_not_exceed_is_refused(
    write: Any, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="cannot have 1 s") as refused:
        write(replace(OPTIONS, windows=(1.0,)))

    assert "0.2 s" in refused.value.why
    assert list(tmp_path.iterdir()) == []


def test_lengths_are_refused_where_the_longest_window_is_short() -> None:
    window = WindowOptions(seconds=10.0).of(whisper_dims(384, 4))
    placed = place_programs("hailo8l", replace(OPTIONS, windows=(5.0,)))

    with pytest.raises(UsageError, match="longest window of 10 s"):
        drafting._check_lengths(placed, window, whisper_dims(384, 4))


# Functions of the outputs of two rows of a batch.
WRONG_BATCH = {
    "logits of the second row": {"logits": lambda rows: rows * np.float32([[1], [0.98]])},
    "logits of the first row in both": {"logits": lambda rows: rows[[0, 0]]},
    "new keys of the other row": {"new_k_0": lambda heads: np.roll(heads, len(heads) // 2, axis=0)},
    "new values": {"new_v_1": scaled(-1)},
}


@pytest.mark.parametrize("wrong", WRONG_BATCH.values(), ids=WRONG_BATCH)
def test_a_wrong_batch_step_is_found_and_nothing_is_written(
    wrong: Any, write: Any, fake_targets: Any, tmp_path: Path
) -> None:
    fake_targets["fake"].wrong = {"step_2": wrong}

    with pytest.raises(VerificationError, match="does not agree") as rejected:
        write(replace(OPTIONS, batch=2))

    assert "step_2" in str(rejected.value)
    assert list(tmp_path.iterdir()) == []


def test_a_batch_step_is_verified_with_every_clip_and_that_is_its_evidence(write: Any) -> None:
    manifest = write(replace(OPTIONS, batch=2)).manifest

    evidence = {entry.spec.name: entry.evidence[0].checks for entry in manifest.programs}
    own = [check for check in evidence["step_2"] if check.program == "step_2"]
    assert [check.what for check in own] == [clip.name for clip in CLIPS]
    assert evidence["step_2"] == tuple(own)  # the other checks did not run it
    assert all(check in evidence["cross_kv"] for check in own)
    assert not any(check in evidence["step"] for check in own)


def test_a_batch_step_is_placed_as_the_step_is_unless_it_is_placed_itself() -> None:
    on_litert = ExportOptions(batch=4, placement={"step": "litert"}, precisions={"step": "w8"})
    apart = replace(on_litert, placement={"step": "litert", "step_4": "onnxruntime"}, precisions={})

    placed = place_programs("onnxruntime", on_litert).placements
    other = place_programs("onnxruntime", apart).placements

    assert placed["step_4"] == placed["step"]
    assert other["step_4"].target == "onnxruntime"
    assert (
        "step_4"
        not in place_programs("onnxruntime", replace(apart, batch=1, placement={})).placements
    )


@pytest.mark.parametrize("batch", [0, 3, 32])
def test_a_batch_of_another_size_is_rejected(batch: int, write: Any) -> None:
    with pytest.raises(UsageError, match="1 or one of 2, 4, 8, 16"):
        write(replace(OPTIONS, batch=batch))


def test_a_wrong_program_leaves_the_bundle_that_was_there(
    write: Any, fake_targets: Any, tmp_path: Path
) -> None:
    write()
    before = contents(tmp_path / "bundle")
    fake_targets["fake"].wrong = WRONG["logits of a step"]

    with pytest.raises(VerificationError):
        write()

    assert contents(tmp_path / "bundle") == before
    assert verify(tmp_path / "bundle", run=ONE_THREAD).checks
    assert list(tmp_path.iterdir()) == [tmp_path / "bundle"]


def test_an_unverified_bundle_says_so_for_ever(
    write: Any, fake_targets: Any, tmp_path: Path
) -> None:
    fake_targets["fake"].wrong = WRONG["logits of a step"]

    write(replace(OPTIONS, allow_unverified=True))

    manifest = Bundle.open(tmp_path / "bundle").manifest
    assert not manifest.verified
    assert not Report.from_json(manifest.verification)


def test_allowing_the_unverified_does_not_unverify_a_good_one(write: Any) -> None:
    assert write(replace(OPTIONS, allow_unverified=True)).manifest.verified


def test_no_clips_at_all_verify_nothing(write: Any, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="does not agree"):
        write(replace(OPTIONS, clips=()))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "place", "words"),
    [
        ("hailo9000", {}, "hailo9000"),
        ("fake", {"encoder": "hailo9000"}, "hailo9000"),
        ("fake", {"decoder": "other"}, "no program `decoder`"),
    ],
)
def test_unknown_names_are_rejected_before_any_work(
    micro_checkpoint: Any,
    fake_targets: Any,
    tmp_path: Path,
    target: str,
    place: dict[str, str],
    words: str,
) -> None:
    stages: list[str] = []

    with pytest.raises(UsageError, match=words), reporting(stages.append):
        export(
            micro_checkpoint,
            target,
            tmp_path / "out",
            replace(OPTIONS, placement=place),
        )

    assert stages == []
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_rejected_before_any_work(
    micro_checkpoint: Any, fake_targets: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    stages: list[str] = []

    with pytest.raises(BundleError, match="not a bundle"), reporting(stages.append):
        export(micro_checkpoint, "fake", tmp_path / "mine", OPTIONS)

    assert stages == []
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_an_interrupt_at_any_stage_leaves_what_was_there(write: Any, tmp_path: Path) -> None:
    stages: list[str] = []
    with reporting(stages.append):
        write()
    before = contents(tmp_path / "bundle")
    assert len(stages) > 20

    for stop in range(len(stages)):
        left = iter(range(stop, -1, -1))

        def interrupt(_: str, left: Any = left) -> None:
            if next(left) == 0:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), reporting(interrupt):
            write()

        assert list(tmp_path.iterdir()) == [tmp_path / "bundle"], stages[stop]
        assert contents(tmp_path / "bundle") == before, stages[stop]


def test_a_full_disk_is_reported_and_leaves_nothing(
    write: Any, fake_targets: Any, tmp_path: Path
) -> None:
    fake_targets["fake"].failure = OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(BundleError, match="disk is full"):
        write()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "failure", [LoweringError("the compiler rejected"), MemoryError(), AssertionError("odd")]
)
def test_a_compiler_that_fails_leaves_nothing(
    write: Any, fake_targets: Any, tmp_path: Path, failure: BaseException
) -> None:
    fake_targets["fake"].failure = failure

    with pytest.raises(type(failure)):
        write()

    assert list(tmp_path.iterdir()) == []


def test_the_checkpoint_is_not_written_to(write: Any, micro_checkpoint: Any) -> None:
    before = {name: weight.clone() for name, weight in micro_checkpoint.weights.items()}

    write()

    assert all(weight.equal(before[name]) for name, weight in micro_checkpoint.weights.items())


def clip(name: str) -> ReferenceClip:
    none = np.empty((0, 4), np.float32)
    return ReferenceClip(name, "so they say", np.zeros(99, np.int16), (1,), (2,), none, none, none)


def words(differ: int, clips: int, *, passed: bool = True) -> Check:
    value = {"words": 9 * clips, "clips": clips, "differ": differ, "change": differ / 9 / clips}
    return Check(
        level="words",
        program="all programs",
        what="word error rate",
        value={**value, "increase_at_most": 1 / 3 / clips},
        rule="",
        passed=passed,
        reason="" if passed else f"{differ} more errors",
    )


ARRAYS = Check(
    level="arrays",
    program="encoder",
    what="clip 0",
    value={"sqnr_db": 5.7},
    rule="",
    passed=False,
    reason="SQNR 5.7 dB is below 10 dB",
)


class Rejected:
    """Rejections of a bundle whose reference has one clip, and how often more clips were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
        self.asked: list[list[str]] = []
        self.found = [words(4, 2, passed=False)]
        monkeypatch.setattr(module, "precisions", lambda *_: {"encoder": precision})
        monkeypatch.setattr(module, "check_words", self.check_words)

    def check_words(self, _: Any, reference: Reference, *__: Any) -> list[Check]:
        self.asked.append([one.name for one in reference.clips])
        return self.found

    def __call__(self, *checks: Check, more: Any = lambda: Reference((clip("further"),), 8)) -> str:
        bundle: Any = SimpleNamespace(
            reference=lambda: Reference((clip("own"),), 8).to_arrays(),
            manifest=SimpleNamespace(programs=()),
        )
        report = Report(subject="", checks=checks)
        return not_verified(Path("out"), report, bundle, RunOptions(), more).why


def test_more_clips_are_transcribed_if_the_words_show_no_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rejected = Rejected(monkeypatch, "w8a8")

    why = rejected(ARRAYS, words(0, 1))

    assert rejected.asked == [["own", "further"]]
    assert "4 more errors" in why.split("\n")[0]
    assert "words: 4 of 18 differ from float32's in 2 clips (WER +22.2 points" in why
    assert "none of 9" not in why


@pytest.mark.parametrize(
    ("precision", "check"), [("w8a8", words(3, 1, passed=False)), ("fp16", words(0, 1))]
)
def test_no_more_clips_where_words_were_lost_or_do_not_decide(
    precision: str, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejected = Rejected(monkeypatch, precision)

    assert "of 9 differ" in rejected(ARRAYS, check)

    assert rejected.asked == []


def test_a_bundle_is_rejected_also_if_more_clips_cannot_be_transcribed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> Reference:
        raise CheckpointError("the file is gone", why="deleted", hint="none")

    rejected = Rejected(monkeypatch, "w8a8")

    assert "none of 9 differs" in rejected(ARRAYS, words(0, 1), more=fail)
    assert "none of 9 differs" in rejected(ARRAYS, words(0, 1), more=None)
