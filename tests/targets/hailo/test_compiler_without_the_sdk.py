"""What is asked of Hailo's compiler, held against recorded signatures: no SDK was here."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.errors import BundleError, LoweringError, MissingPackageError
from whisperport.spec import ProgramSpec, TensorSpec
from whisperport.targets.hailo import stages
from whisperport.targets.hailo.chips import HAILO8, HAILO8L, HAILO10H
from whisperport.targets.hailo.compiler import Job, check_compiler, check_hef, prepare, run
from whisperport.targets.hailo.model_script import model_script

from .fake_sdk import FakeSdk
from .hef_file import encoder_hef, hef_bytes

STAGES = [
    *("ClientRunner", "translate_onnx_model", "save_har"),
    *("ClientRunner", "load_model_script", "optimize", "save_har"),
    *("ClientRunner", "compile", "save_har"),
]
ENCODER = ProgramSpec(
    "encoder", (TensorSpec("mel", (1, 80, 1, 200)),), (TensorSpec("features", (1, 100, 64)),)
)


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> FakeSdk:
    fake = FakeSdk({"encoder": b"a HEF", "decode_full": b"another HEF"})
    monkeypatch.setitem(sys.modules, "hailo_sdk_client", fake)
    return fake


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return _prepared(tmp_path / "bundle.compile")


def _prepared(work: Path, script: str = "", onnx: bytes = b"onnx", value: float = 1.0) -> Path:
    source = work.with_name("encoder.onnx")
    source.write_bytes(onnx)
    (work / "encoder").mkdir(parents=True, exist_ok=True)
    np.save(work / "encoder" / "input_layer1.npy", np.full((2, 1, 8, 3), value, np.float32))
    script = script or model_script("hailo8l", 384)
    job = Job(name="encoder", onnx=source, script=script, calibration="input_layer1.npy")
    prepare(work, HAILO8L, [job])
    return work


def _run(work: Path) -> list[str]:
    said: list[str] = []
    run(work, HAILO8L, said.append)
    return said


def test_without_the_sdk_every_stage_is_called_as_recorded_and_in_order(work, sdk):
    _run(work)
    assert sdk.names() == STAGES
    given = dict(sdk.calls)
    assert given["ClientRunner.translate_onnx_model"]["model_name"] == "encoder"
    assert given["ClientRunner.optimize"]["calib_data"].shape == (2, 1, 8, 3)
    assert [call["hw_arch"] for name, call in sdk.calls if name == "ClientRunner"] == [
        *("hailo8l", None, None)
    ]
    assert (work / "encoder" / "encoder.hef").read_bytes() == b"a HEF"
    for har in ("parsed", "optimized", "compiled"):
        assert (work / "encoder" / f"{har}.har").is_file()


def test_without_the_sdk_a_decoders_set_is_given_by_the_names_of_layers(tmp_path, sdk):
    work, source = tmp_path / "work", tmp_path / "decode_full.onnx"
    source.write_bytes(b"onnx")
    folder = work / "decode_full"
    folder.mkdir(parents=True)
    files = {f"decode_full/input_layer{i}": f"input_layer{i}.npy" for i in (1, 2)}
    for file in files.values():
        np.save(folder / file, np.zeros((2, 1, 4, 3), np.float32))
    script = model_script("hailo8l", 384, program="decode_full")
    prepare(work, HAILO8L, [Job(name="decode_full", onnx=source, script=script, calibration=files)])

    _run(work)

    assert set(dict(sdk.calls)["ClientRunner.optimize"]["calib_data"]) == set(files)


def test_without_the_sdk_finished_stages_are_kept(work, sdk):
    _run(work)
    sdk.calls.clear()
    said = _run(work)
    assert sdk.calls == []
    assert sum("kept" in line for line in said) == 3


@pytest.mark.parametrize(
    ("failing", "left"),
    [("optimize", STAGES[3:]), ("compile", STAGES[7:]), ("translate_onnx_model", STAGES)],
)
def test_without_the_sdk_a_half_finished_compile_goes_on_where_it_stopped(work, sdk, failing, left):
    sdk.failures[f"ClientRunner.{failing}"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        _run(work)
    sdk.failures.clear()
    sdk.calls.clear()

    _run(work)

    assert sdk.names() == left


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ({"script": model_script("hailo8l", 512)}, STAGES[3:]),
        ({"value": 2.0}, STAGES[3:]),
        ({"onnx": b"another"}, STAGES[:3]),  # parsed to the same, and so the rest is kept
    ],
    ids=["script", "calibration", "onnx"],
)
def test_without_the_sdk_a_stage_is_done_again_if_what_it_was_made_from_changed(
    work, sdk, changed, left
):
    _run(work)
    sdk.calls.clear()
    _prepared(work, **changed)
    _run(work)
    # What the fake compiler makes does not depend on what it is given: later stages see no change.
    assert sdk.names() == left[:4]


@pytest.mark.parametrize("damage", ["cut", "missing", "state"])
def test_without_the_sdk_a_stages_file_that_is_not_whole_is_made_again(work, sdk, damage):
    _run(work)
    sdk.calls.clear()
    har = work / "encoder" / "parsed.har"
    if damage == "cut":
        har.write_bytes(har.read_bytes()[:3])
    elif damage == "missing":
        har.unlink()
    else:
        (work / "state.json").write_text('{"encoder": {"par')
    _run(work)
    assert sdk.names()[:3] == STAGES[:3]


def test_a_missing_sdk_leaves_everything_and_a_script_that_does_the_same(work, monkeypatch):
    monkeypatch.setitem(sys.modules, "hailo_sdk_client", None)
    with pytest.raises(MissingPackageError) as caught:
        _run(work)
    assert "3.x" in caught.value.what
    assert "compile.py" in caught.value.hint
    assert (work / "encoder" / "encoder.alls").is_file()
    assert (work / "encoder" / "encoder.onnx").is_file()

    # The script alone, with a compiler beside it and nothing of whisperport.
    (work / "hailo_sdk_client.py").write_text(STAND_ALONE)
    done = subprocess.run(
        [sys.executable, "-S", "-c", ALONE, work], capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
    assert (work / "encoder" / "encoder.hef").read_bytes() == b"made alone"
    assert sum("kept" in line for line in _run(work)) == 3  # the SDK is not asked for


def test_the_script_left_behind_runs_on_the_pythons_of_the_compiler():
    """3.10 and 3.11, of which whisperport itself takes only the second."""
    source = Path(stages.__file__).read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 10))
    nodes = list(ast.walk(tree))
    imported = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    imported |= {str(n.module).split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom)}
    assert imported - sys.stdlib_module_names == {"numpy", "hailo_sdk_client"}


def test_a_finished_compile_needs_no_sdk(work, sdk, monkeypatch):
    _run(work)
    monkeypatch.setitem(sys.modules, "hailo_sdk_client", None)
    _run(work)


@pytest.mark.parametrize(
    ("chip", "version", "serves"),
    [
        (HAILO8, "3.31.0", True),
        (HAILO8L, "3.33.1", True),
        (HAILO10H, "5.1.0", True),
        (HAILO8, "4.0", False),
        (HAILO8, "3.30.9", False),
        (HAILO8, "3", False),
        (HAILO8, "3.100", True),
        (HAILO8, "unknown", True),
        (HAILO8, "5.2.0", False),
        (HAILO10H, "3.31.0", False),
    ],
)
def test_a_compiler_that_does_not_serve_the_chip_is_refused_before_anything(
    sdk, work, chip, version, serves
):
    sdk.__version__ = version
    if serves:
        check_compiler(chip)
        return
    with pytest.raises(LoweringError, match=f"does not serve `{chip.name}`") as caught:
        check_compiler(chip)
    assert version in caught.value.why
    assert f"{chip.compiler[0]}.x" in caught.value.hint
    if chip is not HAILO10H:  # the work folder is for the 8L
        with pytest.raises(LoweringError, match="does not serve"):
            _run(work)
        assert sdk.calls == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ParsingWithRecommendationException", "parse"),
        ("UnsupportedActivationLayerError", "activation"),
        ("UnsupportedShuffleLayerError", "reshape"),
        ("BackendAllocatorException", "place the program"),
        ("SomethingNew", "failed"),
    ],
)
def test_without_the_sdk_its_errors_are_translated_and_kept_as_the_cause(work, sdk, name, says):
    error = type(name, (Exception,), {})("\n\nthe first line\nand many more")
    sdk.failures["ClientRunner.compile"] = error
    with pytest.raises(LoweringError, match=says) as caught:
        _run(work)
    assert caught.value.why == f"{name}: the first line"
    assert caught.value.hint
    assert caught.value.__cause__ is error


def test_without_the_sdk_memory_that_runs_out_is_said_so(work, sdk):
    sdk.failures["ClientRunner.optimize"] = MemoryError()
    with pytest.raises(LoweringError, match="memory"):
        _run(work)


# What was compiled.


def _check(tmp_path: Path, content: bytes, chip: Any = HAILO8L) -> Any:
    path = tmp_path / "encoder.hef"
    path.write_bytes(content)
    return check_hef(path, chip, ENCODER)


def test_a_hef_of_the_chip_and_the_program_is_taken(tmp_path):
    assert _check(tmp_path, encoder_hef(3)).compiler_version == "3.31.0"
    assert _check(tmp_path, encoder_hef(3), HAILO8).chip == "Hailo-8L"  # a Hailo-8 runs it


@pytest.mark.parametrize(("architecture", "chip"), [(1, HAILO8L), (103, HAILO8), (3, HAILO10H)])
def test_a_hef_for_another_chip_is_refused(tmp_path, architecture, chip):
    with pytest.raises(BundleError, match="another chip"):
        _check(tmp_path, encoder_hef(architecture), chip)


def test_a_hef_of_other_shapes_is_refused(tmp_path):
    with pytest.raises(BundleError, match="does not compute `encoder`") as caught:
        _check(tmp_path, encoder_hef(3, frames=1000))
    assert "(1, 1000, 80)" in caught.value.why


def test_a_hef_of_no_network_is_refused(tmp_path):
    whole = hef_bytes(3, {}, {})
    _check(tmp_path, whole)  # its streams are described in the older way: HailoRT will check them
    with pytest.raises(BundleError, match="damaged"):
        _check(tmp_path, whole[:-3])


ALONE = """
import runpy, site, sys
sys.path[:0] = [*site.getsitepackages(), sys.argv[1]]
runpy.run_path(sys.argv[1] + "/compile.py", run_name="__main__")
assert "whisperport" not in sys.modules
"""
STAND_ALONE = """
from pathlib import Path
__version__ = "3.31.0"
class ClientRunner:
    def __init__(self, hw_arch=None, har=None): pass
    def translate_onnx_model(self, onnx_path, model_name): pass
    def save_har(self, path): Path(path).write_text(path)
    def load_model_script(self, script): pass
    def optimize(self, calib_data, work_dir=None): assert calib_data.ndim == 4
    def compile(self): return b"made alone"
"""
