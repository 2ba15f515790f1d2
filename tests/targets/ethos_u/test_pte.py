"""Read the description inside compiled files, right, wrong and damaged ones."""

import random
import re
import struct
from pathlib import Path

import pytest

from whisperport.errors import BundleError
from whisperport.inspection.delegation import read_delegation
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets.ethos_u.pte import Pte, check_pte, read_pte

from ...extent import EVERYTHING, core_or_all
from .pte_file import CONVERSIONS, pte_bytes

MEL, FEATURES = (1, 8, 20), (1, 10, 16)
ENCODER = ProgramSpec("encoder", (TensorSpec("mel", MEL),), (TensorSpec("features", FEATURES),))
WHOLE = pte_bytes([MEL], [FEATURES])
CASES = core_or_all(500, 20_000)


def read(tmp_path: Path, content: bytes) -> Pte:
    path = tmp_path / "encoder.pte"
    path.write_bytes(content)
    return read_pte(path)


def checked(tmp_path: Path, content: bytes) -> Pte:
    path = tmp_path / "encoder.pte"
    path.write_bytes(content)
    return check_pte(path, ENCODER, "ethos-u85")


def test_a_compiled_file_states_its_signature_its_npu_and_what_runs_where(tmp_path):
    assert checked(tmp_path, WHOLE) == Pte(
        method="encoder",
        inputs=((MEL, "float32"),),
        outputs=((FEATURES, "float32"),),
        accelerator="ethos-u85-256",
        subgraphs=1,
        undelegated=tuple(".".join(names) for names in CONVERSIONS),
    )


@pytest.mark.skipif(not EVERYTHING, reason="importing ExecuTorch takes seconds; make test-all")
def test_executorch_reads_the_same_from_the_files_of_these_tests():
    delegation = read_delegation(WHOLE)["encoder"]

    assert delegation.subgraphs == 1
    assert delegation.undelegated == tuple(".".join(names) for names in CONVERSIONS)


@pytest.mark.parametrize("accelerator", ["ethos-u55-128", "ethos-u65-256", "ethos-u850-256", ""])
def test_a_file_for_another_npu_is_rejected(tmp_path, accelerator):
    with pytest.raises(BundleError, match="for another NPU than `ethos-u85`") as other:
        checked(tmp_path, pte_bytes([MEL], [FEATURES], accelerator=accelerator))

    assert (accelerator or "does not name") in other.value.why


@pytest.mark.parametrize(
    ("inputs", "outputs", "kind"),
    [
        ([(1, 8, 21)], [FEATURES], 6),
        ([MEL, MEL], [FEATURES], 6),
        ([MEL], [], 6),
        ([MEL], [FEATURES, FEATURES], 6),
        ([MEL], [FEATURES], 1),
    ],
)
def test_a_file_of_another_signature_is_rejected(tmp_path, inputs, outputs, kind):
    with pytest.raises(BundleError, match="does not compute `encoder`"):
        checked(tmp_path, pte_bytes(inputs, outputs, scalar_type=kind))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"methods": 2}, "it has 2 methods"),
        ({"methods": 0}, "it has 0 methods"),
        ({"backends": ("XnnpackBackend",)}, "XnnpackBackend"),
        ({"backends": ("EthosUBackend", "Other")}, "Other"),
        ({"backends": ()}, r"its delegates are \[\]"),
    ],
)
def test_a_file_without_one_method_for_the_npu_alone_is_rejected(tmp_path, given, why):
    with pytest.raises(BundleError) as wrong:
        read(tmp_path, pte_bytes([MEL], [FEATURES], **given))

    assert re.search(why, wrong.value.why)


@pytest.mark.parametrize("length", [0, 3, 8, 31, 47, len(WHOLE) // 2, len(WHOLE) - 4])
def test_a_truncated_file_is_rejected(tmp_path, length):
    with pytest.raises(BundleError, match="not a compiled file"):
        read(tmp_path, WHOLE[:length])


def test_a_list_that_is_longer_than_the_file_is_not_read(tmp_path):
    for at in range(40, len(WHOLE) - 4, 4):
        content = WHOLE[:at] + struct.pack("<I", 2**31 - 1) + WHOLE[at + 4 :]
        try:
            found = read(tmp_path, content)
        except BundleError:
            continue
        assert len(found.inputs) + len(found.undelegated) <= 4


def test_a_mutated_file_is_read_or_rejected_and_nothing_else(tmp_path):
    randomly, rejected = random.Random(0), 0
    for _ in range(CASES):
        content = bytearray(WHOLE)
        for _ in range(randomly.randint(1, 4)):
            content[randomly.randrange(len(content))] = randomly.randrange(256)
        try:
            read(tmp_path, bytes(content))
        except BundleError:
            rejected += 1
    assert rejected > CASES // 5


def test_a_folder_in_place_of_a_file_is_rejected(tmp_path):
    with pytest.raises(BundleError, match="not a compiled file"):
        read_pte(tmp_path)
