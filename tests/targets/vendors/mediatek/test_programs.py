"""Whisper's programs on the NPU: their operators are in the list, and they compute what torch does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tflite
import torch
from tflite.BuiltinOperator import BuiltinOperator
from torch import Tensor, nn

from whisperport.build.check import check
from whisperport.errors import LoweringError
from whisperport.model.inspection.check import CheckedProgram, check_graph
from whisperport.model.inspection.read_tflite import read_tflite
from whisperport.model.trace.program import trace
from whisperport.model.trace.variants import program_names
from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.targets import get_target
from whisperport.targets.vendors.mediatek.specs import OPERATORS

from ....extent import core_or_all
from ....model.inspection.tflite_file import INT64, Op, T, tflite_file

BOARD = "genio720"
ALL = dict.fromkeys(program_names(), BOARD)
# In part: the window's programs and most of the decoder on the NPU, with four axes; a prompt on the CPU.
PART = {"step": BOARD, "prefill_4": BOARD, "align": BOARD}
BUNDLES = core_or_all(
    [("one layer", PART)], [("one layer", ALL), ("tiny", ALL), ("tiny", PART), ("default", ALL)]
)

# From the part of the vendor's list that names what MDLA 5.3 does not support.
NOT_SUPPORTED = {
    *("GATHER", "SELECT", "SELECT_V2", "TOPK_V2", "FILL", "CEIL", "FLOOR", "LOG", "ROUND"),
    *("EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL", "NOT_EQUAL", "LOGICAL_AND"),
    *("LOGICAL_NOT", "LOGICAL_OR", "LEAKY_RELU", "LOG_SOFTMAX", "REDUCE_ANY", "EMBEDDING_LOOKUP"),
}


@pytest.fixture(scope="module", params=BUNDLES, ids=lambda one: f"{one[0]}-{len(one[1])}")
def bundle(exported: Callable[..., Bundle], request: pytest.FixtureRequest) -> Bundle:
    """A decoder on the NPU: of random weights, in part; in `make test-all` also all of it, and trained."""
    checkpoint, placement = request.param
    return exported(BOARD, checkpoint, placement=placement)


def on_the_npu(bundle: Bundle) -> list[ProgramEntry]:
    """Return the programs on the NPU: the window's, the step, and at least one for prompts."""
    found = [entry for entry in bundle.manifest.programs if entry.target == BOARD]
    assert {"encoder", "cross_kv", *PART} <= {entry.spec.name for entry in found}
    return found


def contents(path: Path) -> tuple[set[str], list[list[int]]]:
    """Return the operators and the shapes of all tensors in a .tflite, read with flatc's classes."""
    model = tflite.Model.GetRootAs(path.read_bytes())
    names = {number: name for name, number in vars(BuiltinOperator).items()}
    codes = [model.OperatorCodes(i) for i in range(model.OperatorCodesLength())]
    graph = model.Subgraphs(0)
    operators = {
        names[max(code.BuiltinCode(), code.DeprecatedBuiltinCode())]
        for code in (
            codes[graph.Operators(i).OpcodeIndex()] for i in range(graph.OperatorsLength())
        )
    }
    tensors = [graph.Tensors(i) for i in range(graph.TensorsLength())]
    return operators, [[t.Shape(axis) for axis in range(t.ShapeLength())] for t in tensors]


def silent(_: str) -> None:
    pass


def test_no_file_of_a_decoder_on_the_npu_has_an_operator_outside_of_the_list(
    bundle: Bundle,
) -> None:
    for entry in on_the_npu(bundle):
        operators, shapes = contents(bundle.path(entry.files[0]))

        assert operators <= OPERATORS.keys(), entry.spec.name
        assert not operators & NOT_SUPPORTED
        assert max(map(len, shapes)) <= 4
        assert min(map(min, filter(None, shapes))) >= 1


def test_the_host_passes_caches_of_four_axes_and_a_bounded_mask(bundle: Bundle) -> None:
    step = bundle.manifest.program("step")
    shapes = {tensor.name: tensor.shape for tensor in step.spec.inputs}

    assert len(shapes["mask"]) == len(shapes["self_k_0"]) == len(shapes["cross_v_0"]) == 4
    assert -100 < step.placement.mask <= -16
    assert step.placement.precision == "fp16"


