"""The content of a file determines its format."""

from pathlib import Path
from typing import Any

import pytest

from whisperport.errors import BundleError, ProgramError, UsageError
from whisperport.model.inspection.lowered import inspect_lowered
from whisperport.program.bundle import Bundle
from whisperport.program.profiling import ProfileOptions
from whisperport.targets import PROFILERS

from ...extent import core_or_all

ONCE = ProfileOptions(repeat=1, threads=1)


def nothing(_: object) -> list[Any]:
    return []


def test_every_format_is_known_by_its_bytes_whatever_its_name(
    naive_pte: Path, step_xml: Path, cumsum_tflite: Path, tmp_path: Path
) -> None:
    runtimes = {naive_pte: "ExecuTorch", cumsum_tflite: "LiteRT"}
    renamed = {}
    for number, (path, runtime) in enumerate(runtimes.items()):
        copy = tmp_path / f"program{number}.bin"
        copy.write_bytes(path.read_bytes())
        renamed[copy] = runtime
    renamed[step_xml] = "OpenVINO"  # its weights are found by its name

    for path, runtime in renamed.items():
        assert inspect_lowered(path, ONCE, nothing, PROFILERS).profiles[0].runtime == runtime


@pytest.mark.parametrize(
    "target",
    core_or_all(["onnxruntime", "xnnpack"], ["onnxruntime", "xnnpack", "litert", "openvino"]),
)
def test_the_programs_of_a_bundle_are_measured_in_its_order(target: str, exported: Any) -> None:
    bundle: Bundle = exported(target)
    messages: list[str] = []

    inspected = inspect_lowered(bundle.folder, ONCE, nothing, PROFILERS, progress=messages.append)

    names = [entry.spec.name for entry in bundle.manifest.programs]
    assert [profile.program for profile in inspected.profiles] == names
    assert inspected.skipped == ()
    assert messages[0].startswith("running encoder")


def test_one_program_of_a_bundle_may_be_chosen(exported: Any) -> None:
    options = ProfileOptions(repeat=1, threads=1, programs=("step",))
    bundle: Bundle = exported("onnxruntime")

    inspected = inspect_lowered(bundle.folder, options, nothing)

    assert [profile.program for profile in inspected.profiles] == ["step"]
    with pytest.raises(BundleError, match="no program 'stop'"):
        inspect_lowered(bundle.folder, ProfileOptions(programs=("stop",)), nothing)


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        (b"", "the file is empty"),
        (b"PK\x03\x04" + b"\0" * 60, "the file is a zip archive"),
        (b"import torch\n", "the file begins with b'import t'"),
        (b"\0" * 100, "the file begins with"),
    ],
)
def test_what_is_no_compiled_program_is_rejected(contents: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_bytes(contents)

    with pytest.raises(ProgramError) as raised:
        inspect_lowered(path, ONCE, nothing)

    assert raised.value.why.startswith(why)
    assert raised.value.hint


def test_a_file_that_is_not_there_and_a_folder_that_is_no_bundle_are_rejected(
    tmp_path: Path,
) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ProgramError):
            inspect_lowered(path, ONCE, nothing)


def test_a_program_is_chosen_only_where_there_are_several(cumsum_tflite: Path) -> None:
    with pytest.raises(ProgramError, match="`--program` does not apply"):
        inspect_lowered(cumsum_tflite, ProfileOptions(programs=("main",)), nothing)


def test_no_runs_are_rejected() -> None:
    with pytest.raises(UsageError, match="`repeat` is 0"):
        ProfileOptions(repeat=0)
