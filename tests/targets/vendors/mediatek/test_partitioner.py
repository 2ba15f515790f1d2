"""MediaTek's LiteRT partitioner, asked for real where ai-edge-litert and a C compiler are installed.

`build()` makes small files, in which each operator is known to be on the plugin's list or not.
"""

import stat
from pathlib import Path
from typing import Any

import pytest

from whisperport.build.check import check
from whisperport.errors import LoweringError, ProgramError
from whisperport.system.child import Limits
from whisperport.targets.partitioner import Declined, Partition
from whisperport.targets.vendors.mediatek import partitioner as module
from whisperport.targets.vendors.mediatek.chips import CHIPS, GENIO350, GENIO720, GENIO1200
from whisperport.targets.vendors.mediatek.partitioner import LiteRtPartitioner
from whisperport.verification.partitions import partition_check

from ....model.inspection.tflite_file import INT32, INT64, Op, T, tflite_file

PARTITIONER = LiteRtPartitioner(GENIO720)
REASON = PARTITIONER.unavailable()
asked = pytest.mark.skipif(bool(REASON), reason=REASON)


def mixed(folder: Path, *, kind: int = 0) -> Path:
    """ADD, CUMSUM, TANH: the second is not on the plugin's list."""
    path = folder / "mixed.tflite"
    axis = T((), INT32, (0).to_bytes(4, "little"))
    tensors = [T((2, 4), kind), T((2, 4), kind), axis, T((2, 4), kind), T((2, 4), kind)]
    operators = [Op("ADD", (0, 0), (1,)), Op("CUMSUM", (1, 2), (3,)), Op("TANH", (3,), (4,))]
    path.write_bytes(tflite_file(tensors, operators, (0,), (4,)))
    return path


def answer(path: Path, soc: str = "mt8189") -> dict[str, Any]:
    """Ask without a child process, which takes a second to start."""
    return module.ask(lambda _: None, str(path), soc)


def plain(folder: Path) -> Path:
    """ADD, TANH: all on the list."""
    path = folder / "plain.tflite"
    tensors = [T((2, 4)), T((2, 4)), T((2, 4))]
    operators = [Op("ADD", (0, 0), (1,)), Op("TANH", (1,), (2,))]
    path.write_bytes(tflite_file(tensors, operators, (0,), (2,)))
    return path


@asked
def test_a_file_with_operators_of_the_list_alone_is_accepted(tmp_path):
    found = PARTITIONER.partition(plain(tmp_path))

    assert found
    assert (found.total, found.accepted, found.partitions, found.declined) == (2, 2, 1, ())
    assert found.runtime["ai-edge-litert"][0].isdigit()
    assert [path.name for path in tmp_path.iterdir()] == ["plain.tflite"]  # nothing is left


@asked
@pytest.mark.parametrize("soc", sorted({chip.litert_soc.lower() for chip in CHIPS} - {""}))
def test_a_declined_operator_is_named_with_its_output_and_a_reason(tmp_path, soc):
    found = answer(mixed(tmp_path), soc)

    assert (found["total"], found["partitions"]) == (3, 2)
    ((operator, tensor, reason),) = found["declined"]
    assert (operator, tensor) == ("CUMSUM", "t3")
    assert "does not have this operator" in reason


@asked
def test_an_unsupported_type_is_named(tmp_path):
    found = answer(mixed(tmp_path, kind=INT64))

    assert [operator for operator, _, _ in found["declined"]] == ["ADD", "CUMSUM", "TANH"]
    assert all("int64" in reason for _, _, reason in found["declined"])


@asked
@pytest.mark.parametrize(
    "content", [b"", b"\x1c\0\0\0TFL3", b"\xff" * 64, b"PK\x03\x04" + b"\0" * 60]
)
def test_a_damaged_file_is_rejected(tmp_path, content):
    path = tmp_path / "damaged.tflite"
    path.write_bytes(content)
    with pytest.raises(ProgramError, match=r"damaged\.tflite"):
        answer(path)


@asked
def test_a_limit_that_is_exceeded_is_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "Limits", lambda *_: Limits(2 * 10**9, 0.0))
    with pytest.raises(ProgramError, match="did not finish") as raised:
        PARTITIONER.partition(plain(tmp_path))
    assert "seconds" in raised.value.why


@asked
def test_a_c_compiler_that_fails_is_explained(tmp_path, monkeypatch):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no headers >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(LoweringError, match="cannot build a shared library") as raised:
        answer(plain(tmp_path))
    assert raised.value.why == "no headers"


