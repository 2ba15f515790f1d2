"""`compile` with a fake of Hailo's compiler in another process, and a fake of its runtime.

Neither SDK nor device was here: both fakes are made of recorded signatures.
"""

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.build.compile.compile import CompileOptions, compile
from whisperport.build.compile.compile_bundle import _output_checks, tokens_of
from whisperport.build.compile.emulating import Emulation, Examples
from whisperport.build.compile.work_folder import MARK, work_folder
from whisperport.errors import (
    AudioError,
    BundleError,
    LoweringError,
    MissingPackageError,
    UsageError,
)
from whisperport.program.bundle import MANIFEST, Bundle
from whisperport.program.bundle.origin import is_trusted
from whisperport.program.bundle.writing import writing_bundle
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.runtime import load_engine, start_tokens
from whisperport.speech.audio import load_audio
from whisperport.system.locking import lock_path, locked
from whisperport.system.progress import reporting
from whisperport.targets import RunOptions
from whisperport.targets.compiler import EmulationNeed
from whisperport.targets.vendors.hailo.target import Hailo
from whisperport.verification import GATES
from whisperport.verification.bundle_check import verify
from whisperport.verification.clips import shipped_audio

from ...conftest import noise_clips
from ...extent import EVERYTHING
from ...targets.vendors.hailo.fake_platform import FakeHef, FakePlatform
from ...targets.vendors.hailo.fake_sdk import KILL, InstalledSdk
from ...targets.vendors.hailo.hef_file import encoder_hef, hef_bytes
from ...wav import write_wav

# `compile` with a fake of Hailo's compiler in another process, and a fake of its runtime.
#
# Neither SDK nor device was here: both fakes are made of recorded signatures.

ROWS = 8
PIECES = (12966, 12966, 12966, 12967)
EMULATED = RunOptions(threads=1, options={"hailo8l.emulate": "on"})


@pytest.fixture
def bundle(exported: Callable[..., Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported("hailo8l").folder, tmp_path / "bundle"))


@pytest.fixture
def full_bundle(exported: Callable[..., Any], tmp_path: Path) -> Path:
    """With `uncached_decoder` of 8 rows."""
    bundle = exported(
        "hailo8l", uncached_decoder=True, options={"hailo8l.sequence-length": str(ROWS)}
    )
    return Path(shutil.copytree(bundle.folder, tmp_path / "bundle"))


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """5 s of speech: two windows, and a rest of 1 s."""
    clip = next(clip.path for clip in shipped_audio() if clip.path.name == "10-ked.mp3")
    return write_wav(tmp_path / "recordings" / "a.wav", load_audio(clip)[: 5 * 16_000]).parent


def _hefs(architecture: int = 3) -> dict[str, bytes]:
    logits = {f"net/conv{i}": (1, ROWS, size) for i, size in enumerate(PIECES)}
    inputs = {"net/input_layer1": (1, 100, 64), "net/input_layer2": (ROWS, 1, 64)}
    return {
        "encoder": encoder_hef(architecture),
        "uncached_decoder": hef_bytes(architecture, inputs, logits),
    }


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> InstalledSdk:
    """The SDK in an interpreter of its own, which the environment names."""
    installed = InstalledSdk(tmp_path / "sdk", _hefs())
    monkeypatch.setenv("WHISPERPORT_TOOLCHAIN_HAILO", str(installed.interpreter))
    return installed


FEW = {"hailo8l.finetune": "off", "hailo8l.emulate": "0"}
EMULATE = {"hailo8l.finetune": "off"}


def _options(recordings: Path | None, *, force: bool = True, **more: Any) -> CompileOptions:
    return CompileOptions(calibration=recordings, force=force, options=FEW, threads=1, **more)


def test_without_the_sdk_a_bundle_is_compiled_and_its_manifest_says_so(bundle, recordings, sdk):
    compiled = compile(bundle, _options(recordings))

    reopened = Bundle.open(bundle)  # every byte is checked
    entry = reopened.manifest.program("encoder")
    assert reopened.manifest.status("encoder") == "compiled here"
    assert entry.files[0] == "hailo8l/encoder.hef"
    assert "hailo8l/encoder.onnx" in entry.files
    assert entry.facts.compiled_for == "Hailo-8L"
    assert entry.facts.calibration_samples == 9
    assert (bundle / entry.files[0]).read_bytes() == sdk.hefs["encoder"]
    script = (bundle / "hailo8l" / "encoder.alls").read_text()
    assert "calibset_size=9)" in script  # what was given to the compiler
    assert [(p.compiler, p.emulation) for p in compiled.programs] == [("3.31.0", ())]
    assert "infer" not in sdk.names()
    assert reopened.manifest.status("step") == "run here"


