"""The calls of AWS's tracer are compared with its documented signatures; the SDK is not installed.

`torch_neuronx` is a fake that checks calls. It compiles nothing: these are signature checks.
"""

import importlib.util
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from whisperport.build.compile.compile import CompileOptions, compile
from whisperport.errors import BundleError, LoweringError, MissingPackageError, UsageError
from whisperport.program.bundle import Bundle
from whisperport.program.spec import ProgramSpec
from whisperport.system.progress import reporting
from whisperport.targets.compiler import CompileRequest
from whisperport.targets.toolchain import Failure, Job, driver, has_unfinished_stages, prepare
from whisperport.targets.vendors.aws_neuron import flags, neuron_modules, stages
from whisperport.targets.vendors.aws_neuron.compiler import NeuronCompiler, check_traced

from ....extent import EVERYTHING, core_or_all
from ....micro import TURBO
from . import micro_modules

HERE = Path(__file__).parent
COMPILER = NeuronCompiler()
SETTINGS = {"torch": [*COMPILER.settings()["torch"], torch.__version__.rpartition(".")[0]]}


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The fake SDK as a new module, with a program `neuronx-cc` in PATH that nothing starts."""
    spec = importlib.util.spec_from_file_location("torch_neuronx", HERE / "fake_torch_neuronx.py")
    assert spec is not None
    assert spec.loader is not None
    fake = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fake)
    monkeypatch.setitem(sys.modules, "torch_neuronx", fake)
    program = tmp_path / "bin" / "neuronx-cc"
    program.parent.mkdir()
    program.write_text("#!/bin/false\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return fake


def prepared(
    work: Path,
    program: str = "step",
    options: flags.CompileOptions | None = None,
    dtype: str = "float32",
) -> Path:
    """Make a work folder as `compile` prepares it for the driver."""
    folder = work / program
    micro_modules.write(folder, dtype)
    plan = COMPILER.plan(
        CompileRequest(
            spec=ProgramSpec(program, (), ()),
            dims=TURBO,
            options=options or flags.CompileOptions(),
            folder=folder,
            files=(micro_modules.DESCRIPTION, micro_modules.WEIGHTS),
        )
    )
    job = Job(name=program, stages=plan.stages, settings=plan.settings)
    prepare(work, COMPILER.script, SETTINGS, [job])
    return work


def run(work: Path) -> list[dict[str, Any]]:
    """Run the driver; return its events."""
    events: list[dict[str, Any]] = []
    try:
        driver.run(work, lambda event, **facts: events.append({"event": event, **facts}))
    except driver.StopError:
        assert events[-1]["event"] in ("failed", "unsuitable", "missing")
    return events


def explained(event: dict[str, Any]) -> tuple[str, str]:
    """Explain the driver's last event as `whisperport compile` does."""
    failure = Failure(
        kind="failed",
        message=event["message"],
        program=event["program"],
        stage=event["stage"],
        classes=event["classes"],
    )
    return COMPILER.explain(failure)


@pytest.mark.parametrize(
    "program", core_or_all(["encoder", "prefill_4", "step_4"], list(micro_modules.PROGRAMS))
)
def test_without_the_sdk_every_program_is_traced_as_documented_and_its_artifact_computes_the_same(
    program, sdk, tmp_path
):
    work = prepared(tmp_path / "work", program)

    events = run(work)

    assert [one.get("stage") for one in events] == [None, "check", "compile"]
    ((name, given),) = sdk.calls
    assert name == "trace"
    assert given["inline_weights_to_neff"] is False
    assert given["cpu_backend"] is True
    assert given["partitioner_config"] is None
    folder = work / program
    description = neuron_modules.read_description(folder / micro_modules.DESCRIPTION)
    module, inputs, aliases = neuron_modules.build(description, micro_modules.weights(), program)
    inputs = tuple(torch.randn(one.shape) if one.is_floating_point() else one for one in inputs)
    with torch.no_grad():
        expected = module(*inputs)
        made = torch.jit.load(str(folder / f"{program}.pt"))(*inputs)
    assert list(given["input_output_aliases"].values()) == list(aliases.values())
    assert len(made) == len(expected)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_the_state_of_a_step_is_described_with_the_output_that_replaces_it(sdk, tmp_path):
    work = prepared(tmp_path / "work")
    run(work)

    described = json.loads((work / "step" / "io.json").read_text())

    layers = micro_modules.LAYERS
    assert [one["name"] for one in described["state"]] == [
        *(f"self_k.{layer}" for layer in range(layers)),
        *(f"self_v.{layer}" for layer in range(layers)),
    ]
    assert [one["output"] for one in described["state"]] == list(
        range(1 + 2 * layers, 1 + 4 * layers)
    )
    assert len(described["outputs"]) == 1 + 2 * layers
    assert {one["dtype"] for one in described["inputs"]} == {"float32", "int32"}