def test_why_a_partitioner_cannot_be_asked_is_told(monkeypatch, tmp_path):
    for chip in (GENIO350, GENIO1200):
        assert chip.soc in LiteRtPartitioner(chip).unavailable()
    monkeypatch.setattr(module, "_package_folder", lambda: None)
    assert "whisperport[litert]" in PARTITIONER.unavailable()
    monkeypatch.setattr(module, "_package_folder", lambda: tmp_path)
    assert "no plugin for MediaTek" in PARTITIONER.unavailable()
    for file in (module.TOOL, module.PLUGIN):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert "C compiler" in PARTITIONER.unavailable()
    with pytest.raises(LoweringError, match="cannot be asked"):
        PARTITIONER.partition(tmp_path / "any.tflite")


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("", "no line about the first subgraph"),
        (
            "Partitioned subgraph<1>, selected 1 ops, from a total of 1 ops. resulted in 1 partitions",
            "no line",
        ),
        ("ERROR: [plugin.cc:1] all is lost\n\x1b[2J", "all is lost"),
        ("Partitioned subgraph<0>, selected -1 ops, from a total of 3 ops.", "no line"),
    ],
)
def test_an_answer_in_another_form_is_an_error_and_not_an_acceptance(output, why):
    with pytest.raises(LoweringError, match="not understood") as raised:
        module._numbers(output)
    assert why in raised.value.why


@asked
@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "selected 2 ops, from a total of 9 ops. resulted in 1 partitions",
            "counted 9 operators in subgraph 0, which has 3",
        ),
        (
            "selected 3 ops, from a total of 3 ops. resulted in 1 partitions",
            "1 are not in its result",
        ),
    ],
)
def test_numbers_that_contradict_the_file_are_an_error(tmp_path, monkeypatch, line, why):
    path = mixed(tmp_path)
    real = module._run

    def run(*arguments: Any) -> str:
        real(*arguments)
        return f"Partitioned subgraph<0>, {line}"

    monkeypatch.setattr(module, "_run", run)
    with pytest.raises(LoweringError, match="not understood") as raised:
        module.ask(lambda _: None, str(path), "mt8189")
    assert why in raised.value.why


@asked
def test_a_crash_of_the_partitioner_is_an_error(tmp_path, monkeypatch):
    package = tmp_path / "package"
    (package / "tools").mkdir(parents=True)
    tool = package / module.TOOL
    tool.write_text("#!/bin/sh\nkill -SEGV $$\n")
    tool.chmod(0o755)
    monkeypatch.setattr(module, "_package_folder", lambda: package)
    with pytest.raises(ProgramError, match="crashed") as raised:
        module.ask(lambda _: None, str(plain(tmp_path)), "mt8189")
    assert "SIGSEGV" in raised.value.why


@asked
def test_a_soc_that_the_plugin_does_not_have_is_an_error(tmp_path):
    with pytest.raises(ProgramError, match="rejects") as raised:
        module.ask(lambda _: None, str(plain(tmp_path)), "mt9999")
    assert "mt9999" in raised.value.why


@asked
def test_check_shows_what_the_partitioner_accepts_and_fails_if_it_declines(tmp_path):
    good, bad = check(plain(tmp_path), "genio720"), check(mixed(tmp_path), "genio720")

    assert good
    assert good.partitions[0].partition.accepted == 2
    assert not bad
    found = bad.to_json()["partitions"][0]
    assert found["program"] == "mixed"
    assert [one["operator"] for one in found["partition"]["declined"]] == ["CUMSUM"]


def test_check_without_the_partitioner_tells_why(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_package_folder", lambda: None)

    checked = check(plain(tmp_path), "genio720")

    assert checked
    (found,) = checked.partitions
    assert found.partition is None
    assert "whisperport[litert]" in found.reason
    assert checked.to_json()["partitions"][0]["not_asked"] == found.reason


def test_a_partition_that_declines_is_a_failed_check_with_the_names():
    declined = tuple(Declined(name, "t", "why") for name in ("A", "B", "A", "C", "D"))
    none = Partition(total=5, partitions=0, declined=declined, runtime={})
    whole = Partition(total=2, partitions=1, declined=(), runtime={})
    empty = Partition(total=0, partitions=0, declined=(), runtime={})

    failed, passed = partition_check("step", none), partition_check("step", whole)

    assert failed.reason == "5 of 5 operators were declined: A, B, C, …"
    assert passed.passed
    assert passed.value == {"operators": 2, "accepted": 2}
    assert not partition_check("step", empty).passed