def test_without_the_sdk_the_quantized_encoder_is_emulated_compared_and_the_numbers_are_kept(
    bundle, recordings, sdk
):
    emulate = replace(_options(recordings), options=EMULATE)
    compiled = compile(bundle, emulate)
    sdk.clear()
    again = compile(bundle, emulate)

    assert sdk.names() == []  # the same inputs were recorded, so the stage is kept
    assert again.programs == compiled.programs
    manifest = Bundle.open(bundle).manifest
    emulated = next(
        one
        for one in manifest.evidence("encoder")
        if "3.31.0" in one.runtime.values() and one.checks
    )
    (program,) = compiled.programs
    assert emulated.kind == "emulated"
    assert emulated.checks == program.emulation
    assert set(emulated.files) == {"hailo8l/encoder.onnx", "hailo8l/encoder.alls"}
    features = [check for check in emulated.checks if check.level == "arrays"]
    assert {check.program for check in features} == {"encoder"}
    assert all(20 < check.value["sqnr_db"] < 60 for check in features)  # 8 bits, not float32
    assert all(check.value["worst_frame_cosine"] > 0.9 for check in features)
    assert [check.level for check in emulated.checks][-1] == "words"
    assert emulated.passed
    # What was compiled has not run.
    assert manifest.status("encoder") == "compiled here"
    assert not manifest.is_verified("encoder")


def test_without_the_sdk_an_emulated_encoder_that_loses_its_words_is_reported_and_compiled(
    bundle, recordings, sdk
):
    sdk.configure(levels=1)

    emulate = replace(_options(recordings), options=EMULATE)

    (program,) = compile(bundle, emulate).programs

    failed = [check for check in program.emulation if not check.passed]
    assert failed
    assert Bundle.open(bundle).manifest.status("encoder") == "compiled here"


@pytest.mark.parametrize("name", ["", "somebody's"])
def test_a_compiled_bundle_is_trusted_if_it_was_before(bundle, recordings, sdk, name):
    manifest = Bundle.open(bundle).manifest
    renamed = replace(manifest, name=name or manifest.name)
    (bundle / MANIFEST).write_bytes(renamed.to_bytes())

    compile(bundle, _options(recordings))

    assert is_trusted(Bundle.open(bundle)) == (not name)


def test_without_the_sdk_a_second_compile_does_nothing_again(bundle, recordings, sdk):
    compile(bundle, _options(recordings))
    sdk.clear()
    stages: list[str] = []

    with reporting(stages.append):
        compile(bundle, _options(recordings))
    with reporting(stages.append):
        compile(bundle, _options(None))  # the set that was used before

    assert sdk.names() == []
    assert sum("using the existing calibration set" in line for line in stages) == 2


def test_other_audio_files_make_another_set(bundle, recordings, sdk):
    compile(bundle, _options(recordings))
    sdk.clear()
    write_wav(recordings / "b.wav", 0.1 * np.random.default_rng(8).standard_normal(32_000))
    compile(bundle, _options(recordings))
    work = bundle.with_name("bundle.compile")
    assert np.load(work / "hailo8l" / "encoder" / "input_layer1.npy", mmap_mode="r").shape[0] == 12
    assert "optimize" in sdk.names()
    assert "translate_onnx_model" not in sdk.names()  # its input is the same


