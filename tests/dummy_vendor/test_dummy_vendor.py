"""A vendor that consists of one folder and one line: lower, calibrate, compile, run, and import."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport import targets
from whisperport.build.compile.compile import CompileOptions, compile
from whisperport.build.compile.compile_bundle import emulate
from whisperport.build.compile.compiled import Compiled
from whisperport.build.compile.importing import ImportOptions, import_artifact
from whisperport.build.compile.work_folder import MARK
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.errors import (
    BundleError,
    LoweringError,
    MissingPackageError,
    UsageError,
    VerificationError,
)
from whisperport.program.bundle import Bundle
from whisperport.runtime import DecodeOptions, Decoder, decode_window, load_engine
from whisperport.runtime.engine import engine
from whisperport.targets import RunOptions
from whisperport.targets.compiler import CompileRequest
from whisperport.verification.clips import Clip
from whisperport.verification.recording import BundleSession
from whisperport.verification.reference import Reference

from ..docs.pages import ROOT
from ..extent import core_or_all
from ..test_imports import faults, naming
from ..wav import write_wav
from .listed import HERE, WITH_DUMMY, interpreter

HOW_TO = (ROOT / "docs" / "how-to" / "add-a-target.md").read_text(encoding="utf-8")
FILES = {path.name: path for path in sorted((HERE / "dummy").glob("*.py"))}

ONE = RunOptions(threads=1)
EMULATED = RunOptions(threads=1, options={"dummy1.emulate": "on", "dummy2.emulate": "on"})


def _noise(seed: int) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(3200)).astype(np.float32)


EXPORT = ExportOptions(clips=(Clip("hiss", "so", _noise(0)), Clip("more", "", _noise(1))), run=ONE)


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "TARGETS", WITH_DUMMY)


@pytest.fixture(scope="module")
def exported_once(
    micro_checkpoint: Any, micro_programs: tuple[Any, ...], tmp_path_factory: Any
) -> Path:
    """Export a bundle with the encoder on one chip, the step on the other, and the rest on the CPU."""
    from whisperport.model.trace import variants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "TARGETS", WITH_DUMMY)
        patch.setattr(variants, "whisper_programs", lambda *_, **__: iter(micro_programs))
        options = replace(EXPORT, placement={"step": "dummy2"})
        return export(
            micro_checkpoint, "dummy1", tmp_path_factory.mktemp("dummy") / "bundle", options
        ).folder


@pytest.fixture
def bundle(exported_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported_once, tmp_path / "bundle"))


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """2 s of noise: ten windows of 0.2 s."""
    samples = 0.1 * np.random.default_rng(7).standard_normal(32_000)
    return write_wav(tmp_path / "recording.wav", samples)


@pytest.fixture
def compiled(bundle: Path, recording: Path, tmp_path: Path) -> Callable[..., Compiled]:
    """Return `compiled(**options)`, which compiles with few samples and the SDK in another interpreter."""

    def run(options: dict[str, str] | None = None, **more: Any) -> Compiled:
        few = {"dummy1.samples": "4", "dummy2.samples": "12", **(options or {})}
        sdk = {"toolchains": {"dummy": str(interpreter(tmp_path))}, **more}
        return compile(
            bundle,
            CompileOptions(calibration=recording, force=True, options=few, threads=1, **sdk),
        )

    return run


def test_programs_of_two_chips_are_compiled_each_in_its_own_folder(compiled, bundle):
    made = compiled()

    assert [(p.name, p.target, p.samples, p.compiler) for p in made.programs] == [
        ("encoder", "dummy1", 4, "2.1"),
        ("step", "dummy2", 12, "2.1"),
    ]
    manifest = Bundle.open(bundle).manifest
    for name, target in (("encoder", "dummy1"), ("step", "dummy2")):
        entry = manifest.program(name)
        assert manifest.status(name) == "simulated here"
        assert entry.files == (
            f"{target}/{name}.dmy",
            f"{target}/{name}.onnx",
            f"{target}/{name}.json",
        )
    assert manifest.program("cross_kv").target == "onnxruntime"
    snr = manifest.program("step").facts.snr_db
    assert snr["self_k_0.npy"] == 20.5
    work = bundle.with_name("bundle.compile")
    assert {path.name for path in work.iterdir()} == {MARK, "dummy1", "dummy2"}


def test_compile_loads_each_program_once_and_encodes_each_window_once(
    compiled, bundle, monkeypatch
):
    loads, encoded = Counter(), []

    load, encode_window = engine.load_runners, engine.Engine.encode

    def load_runners(*arguments, **more):
        made = load(*arguments, **more)
        loads.update(list(made))
        return made

    def encode(self, mel):
        encoded.append(mel.tobytes())
        return encode_window(self, mel)

    monkeypatch.setattr(engine, "load_runners", load_runners)
    monkeypatch.setattr(engine.Engine, "encode", encode)

    compiled(trust=True)  # a trial run would load the programs too, in a child process

    names = [entry.spec.name for entry in Bundle.open(bundle).manifest.programs]
    assert loads == dict.fromkeys(names, 1)
    assert max(Counter(encoded).values()) == 1


def test_what_the_vendors_simulator_computed_is_compared_with_float32_and_kept(compiled, bundle):
    made = compiled()

    manifest = Bundle.open(bundle).manifest
    encoder, step = made.programs
    for program in (encoder, step):
        (evidence,) = [e for e in manifest.evidence(program.name) if e.kind == "simulated"]
        assert evidence.checks == program.emulation
        assert evidence.passed
        assert program.file in evidence.files  # the compiled file itself ran
        arrays = [check for check in program.emulation if check.level == "arrays"]
        assert all(20 < check.value["sqnr_db"] < 100 for check in arrays)
    assert {check.level for check in encoder.emulation} == {"arrays", "tokens", "words"}
    spec = manifest.program("step").spec
    assert [c.what for c in step.emulation] == [f"{t.name}, simulated" for t in spec.outputs]


def test_without_clips_nothing_is_simulated(exported_once, tmp_path, monkeypatch):
    none = replace(Reference.from_arrays(Bundle.open(exported_once).reference()), clips=())
    monkeypatch.setattr(Reference, "from_arrays", staticmethod(lambda _: none))
    bundle = Bundle.open(exported_once)
    compiler, spec = targets.get_target("dummy1").compiler, bundle.manifest.program("encoder").spec
    need = compiler.emulation(spec, compiler.options())
    session = BundleSession(bundle, RunOptions(threads=1))

    assert emulate(session, spec, need, tmp_path) is None
    plan = compiler.plan(
        CompileRequest(
            spec=spec,
            dims=bundle.manifest.dims,
            options=compiler.options(),
            folder=tmp_path,
            files=("encoder.onnx",),
        )
    )
    assert [stage.name for stage in plan.stages] == ["quantize", "assemble"]


@pytest.mark.parametrize(
    "wrong", core_or_all(["negated", "a NaN"], ["zeros", "negated", "another shape", "a NaN"])
)
def test_a_wrong_simulation_is_not_written_unless_asked_and_gives_no_status(
    compiled, bundle, tmp_path, wrong
):
    changed = {"zeros": "0 * one", "negated": "-one", "another shape": "one[..., :-1]"}
    sdk = (HERE / "sdk" / "dummy_sdk.py").read_text()
    returned = changed.get(wrong, "one + np.nan")
    other = tmp_path / "other"
    other.mkdir()
    replaced = sdk.replace("np.stack([_in_8_bits(one)", f"np.stack([{returned}")
    (other / "dummy_sdk.py").write_text(replaced)
    path = interpreter(other)
    path.write_text(path.read_text().replace('PYTHONPATH="', f'PYTHONPATH="{other}:'))

    before = Bundle.open(bundle).manifest
    with pytest.raises(VerificationError, match="disagree with their reference") as refused:
        compiled(toolchains={"dummy": str(path)})
    assert "simulated" in refused.value.why
    assert "--allow-unverified" in refused.value.hint
    assert Bundle.open(bundle).manifest == before

    made = compiled(toolchains={"dummy": str(path)}, allow_unverified=True)

    manifest = Bundle.open(bundle).manifest
    for program in made.programs:
        assert not all(check.passed for check in program.emulation)
        assert manifest.status(program.name) == "compiled here"


def test_the_step_is_calibrated_with_real_caches_in_the_layout_that_was_asked_for(compiled, bundle):
    compiled()

    folder = bundle.with_name("bundle.compile") / "dummy2" / "step"
    spec = Bundle.open(bundle).manifest.program("step").spec
    caches = [tensor for tensor in spec.inputs if tensor.name.startswith("self_")]
    assert len(caches) == 4
    for tensor in caches:
        array = np.load(folder / f"{tensor.name}.npy")
        assert array.shape == (12, 1, int(np.prod(tensor.shape)))
        assert array.dtype == np.float16
        assert (np.abs(array).max(axis=(1, 2)) > 0).all()  # none is a fresh cache
    ranges = json.loads((folder / "ranges.json").read_text())
    assert ranges["self_k_0.npy"]["samples"] == 12


def test_the_compiled_bundle_transcribes_as_its_emulation(compiled, bundle):
    opened = Bundle.open(bundle)
    with pytest.raises(BundleError, match="not compiled for `dummy1` yet"):
        load_engine(opened, ONE)
    compiled()
    opened = Bundle.open(bundle)
    device, emulation = load_engine(opened, ONE), load_engine(opened, EMULATED)
    mel = np.random.default_rng(3).standard_normal((8, 20)).astype(np.float32)

    decoded = [
        decode_window(Decoder(engine), engine.encode(mel), DecodeOptions(language="en"))
        for engine in (device, emulation)
    ]

    assert decoded[0] == decoded[1]


def test_state_stays_on_the_device_and_only_new_rows_are_sent(compiled, bundle):
    compiled()
    device = load_engine(Bundle.open(bundle), ONE)
    emulation = load_engine(Bundle.open(bundle), EMULATED)
    features = device.encode(np.random.default_rng(3).standard_normal((8, 20)).astype(np.float32))
    decoders = Decoder(device), Decoder(emulation)
    for decoder in decoders:
        decoder.start_window(features)
        decoder.prefill([1, 2, 3])
        decoder.step(4)
    cache = decoders[0].cache
    binding = cache.bindings[device.step]
    row = sum(array.nbytes for array in cache.arrays.values()) // cache.rows

    sent = binding.sent
    first = [decoder.step(5) for decoder in decoders]
    assert binding.sent == sent + row
    for array in cache.arrays.values():
        array[:] = np.nan  # the device does not read the host's memory
    second = [decoder.step(6) for decoder in decoders]

    np.testing.assert_array_equal(*first)
    np.testing.assert_array_equal(*second)


def test_finished_stages_are_kept_and_an_option_redoes_what_it_concerns(compiled, bundle):
    compiled()
    log = bundle.with_name("bundle.compile") / "dummy2" / "step" / "quantize.log"
    log.write_text("not written again")
    compiled()
    assert log.read_text() == "not written again"

    compiled({"dummy2.percentile": "99"})

    assert "20.5 dB" in log.read_text()


def test_a_missing_or_an_old_sdk_is_explained_in_general_words(compiled, bundle, tmp_path):
    with pytest.raises(
        MissingPackageError, match="the dummy's compiler is not installed"
    ) as missing:
        compiled(toolchains={})
    assert "--toolchain dummy=" in missing.value.hint
    old = tmp_path / "old"
    old.mkdir()
    (old / "dummy_sdk.py").write_text('__version__ = "1.9"\n')
    path = interpreter(old)
    path.write_text(path.read_text().replace('PYTHONPATH="', f'PYTHONPATH="{old}:'))
    with pytest.raises(LoweringError, match="does not support `dummy1`") as unsuitable:
        compiled(toolchains={"dummy": str(path)})
    assert unsuitable.value.why == "dummy1 needs dummy-sdk 2.0 or later; version 1.9 is installed"
    with pytest.raises(UsageError, match="cannot be `80`"):
        compiled({"dummy1.percentile": "80"})


def test_what_was_compiled_is_imported_by_whoever_recognizes_it(
    compiled, bundle, micro_checkpoint, quick_tracing, tmp_path
):
    compiled()
    published = tmp_path / "anything.bin"
    shutil.copyfile(bundle / "dummy1" / "encoder.dmy", published)

    import_artifact(published, micro_checkpoint, tmp_path / "imported", ImportOptions(run=ONE))

    manifest = Bundle.open(tmp_path / "imported").manifest
    entry = manifest.program("encoder")
    assert (entry.target, entry.files[0]) == ("dummy1", "dummy1/encoder.dmy")
    assert entry.facts.imported == "anything.bin"
    assert manifest.status("encoder") == "checked against vendor documentation"


# The how-to --------------------------------------------------------------------------------------


def test_the_how_to_names_every_file_and_shows_the_target_as_it_is():
    blocks = re.findall(r"<!-- file: dummy/(\S+) -->\n```python\n(.*?)```\n", HOW_TO, re.DOTALL)
    named = re.findall(r"^\| \[`(\S+)`\]\(\S+/dummy_vendor/dummy/\1\)", HOW_TO, re.MULTILINE)

    assert blocks == [("target.py", FILES["target.py"].read_text(encoding="utf-8"))]
    assert sorted(named) == sorted(FILES)


def test_the_line_of_the_how_to_lists_the_targets_that_are_tested_here():
    listing = (ROOT / "src" / "whisperport" / "targets" / "__init__.py").read_text(encoding="utf-8")
    (line,) = re.findall(r'^    ("vendors.dummy.*)$', HOW_TO, re.MULTILINE)
    changed = listing.replace("\n)\n\nTARGETS:", f"\n    {line}\n)\n\nTARGETS:")
    assert changed.count("\n") == listing.count("\n") + 1

    namespace: dict[str, Any] = {"__name__": "whisperport.targets"}
    exec(changed, namespace)

    names = [target.spec.name for target in namespace["__getattr__"]("TARGETS")]
    assert names == [target.spec.name for target in WITH_DUMMY]


@pytest.mark.parametrize("name", FILES)
def test_its_files_import_only_what_a_target_may(name):
    assert faults(f"targets/vendors/dummy/{name}", FILES[name].read_text(encoding="utf-8")) == []


def test_its_folder_is_the_only_place_that_names_it():
    package = Path(targets.__file__).parents[1]
    assert naming("dummy_vendor", ("dmy",), package) == []
    assert naming("dummy", ("dmy",), HERE / "dummy")
