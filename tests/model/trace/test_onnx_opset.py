"""Any opset from 13 to 20 that is asked for is the one written, and computes the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from torch import Tensor, nn

from whisperport.errors import LoweringError
from whisperport.model.trace import onnx as writer
from whisperport.model.trace.onnx_file import write_onnx_file
from whisperport.model.trace.onnx_opset import NEWEST, OLDEST, downgrade
from whisperport.model.trace.program import Program, trace
from whisperport.model.trace.trial import eager_outputs, random_inputs
from whisperport.model.trace.whisper import Parts, align, cross_kv, encoder, prefill, step
from whisperport.program.dims import Dims

from ...extent import core_or_all

OPSETS = range(OLDEST, NEWEST + 1)
ATOL = 1e-4  # what the project promises; another order of summation gives 1e-6 at these sizes

ODD = Dims(  # no size a power of two, and no two that could be mistaken for each other
    n_mels=7,
    n_audio_ctx=9,
    n_audio_state=15,
    n_audio_head=3,
    n_audio_layer=1,
    n_text_ctx=11,
    n_text_state=15,
    n_text_head=5,
    n_text_layer=2,
    n_vocab=53,
    n_audio_ffn=21,
    n_text_ffn=19,
)


def session_outputs(path: Path, program: Program, inputs: list[Tensor]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [tensor.name for tensor in program.spec.outputs]
    arrays = [tensor.numpy() for tensor in inputs]
    return session.run(names, {t.name: a for t, a in zip(program.spec.inputs, arrays, strict=True)})


def assert_written(program: Program, path: Path, opset: int, **how: Any) -> onnx.ModelProto:
    """Written in `opset` by its own word, valid in full, static, and equal to torch."""
    facts = write_onnx_file(program, path, opset=opset, **how)
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(str(path))
    assert [(o.domain, o.version) for o in model.opset_import] == [("", opset)]
    assert facts.nodes == len(model.graph.node)
    assert facts.max_rank <= 4
    for value in [*model.graph.value_info, *model.graph.input, *model.graph.output]:
        assert all(d.HasField("dim_value") for d in value.type.tensor_type.shape.dim), value.name
    inputs = random_inputs(program, seed=0)
    actual = session_outputs(path, program, inputs)
    for onnx_output, expected in zip(actual, eager_outputs(program, inputs), strict=True):
        np.testing.assert_allclose(onnx_output, expected.numpy(), atol=ATOL, rtol=0)
    return model


@pytest.fixture
def torch_writes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's part is the same for every opset, and takes all the time."""
    written: dict[int, ir.Model] = {}
    convert = writer._convert

    def once(program: Program) -> ir.Model:
        if id(program) not in written:
            written[id(program)] = convert(program)
        return written[id(program)].clone()

    monkeypatch.setattr(writer, "_convert", once)


@pytest.fixture(scope="module")
def odd_programs() -> tuple[Program, ...]:
    from whisperport.model.network.whisper import Whisper

    torch.manual_seed(0)
    model = Whisper(ODD).eval().requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    parts = Parts(model, [(0, 1), (1, 4)])
    first, second = prefill(parts, 3), prefill(parts, 5)
    programs = encoder(parts), cross_kv(parts), first, second, step(parts), align(parts)
    return tuple(program.traced() for program in programs)


# The second prefill repeats the first with more tokens.
@pytest.mark.parametrize("index", core_or_all((0, 1, 2, 4, 5), range(6)))
def test_each_of_our_programs_in_each_opset(
    odd_programs: tuple[Program, ...], index: int, tmp_path: Path, torch_writes_once: None
) -> None:
    for opset in core_or_all((13, 17, 20), OPSETS):
        model = assert_written(odd_programs[index], tmp_path / f"{opset}.onnx", opset)

        introduced = {n.op_type: onnx.defs.get_schema(n.op_type, opset) for n in model.graph.node}
        assert all(schema.since_version <= opset for schema in introduced.values())


