"""Third-party files are read completely or rejected with a reason; code in them is not run."""

import contextlib
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from whisperport.errors import ProgramError
from whisperport.model.trace.pt2 import read_pt2, weight_bytes
from whisperport.model.trace.trial import eager_outputs, random_inputs
from whisperport.program.spec import TensorSpec


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