def test_a_decoder_is_compiled_from_what_the_engine_feeds_it(full_bundle, recordings, sdk):
    emulate = replace(_options(recordings), options=EMULATE)
    _, full = compile(full_bundle, emulate).programs

    assert [check.what for check in full.emulation] == [f"logits_{i}, emulated" for i in range(4)]
    assert all(25 < check.value["sqnr_db"] < 60 for check in full.emulation)
    opened = Bundle.open(full_bundle)
    assert opened.manifest.program("uncached_decoder").files[0] == "hailo8l/uncached_decoder.hef"
    assert "resources_param" in (full_bundle / "hailo8l" / "uncached_decoder.alls").read_text()
    folder = full_bundle.with_name("bundle.compile") / "hailo8l" / "uncached_decoder"
    features = np.load(folder / "input_layer1.npy")
    rows = np.load(folder / "input_layer2.npy")
    mels = np.load(folder.with_name("encoder") / "input_layer1.npy")
    prompt = start_tokens(opened.manifest.generation, "en", "transcribe")
    assert features.shape == (9, 1, 100, 64)
    assert rows.shape == (9, ROWS, 1, 64)
    expected = opened.embedding()[prompt] + opened.positions()[: len(prompt)]
    assert np.allclose(rows[:, : len(prompt), 0], expected, atol=1e-6)
    engine = load_engine(opened, EMULATED)
    assert np.allclose(features[0, 0], engine.encode(mels[0, 0].T), atol=1e-5)


