"""OpenVINO's counters give the kernel and time of every node that ran."""

import builtins
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from whisperport.errors import MissingPackageError, ProgramError
from whisperport.program.profiling import ProfileOptions
from whisperport.targets.cpu.openvino.profiler import OpenVinoProfiler, _node

PROFILER = OpenVinoProfiler()
ONCE = ProfileOptions(repeat=2, threads=1)


def test_every_node_that_ran_is_measured_with_its_kernel(step_xml: Path) -> None:
    profile = PROFILER.profile([step_xml], ONCE)

    assert profile.program == "step"
    assert profile.target == "CPU"
    assert any(node.operator == "FullyConnected" for node in profile.nodes)
    assert all(node.where.startswith("CPU ") for node in profile.nodes)
    assert all((node.ms or 0) >= 0 for node in profile.nodes)
    assert "were fused into others" in profile.notes[0]
    times = [node.ms or 0 for node in profile.nodes]
    assert times == sorted(times, reverse=True)


def test_a_property_of_openvino_is_passed_on(step_xml: Path) -> None:
    options = ProfileOptions(repeat=1, threads=1, options={"INFERENCE_PRECISION_HINT": "f32"})

    profile = PROFILER.profile([step_xml], options)

    assert not [node for node in profile.nodes if node.where.endswith("bf16")]
    assert not [note for note in profile.notes if "bfloat16" in note]


def test_an_unknown_device_or_property_is_rejected(step_xml: Path) -> None:
    for options in ({"device": "NOSUCH"}, {"NO_SUCH_PROPERTY": "1"}):
        with pytest.raises(ProgramError, match=r"cannot run step\.xml") as raised:
            PROFILER.profile([step_xml], ProfileOptions(options=options))
        assert raised.value.why


def test_a_model_cut_short_or_without_its_weights_is_rejected(
    step_xml: Path, tmp_path: Path
) -> None:
    whole = step_xml.read_bytes()
    short, alone, named = (tmp_path / f"{name}.xml" for name in ("short", "alone", "named"))
    short.write_bytes(whole[: len(whole) // 2])
    alone.write_bytes(whole)
    named.write_bytes(whole.replace(b'name="x"', b'name="\xcc"'))
    named.with_suffix(".bin").write_bytes(step_xml.with_suffix(".bin").read_bytes())

    for path in (short, alone, named):
        with pytest.raises(ProgramError, match=path.name):
            PROFILER.profile([path], ONCE)


def test_a_reference_kernel_is_pointed_out() -> None:
    info = SimpleNamespace(node_name="n", node_type="CumSum", exec_type="ref_any_f32")

    node = _node(info, "CPU", [3.0, 1.0, 2.0])

    assert node.ms == 2.0
    assert node.reason.startswith("a slow reference kernel")


def test_without_openvino_it_says_what_to_install(
    step_xml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "openvino":
            raise ImportError("No module named 'openvino'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)

    with pytest.raises(MissingPackageError) as raised:
        PROFILER.profile([step_xml], ONCE)

    assert raised.value.hint == 'pip install "whisperport[openvino]"'
