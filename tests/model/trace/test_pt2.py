"""Third-party `.pt2` files are read completely or rejected; their dynamic sizes become numbers."""

import contextlib
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._sympy.functions import FloorDiv, Mod

from whisperport.build.check import check
from whisperport.build.fix import fix
from whisperport.build.lower import LowerOptions, lower
from whisperport.errors import ProgramError
from whisperport.model.trace.pt2 import read_pt2, weight_bytes
from whisperport.model.trace.trial import eager_outputs, random_inputs
from whisperport.program.sizes import MAX_POWER, MAX_SIZE, fix_sizes
from whisperport.program.spec import TensorSpec

from ...extent import core_or_all
from ..rewrites.third_party import FEATURES, TOKENS, Decoder, small_transformers

# Third-party files are read completely or rejected with a reason; code in them is not run.


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.register_buffer("shift", torch.arange(4.0), persistent=False)

    def forward(self, tokens: Tensor, *, scale: Tensor) -> Tensor:
        x = self.table(tokens) * scale + self.shift
        return x @ self.table.weight.T


def saved(path: Path, module: nn.Module, args: tuple[Any, ...], **how: Any) -> Path:
    torch.export.save(torch.export.export(module.eval(), args, strict=False, **how), path)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens (1, 5) and a scale (4,), saved; do not write to it."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("pt2") / "small.pt2"
    tokens = torch.zeros(1, 5, dtype=torch.long)
    return saved(path, Small(), (tokens,), kwargs={"scale": torch.ones(4)})


