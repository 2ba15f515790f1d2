"""Whisper's programs on the NPU: their operators are in the list, they compute what torch does, in fewer
bits too.
"""

import logging
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tflite
import torch
from tflite.BuiltinOperator import BuiltinOperator
from torch import Tensor, nn

from whisperport.build.check import check
from whisperport.errors import LoweringError, ProgramError
from whisperport.model.inspection.read_tflite import read_tflite
from whisperport.model.inspection.rejections import CheckedProgram, check_graph
from whisperport.model.trace.program import Program, trace
from whisperport.model.trace.variants import program_names
from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.program.placement import Placement
from whisperport.system.child import Limits
from whisperport.targets import RunOptions, Target, get_target
from whisperport.targets.partitioner import Declined, Partition
from whisperport.targets.vendors.mediatek import partitioner as module
from whisperport.targets.vendors.mediatek.chips import CHIPS, GENIO350, GENIO720, GENIO1200
from whisperport.targets.vendors.mediatek.partitioner import LiteRtPartitioner
from whisperport.targets.vendors.mediatek.specs import OPERATORS
from whisperport.targets.vendors.mediatek.target import DEVICE_IO, LowerOptions
from whisperport.verification.evidence import partition_check

from ....extent import core_or_all
from ....model.inspection.tflite_file import INT32, INT64, Op, T, tflite_file

# Whisper's programs on the NPU: their operators are in the list, and they compute what torch does.

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
        get_target(BOARD).lower([program()], tmp_path)

    assert reason in raised.value.why
    assert "--placement" in raised.value.hint
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# MediaTek's LiteRT partitioner, asked for real where ai-edge-litert and a C compiler are installed.
#
# `build()` makes small files, in which each operator is known to be on the plugin's list or not.

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
    return module.ask(str(path), soc)


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
        module.ask(str(path), "mt8189")
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
        module.ask(str(plain(tmp_path)), "mt8189")
    assert "SIGSEGV" in raised.value.why


@asked
def test_a_soc_that_the_plugin_does_not_have_is_an_error(tmp_path):
    with pytest.raises(ProgramError, match="rejects") as raised:
        module.ask(str(plain(tmp_path)), "mt9999")
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


WIDTH, SAMPLES = 16, 12

Quantize = Callable[[str, str], tuple[Path, ProgramEntry, Target]]


@pytest.fixture(scope="module")
def samples() -> np.ndarray:
    random = np.random.default_rng(0)
    return random.standard_normal((SAMPLES, 1, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 8))
    return trace("encoder", module, (torch.zeros(1, WIDTH),), ["features"])


@pytest.fixture(scope="module")
def lowered(
    program: Program, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ProgramEntry]:
    """The program in float32. Do not write to its folder: copy it."""
    folder = tmp_path_factory.mktemp("lowered")
    (entry,) = get_target(BOARD).lower([program], folder)
    return folder, entry


@pytest.fixture
def quantize(lowered: tuple[Path, ProgramEntry], samples: np.ndarray, tmp_path: Path) -> Quantize:
    """`quantize(precision, operators)`: quantize a copy of the program with the samples."""

    def make(precision: str, operators: str) -> tuple[Path, ProgramEntry, Target]:
        target = get_target(BOARD).configured(LowerOptions(static=operators))  # type: ignore[arg-type]
        folder = shutil.copytree(lowered[0], tmp_path / "quantized")
        entry = replace(lowered[1], placement=Placement(BOARD, precision))
        need = target.calibration(entry.spec, precision)
        assert need is not None
        assert need.names == ("input",)
        np.save(tmp_path / "input.npy", samples)
        entry = target.quantize(entry, folder, {"input": tmp_path / "input.npy"})
        return folder, entry, target

    return make


def dtypes_of(path: Path) -> set[str]:
    (graph,) = read_tflite(path)
    return {value.dtype for node in graph.nodes for value in (*node.tensors, *node.outputs)}


@pytest.mark.parametrize(
    ("precision", "activations", "min_db"), [("w8a16", "int16", 35), ("w8a8", "int8", 20)]
)
def test_a_quantized_file_is_within_the_limits_and_close_to_float32(
    quantize: Quantize,
    program: Program,
    samples: np.ndarray,
    precision: str,
    activations: str,
    min_db: float,
) -> None:
    folder, entry, target = quantize(precision, "linear")

    # then: weights of 8 bits limit the SQNR to about 40 dB
    (graph,) = read_tflite(folder / entry.files[0])
    assert {activations, "int8"} <= dtypes_of(folder / entry.files[0])
    assert not check_graph(graph, target.spec).rejected
    options = RunOptions(threads=1, options={f"{BOARD}.emulate": "on"})
    found = target.load(folder, [entry], options)["encoder"].run({"input": samples[0]})["features"]
    wanted = program.exported.module(check_guards=False)(torch.from_numpy(samples[0]))
    wanted = wanted.detach().numpy()
    assert 10 * np.log10((wanted**2).mean() / ((found - wanted) ** 2).mean()) > min_db
    assert target.emulated_precision(precision) == precision


@pytest.mark.parametrize(("operators", "dtype"), [("linear", "float32"), ("all", "int16")])
def test_the_entry_tells_the_device_which_numbers_go_in_and_out(
    quantize: Quantize, operators: str, dtype: str
) -> None:
    _, entry, _ = quantize("w8a16", operators)

    (given,), (returned,) = (
        entry.facts.target_facts[DEVICE_IO][side] for side in ("inputs", "outputs")
    )
    if operators == "all":
        assert (given["dtype"], returned["dtype"]) == (dtype, dtype)
        assert given["scale"] > 0
        assert given["zero_point"] == 0
    assert entry.spec.inputs[0].dtype == "float32"  # the host passes real numbers in both cases


def test_a_board_without_16_bit_activations_rejects_such_a_file(quantize: Quantize) -> None:
    folder, entry, _ = quantize("w8a16", "all")
    (graph,) = read_tflite(folder / entry.files[0])

    found = check_graph(graph, get_target("genio1200").spec).rejected

    assert ("WP214", "linear") in {(group.rule, group.operator) for group in found}


def test_8_bits_for_an_encoder_is_a_warning_that_names_the_vendors_own_choice(
    quantize: Quantize, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        quantize("w8a8", "linear")

    (warning,) = [record.getMessage() for record in caplog.records]
    assert "outliers" in warning
    assert "MediaTek's own export of Whisper uses w8a16 by default" in warning