def test_bfloat16_is_traced_with_a_state_of_bfloat16(sdk, tmp_path):
    work = prepared(tmp_path / "work", dtype="bfloat16")

    assert run(work)[-1]["event"] == "stage"

    described = json.loads((work / "step" / "io.json").read_text())
    assert {one["dtype"] for one in described["state"]} == {"bfloat16"}
    assert {one["dtype"] for one in described["outputs"]} == {"float32"}


def test_finished_stages_are_kept_and_a_changed_option_runs_them_again(sdk, tmp_path):
    work = prepared(tmp_path / "work")
    run(work)
    assert not has_unfinished_stages(work)
    assert [one["event"] for one in run(prepared(work))] == ["kept", "kept"]

    prepared(work, options=flags.CompileOptions(chip="trn2"))

    assert has_unfinished_stages(work)
    run(work)
    arguments = sdk.calls[-1][1]["compiler_args"]
    assert arguments[:2] == ["--target", "trn2"]
    assert arguments[arguments.index("--logical-nc-config") + 1] == "2"


def test_the_compilers_files_are_deleted_when_it_is_done_and_kept_when_it_fails(sdk, tmp_path):
    work = prepared(tmp_path / "work")
    sdk.failure.update(status=70, logged="nothing of use")
    run(work)
    assert (work / "step" / "neuronx-cc" / "log-neuron-cc.txt").is_file()
    sdk.failure.clear()
    (work / "step" / "neuronx-cc" / "half-written.neff").write_text("of the run before")

    run(work)

    assert not (work / "step" / "neuronx-cc").exists()
    assert sorted(path.name for path in (work / "step").iterdir() if "partial" in path.name) == []


def test_a_stage_that_was_killed_leaves_no_artifact_and_runs_again(sdk, tmp_path, monkeypatch):
    work = prepared(tmp_path / "work")
    monkeypatch.setattr(torch.jit, "save", lambda _traced, path: Path(path).write_bytes(b"half"))
    monkeypatch.setattr(os, "replace", _die_at_artifact(os.replace))
    with pytest.raises(KeyboardInterrupt):
        driver.run(work, lambda *_a, **_k: None)
    monkeypatch.undo()

    assert not (work / "step" / "step.pt").exists()
    assert has_unfinished_stages(work)


def _die_at_artifact(replace: Any) -> Any:
    def dying(source: str, target: str) -> None:
        if str(target).endswith(".pt"):
            raise KeyboardInterrupt
        replace(source, target)

    return dying