def test_without_a_device_the_compiled_bundle_is_fed_as_the_emulated_one(
    bundle, recordings, sdk, monkeypatch
):
    compile(bundle, _options(recordings))
    opened = Bundle.open(bundle)
    emulated = load_engine(opened, EMULATED)

    def compute(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        (mel,) = given.values()
        return {"net/normalization9": emulated.encode(mel[0].T)[None]}

    encoder = FakeHef(
        {"net/input_layer1": (1, 200, 80)}, {"net/normalization9": (1, 100, 64)}, compute
    )
    platform = FakePlatform({bundle / "hailo8l/encoder.hef": encoder})
    monkeypatch.setitem(sys.modules, "hailo_platform", platform)
    mel = np.random.default_rng(0).standard_normal((80, 200)).astype(np.float32)

    features = load_engine(opened, RunOptions(threads=1)).encode(mel)

    assert (features == emulated.encode(mel)).all()


@pytest.mark.parametrize(("sqnr_db", "passes"), [(40, True), (12, True), (-20, False)])
def test_without_a_device_a_compiled_bundle_is_judged_by_its_words_and_dead_frames(
    bundle, recordings, sdk, monkeypatch, sqnr_db, passes
):
    compile(bundle, _options(recordings))
    emulated = load_engine(Bundle.open(bundle), EMULATED)

    def compute(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        (mel,) = given.values()
        exact = emulated.encode(mel[0].T)
        noise = np.random.default_rng(7).standard_normal(exact.shape)
        noise *= np.linalg.norm(exact) / np.linalg.norm(noise) / 10 ** (sqnr_db / 20)
        return {"net/normalization9": (exact + noise)[None]}

    encoder = FakeHef(
        {"net/input_layer1": (1, 200, 80)}, {"net/normalization9": (1, 100, 64)}, compute
    )
    platform = FakePlatform({bundle / "hailo8l/encoder.hef": encoder})
    monkeypatch.setitem(sys.modules, "hailo_platform", platform)

    report = verify(bundle, run=RunOptions(threads=1))

    arrays = {check.program: check for check in report.checks if check.level == "arrays"}
    assert arrays["encoder"].passed == passes
    assert all(check.passed for name, check in arrays.items() if name != "encoder")
    (words,) = (check for check in report.checks if check.level == "words")
    # With all its layers, as in `make test-all`, random weights say other words at 12 dB.
    assert words.passed == passes or (EVERYTHING and sqnr_db == 12)
    assert bool(report) == (passes and words.passed)
    assert verify(bundle, run=EMULATED)  # the ONNX file is float32 still


@pytest.mark.parametrize(
    ("hefs", "says"),
    [
        (_hefs(architecture=1), "another chip"),
        ({**_hefs(), "encoder": encoder_hef(3)[:-4]}, "damaged"),
        ({**_hefs(), "encoder": encoder_hef(3, frames=1000)}, "does not compute"),
        ({**_hefs(), "encoder": b""}, "is not a HEF"),
    ],
    ids=["chip", "truncated", "window", "empty"],
)
def test_without_the_sdk_a_wrong_result_is_rejected_and_the_bundle_stays(
    bundle, recordings, sdk, hefs, says
):
    before = (bundle / "manifest.json").read_bytes()
    sdk.configure(hefs=hefs)
    with pytest.raises(BundleError, match=says):
        compile(bundle, _options(recordings))
    assert (bundle / "manifest.json").read_bytes() == before
    assert not (bundle / "hailo8l" / "encoder.hef").exists()


def test_a_missing_sdk_leaves_a_folder_to_take_away_and_the_bundle_as_it_was(bundle, recordings):
    before = (bundle / "manifest.json").read_bytes()
    with pytest.raises(MissingPackageError) as caught:
        compile(bundle, _options(recordings))
    work = bundle.with_name("bundle.compile") / "hailo8l"
    assert str(work) in caught.value.hint
    assert "--toolchain hailo=" in caught.value.hint
    assert {p.name for p in work.iterdir()} == {
        "job.json",
        "compile.py",
        "kit.py",
        "stages.py",
        "encoder",
    }
    assert json.loads((work / "job.json").read_text())["settings"]["chip"] == "hailo8l"
    assert (bundle / "manifest.json").read_bytes() == before


def test_what_the_compiler_measured_and_its_logs_are_kept(bundle, recordings, sdk):
    compiled = compile(bundle, _options(recordings))

    snr = {"encoder/output_layer1": 9.179}
    assert Bundle.open(bundle).manifest.program("encoder").facts.snr_db == snr
    (program,) = compiled.programs
    assert program.snr_db == snr
    assert [Path(log).name for log in program.logs] == [
        *("compile.log", "optimize.log", "parse.log")
    ]

    again = compile(bundle, _options(recordings))  # nothing is run

    assert again.programs[0].snr_db == snr
    assert pickle.loads(pickle.dumps(again)) == again  # as a watched job returns it
    Path(program.logs[1]).unlink()
    without = compile(bundle, _options(recordings))
    assert without.programs[0].snr_db == {}
    assert pickle.loads(pickle.dumps(without)).programs == without.programs


@pytest.mark.parametrize(
    ("kind", "says", "why"),
    [
        ("BackendAllocatorException", "could not place", "BackendAllocatorException: no room"),
        (KILL, "ended without a result", "encoder, compile: the system killed the process"),
    ],
)
def test_a_stage_that_fails_names_its_log_and_what_was_finished_is_kept(
    bundle, recordings, sdk, kind, says, why
):
    sdk.configure(failures={"ClientRunner.compile": (kind, "no room\nat all")})
    with pytest.raises(LoweringError, match=says) as caught:
        compile(bundle, _options(recordings))
    log = bundle.with_name("bundle.compile") / "hailo8l" / "encoder" / "compile.log"
    assert why in caught.value.why
    assert str(log) in caught.value.hint
    assert kind == KILL or "Traceback" in log.read_text()
    sdk.configure()
    sdk.clear()

    compile(bundle, _options(recordings))

    assert sdk.names() == ["ClientRunner", "compile", "save_har"]


def test_the_interpreter_that_is_named_goes_before_that_of_the_environment(
    bundle, recordings, sdk, monkeypatch
):
    monkeypatch.setenv("WHISPERPORT_TOOLCHAIN_HAILO", "/nowhere/python")
    with pytest.raises(UsageError, match="toolchain `hailo` has no interpreter"):
        compile(bundle, _options(recordings))
    named = {"hailo": str(sdk.interpreter)}
    assert compile(bundle, _options(recordings, toolchains=named)).programs


def test_an_interpreter_without_the_sdk_is_no_compiler(bundle, recordings):
    with pytest.raises(MissingPackageError, match="cannot be used") as caught:
        compile(bundle, _options(recordings, toolchains={"hailo": sys.executable}))
    assert "hailo_sdk_client" in caught.value.why


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hailo8l.epoch": "4"}, "no option `epoch`"),
        ({"hailo8.epochs": "4"}, "no option `hailo8.epochs`"),
        ({"epochs": "4"}, "no option `epochs`"),
        ({"hailo8l.epochs": "0"}, "cannot be `0`"),
        ({"hailo8l.finetune": "maybe"}, "cannot be `maybe`"),
    ],
)
def test_options_that_no_compiler_of_the_bundle_has_are_rejected_with_those_there_are(
    bundle, recordings, options, says
):
    with pytest.raises(UsageError, match=says) as caught:
        compile(bundle, CompileOptions(calibration=recordings, options=options))
    assert "hailo8l.epochs" in caught.value.hint or "expected" in caught.value.hint
    assert not bundle.with_name("bundle.compile").exists()


def test_too_few_audio_files_are_rejected_before_the_compiler_starts(bundle, recordings, sdk):
    with pytest.raises(AudioError, match="too little audio to calibrate `encoder`") as caught:
        compile(bundle, _options(recordings, force=False))
    assert "9 samples of 2 s, and 1024 samples are needed" in caught.value.why
    assert sdk.names() == []