def test_the_check_finds_nothing_to_reject_in_the_bundle(bundle: Bundle) -> None:
    for entry in on_the_npu(bundle):
        checked = checked_file(bundle.path(entry.files[0]))

        assert not checked.rejected
        # The encoder's linears have one row for each position; those of a prompt of 4 tokens have 4.
        has_warnings = entry.spec.name in ("encoder", "cross_kv", "prefill_64", "align")
        assert {group.rule for group in checked.findings} == ({"WP502"} if has_warnings else set())


def test_a_bundle_on_the_npu_is_verified_by_emulation_and_claims_no_more(bundle: Bundle) -> None:
    assert bundle.manifest.verified
    for entry in on_the_npu(bundle):
        kinds = {one.kind for one in bundle.manifest.evidence(entry.spec.name)}
        assert "emulated" in kinds
        assert not kinds & {"run", "compiled", "simulated"}


# What the NPU does not support --------------------------------------------------------------------


def checked_file(path: Path, target: str = BOARD) -> CheckedProgram:
    """Check a file against the limits alone, without LiteRT's partitioner."""
    (graph,) = read_tflite(path)
    return check_graph(graph, get_target(target).spec)


def rejected(path: Path, target: str = BOARD) -> dict[str, tuple[str, str]]:
    """Return rule -> operator and reason of what the limits reject in a file."""
    return {
        group.rule: (group.operator, group.occurrences[0].reason)
        for group in checked_file(path, target).rejected
    }


def test_a_lookup_of_tokens_is_named_with_its_reason(tmp_path: Path) -> None:
    # given: a table (40, 16), and tokens (1, 8) in int64
    path = tmp_path / "lookup.tflite"
    table = T((40, 16), data=bytes(40 * 16 * 4))
    tensors = [table, T((1, 8), INT64), T((1, 8, 16))]
    path.write_bytes(tflite_file(tensors, [Op("GATHER", [0, 1], [2])], [1], [2]))

    result = check(path, BOARD)
    found = rejected(path)

    assert not result
    assert found["WP101"] == ("gather", "GATHER (gather) is not in the list of supported operators")
    assert "input of dtype int64" in found["WP202"][1]


@pytest.mark.parametrize("name", ["SELECT", "TOPK_V2", "FILL", "LOG_SOFTMAX", "CUMSUM"])
def test_an_operator_that_no_mdla_has_is_rejected_on_every_board_with_one(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "one.tflite"
    path.write_bytes(tflite_file([T((1, 8)), T((1, 8))], [Op(name, [0], [1])], [0], [1]))

    for board in ("genio510", "genio520", "genio700", "genio720", "genio1200"):
        assert list(rejected(path, board)) == ["WP101"], board


def test_a_file_of_five_axes_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "deep.tflite"
    deep = T((1, 1, 1, 2, 3))
    path.write_bytes(tflite_file([deep, deep], [Op("ABS", [0], [1])], [0], [1]))

    assert rejected(path) == {"WP201": ("abs", "rank 5 is above the limit of 4; fold axes")}


def test_attention_is_rejected_on_mdla_2_not_seen_on_mdla_3_and_accepted_on_mdla_5(
    tmp_path: Path,
) -> None:
    path = tmp_path / "attention.tflite"
    sides = [T((1, 4, 8)), T((1, 8, 4)), T((1, 4, 4))]
    path.write_bytes(tflite_file(sides, [Op("BATCH_MATMUL", [0, 1], [2])], [0, 1], [2]))

    kinds = {}
    for board in ("genio1200", "genio700", "genio720"):
        findings = checked_file(path, board).findings
        kinds[board] = [(group.rule, group.kind) for group in findings]

    assert kinds == {
        "genio1200": [("WP101", "rejected")],
        "genio700": [("WP104", "not seen")],
        "genio720": [],
    }


class Lookup(nn.Module):
    """A table inside of the program, which needs GATHER."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)

    def forward(self, tokens: Tensor) -> Any:
        return self.table(tokens)


class Integers(nn.Module):
    """Integers between two nodes: each operator is in the list, but no integer of 32 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.int32).to(torch.float32) + x


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda: trace("lookup", Lookup(), (torch.zeros(1, 8, dtype=torch.int64),)), "int64"),
        (lambda: trace("integers", Integers(), (torch.zeros(1, 8),)), "int32"),
    ],
    ids=["in the torch graph", "in the file"],
)
def test_a_program_with_a_node_that_is_not_supported_is_not_written(
    program: Callable[[], Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(LoweringError, match="`genio720` does not support the program") as raised:
        get_target(BOARD).lower([program()], tmp_path, silent)

    assert reason in raised.value.why
    assert "--placement" in raised.value.hint
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