@pytest.mark.parametrize(
    ("failure", "kind", "words", "hint"),
    [
        (
            {"status": 70, "printed": "ERROR 123 [NCC_EVRF007] Instructions 6M exceed the limit\n"},
            "CodeError",
            "more instructions than its limit (NCC_EVRF007)",
            "optlevel=1",
        ),
        (
            {
                "status": 70,
                "logged": "x\n2026 ERROR: NCC_EVRF001: Operator sort is not supported\n",
            },
            "CodeError",
            "does not support an operator (NCC_EVRF001)",
            "list-operators",
        ),
        (
            {"status": 1, "message": "[NCC_EOOM001] the memory exceeds the limit"},
            "CodeError",
            "more device memory than one core has (NCC_EOOM001)",
            "bf16",
        ),
        ({"status": -9}, "OutOfMemoryError", "ran out of memory", "more memory"),
        ({"status": -11}, "CrashedError", "crashed", "optlevel=1"),
        (
            {"status": 70, "logged": "\nINTERNAL_ERROR: something\n"},
            "CompilerError",
            "failed",
            "finished stages are kept",
        ),
        (
            {"status": 70, "printed": "NCC_EZZZ999: of a later release\n"},
            "CodeError",
            "failed",
            "finished stages are kept",
        ),
    ],
    ids=["printed", "logged", "message", "killed", "crashed", "unknown", "unknown code"],
)
def test_a_failure_of_the_compiler_is_explained(failure, kind, words, hint, sdk, tmp_path):
    sdk.failure.update(failure)

    event = run(prepared(tmp_path / "work"))[-1]

    assert event["classes"][0] == kind
    happened, next_step = explained(event)
    assert words in happened
    assert hint in next_step
    if kind == "CodeError":
        assert event["message"].startswith("NCC_E")


def test_an_input_that_the_tracer_drops_is_an_error_that_says_which(sdk, tmp_path, monkeypatch):
    work = prepared(tmp_path / "work")
    file = work / "step" / micro_modules.DESCRIPTION
    described = json.loads(file.read_text())
    for node in described["programs"]["step"]["nodes"]:
        if node["args"][-1] == {"node": "mask"}:  # scores + mask
            node["args"][-1] = 0.0
    file.write_text(json.dumps(described))

    event = run(work)[-1]

    assert event["classes"][0] == "UnusedInputError"
    assert "index=1, shape=torch.Size([1, 1, 9])" in event["message"]
    assert not (work / "step" / "step.pt").exists()
    assert "audio features" in explained(event)[1]


def test_an_sdk_that_ignores_an_argument_is_an_error(sdk, tmp_path, monkeypatch):
    import warnings

    traced = sdk.trace

    def older(*args: Any, **kwargs: Any) -> Any:
        warnings.warn("Unexpected keyword arguments: ['cpu_backend']", stacklevel=1)
        return traced(*args, **kwargs)

    older.__signature__ = sdk.signature("trace")  # type: ignore[attr-defined]
    monkeypatch.setattr(sdk, "trace", older)

    event = run(prepared(tmp_path / "work"))[-1]

    assert event["classes"][0] == "IgnoredArgumentError"
    assert "later torch-neuronx" in explained(event)[1]


@pytest.mark.parametrize("damage", ["weights", "description", "program"])
def test_damaged_files_fail_in_the_check_before_anything_is_compiled(damage, sdk, tmp_path):
    work = prepared(tmp_path / "work")
    folder = work / "step"
    if damage == "weights":
        (folder / micro_modules.WEIGHTS).write_bytes(b"\0" * 16)
    elif damage == "description":
        (folder / micro_modules.DESCRIPTION).write_text("{")
    else:
        programs = {"format": neuron_modules.FORMAT, "programs": {}}
        (folder / micro_modules.DESCRIPTION).write_text(json.dumps(programs))

    event = run(work)[-1]

    assert (event["stage"], event["classes"][0]) == ("check", "ModuleError")
    assert sdk.calls == []
    assert "export the bundle again" in explained(event)[1]