def test_the_audio_files_that_a_bundle_was_verified_with_are_never_used(bundle, tmp_path, sdk):
    clips = [clip.samples for clip in noise_clips()]
    folder = write_wav(tmp_path / "clips" / "0.wav", clips[0]).parent
    write_wav(folder / "1.wav", clips[1])
    with pytest.raises(AudioError) as caught:
        compile(bundle, _options(folder))
    assert "2 used to verify the bundle" in caught.value.why


@pytest.mark.parametrize("there", [True, False], ids=["empty", "missing"])
def test_a_folder_without_audio_is_rejected(bundle, tmp_path, sdk, there):
    folder = tmp_path / "nothing"
    if there:
        folder.mkdir()
    with pytest.raises(AudioError, match="no audio files"):
        compile(bundle, _options(folder))


def test_a_compiler_of_the_other_generation_is_rejected_before_the_set_is_made(
    bundle, recordings, sdk
):
    sdk.configure(version="5.2.0")
    with pytest.raises(LoweringError, match="does not support `hailo8l`"):
        compile(bundle, _options(recordings))
    assert not bundle.with_name("bundle.compile").exists()


def test_a_model_too_large_is_rejected_with_the_estimate_before_anything(
    bundle, recordings, sdk, monkeypatch
):
    monkeypatch.setattr(Hailo, "too_large", lambda self, dims: "it would take 40 contexts")
    options = CompileOptions(calibration=recordings)
    with pytest.raises(LoweringError, match="too large") as caught:
        compile(bundle, options)
    assert caught.value.why == "it would take 40 contexts"
    assert not bundle.with_name("bundle.compile").exists()


def test_spectrograms_made_elsewhere_are_used(bundle, recordings, sdk, tmp_path):
    compile(bundle, _options(recordings))
    made = bundle.with_name("bundle.compile") / "hailo8l" / "encoder" / "input_layer1.npy"
    ready = Path(shutil.copy(made, tmp_path / "ready.npy"))
    sdk.clear()

    compile(bundle, _options(ready, work=tmp_path / "other"))

    again = tmp_path / "other" / "hailo8l" / "encoder" / "input_layer1.npy"
    assert (np.load(again) == np.load(made)).all()


def test_a_bundle_with_nothing_to_compile_is_rejected(exported: Callable[..., Any]):
    with pytest.raises(UsageError, match="has no programs to compile"):
        compile(exported("onnxruntime").folder)


def test_a_set_of_another_window_is_not_kept(bundle, recordings, sdk):
    compile(bundle, _options(recordings))
    noted = bundle.with_name("bundle.compile") / "hailo8l" / "encoder" / "calibration.json"
    saved = json.loads(noted.read_text())
    saved["from"]["spec"]["inputs"][0]["shape"] = [1, 80, 1, 1000]
    noted.write_text(json.dumps(saved))
    stages: list[str] = []
    with reporting(stages.append):
        compile(bundle, _options(None))
    assert "encoder: making the calibration set" in stages


def test_a_work_folder_inside_the_bundle_is_rejected(bundle, recordings):
    with pytest.raises(UsageError, match="cannot be inside"):
        compile(bundle, CompileOptions(calibration=recordings, work=bundle / "work"))


def test_the_work_folder_can_be_elsewhere(bundle, recordings, sdk, tmp_path):
    compile(bundle, _options(recordings, work=tmp_path / "deep" / "work"))
    assert (tmp_path / "deep" / "work" / "hailo8l" / "encoder" / "encoder.hef").is_file()
    assert not bundle.with_name("bundle.compile").exists()


