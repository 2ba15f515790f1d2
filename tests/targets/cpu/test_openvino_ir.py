"""OpenVINO files as inputs: read without OpenVINO, checked, inspected and compared, whoever wrote them."""

import os
import time
from pathlib import Path

import pytest

from whisperport.errors import ProgramError
from whisperport.targets.cpu.openvino import ir
from whisperport.targets.cpu.openvino.ir import constants, read_ir

CONSTANT = (
    "<net><layers><layer id='0' name='w' type='Const'><data element_type='f32' offset='{}' size='{}'/>"
    "<output><port id='0'><dim>2</dim></port></output></layer></layers></net>"
)


@pytest.mark.parametrize(
    ("start", "size"), [(0, 12), (8, 8), (-8, 8), (2**63, 8), (4, -4), (0, "9" * 5000)]
)
def test_a_constant_outside_of_the_file_of_weights_is_an_error(
    start: int, size: int, tmp_path: Path
) -> None:
    # given a file of weights of 8 bytes
    (tmp_path / "model.bin").write_bytes(b"\0\0\x80\x3f\0\0\0\x40")
    path = tmp_path / "model.xml"
    path.write_text(CONSTANT.format(0, 8))
    assert [values.tolist() for _, values in constants(path)] == [[1, 2]]
    # when a constant is at another place
    path.write_text(CONSTANT.format(start, size))
    # then reading it is an error of the file
    with pytest.raises(ProgramError, match=r"`w` in model\.bin is damaged"):
        list(constants(path))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.xml")
    with pytest.raises(ProgramError, match="cannot read"):
        read_ir(tmp_path / "model.xml")


def test_the_time_to_read_a_node_grows_with_its_inputs_only(tmp_path: Path) -> None:
    # given a node of 20,000 inputs
    ports = "".join(f"<port id='{i}'/>" for i in range(20_000))
    path = tmp_path / "model.xml"
    path.write_text(
        f"<net><layers><layer id='0' name='a' type='Concat'><input>{ports}</input></layer></layers></net>"
    )
    # when it is read
    started = time.process_time()
    read_ir(path)
    # then this takes 0.05 s; a search through all ports for each took 11 s
    assert time.process_time() - started < 2


def test_a_file_of_many_elements_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ir, "MAX_ELEMENTS", 5)
    path = tmp_path / "model.xml"
    path.write_text(CONSTANT.format(0, 8))
    with pytest.raises(ProgramError, match="damaged") as caught:
        read_ir(path)
    assert "more than 5 elements" in caught.value.why