@pytest.mark.parametrize("fault", ["no trace", "no cpu", "torch", "no program", "no sdk"])
def test_an_sdk_that_cannot_compile_is_reported_before_the_first_stage(
    fault, sdk, tmp_path, monkeypatch
):
    work = prepared(tmp_path / "work")
    if fault == "no trace":
        monkeypatch.delattr(sdk, "trace")
        expected = "placeholder"
    elif fault == "no cpu":
        monkeypatch.setattr(sdk, "trace", lambda func, example_inputs, **_: None)
        expected = "no argument input_output_aliases"
    elif fault == "torch":
        settings = json.loads((work / "job.json").read_text())
        settings["settings"]["torch"] = ["2.9"]
        (work / "job.json").write_text(json.dumps(settings))
        expected = "expected torch 2.9"
    elif fault == "no program":
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.setattr(stages, "_folders", list)
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        expected = "neither in PATH"
    else:
        monkeypatch.setitem(sys.modules, "torch_neuronx", None)
        expected = "torch_neuronx"

    (event,) = run(work)

    assert event["event"] == ("missing" if fault == "no sdk" else "unsuitable")
    assert expected in event["message"]


@pytest.mark.parametrize("fault", ["repeated", "foreign", "order", "shape", "list"])
def test_a_module_that_the_tracer_would_number_wrongly_is_not_traced(fault):
    state = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    module = torch.nn.ParameterList([state])
    x, y = torch.ones(2), torch.ones(2)
    outputs: Any = (x, y)
    aliases: dict[Any, int] = {state: 1}
    stages.describe(module, (x,), outputs, aliases)
    if fault == "repeated":
        outputs = (x, x)
    elif fault == "foreign":
        aliases = {torch.nn.Parameter(torch.zeros(2), requires_grad=False): 1}
    elif fault == "order":
        aliases = {state: 0}
    elif fault == "shape":
        outputs = (x, torch.ones(3))
    else:
        outputs = [x, y]
    with pytest.raises(stages.ModuleMismatchError):
        stages.describe(module, (x,), outputs, aliases)


def test_the_fakes_artifact_is_never_taken_for_a_compiled_program(sdk, tmp_path):
    work = prepared(tmp_path / "work")
    run(work)
    with pytest.raises(BundleError, match=r"step\.pt is not a file") as raised:
        COMPILER.check(work / "step" / "step.pt", ProgramSpec("step", (), ()))
    assert "without a Neuron graph" in raised.value.why


def _artifact(path: Path, code: str = "def f(self): return ops.neuron.forward_v2(x)") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("step/code/__torch__/module.py", code)
    return path


def test_facts_of_a_compiled_file_come_from_what_the_stage_recorded(tmp_path):
    artifact = _artifact(tmp_path / "step.pt")
    built = {"versions": {"neuronx-cc": "2.26.6360.0"}, "chip": "trn2", "lnc": 2}
    (tmp_path / "built.json").write_text(json.dumps(built))
    facts = COMPILER.check(artifact, ProgramSpec("step", (), ()))
    assert facts == {"compiler": "2.26.6360.0", "compiled_for": "trn2", "lnc": 2}


@pytest.mark.parametrize("text", ["", "[]", '{"versions": 3, "lnc": "x"}', "[" * 100_000, "\0"])
def test_a_damaged_record_gives_no_facts(text, tmp_path):
    artifact = _artifact(tmp_path / "step.pt")
    (tmp_path / "built.json").write_text(text)
    facts = COMPILER.check(artifact, ProgramSpec("step", (), ()))
    assert facts == {"compiler": "", "compiled_for": "", "lnc": 1}


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "text", "truncated", "other code"])
def test_a_file_that_the_compiler_did_not_write_is_an_error(kind, tmp_path):
    path = _artifact(
        tmp_path / "step.pt", code="return 1" if kind == "other code" else "ops.neuron.f"
    )
    if kind != "other code":
        data = path.read_bytes()
        path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind in ("empty", "text", "truncated"):
        path.write_bytes({"empty": b"", "text": b"hello", "truncated": data[:-30]}[kind])
    with pytest.raises(BundleError, match="is not a file"):
        check_traced(path)


def test_a_damaged_compiled_file_is_an_error_or_is_still_recognized(tmp_path):
    whole = _artifact(tmp_path / "step.pt").read_bytes()
    path = tmp_path / "damaged.pt"
    rejected = 0
    for position in range(len(whole)):
        for damaged in (
            whole[:position],
            whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :],
        ):
            path.write_bytes(damaged)
            try:
                check_traced(path)
            except BundleError:
                rejected += 1
    assert rejected > len(whole)


