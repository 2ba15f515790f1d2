"""MediaTek's compiler, driven with a fake `ncc-tflite` that checks flags and prints text; see the fake.

The tests show what whisperport does with an SDK. They show nothing about MediaTek's compiler.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whisperport.build.compile.compile import CompileOptions, compile
from whisperport.build.inspect import inspect
from whisperport.errors import BundleError, MissingPackageError, UsageError
from whisperport.program.bundle import Bundle
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.system.child import StoppedError
from whisperport.system.progress import reporting
from whisperport.targets import get_target
from whisperport.targets.compiler import CompileRequest
from whisperport.targets.toolchain import (
    Failure,
    Job,
    has_unfinished_stages,
    prepare,
    probe,
    run_driver,
)
from whisperport.targets.vendors.mediatek import flags, partitioner
from whisperport.targets.vendors.mediatek.chips import GENIO510, GENIO720, Chip
from whisperport.targets.vendors.mediatek.compiler import NccCompiler
from whisperport.verification.evidence import with_partitions

from ....extent import core_or_all
from ....model.inspection.tflite_file import Op, T, tflite_file
from . import fake_ncc_tflite as fake
from .test_programs import ALL, BOARD, PART, on_the_npu

SPEC = ProgramSpec("encoder", (TensorSpec("x", (2, 3)),), (TensorSpec("y", (2, 4)),))
FLOATS = ([["float32", [2, 3]]], [["float32", [2, 4]]])  # inputs and outputs of the model


def linear() -> bytes:
    """Return a .tflite with the inputs and outputs of `SPEC`."""
    return tflite_file(
        [T((2, 3)), T((4, 3), data=bytes(48)), T((4,), data=bytes(16)), T((2, 4))],
        [Op("FULLY_CONNECTED", (0, 1, 2), (3,))],
        (0,),
        (3,),
        signature=("encoder", ("x",), ("y",)),
    )


def work_folder(
    folder: Path, options: flags.CompileOptions | None = None, chip: Chip = GENIO720
) -> Path:
    """Prepare a work folder with the program `linear`; return it."""
    compiler, program = NccCompiler(chip), folder / "work" / "encoder"
    program.mkdir(parents=True, exist_ok=True)
    (program / "encoder.tflite").write_bytes(linear())
    (program / "encoder.fake.json").write_text(json.dumps(FLOATS))  # for the fake, see there
    request = CompileRequest(
        spec=SPEC,
        dims=_unused(),
        options=options or flags.CompileOptions(),
        folder=program,
        files=("encoder.tflite",),
    )
    plan = compiler.plan(request)
    job = Job(name="encoder", stages=plan.stages, settings=plan.settings)
    prepare(folder / "work", compiler.script, compiler.settings(), [job])
    return folder / "work"


def _unused() -> Any:
    return None


COMPILER = NccCompiler(GENIO720)


@pytest.fixture(autouse=True)
def no_sdk(monkeypatch):
    for name in ("WHISPERPORT_TOOLCHAIN_MEDIATEK", "MTK_NEURON_SDK"):
        monkeypatch.delenv(name, raising=False)


def io_lines(dtype: str, shape: str) -> list[str]:
    return [f" ├ Type: kTfLite{dtype}", f" └ Shape: {{{shape}}}"]


def run(sdk: Path, work: Path) -> Failure | None:
    installed = COMPILER.installed({"mediatek": str(sdk)})
    assert installed is not None
    return run_driver(installed, work)


def checked(folder: Path, plan: list[str] = [], io: list[str] = []) -> dict[str, Any]:  # noqa: B006
    """Check a compiled file, after a compiler that printed this."""
    program = work_folder(folder) / "encoder"
    (program / "encoder.dla").write_bytes(b"compiled")
    (program / "plan.txt").write_text("\n".join(plan))
    (program / "io.txt").write_text("\n".join(io))
    return COMPILER.check(program / "encoder.dla", SPEC)


def test_every_stage_runs_once_with_the_flags_of_the_board(tmp_path):
    sdk, work = fake.install(tmp_path / "sdk"), work_folder(tmp_path)

    assert run(sdk, work) is None
    assert run(sdk, work) is None

    always = ["--arch=mdla5.3,edma3.6", "-O3", "--l1-size-kb=256", "--num-mdla=1", "--relax-fp32"]
    always += ["--opt-accuracy", "--opt-footprint", "--fc-to-conv"]
    assert fake.calls(sdk) == [
        ["encoder.tflite", *always, "--check-target-only"],
        ["encoder.tflite", *always, "--show-io-info"],
        [
            *("encoder.tflite", *always, "--show-exec-plan", "--show-memory-summary"),
            *("-d", "partial.encoder.dla"),
        ],
    ]
    assert not has_unfinished_stages(work)
    assert not (work / "encoder" / "partial.encoder.dla").exists()
    assert "$ ncc-tflite encoder.tflite" in (work / "encoder" / "compile.log").read_text()


def test_what_is_known_of_a_compiled_file_is_stated_and_nothing_more(tmp_path):
    work = work_folder(tmp_path)
    assert run(fake.install(tmp_path / "sdk"), work) is None

    facts = COMPILER.check(work / "encoder" / "encoder.dla", SPEC)

    assert facts["compiler"] == "8.0.10"
    assert facts["plan"] == {"MDLA_5_3": 1}
    assert facts["inputs_and_outputs_compared"] is True
    assert "--relax-fp32" in facts["compiler_flags"]
    assert facts["notes"] == []
    json.dumps(facts)


def test_the_version_in_a_compiled_file_is_preferred(tmp_path):
    record = b'\0{"CompilerName": "ncc", "CompilerVersion": "8.2.31", "Neuron SHA1": "b3a8"}\0'
    sdk, work = fake.install(tmp_path / "sdk", bytes=list(record)), work_folder(tmp_path)
    assert run(sdk, work) is None
    assert COMPILER.check(work / "encoder" / "encoder.dla", SPEC)["compiler"] == "8.2.31"


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (["Target: MDLA_5_3", "Target: EDMA_3_6"], ""),
        (["Target: MDLA_5_3", "Target: EDPA_1_2"], "runs on EDPA_1_2, not on MDLA_5_3"),
        (["Target: EDPA_1_2"], "disallow-bridge=on"),
        (
            ["Target: CPU", "Target: MDLA_5_3", "Target: CPU"],
            "2 parts of the execution plan run on CPU",
        ),
        (
            ["Target: MDLA_5_3", "OP[3]: GATHER", " fallback"],
            "GATHER: the compiler printed: fallback",
        ),
        (["\x1b]0;title\x07 done"], "not understood"),
    ],
    ids=["edma", "edpa", "what to do", "cpu", "operator", "unknown"],
)
def test_what_does_not_run_on_the_npu_is_a_note(tmp_path, plan, expected):
    notes = checked(tmp_path, plan)["notes"]

    assert [expected in note for note in notes] == [True] * bool(expected)


def test_suppressed_outputs_are_a_note(tmp_path):
    program = work_folder(tmp_path, flags.CompileOptions(suppress_output=True)) / "encoder"
    (program / "encoder.dla").write_bytes(b"compiled")
    (program / "plan.txt").write_text("Target: MDLA_5_3")
    (note,) = COMPILER.check(program / "encoder.dla", SPEC)["notes"]
    assert "padded to a multiple of 16" in note


@pytest.mark.parametrize(
    ("io", "outcome"),
    [
        (["# of output tensors: 1"], False),
        (["nothing", "of", "this"], False),
        (
            [*io_lines("Int8", "2,3"), "# of output tensors: 1", *io_lines("Int8", "2,4")],
            "describes its inputs as int8",
        ),
        (
            [*io_lines("Float32", "2,3"), "# of output tensors: 1", *io_lines("Float32", "2,16")],
            "describes its outputs as float32[2, 16]; expected float32[2, 4]",
        ),
    ],
    ids=["empty", "unknown", "dtype", "shape"],
)
def test_inputs_and_outputs_are_compared_where_the_compiler_describes_them(tmp_path, io, outcome):
    if isinstance(outcome, bool):
        assert checked(tmp_path, io=io)["inputs_and_outputs_compared"] is outcome
        return
    with pytest.raises(BundleError, match="does not compute `encoder`") as raised:
        checked(tmp_path, io=io)
    assert outcome in raised.value.why


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "No such file"), (b"", "empty"), (b"\x1c\0\0\0TFL3" + bytes(20), "a .tflite")],
    ids=["missing", "empty", "tflite"],
)
def test_what_is_no_compiled_file_is_rejected(tmp_path, content, why):
    artifact = tmp_path / "encoder.dla"
    if content is not None:
        artifact.write_bytes(content)
    with pytest.raises(BundleError, match="is not a compiled file") as raised:
        COMPILER.check(artifact, SPEC)
    assert why in raised.value.why


def test_a_compiled_file_with_hostile_files_beside_it_is_checked_without_them(tmp_path):
    (tmp_path / "encoder.dla").write_bytes(b"\0" * 100)
    (tmp_path / "plan.txt").write_bytes(b"\xff\xfe\x1b[2J" * 1000)
    (tmp_path / "io.txt").write_bytes(b"# of output tensors" * 1000)
    (tmp_path / "built.json").write_text('{"flags": {"a": 1}, "version": ["\\u001b"]}')
    (tmp_path / "notes.json").write_text("[" * 100)

    facts = COMPILER.check(tmp_path / "encoder.dla", SPEC)

    assert facts["inputs_and_outputs_compared"] is False
    assert "\x1b" not in json.dumps(facts, ensure_ascii=False)
    assert facts["compiler_flags"] == []


UNSUPPORTED = ["OP[11]: ADD", "OP[12]: GATHER", "    MDLA: unsupported operation"]


@pytest.mark.parametrize(
    ("stage", "lines", "kind", "message", "happened"),
    [
        (
            *("check", UNSUPPORTED, "UnsupportedOperatorError"),
            *("OP[12]: GATHER: MDLA: unsupported operation", "does not support an operator"),
        ),
        (
            *(
                "compile",
                ["OP[0]: ADD", "MDLA: unsupported data type FLOAT64"],
                "UnsupportedTypeError",
            ),
            *("OP[0]: ADD: MDLA: unsupported data type FLOAT64", "does not support the type"),
        ),
        (
            *("compile", ["terminate called: std::bad_alloc"], "MemoryError"),
            *("terminate called: std::bad_alloc", "ran out of memory"),
        ),
        (
            *("describe", ["Can't open config file", "ERROR: x"], "MissingConfigurationError"),
            *("Can't open config file", "cannot read the configuration"),
        ),
        (
            *("compile", ["line", "ERROR: \x1b[2Jodd", "later"], "NccError"),
            *("ERROR:  [2Jodd", "failed"),
        ),
        ("compile", [], "NccError", "it ended with exit status 1 and printed nothing", "failed"),
    ],
)
def test_a_failure_of_a_stage_is_explained(tmp_path, stage, lines, kind, message, happened):
    sdk, work = fake.install(tmp_path / "sdk", **{stage: lines}), work_folder(tmp_path)

    failure = run(sdk, work)

    assert failure is not None
    assert (failure.kind, failure.stage, failure.classes[0]) == ("failed", stage, kind)
    assert failure.message == message
    words, hint = COMPILER.explain(failure)
    assert happened in words
    assert "{" not in hint
    assert not (work / "encoder" / "encoder.dla").exists()


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ({"empty": True}, "NotWrittenError"),
        ({"signal": 11}, "NccError"),
        ({"signal": 9}, "MemoryError"),
    ],
    ids=["nothing written", "crash", "killed"],
)
def test_a_compiler_that_writes_nothing_fails(tmp_path, faults, kind):
    failure = run(fake.install(tmp_path / "sdk", **faults), work_folder(tmp_path))
    assert failure is not None
    assert failure.classes[0] == kind


def test_a_flag_that_this_version_does_not_have_is_explained(tmp_path):
    work = work_folder(tmp_path, flags.CompileOptions(flags="--newer-flag"))
    failure = run(fake.install(tmp_path / "sdk"), work)
    assert failure is not None
    assert failure.message == "ncc-tflite: unknown option --newer-flag"
    assert "ncc-tflite --help" in COMPILER.explain(failure)[1]


@pytest.mark.parametrize(
    "place", [".", "neuron_sdk", "neuron_sdk/host", "neuron_sdk/host/bin/ncc-tflite"]
)
def test_the_sdk_may_be_named_by_any_of_its_folders_or_by_its_program(tmp_path, place):
    sdk = fake.install(tmp_path / "sdk")
    installed = COMPILER.installed({"mediatek": str(sdk / place)})
    assert installed is not None
    assert probe(installed, COMPILER.script, COMPILER.settings()) is None


def _broken(folder: Path, how: str) -> Path:
    sdk = fake.install(folder / "sdk")
    program = sdk / "neuron_sdk/host/bin/ncc-tflite"
    if how == "wrong folder":
        program.unlink()
    elif how == "not executable":
        program.chmod(0o644)
    elif how == "another processor":
        program.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(100))
    elif how == "missing library":
        loader = "error while loading shared libraries: libc++.so.1: cannot open shared object file"
        program.write_text(f"#!/bin/sh\necho 'ncc-tflite: {loader}' >&2\nexit 127\n")
    return sdk


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("wrong folder", "looked in it and in neuron_sdk/host/bin"),
        ("not executable", "chmod +x"),
        ("another processor", "Exec format error"),
        ("missing library", "libc++.so.1"),
    ],
)
def test_an_sdk_that_cannot_be_started_is_explained(tmp_path, how, message):
    installed = COMPILER.installed({"mediatek": str(_broken(tmp_path, how))})
    failure = probe(installed, COMPILER.script, COMPILER.settings())
    assert failure is not None
    assert failure.kind == "missing"
    assert message in failure.message


def test_an_sdk_without_the_boards_architecture_is_unsuitable(tmp_path):
    sdk = fake.install(tmp_path / "sdk", arch=["Available:", "  - mdla3.0", "  - vpu"])
    installed = COMPILER.installed({"mediatek": str(sdk)})

    failure = probe(installed, COMPILER.script, COMPILER.settings())

    assert failure is not None
    assert failure.kind == "unsuitable"
    assert "needs the architecture mdla5.3" in failure.message
    assert "mdla3.0, vpu" in failure.message
    other = NccCompiler(GENIO510)
    assert probe(installed, other.script, other.settings()) is None


def test_an_sdk_that_lists_no_architectures_and_no_version_is_tried(tmp_path):
    sdk = fake.install(tmp_path / "sdk", arch=["?"], version=["?"])
    installed = COMPILER.installed({"mediatek": str(sdk)})
    assert probe(installed, COMPILER.script, COMPILER.settings()) is None


# A bundle with every program on the NPU: accepted by the partitioner, and compiled with a fake SDK.

REASON = get_target(BOARD).partitioner.unavailable()


@pytest.fixture
def bundle(
    exported: Callable[..., Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    for name in ("WHISPERPORT_TOOLCHAIN_MEDIATEK", "MTK_NEURON_SDK"):
        monkeypatch.delenv(name, raising=False)
    made = exported(BOARD, "one layer", placement=core_or_all(PART, ALL))
    return shutil.copytree(made.folder, tmp_path / "bundle")


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_export_records_that_the_partitioner_accepts_every_operator_of_every_program(bundle):
    opened = Bundle.open(bundle)
    manifest = opened.manifest
    for entry in on_the_npu(opened):
        (evidence,) = [
            one for one in manifest.evidence(entry.spec.name) if one.kind == "partitioned"
        ]
        assert evidence.passed
        assert "ai-edge-litert" in evidence.runtime
        (check,) = evidence.checks
        assert check.level == "operators"
        # At least a product and another operator for each output: the list is not empty by mistake.
        assert check.value["accepted"] == check.value["operators"] >= 2 * len(entry.spec.outputs)
        assert manifest.status(entry.spec.name) == "accepted by the vendor's partitioner"


def test_without_an_sdk_a_work_folder_is_left_for_another_machine(bundle, tmp_path, monkeypatch):
    before = Bundle.open(bundle).manifest
    work = bundle.with_name("bundle.compile") / BOARD
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MissingPackageError) as raised:
        compile(bundle)
    assert "MTK_NEURON_SDK=/path/to/sdk python compile.py" in raised.value.hint
    assert Bundle.open(bundle).manifest == before
    sdk = fake.install(tmp_path / "sdk")  # on another machine

    subprocess.run(
        [sys.executable, "-I", "-S", work / "compile.py"],
        env={"MTK_NEURON_SDK": str(sdk), "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
    )
    made = compile(bundle)

    assert {program.name for program in made.programs} == {
        entry.spec.name for entry in on_the_npu(made.bundle)
    }
    assert {program.compiler for program in made.programs} == {"8.0.10"}
    (evidence,) = [e for e in made.bundle.manifest.evidence("step") if e.kind == "compiled"]
    assert evidence.machine == {}  # whose machine it was is not known


def test_a_compiled_bundle_has_the_compiled_files_first_and_keeps_the_others(bundle, tmp_path):
    sdk = fake.install(tmp_path / "sdk", plan=["Target: MDLA_5_3", "OP[7]: MEAN", "Target: CPU"])

    made = compile(bundle, CompileOptions(toolchains={"mediatek": str(sdk)}))

    compiled = on_the_npu(made.bundle)
    for entry in compiled:
        name = entry.spec.name
        assert entry.files == (f"{BOARD}/{name}.dla", f"{BOARD}/{name}.tflite")
        assert entry.facts.plan == {"MDLA_5_3": 1, "CPU": 1}
        assert made.bundle.manifest.status(name) == "compiled here"
        assert not made.bundle.manifest.is_verified(name)  # the compiled file was never run
        kinds = {one.kind for one in made.bundle.manifest.evidence(name)}
        assert "run" not in kinds
        assert kinds >= {"compiled", "emulated"}
    (note,) = made.programs[0].notes
    assert "on CPU, not on MDLA_5_3" in note
    inspected = inspect(bundle)
    assert [plan.engines for plan in inspected.plans] == [{"MDLA_5_3": 1, "CPU": 1}] * len(compiled)
    assert inspected.plans[0].notes == (note,)


def test_a_flag_of_whisperport_itself_is_rejected_before_anything_is_written(bundle):
    options = {f"{BOARD}.flags": "--exec"}
    with pytest.raises(UsageError, match=r"`--exec` .* is not for the user"):
        compile(bundle, CompileOptions(options=options))


def test_a_partitioner_that_cannot_be_asked_leaves_no_evidence_and_is_told(bundle, monkeypatch):
    opened = Bundle.open(bundle)
    without = replace(
        opened.manifest, programs=tuple(replace(e, evidence=()) for e in opened.manifest.programs)
    )
    monkeypatch.setattr(partitioner, "_package_folder", lambda: None)
    told: list[str] = []

    with reporting(told.append):
        after = with_partitions(without, bundle)

    assert all(not entry.evidence for entry in after.programs)
    assert len(told) == len(on_the_npu(opened))
    assert all("ai-edge-litert is not installed" in line for line in told)


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_partitioner_that_declines_gives_failed_evidence_and_one_that_fails_gives_none(
    bundle, monkeypatch, caplog
):
    opened = Bundle.open(bundle)
    encoder = replace(opened.manifest.program("encoder"), evidence=())
    only = replace(opened.manifest, programs=(encoder,))

    def declining(*_: object, **__: object) -> dict[str, object]:
        declined = [("GATHER", "t", "why")]
        return {"total": 2, "partitions": 1, "declined": declined, "version": "2.3.0"}

    monkeypatch.setattr(partitioner, "run_limited", declining)
    declined = with_partitions(only, bundle)
    (evidence,) = declined.programs[0].evidence
    assert not evidence.passed
    assert evidence.checks[0].reason == "1 of 2 operators were declined: GATHER"
    assert declined.status("encoder") == "checked against vendor documentation"

    def failing(*_: object, **__: object) -> None:
        raise StoppedError("it took more than 1 seconds")

    monkeypatch.setattr(partitioner, "run_limited", failing)
    assert with_partitions(only, bundle) == only
    assert "it took more than 1 seconds" in caplog.text
