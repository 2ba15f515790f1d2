"""Execution providers in plug-ins: a real one, libraries that are none, and what is told of each.

The real one is in the package onnxruntime-ep-openvino. It computes in bfloat16 where the CPU can.
"""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from whisperport import RunOptions, Transcriber
from whisperport.apps.cli.verify import print_provider_report
from whisperport.build import doctor
from whisperport.errors import LoweringError, UsageError
from whisperport.program import execution_providers
from whisperport.program.execution_providers import (
    CPU,
    POLICIES,
    Device,
    Provider,
    compatibility,
    list_devices,
)
from whisperport.program.profiling import ProfileOptions
from whisperport.verification.clips import shipped_audio
from whisperport.verification.providers import verify_each_program

from ..embedded import default_bundle

OPENVINO, PACKAGE = "OpenVINOExecutionProvider", "onnxruntime_ep_openvino"
F32 = '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'
ABSENT = "FakeExecutionProvider"

plug_in = pytest.mark.usefixtures("openvino_device")


@pytest.fixture(scope="module")
def openvino_device() -> None:
    """Skip where the plug-in has no device: it offers Intel's processors only.

    There, a policy may choose Qualcomm's provider, which has no library for a CPU.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"{PACKAGE} is not installed")
    code = (
        "from whisperport.program.execution_providers import list_devices\n"
        "print(*[device['provider'] for device in list_devices() if device['kind']])"
    )
    command = [sys.executable, "-c", code]  # this process must not load all plug-ins
    if OPENVINO not in subprocess.run(command, capture_output=True, text=True, check=True).stdout:
        pytest.skip(f"{OPENVINO} has no device on this machine")


def run_options(**options: str) -> RunOptions:
    named = {f"onnxruntime.{name.replace('_', '-')}": text for name, text in options.items()}
    return RunOptions(threads=1, options=named)


def transcript(**options: str) -> Any:
    return Transcriber(default_bundle(), run_options(**options)).transcribe(shipped_audio()[0].path)


def outputs(provider: Provider) -> tuple[Any, str]:
    """The outputs of a program on a provider, and the provider that its session names first."""
    ort = provider.require()
    path = str(default_bundle() / "onnxruntime" / "cross_kv.onnx")
    session = provider.session(ort, path, ort.SessionOptions())
    (features,) = session.get_inputs()
    noise = np.random.default_rng(0).normal(size=features.shape).astype(np.float32)
    return session.run(None, {features.name: noise}), session.get_providers()[0]


# A plug-in that is installed -----------------------------------------------------------------------


@plug_in
@pytest.mark.parametrize("device", ["", "cpu", "CPU"])
def test_a_plug_in_is_found_by_its_providers_name_and_runs_the_program(device: str) -> None:
    expected, _ = outputs(Provider())

    actual, used = outputs(Provider(name=OPENVINO, device=device, options={"load_config": F32}))

    assert used == OPENVINO
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4 * float(np.abs(other).max()))


@plug_in
def test_a_transcript_with_all_programs_on_a_plug_in_has_the_same_tokens() -> None:
    expected = transcript()

    actual = transcript(provider=OPENVINO, device="cpu", provider_options=f"load_config={F32}")

    tokens = [[segment.tokens for segment in made.segments] for made in (actual, expected)]
    assert tokens[0] == tokens[1]
    assert sum(map(len, tokens[0])) > 10


@plug_in
def test_each_program_is_tried_on_it_with_its_documented_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = run_options(provider=OPENVINO, device="cpu", provider_programs="cross_kv")

    report = verify_each_program(default_bundle(), options)

    assert [dict(trial.options) for trial in report.trials] == [{}, {"load_config": F32}]
    assert all(trial.on_provider == 1 and not trial.elsewhere for trial in report.trials)
    assert report.trials[1].sqnr_db > 100
    assert report.device == "cpu"
    if chosen := report.run_options():
        assert chosen["onnxruntime.device"] == "cpu"
    print_provider_report(report)
    assert f"{OPENVINO} with its default options" in capsys.readouterr().out


@plug_in
def test_the_nodes_of_a_file_are_shown_on_it() -> None:
    from whisperport.model.inspection.profile_onnx import profile_onnx

    path = default_bundle() / "onnxruntime" / "cross_kv.onnx"
    chosen = {"provider": OPENVINO, "device": "cpu"}

    profile = profile_onnx(path, ProfileOptions(repeat=1, threads=1, options=chosen))

    assert {node.where for node in profile.nodes} == {OPENVINO}


@plug_in
def test_a_library_may_be_named_instead_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_providers, "_plug_ins", lambda: ())
    folder = Path(importlib.util.find_spec(PACKAGE).origin).parent  # type: ignore[union-attr, arg-type]
    (library,) = folder.glob("*onnxruntime_providers_openvino_plugin.*o") or [None]

    _, used = outputs(Provider(name=OPENVINO, library=str(library)))

    assert used == OPENVINO


@plug_in
def test_doctor_lists_every_device_and_what_has_its_provider() -> None:
    devices = doctor.devices()

    assert not isinstance(devices, str)
    by_name = {device.provider: device for device in devices}
    assert by_name[CPU].origin == "onnxruntime"
    assert by_name[CPU].version == onnxruntime.__version__
    assert (by_name[OPENVINO].origin, by_name[OPENVINO].kind) == (PACKAGE, "cpu")
    assert by_name[OPENVINO].version.startswith("1.")
    assert set(onnxruntime.get_available_providers()) <= by_name.keys()


@plug_in
def test_a_provider_tells_whether_it_runs_a_file_that_was_compiled(tmp_path: Path) -> None:
    ort = Provider(name=OPENVINO).require()
    devices = [device for device in ort.get_ep_devices() if device.ep_name == OPENVINO]
    settings = ort.SessionOptions()
    settings.add_provider_for_devices(devices, {})
    model = str(default_bundle() / "onnxruntime" / "cross_kv.onnx")
    compiler = ort.ModelCompiler(settings, model, embed_compiled_data_into_model=True)
    compiler.compile_to_file(str(tmp_path / "compiled.onnx"))
    (stated,) = [
        entry.value
        for entry in onnx.load(tmp_path / "compiled.onnx").metadata_props
        if entry.key == f"ep_compatibility_info.{OPENVINO}"
    ]

    assert compatibility(devices, stated) == "best"
    assert compatibility(devices, re.sub("ov=[0-9.]+", "ov=2020.1.0", stated)) == "not"
    assert compatibility(devices, "") == ""
    assert compatibility([], stated) == ""
    on_cpu = [device for device in ort.get_ep_devices() if device.ep_name == CPU]
    assert compatibility(on_cpu, stated) == ""  # this provider compiles nothing


# Policies ------------------------------------------------------------------------------------------


@plug_in
@pytest.mark.parametrize("policy", POLICIES)
def test_onnx_runtime_has_every_policy_and_chooses_a_provider(policy: str) -> None:
    expected, _ = outputs(Provider())

    actual, used = outputs(Provider(name=policy))

    assert used in onnxruntime.get_available_providers()
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-2 * float(np.abs(other).max()))  # bfloat16


@plug_in
def test_what_onnx_runtime_chose_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    importlib.import_module("whisperport.targets.onnx.runner")._say_choice.cache_clear()

    assert "".join(segment.text for segment in transcript(provider="prefer_cpu").segments)

    told = [record.message for record in caplog.records if "ONNX Runtime chose" in record.message]
    assert len(told) == 1
    assert told[0].startswith("with `prefer_cpu`, ONNX Runtime chose ")


@pytest.mark.parametrize("more", [{"device": "npu"}, {"provider_options": "A=1"}])
def test_what_onnx_runtime_chooses_cannot_be_named_as_well(more: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="ONNX Runtime chooses the device") as refused:
        transcript(provider="prefer_npu", **more)

    assert "whisperport doctor" in refused.value.hint


def test_a_policy_is_no_provider_to_try_each_program_on() -> None:
    with pytest.raises(UsageError, match="no execution provider is named"):
        verify_each_program(default_bundle(), run_options(provider="prefer_npu"))


# What is not there, and libraries that are none ------------------------------------------------------


@plug_in
def test_a_device_that_is_not_there_is_an_error_that_lists_those_that_are() -> None:
    with pytest.raises(LoweringError, match="has no device `npu`") as refused:
        transcript(provider=OPENVINO, device="npu")

    assert refused.value.why.startswith("it lists cpu (")


def test_a_provider_that_lists_no_device_has_none() -> None:
    with pytest.raises(LoweringError, match="has no device `gpu`") as refused:
        transcript(provider="AzureExecutionProvider", device="gpu")

    assert "it lists no device" in refused.value.why


def test_a_provider_that_is_nowhere_is_an_error() -> None:
    with pytest.raises(LoweringError, match=f"no execution provider `{ABSENT}`") as refused:
        transcript(provider=ABSENT)

    assert CPU in refused.value.why
    assert "option `library`" in refused.value.hint


def a_text(folder: Path) -> Path:
    path = folder / "provider.so"
    path.write_text("no library")
    return path


def another_library(folder: Path) -> Path:
    return Path(importlib.util.find_spec("numpy._core._multiarray_umath").origin)  # type: ignore[union-attr, arg-type]


def nothing(folder: Path) -> Path:
    return folder / "provider.so"


@pytest.mark.parametrize("make", [a_text, another_library, nothing])
def test_a_library_without_a_provider_is_an_error(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    with pytest.raises(LoweringError, match="cannot load the execution provider") as refused:
        transcript(provider=ABSENT, library=str(make(tmp_path)))

    assert refused.value.why
    assert onnxruntime.__version__ in refused.value.hint


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """`packages(name, source)` installs a package; others are not seen."""
    monkeypatch.syspath_prepend(tmp_path)
    listed = execution_providers.pkgutil.iter_modules

    def own() -> Any:
        return listed([str(tmp_path)])

    monkeypatch.setattr(execution_providers.pkgutil, "iter_modules", own)

    def install(name: str, source: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return install


BROKEN = """
def get_library_path(): return __file__
def get_ep_names(): return ["FakeExecutionProvider"]
"""


def test_a_package_that_is_broken_is_told_where_it_is_needed(packages: Any) -> None:
    packages("onnxruntime_ep_fake", BROKEN)

    with pytest.raises(LoweringError, match="cannot load the execution provider of onnxruntime_ep"):
        Provider(name=ABSENT).require()
    Provider(name="AzureExecutionProvider").require()
    devices = {device["provider"]: Device(**device) for device in list_devices()}
    assert devices[ABSENT].name.startswith("not loaded: ")
    assert devices[CPU].kind == "cpu"


@plug_in
def test_with_a_policy_a_package_that_is_broken_is_a_warning(
    packages: Any, caplog: pytest.LogCaptureFixture
) -> None:
    packages("onnxruntime_ep_fake", BROKEN)

    outputs(Provider(name="prefer_cpu"))

    assert "ONNX Runtime cannot load the execution provider of onnxruntime_ep_fake" in caplog.text


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("onnxruntime_other", "raise SystemExit('imported')"),
        ("other_onnxruntime", BROKEN),
        ("onnxruntime_ep_old", "def get_library_path(): return ''"),
        ("onnxruntime_ep_needs", BROKEN + "import a_module_that_is_not_installed"),
    ],
)
def test_what_is_no_plug_in_is_not_loaded(packages: Any, name: str, source: str) -> None:
    packages(name, source)

    assert list(execution_providers._plug_ins()) == []


def test_an_onnx_runtime_without_plug_ins_has_its_own_providers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(onnxruntime, "register_execution_provider_library")
    monkeypatch.delattr(onnxruntime, "get_ep_devices")

    _, used = outputs(Provider())

    assert used == CPU
    assert {device["provider"] for device in list_devices()} == set(
        onnxruntime.get_available_providers()
    )


def test_a_process_that_cannot_list_devices_does_not_end_doctor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def crash(*_: Any) -> Any:
        raise doctor.StoppedError("it crashed with SIGSEGV")

    monkeypatch.setattr(doctor, "run_limited", crash)

    assert doctor.devices() == "it crashed with SIGSEGV"


def test_packages_are_not_searched_for_a_provider_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def search() -> Any:
        raise AssertionError("it searches")

    monkeypatch.setattr(execution_providers, "_plug_ins", search)

    Provider(name="AzureExecutionProvider").require()
    outputs(Provider())
    with pytest.raises(AssertionError, match="it searches"):
        Provider(name=ABSENT).require()