def test_a_program_without_exactly_one_description_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="cannot be compiled"):
        COMPILER.plan(
            CompileRequest(
                spec=ProgramSpec("step", (), ()),
                dims=TURBO,
                options=flags.CompileOptions(),
                folder=tmp_path,
                files=("a.safetensors",),
            )
        )


# `compile` of a bundle: without the SDK, with a wrong one, and with a fake that compiles nothing.

NAME = "aws-neuron"


@pytest.fixture
def bundle(exported: Callable[..., Bundle], tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported(NAME, "one layer").folder, tmp_path / "bundle"))


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompileOptions:
    """This interpreter as the toolchain, with the fake SDK and a `neuronx-cc` that nothing starts."""
    sdk = tmp_path / "sdk"
    sdk.mkdir()
    shutil.copy(HERE / "fake_torch_neuronx.py", sdk / "torch_neuronx.py")
    shutil.copy(HERE / "signatures.json", sdk)
    (sdk / "neuronx-cc").write_text("#!/bin/false\n")
    (sdk / "neuronx-cc").chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(sdk))
    monkeypatch.setenv("PATH", str(sdk), prepend=os.pathsep)
    return CompileOptions(work=tmp_path / "work", toolchains={NAME: sys.executable})


def test_without_the_sdk_a_folder_for_another_machine_is_left(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingPackageError, match="torch-neuronx is not installed here") as raised:
        compile(bundle, CompileOptions(work=tmp_path / "work"))

    assert "--toolchain aws-neuron=/path/to/python" in raised.value.hint
    assert "no device" in raised.value.hint
    work = tmp_path / "work" / NAME
    assert {"job.json", "compile.py", "stages.py"} <= {path.name for path in work.iterdir()}
    folders = [path for path in work.iterdir() if path.is_dir()]
    names = {entry.spec.name for entry in Bundle.open(bundle).manifest.programs}
    assert {folder.name for folder in folders} == names
    weights = [folder / "fp32.safetensors" for folder in folders]
    assert len({path.stat().st_ino for path in weights}) == 1, "the weights are stored once"
    assert weights[0].stat().st_ino != (bundle / NAME / "fp32.safetensors").stat().st_ino
    assert all((folder / "neuron_modules.py").is_file() for folder in folders)


def test_an_sdk_for_another_torch_is_an_error_before_the_work_begins(
    bundle: Path, options: CompileOptions
) -> None:
    with pytest.raises(LoweringError, match="does not support `aws-neuron`") as raised:
        compile(bundle, options)

    assert f"torch {torch.__version__} is installed" in raised.value.why
    assert "expected torch 2.9" in raised.value.why
    assert not (options.work / NAME).exists()


@pytest.mark.skipif(not EVERYTHING, reason="make test-all: it traces every program")
def test_what_a_fake_wrote_is_rejected_and_the_bundle_stays(
    bundle: Path, options: CompileOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (bundle / "manifest.json").read_bytes()
    settings = {"torch": [torch.__version__.rpartition(".")[0]]}
    monkeypatch.setattr(NeuronCompiler, "settings", lambda _self: settings)
    said: list[str] = []

    failure = pytest.raises(BundleError, match="not a file that AWS's torch-neuronx compiled")
    with failure as raised, reporting(said.append):
        compile(bundle, options)

    assert "without a Neuron graph" in raised.value.why
    assert (bundle / "manifest.json").read_bytes() == before
    programs = [entry.spec.name for entry in Bundle.open(bundle).manifest.programs]
    assert [line for line in said if line.endswith(": compile")] == [
        f"{name}: compile" for name in programs
    ]
    evidence: list[Any] = [
        one.kind for entry in Bundle.open(bundle).manifest.programs for one in entry.evidence
    ]
    assert "compiled" not in evidence