def forged(path: Path, original: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """A copy with some members changed, or left out where the change is None."""
    with zipfile.ZipFile(original) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            data = change(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
    return path


def in_graph(edit: Callable[[Any], None]) -> Callable[[str, bytes], bytes]:
    def change(name: str, data: bytes) -> bytes:
        if not name.endswith("models/model.json"):
            return data
        graph = json.loads(data)
        edit(graph)
        return json.dumps(graph).encode()

    return change


def test_a_program_is_read_as_it_was_saved(small: Path) -> None:
    program = read_pt2(small)

    assert program.name == "small"
    assert program.spec.inputs == (
        TensorSpec("tokens", (1, 5), "int64"),
        TensorSpec("scale", (4,), "float32"),
    )
    assert [t.shape for t in program.spec.outputs] == [(1, 5, 7)]
    assert weight_bytes(program) == 4 * (7 * 4 + 4)
    tokens, scale = random_inputs(program, seed=0)
    assert 0 <= tokens.min() < tokens.max() < 7  # in range of the table it reads
    torch.manual_seed(0)
    with torch.no_grad():
        expected = Small()(tokens, scale=scale)
    torch.testing.assert_close(eager_outputs(program, [tokens, scale])[0], expected)


def test_random_inputs_repeat_by_seed(small: Path) -> None:
    program = read_pt2(small)

    first, again, other = (random_inputs(program, seed)[1] for seed in (0, 0, 1))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_program_without_example_inputs_gets_zeros(small: Path, tmp_path: Path) -> None:
    def empty(name: str, data: bytes) -> bytes:
        return b"" if "sample_inputs" in name else data

    program = read_pt2(forged(tmp_path / "p.pt2", small, empty))

    args, kwargs = program.exported.example_inputs
    assert args[0].shape == (1, 5)
    assert kwargs["scale"].shape == (4,)


def rejected(path: Path, says: str) -> ProgramError:
    with pytest.raises(ProgramError) as error:
        read_pt2(path)
    assert says in str(error.value), error.value
    assert str(path) in error.value.what
    assert error.value.hint
    return error.value


def test_what_is_not_there_or_a_folder(tmp_path: Path) -> None:
    rejected(tmp_path / "none.pt2", "No such file")
    rejected(tmp_path, "folder")


@pytest.mark.parametrize("data", [b"", b"hello", b"PK\x03\x04", b"\x80\x02}q\x00."])
def test_another_kind_of_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "p.pt2").write_bytes(data)

    rejected(tmp_path / "p.pt2", "is not a program saved by torch.export")


def test_a_checkpoint_is_no_program(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")

    rejected(tmp_path / "model.pt", "it contains 0 programs")


def test_dynamic_shapes(tmp_path: Path) -> None:
    shapes = {"input": {0: torch.export.Dim("batch", min=2, max=9)}}
    path = saved(tmp_path / "p.pt2", nn.Linear(3, 2), (torch.ones(4, 3),), dynamic_shapes=shapes)

    rejected(path, "has dynamic shapes")


def test_another_torch_is_named(small: Path, tmp_path: Path) -> None:
    def older(graph: Any) -> None:
        graph["schema_version"]["major"] = 5
        graph["torch_version"] = "2.3.1"

    path = forged(tmp_path / "p.pt2", small, in_graph(older))

    assert "torch 2.3.1 wrote schema 5" in rejected(path, "an incompatible version of torch").why


def test_a_custom_operator_is_named(tmp_path: Path) -> None:
    with torch.library._scoped_library("strange", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: 2 * x, "CompositeExplicitAutograd")
        library.impl("double", lambda x: torch.empty_like(x), "Meta")

        class Custom(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.ops.strange.double(x)

        path = saved(tmp_path / "p.pt2", Custom(), (torch.ones(3),))

        rejected(path, "uses `strange.double.default`, which is not a standard operator of torch")


def test_a_function_smuggled_in_as_an_operator_is_not_run(small: Path, tmp_path: Path) -> None:
    """torch resolves any dotted path below `torch`, `torch.os.system` among them."""
    mark = tmp_path / "was run"

    def smuggle(graph: Any) -> None:
        node = graph["graph_module"]["graph"]["nodes"][0]
        node["target"] = "torch.os.mkdir"
        node["inputs"] = [{"name": "", "arg": {"as_string": str(mark)}, "kind": 1}]

    path = forged(tmp_path / "p.pt2", small, in_graph(smuggle))

    with pytest.raises(ProgramError):
        read_pt2(path)
    assert not mark.exists()


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("where", ["sample_inputs", "weights", "aotinductor"])
def test_a_pickle_is_not_run(small: Path, tmp_path: Path, where: str) -> None:
    mark = tmp_path / "was run"
    buffer = io.BytesIO()
    torch.save(Bomb(mark), buffer)

    def plant(name: str, data: bytes) -> bytes:
        if where == "sample_inputs" and where in name:
            return buffer.getvalue()
        if where == "weights" and name.endswith("model_weights_config.json"):
            config = json.loads(data)
            for entry in config["config"].values():
                entry["use_pickle"] = True
            return json.dumps(config).encode()
        if where == "weights" and "/weights/weight_" in name:
            return buffer.getvalue()
        return data

    path = forged(tmp_path / "p.pt2", small, plant)
    if where == "aotinductor":
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("small/data/aotinductor/model/x.so", b"\x7fELF")

    rejected(path, "contains code, which was not run")
    assert not mark.exists()


def test_a_symbolic_size_is_not_evaluated(small: Path, tmp_path: Path) -> None:
    mark = tmp_path / "was run"

    def plant(graph: Any) -> None:
        values = graph["graph_module"]["graph"]["tensor_values"]
        code = f"__import__('os').mkdir({str(mark)!r})"
        next(iter(values.values()))["sizes"][0] = {"as_expr": {"expr_str": code, "hint": None}}

    rejected(forged(tmp_path / "p.pt2", small, in_graph(plant)), "dynamic shapes")
    assert not mark.exists()


def test_guards_are_not_run(small: Path, tmp_path: Path) -> None:
    mark = tmp_path / "was run"

    def plant(graph: Any) -> None:
        graph["guards_code"] = [f"__import__('os').mkdir({str(mark)!r})"]

    program = read_pt2(forged(tmp_path / "p.pt2", small, in_graph(plant)))

    eager_outputs(program, random_inputs(program, seed=0))
    program.exported.module()
    assert not mark.exists()


@given(data=st.data())
@settings(max_examples=40)
def test_a_damaged_file_is_rejected_or_read_and_nothing_else(
    small: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = bytearray(small.read_bytes())
    if data.draw(st.booleans(), label="cut"):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        for place in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=4)):
            raw[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("damaged") / "p.pt2"
    path.write_bytes(raw)

    with contextlib.suppress(ProgramError):
        read_pt2(path)


# Numbers for the dynamic sizes of a `.pt2` file: expressions, real programs, errors, hostile files.

S, T = (sympy.Symbol(name, positive=True, integer=True) for name in ("s1", "s2"))


class Joined(nn.Module):
    """Sizes that are sums, products and quotients of the inputs' sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([self.linear(x), y], dim=1)
        rows = both.reshape(1, -1, 4)[:, : x.shape[1] * 2]
        return rows * rows.shape[1] + torch.arange(rows.shape[1])[None, :, None]


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The file of a program, and its two symbols."""
    first, second = (torch.export.Dim(name, min=3, max=40) for name in ("first", "second"))
    inputs = (torch.randn(1, 6, 8), torch.randn(1, 7, 8))
    shapes = ({1: first}, {1: second})
    exported = torch.export.export(Joined().eval(), inputs, dynamic_shapes=shapes)
    path = tmp_path_factory.mktemp("dynamic") / "joined.pt2"
    torch.export.save(exported, path)
    one, two = (str(name) for name in exported.range_constraints if name.is_symbol)
    return path, one, two


def expressions() -> st.SearchStrategy[Any]:
    leaves = st.sampled_from((S, T)) | st.integers(0, 9).map(sympy.Integer)
    joins = st.sampled_from((sympy.Add, sympy.Mul, sympy.Max, sympy.Min))
    divisions = st.sampled_from((FloorDiv, Mod))

    def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        joined = st.builds(lambda kind, one, two: kind(one, two), joins, inner, inner)
        number = st.integers(1, 7).map(sympy.Integer)
        divided = st.builds(lambda kind, one, two: kind(one, two), divisions, inner, number)
        return joined | divided | st.builds(sympy.Pow, inner, st.integers(0, 3))

    compared = st.sampled_from((sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt, sympy.Ne, sympy.Eq))
    sizes = st.recursive(leaves, deeper, max_leaves=5)
    return sizes | st.builds(lambda kind, one, two: kind(one, two), compared, sizes, sizes)


def program(text: str) -> dict[str, Any]:
    limits = {"min_val": 1, "max_val": 100}
    return {
        "range_constraints": {"s1": limits, "s2": limits},
        "graph_module": {"sizes": [{"as_expr": {"expr_str": text, "hint": {"as_int": 1}}}]},
    }


def fixed(text: str, first: int = 1, second: int = 1) -> Any:
    (found,) = fix_sizes("p", program(text), {"s1": first, "s2": second})["graph_module"]["sizes"]
    (value,) = found.values()
    return value


@given(expressions(), st.integers(1, 100), st.integers(1, 100))
@settings(max_examples=core_or_all(40, 1000), deadline=None)
def test_the_value_of_an_expression_is_sympys(expression: Any, first: int, second: int) -> None:
    expected = expression.subs({S: first, T: second})
    assume(expected.is_Boolean or expected >= 0)
    parts = (one.subs({S: first, T: second}) for one in sympy.preorder_traversal(expression))
    assume(all(one.is_Boolean or abs(one) <= MAX_SIZE for one in parts))
    assume(all(power.exp <= MAX_POWER for power in expression.atoms(sympy.Pow)))

    found = fixed(sympy.srepr(expression), first, second)

    assert found == expected
    assert isinstance(found, bool) == expected.is_Boolean


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "Symbol('s3')",
        "Symbol('s1').name",
        "(lambda: 1)()",
        "Pow(Integer(10), Integer(100000000))",
        "Mul(Integer(-3), Symbol('s1'))",
        "Pow(" * 40 + "Integer(3)" + ", Integer(8))" * 40,
        "FloorDiv(Integer(1), Integer(0))",
        "Integer('9')",
        "Add(" * 2000 + ")" * 2000,
        "[1][0]",
        "1 +",
    ],
)
def test_text_that_is_no_size_is_an_error_and_is_not_run(text: str) -> None:
    with pytest.raises(ProgramError, match="cannot compute the sizes"):
        fixed(text)


@pytest.mark.parametrize(("first", "second"), [(3, 40), (6, 7), (11, 5)])
def test_a_program_of_fixed_sizes_computes_the_same(
    joined: tuple[Path, str, str], first: int, second: int
) -> None:
    path, one, two = joined

    static = read_pt2(path, {one: first, two: second})

    assert [tensor.shape for tensor in static.spec.inputs] == [(1, first, 8), (1, second, 8)]
    inputs = random_inputs(static, 0)
    expected = torch.export.load(path).module()(*inputs)
    torch.testing.assert_close(eager_outputs(static, inputs)[0], expected)
    names = [str(n.target) for n in static.exported.graph.nodes if n.op == "call_function"]
    assert [name for name in names if "sym" in name or "operator" in name] == []


def test_the_decoder_of_transformers_with_any_number_of_tokens(
    random_hf_whisper: Callable[..., Any], tmp_path: Path
) -> None:
    decoder = Decoder(small_transformers(random_hf_whisper, "eager")).eval()
    shapes = ({1: torch.export.Dim("tokens", min=2, max=60)}, None)
    exported = torch.export.export(decoder, (TOKENS, FEATURES), dynamic_shapes=shapes)
    torch.export.save(exported, tmp_path / "decoder.pt2")
    (symbol,) = map(str, exported.range_constraints)

    fixed_program = fix(tmp_path / "decoder.pt2", "xnnpack", sizes={symbol: 9})
    checked = check(tmp_path / "decoder.pt2", "xnnpack", sizes={symbol: 9})

    assert fixed_program.program.spec.inputs[0].shape == (1, 9)
    assert fixed_program.remaining == ()
    assert {kind.rule for kind in checked.programs[0].findings} & {"WP204"} == set()


def test_a_program_is_lowered_with_its_sizes(joined: tuple[Path, str, str], tmp_path: Path) -> None:
    path, one, two = joined
    options = LowerOptions(sizes={one: 4, two: 5})

    lowered = lower(path, "onnxruntime", tmp_path / "joined.onnx", options)

    assert lowered.equal
    assert [tensor.shape for tensor in lowered.spec.inputs] == [(1, 4, 8), (1, 5, 8)]


def test_without_numbers_the_error_gives_the_option(joined: tuple[Path, str, str]) -> None:
    path, one, two = joined

    with pytest.raises(ProgramError) as caught:
        read_pt2(path)

    assert f"--size {one}=NUMBER --size {two}=NUMBER" in str(caught.value)
    assert f"{one}: 3 to 40" in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"s999": 4}, "has no dynamic size `s999`"),
        ({"first": 2}, "is not in the range"),
        ({"first": 41}, "is not in the range"),
        ({"first": 4}, "has dynamic shapes"),
    ],
)
def test_wrong_numbers_are_errors(
    joined: tuple[Path, str, str], wrong: dict[str, int], says: str
) -> None:
    path, one, _ = joined
    sizes = {one if name == "first" else name: number for name, number in wrong.items()}

    for read in (lambda: read_pt2(path, sizes), lambda: check(path, "xnnpack", sizes=sizes)):
        with pytest.raises(ProgramError, match=says):
            read()


def test_a_file_of_another_kind_has_no_sizes_to_fix(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"\x08\x08")

    with pytest.raises(ProgramError, match="cannot be fixed"):
        check(tmp_path / "x.onnx", "onnxruntime", sizes={"s1": 4})


def test_sizes_of_what_is_no_file_are_an_error() -> None:
    with pytest.raises(ProgramError, match="cannot be fixed"):
        check(Joined(), (torch.zeros(1, 6, 8), torch.zeros(1, 7, 8)), "xnnpack", sizes={"s1": 4})  # type: ignore[call-overload]


def test_the_rest_of_the_file_is_checked_as_without_sizes(
    joined: tuple[Path, str, str], tmp_path: Path
) -> None:
    path, one, two = joined
    copy = tmp_path / "changed.pt2"
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copy, "w") as written:
        for entry in archive.infolist():
            data = archive.read(entry)
            if entry.filename.endswith("model.json"):
                graph = json.loads(data)
                graph["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.evil.run.default"
                data = json.dumps(graph).encode()
            written.writestr(entry, data)

    with pytest.raises(ProgramError):
        read_pt2(copy, {one: 4, two: 5})