class _Logits(nn.Module):
    """Hugging Face's decoder with the vocabulary's weights tied, as its users export it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.decoder = model.model.decoder
        self.proj_out = model.proj_out

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        out = self.decoder(input_ids=tokens, encoder_hidden_states=features, use_cache=False)
        return self.proj_out(out.last_hidden_state)


class _Features(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.encoder = model.model.encoder

    def forward(self, mel: Tensor) -> Tensor:
        return self.encoder(mel).last_hidden_state


@pytest.fixture(scope="module")
def third_party_programs(random_hf_whisper: Any, random_openai_whisper: Any) -> dict[str, Program]:
    hf, openai = random_hf_whisper(), random_openai_whisper()
    tokens, features = torch.zeros(1, 9, dtype=torch.long), torch.zeros(1, 50, 64)
    mel = torch.zeros(1, 80, 200)
    hf.set_attn_implementation("eager")
    return {
        "hf decoder": trace("hf_decoder", _Logits(hf), (tokens, features), ["logits"]),
        "hf encoder": trace("hf_encoder", _Features(hf), (mel,), ["features"]),
        "openai decoder": trace("decoder", openai.decoder, (tokens, features), ["logits"]),
        "openai encoder": trace("encoder", openai.encoder, (mel,), ["features"]),
    }


@pytest.mark.parametrize(
    "name",
    core_or_all(
        ["hf encoder", "openai decoder"],
        ["hf encoder", "hf decoder", "openai encoder", "openai decoder"],
    ),
)
def test_third_party_modules_with_no_weight_stored_twice(
    third_party_programs: dict[str, Program], name: str, tmp_path: Path, torch_writes_once: None
) -> None:
    program = third_party_programs[name]
    unique = {t.untyped_storage().data_ptr(): t for t in program.exported.state_dict.values()}
    weights = sum(tensor.numel() * tensor.element_size() for tensor in unique.values())

    for opset in core_or_all((20,), (13, 17, 20)):  # 13 is below
        assert_written(program, tmp_path / "program.onnx", opset)
        assert (tmp_path / "program.onnx").stat().st_size < 1.01 * weights + 100_000

    assert_written(program, tmp_path / "simple.onnx", 13, simplify=True)
    assert (tmp_path / "simple.onnx").stat().st_size < 1.01 * weights + 100_000


FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def one_node(
    operator: str, x: np.ndarray, *constants: np.ndarray | None, outputs: int = 1, **attributes: Any
) -> onnx.ModelProto:
    """A graph of opset 20 with one node, its shapes inferred."""
    stored = [c for c in constants if c is not None]
    names = ["x", *("" if c is None else f"c{i}" for i, c in enumerate(constants))]
    node = helper.make_node(operator, names, [f"y{i}" for i in range(outputs)], **attributes)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [onnx.ValueInfoProto(name=f"y{i}") for i in range(outputs)],
        [
            onnx.numpy_helper.from_array(c, name)
            for c, name in zip(stored, [n for n in names[1:] if n], strict=True)
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def lowered(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    taken = ir.from_proto(model)
    downgrade(taken, opset, "one")
    written = ir.to_proto(taken)
    onnx.checker.check_model(written, full_check=True)
    return written


def run(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})


RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 3, 5)).astype(np.float32)
AXES = np.array([1], np.int64)
REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
ONE_NODE: dict[str, Callable[[], onnx.ModelProto]] = {
    **{
        f"Reduce{how}": lambda how=how: one_node(f"Reduce{how}", abs(X), AXES) for how in REDUCTIONS
    },
    "ReduceMean, last axis dropped": lambda: one_node("ReduceMean", X, -AXES, keepdims=0),
    "ReduceMean of all": lambda: one_node("ReduceMean", X),
    "ReduceMean of nothing": lambda: one_node(
        "ReduceMean", X, np.zeros(0, np.int64), noop_with_empty_axes=1
    ),
    "LayerNormalization": lambda: one_node("LayerNormalization", X, X[0, 0], X[0, 1]),
    "LayerNormalization, no bias": lambda: one_node("LayerNormalization", X, X[0], axis=1),
    "LayerNormalization in halves": lambda: one_node(
        "LayerNormalization", X.astype(np.float16), X[0, 0].astype(np.float16)
    ),
    "Gelu": lambda: one_node("Gelu", X),
    "Gelu by tanh": lambda: one_node("Gelu", X, approximate="tanh"),
    "HardSwish": lambda: one_node("HardSwish", X),
    "Mish": lambda: one_node("Mish", X),
    "Pad": lambda: one_node("Pad", X, np.array([1, 2], np.int64), np.float32([7])[0], AXES),
    "Pad, first and last axis": lambda: one_node(
        "Pad", X, np.array([1, 2, 3, 0], np.int64), None, np.array([0, -1]), mode="edge"
    ),
    "Reshape": lambda: one_node("Reshape", X, np.array([5, -1], np.int64), allowzero=1),
    "Reshape, a size copied": lambda: one_node("Reshape", X, np.array([0, 15], np.int64)),
    "CastLike": lambda: one_node("CastLike", X, np.array([1], np.int64)),
    "Trilu": lambda: one_node("Trilu", X),
    "Trilu, lower, shifted": lambda: one_node("Trilu", X, np.array(-1, np.int64), upper=0),
    "Trilu of infinities": lambda: one_node("Trilu", X * np.inf, np.array(1, np.int64)),
    "Trilu of bool": lambda: one_node("Trilu", X > 0),
    "Add": lambda: one_node("Add", X, X),
    "Shape": lambda: one_node("Shape", X),
    "IsNaN": lambda: one_node("IsNaN", X),
}


@pytest.mark.parametrize("name", ONE_NODE)
def test_an_operator_written_with_older_ones_computes_the_same(name: str) -> None:
    model = ONE_NODE[name]()
    kind = helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    x = abs(X) if "Reduce" in name else X * np.inf if "infin" in name else X
    x = (X > 0) if kind == np.bool_ else x.astype(kind)
    expected = run(model, x)[0]

    for opset in OPSETS:
        actual = run(lowered(model, opset), x)[0]

        assert actual.dtype == expected.dtype
        atol = 2e-3 if kind == np.float16 else 1e-6  # one rounding of a value of about 2
        np.testing.assert_allclose(actual, expected, atol=atol, rtol=1e-6)


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
    opset=st.integers(13, 16),
)
@settings(max_examples=25)
def test_layer_norm_of_any_shape_and_axis(
    shape: list[int], data: st.DataObject, opset: int
) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    scale = np.full(shape[axis % len(shape) :], 1.5, np.float32)
    model = one_node("LayerNormalization", x, scale, axis=axis, epsilon=1e-3)

    np.testing.assert_allclose(run(lowered(model, opset), x)[0], run(model, x)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: one_node("BitwiseNot", X.astype(np.int64)), "`BitwiseNot` is new in opset 18"),
        (lambda: one_node("HannWindow", np.array(4, np.int64)), "`HannWindow` is new in opset 17"),
        (
            lambda: one_node("LayerNormalization", X, X[0, 0], outputs=2),
            "`LayerNormalization` is new in opset 17, and an output other than the first is used",
        ),
        (
            lambda: one_node("Reshape", X[:, :0], np.array([0, 3], np.int64), allowzero=1),
            "its shape contains a 0",
        ),
        (
            lambda: one_node("Pad", X, np.array([1, 1], np.int64), None, AXES, mode="wrap"),
            "its mode is `wrap`",
        ),
        (lambda: one_node("Add", X.astype(np.int8), X.astype(np.int8)), "supports tensor(int8)"),
        (
            lambda: one_node("ScatterND", X, AXES[None], X[:1], reduction="add"),
            "has the attribute `reduction`, which opset 13 does not have",
        ),
        (
            lambda: one_node("Resize", X, None, np.float32([1, 1, 2]), antialias=1, mode="linear"),
            "`Resize` of opset 19 differs from that of opset 13",
        ),
    ],
)
def test_what_an_older_opset_cannot_say_is_rejected_by_name(
    model: Callable[[], onnx.ModelProto], says: str
) -> None:
    taken = ir.from_proto(model())

    with pytest.raises(LoweringError, match="cannot be written as ONNX opset 13") as raised:
        downgrade(taken, 13, "one")

    assert says in raised.value.why


def test_axes_that_are_computed_are_rejected() -> None:
    model = one_node("ReduceMean", X, AXES)
    model.graph.input.append(helper.make_tensor_value_info("c0", INT64, [1]))
    del model.graph.initializer[:]

    with pytest.raises(LoweringError) as raised:
        downgrade(ir.from_proto(model), 13, "one")

    assert "its input `c0` is not a constant" in raised.value.why


def test_an_operator_of_another_set_is_rejected_with_the_set() -> None:
    model = one_node("Add", X, X)
    model.graph.node[0].domain = "com.example"

    with pytest.raises(LoweringError) as raised:
        downgrade(ir.from_proto(model), 13, "one")

    assert "`com.example`" in raised.value.why


def test_a_node_with_a_graph_of_its_own_is_rejected() -> None:
    branch = helper.make_graph(
        [helper.make_node("Gelu", ["x"], ["z"])],
        "branch",
        [],
        [helper.make_tensor_value_info("z", FLOAT, X.shape)],
    )
    model = one_node("Gelu", X)
    model.graph.node[0].CopyFrom(
        helper.make_node("If", ["c"], ["y0"], then_branch=branch, else_branch=branch)
    )
    model.graph.input.append(helper.make_tensor_value_info("c", BOOL, []))

    with pytest.raises(LoweringError) as raised:
        downgrade(ir.from_proto(model), 19, "one")

    assert "`If` contains a subgraph" in raised.value.why


@pytest.mark.parametrize("opset", [12, 21, 0])
def test_other_opsets_are_rejected_before_any_work(opset: int, tmp_path: Path) -> None:
    program = trace("p", nn.Linear(3, 2), (torch.zeros(1, 3),), ["y"])

    with pytest.raises(LoweringError) as raised:
        write_onnx_file(program, tmp_path / "p.onnx", opset=opset)

    assert raised.value.why == "supported opsets are 13 to 20"


def test_large_weights_go_beside_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whisperport.model.trace.onnx_file.MAX_WEIGHT_BYTES", 1000)
    program = trace("p", nn.Linear(64, 64), (torch.zeros(1, 64),), ["y"])

    facts = write_onnx_file(program, tmp_path / "p.onnx", opset=13)

    assert facts.files == (tmp_path / "p.onnx", tmp_path / "p.onnx.data")
    assert (tmp_path / "p.onnx").stat().st_size < 2000
    inputs = random_inputs(program, seed=0)
    actual = session_outputs(tmp_path / "p.onnx", program, inputs)[0]
    np.testing.assert_allclose(actual, eager_outputs(program, inputs)[0], atol=1e-6)


def test_a_weight_that_simplifying_stores_twice_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxslim

    def untie(model: onnx.ModelProto) -> onnx.ModelProto:
        twin = onnx.TensorProto()
        twin.CopyFrom(max(model.graph.initializer, key=lambda t: len(t.raw_data)))
        twin.name = "twin"
        model.graph.initializer.append(twin)
        return model

    monkeypatch.setattr(onnxslim, "slim", untie)
    program = trace("p", nn.Linear(256, 256), (torch.zeros(1, 256),), ["y"])

    with pytest.raises(LoweringError, match=r"onnxslim made `.*` larger by") as raised:
        write_onnx_file(program, tmp_path / "p.onnx", simplify=True)

    assert "stored twice" in raised.value.why
    assert not (tmp_path / "p.onnx").exists()