def test_a_folder_with_files_of_the_user_is_no_work_folder(bundle, recordings, sdk, tmp_path):
    mine = tmp_path / "mine" / "hailo8l" / "encoder" / "encoder.onnx"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")

    with pytest.raises(BundleError, match="is not a work folder of whisperport") as error:
        compile(bundle, _options(recordings, work=tmp_path / "mine"))

    assert "it contains `hailo8l`" in error.value.why
    assert [path for path in (tmp_path / "mine").rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == "mine"


def test_a_mark_that_a_killed_process_did_not_rename_claims_no_work_folder(tmp_path):
    # given the only file of a process that was killed right before it renamed the mark
    left = tmp_path / f".{MARK}.0123456789ab.tmp"
    left.touch()
    # when the next one begins, then the folder is its own, and that file is deleted
    with work_folder(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [MARK]


def test_two_compilations_do_not_share_a_work_folder(bundle, recordings, sdk):
    work = bundle.with_name("bundle.compile")

    with locked(lock_path(work)), pytest.raises(BundleError, match="another process") as rejected:
        compile(bundle, _options(recordings))

    assert str(work) in rejected.value.what
    assert "`--work`" in rejected.value.hint
    assert list(work.iterdir()) == []
    assert sdk.names() == []


def test_what_a_killed_compilation_was_writing_is_cleared(bundle, recordings, sdk):
    left = bundle.with_name("bundle.compile") / "hailo8l/encoder/.encoder.alls.0123456789ab.tmp"
    left.parent.mkdir(parents=True)
    left.touch()
    (bundle.with_name("bundle.compile") / MARK).touch()

    compile(bundle, _options(recordings))

    assert not left.exists()
    assert not list(bundle.parent.glob(".*"))


def test_a_bundle_that_was_replaced_during_the_compilation_is_not_mixed_with_it(
    bundle, recordings, sdk
):
    def replaced(stage: str) -> None:
        if stage == "checking the compiled files":
            opened = Bundle.open(bundle)
            with writing_bundle(bundle) as writer:
                unlisted = shutil.ignore_patterns("manifest.json")
                shutil.copytree(bundle, writer.folder, dirs_exist_ok=True, ignore=unlisted)
                writer.commit(replace(opened.manifest, name="another"))

    with pytest.raises(BundleError, match="was replaced"), reporting(replaced):
        compile(bundle, _options(recordings))

    assert Bundle.open(bundle).manifest.name == "another"
    assert not (bundle / "hailo8l" / "encoder.hef").exists()


# Outputs of a vendor's emulator or simulator: what of them is compared.

X = TensorSpec("x", (1, 4, 8))
OUTPUTS = (
    TensorSpec("new_k_0", (2, 3, 4)),
    TensorSpec("new_v_0", (2, 4, 3)),
    TensorSpec("logits", (2, 9)),
)
SPEC = ProgramSpec("prefill_4", (X,), OUTPUTS)
NEED = EmulationNeed(inputs=("x",), outputs=("k", "v", "logits"), kind="simulated")


def emulation(tokens: tuple[int, ...]) -> Emulation:
    random = np.random.default_rng(0)
    expected = tuple(random.standard_normal((2, *t.shape)).astype(np.float32) for t in OUTPUTS)
    return Emulation(
        spec=SPEC,
        need=NEED,
        examples=Examples(names=(), inputs=(), tokens=tokens),
        expected=expected,
    )


def test_the_tokens_of_a_sample_end_where_the_padding_begins() -> None:
    x = np.ones((1, 4, 8), np.float32)
    x[0, 3:] = 0
    y = np.ones((1, 4, 8), np.float32)
    y[0, 1] = 0  # an embedding of zeros that is no padding

    assert tokens_of(SPEC, [[x], [y], [np.zeros_like(x)]]) == (3, 4, 0)


def test_a_program_that_reads_one_token_has_no_padding() -> None:
    step = ProgramSpec("step", (TensorSpec("x", (1, 1, 8)),), OUTPUTS)

    assert tokens_of(step, [[np.zeros((1, 1, 8), np.float32)]]) == ()


def test_what_was_computed_from_padding_is_not_compared() -> None:
    made = emulation((3, 4))
    keys, values, logits = (array.copy() for array in made.expected)
    keys[0, :, :, 3] += 9
    values[0, :, 3] += 9

    checks = list(_output_checks(made, [keys, values, logits], GATES["fp16"]))

    assert [check.what for check in checks] == [f"{tensor.name}, simulated" for tensor in OUTPUTS]
    assert all(check.passed for check in checks)


@pytest.mark.parametrize("output", [0, 1, 2])
def test_a_wrong_value_of_a_token_or_a_logit_is_found(output: int) -> None:
    made = emulation((3, 4))
    outputs = [array.copy() for array in made.expected]
    outputs[output][1, 0, 0] += 9

    failed = [check for check in _output_checks(made, outputs, GATES["fp16"]) if not check.passed]

    assert [check.what for check in failed] == [f"{OUTPUTS[output].name}, simulated"]
