"""The modules compute what the torch programs compute, and write the caches as a host would."""

import ast
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from whisperport.targets.vendors.aws_neuron import neuron_modules as modules
from whisperport.targets.vendors.aws_neuron.neuron_modules import ModuleError

from ....extent import core_or_all
from .micro_modules import (
    DECODERS,
    DESCRIPTION,
    DIMS,
    LAYERS,
    PROGRAMS,
    WEIGHTS,
    description,
    programs,
    weights,
    whisper,
    write,
)

# float32 sums of products of up to 10 in another order, as fractions of the largest value
CLOSE = 1e-5


def built(program: str, dtype: str = "float32") -> Any:
    return modules.build(description(dtype), weights(), program)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text_inputs(batch: int, tokens: int, cached: int, seed: int = 0) -> list[Tensor]:
    """x (B, P, d), mask (B, P, N + P) after `cached` tokens, and position (B, P)."""
    mask = torch.full((batch, tokens, DIMS.n_text_ctx + tokens), -30_000.0)
    mask[..., :cached] = 0
    mask[..., DIMS.n_text_ctx :] = torch.full((tokens, tokens), -30_000.0).triu(1)
    position = torch.arange(cached, cached + tokens, dtype=torch.int32).repeat(batch, 1)
    return [noise(batch, tokens, DIMS.n_text_state, seed=seed), mask, position]


def caches(module: Any, seed: int = 0) -> dict[str, list[Tensor]]:
    """Random self_k, self_v, cross_k and cross_v of each layer; they become the module's state."""
    made = {}
    for index, name in enumerate(modules.STATE):
        layers = list(getattr(module, name))
        made[name] = [noise(*p.shape, seed=seed + 10 * index + i) for i, p in enumerate(layers)]
        for parameter, tensor in zip(layers, made[name], strict=True):
            parameter.data = tensor.to(parameter.dtype)
    return made


def assert_close(found: Tensor, expected: Tensor, what: str, tolerance: float = CLOSE) -> None:
    limit = tolerance * float(expected.abs().max())
    difference = float((found - expected).abs().max())
    assert 0 <= difference <= limit, f"{what}: {difference} is above {limit}"


# The file ----------------------------------------------------------------------------------------


def test_it_imports_nothing_but_torch_and_the_standard_library() -> None:
    tree = ast.parse(Path(modules.__file__).read_text(encoding="utf-8"), feature_version=(3, 10))
    nodes = list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}

    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"torch"}
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes)


# Parity ------------------------------------------------------------------------------------------


def of_torch(program: str, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """What the torch program computes from inputs by name."""
    traced = next(one for one in programs() if one.name == program)
    inputs = [given[tensor.name] for tensor in traced.spec.inputs]
    args, kwargs = torch.utils._pytree.tree_unflatten(inputs, traced.exported.call_spec.in_spec)
    found = traced.exported.module(check_guards=False)(*args, **kwargs)
    return found if isinstance(found, tuple) else (found,)


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_returns_what_the_torch_program_returns(program: str, dtype: str) -> None:
    module, examples, aliases = built(program, dtype)
    decodes = program in DECODERS
    states = caches(module) if decodes else {}
    inputs: list[Tensor] = [noise(*one.shape, seed=9) for one in examples]
    if decodes:
        batch, tokens = examples[0].shape[:2]
        x, mask, position = text_inputs(batch, tokens, cached=3)
        pick = [torch.eye(tokens)[None, [tokens - 1, 0]]] if program == "prefill_4" else []
        source = [torch.arange(batch, dtype=torch.int32)] if batch > 1 else []
        inputs = [x, mask, *pick, position, *source]

    found = modules.run(module, inputs, aliases)

    given = (
        dict(zip(("x", "mask", *(["pick"] if pick else [])), inputs, strict=False))
        if decodes
        else {}
    )
    given |= {f"{k}_{i}": one.flatten(0, 1) for k, of in states.items() for i, one in enumerate(of)}
    given |= {} if decodes else {("mel" if program == "encoder" else "features"): inputs[0]}
    expected = of_torch(program, given)
    if program == "encoder":  # it computes the cross-attention K/V too
        expected = (*expected, *of_torch("cross_kv", {"features": expected[0]}))
    assert {one.dtype for one in found} == {torch.float32}
    # bfloat16 has 8 bits; measured: at most 0.009 of the largest value
    tolerance = CLOSE if dtype == "float32" else 0.02
    for index, (one, wanted) in enumerate(zip(found, expected, strict=True)):
        assert_close(one, wanted, f"output {index}", tolerance)


@torch.no_grad()
def test_new_tokens_are_written_to_the_rows_that_position_names_and_to_no_others() -> None:
    module, _, aliases = built("prefill_4")
    states = caches(module)
    x, mask, position = text_inputs(1, 4, cached=3)
    position[0, 2] = -1

    found = modules.run(module, [x, mask, torch.zeros(1, 2, 4), position], aliases)

    news = zip(found[1 : 1 + LAYERS], found[1 + LAYERS :], strict=True)
    for layer, (new_k, new_v) in enumerate(news):
        expected_k, expected_v = states["self_k"][layer].clone(), states["self_v"][layer].clone()
        for token, row in ((0, 3), (1, 4), (3, 6)):
            expected_k[0, :, :, row] = new_k[:, :, token]
            expected_v[0, :, row] = new_v[:, token]
        assert torch.equal(module.self_k[layer], expected_k)
        assert torch.equal(module.self_v[layer], expected_v)
        assert torch.equal(module.cross_k[layer], states["cross_k"][layer])


@torch.no_grad()
def test_a_text_in_resident_caches_gets_the_logits_of_one_pass_without_a_cache() -> None:
    model, tokens = whisper(), torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    cross = model.cross_kv(noise(1, DIMS.n_audio_ctx, DIMS.n_audio_state))
    module, _, aliases = built("step")
    for layer, (keys, values) in enumerate(cross):
        module.cross_k[layer].data, module.cross_v[layer].data = keys[None], values[None]
    decoder = model.decoder

    logits = []
    for index, token in enumerate(tokens):
        _, mask, position = text_inputs(1, 1, cached=index)
        x = (decoder.token_embedding(token) + decoder.positional_embedding[index])[None, None]
        logits.append(modules.run(module, [x, mask, position], aliases)[0][0])

    assert_close(torch.stack(logits), model.logits(tokens, cross), "logits")


# Batches -----------------------------------------------------------------------------------------


def row_of(tensors: list[Tensor], row: int) -> list[Tensor]:
    return [one[row : row + 1] for one in tensors]


@torch.no_grad()
def test_a_batch_computes_what_single_runs_compute_with_a_position_for_each_row() -> None:
    batch, _, aliases = built("step_4")
    single, _, single_aliases = built("step")
    states = caches(batch)
    rows = [text_inputs(1, 1, cached, seed=row) for row, cached in enumerate((3, 5, 0, 7))]
    inputs = [torch.cat(tensors) for tensors in zip(*rows, strict=True)]

    logits, *_ = modules.run(batch, [*inputs, torch.arange(4, dtype=torch.int32)], aliases)

    for row, given in enumerate(rows):
        for name, tensors in states.items():
            for parameter, one in zip(getattr(single, name), row_of(tensors, row), strict=True):
                parameter.data = one
        (expected, *_) = modules.run(single, given, single_aliases)
        assert_close(logits[row : row + 1], expected, f"row {row}")
        for name in ("self_k", "self_v"):
            own = row_of(list(getattr(batch, name)), row)
            for one, wanted in zip(own, getattr(single, name), strict=True):
                assert_close(one, wanted, f"{name} of row {row}")


@torch.no_grad()
def test_source_reorders_the_caches_as_a_host_would() -> None:
    source, order = (
        torch.tensor([2, 0, 2, 3], dtype=torch.int32),
        torch.arange(4, dtype=torch.int32),
    )
    inputs = text_inputs(4, 1, cached=6)
    found = []
    for reordered, given in ((False, source), (True, order)):
        module, _, aliases = built("step_4")
        caches(module)
        for parameter in [*module.self_k, *module.self_v] if reordered else []:
            parameter.data = parameter.data[source]
        outputs = modules.run(module, [*inputs, given], aliases)
        found.append([*outputs, *module.self_k, *module.self_v])

    for one, wanted in zip(*found, strict=True):
        assert torch.equal(one, wanted)


# What stays on the device, and what travels for each token ------------------------------------------


@pytest.mark.parametrize("program", DECODERS)
def test_caches_are_state_and_no_weight_projects_audio_features(program: str) -> None:
    module, inputs, aliases = built(program)

    names = [name for name, _ in module.named_parameters()]
    states = [name for name in names if modules.is_state(name)]
    assert states == [f"{kind}.{layer}" for kind in modules.STATE for layer in range(LAYERS)]
    assert len(aliases) == 2 * LAYERS  # the cross-attention K/V are no outputs
    assert not any(one.shape[-1] == DIMS.n_audio_ctx for one in aliases)
    read = description()["programs"][program]["weights"].values()
    assert not [one for one in read if "cross_attn.key" in one or "cross_attn.value" in one]
    assert all(DIMS.n_audio_ctx not in one.shape for one in inputs)


def test_weights_that_several_programs_read_have_one_name() -> None:
    described = description()["programs"]

    read = {name: set(described[name]["weights"].values()) for name in PROGRAMS}
    assert read["step"] == read["step_4"] == read["prefill_4"]
    assert read["align"] < read["step"]  # all but the vocabulary projection
    assert read["cross_kv"] < read["encoder"]
    assert len(weights()) == len(set.union(*read.values()))


# Precision ---------------------------------------------------------------------------------------


# The programs of other numbers of rows are of the same modules as `step`.
@pytest.mark.parametrize("program", core_or_all(["encoder", "cross_kv", "step"], PROGRAMS))
def test_in_bfloat16_only_layer_norm_and_softmax_compute_in_float32(program: str) -> None:
    module, inputs, _ = built(program, "bfloat16")

    exported = torch.export.export(module, inputs, strict=False)

    found: dict[str, set[torch.dtype]] = {}
    for node in exported.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            found.setdefault(str(node.target), set()).add(node.meta["val"].dtype)
    assert {one.dtype for one in module.parameters()} == {torch.bfloat16}
    assert found["aten.linear.default"] == {torch.bfloat16}
    for op in modules.IN_FLOAT32:
        assert found.get(op, {torch.float32}) == {torch.float32}
    assert (set(modules.IN_FLOAT32) <= set(found)) == (program != "cross_kv")


# Files -------------------------------------------------------------------------------------------


def test_a_weight_file_is_read_as_safetensors_reads_it(tmp_path: Path) -> None:
    write(tmp_path)

    found = modules.read_weights(tmp_path / WEIGHTS)

    expected = weights()
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


HEADER = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def changed(**entry: Any) -> dict[str, Any]:
    return {"a": {**HEADER["a"], **entry}}


@pytest.mark.parametrize(
    "header",
    [
        changed(dtype="F8"),
        changed(dtype=["F32"]),
        changed(shape=[3]),
        changed(shape=[-2]),
        changed(shape=[True]),
        changed(shape=[2**40, 2**40]),
        changed(shape=[1] * 9),
        changed(data_offsets=[0, 12]),
        changed(data_offsets=[4, 12]),
        changed(data_offsets=[-8, 0]),
        changed(data_offsets=[8, 0]),
        changed(data_offsets=[0]),
        {**HEADER, "b": HEADER["a"]},
        {**HEADER, "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}},
        {"a": 1},
        {},
        [],
    ],
)
def test_a_weight_file_with_a_wrong_header_is_refused(header: Any, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / WEIGHTS
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))

    with pytest.raises(ModuleError):
        modules.read_weights(path)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", b"\xff" * 16, bytes(8), b"\x02" + bytes(7) + b"[]"]
)
def test_a_file_that_is_no_weight_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS
    path.write_bytes(content)

    with pytest.raises(ModuleError):
        modules.read_weights(path)


@pytest.mark.parametrize("file", [DESCRIPTION, WEIGHTS])
def test_damaged_files_are_refused_or_still_work(file: str, tmp_path: Path) -> None:
    """Bytes are changed, removed or repeated at random; nothing but ModuleError may be raised."""
    write(tmp_path)
    content, random = (tmp_path / file).read_bytes(), Random(file)
    refused = 0
    for _ in range(core_or_all(60, 2_000)):
        damaged = bytearray(content)
        for _ in range(random.randint(1, 3)):
            at = random.randrange(min(len(damaged), 600) if random.random() < 0.7 else len(damaged))
            damaged[at : at + random.choice((0, 1, 1, 4))] = random.randbytes(
                random.choice((0, 1, 1, 3))
            )
        (tmp_path / file).write_bytes(damaged)
        try:
            described = modules.read_description(tmp_path / DESCRIPTION)
            tensors = modules.read_weights(tmp_path / WEIGHTS)
            for program in described["programs"]:
                modules.build(described, tensors, program)
        except ModuleError:
            refused += 1
    assert refused > 10


def test_a_description_of_another_format_is_refused_with_its_format(tmp_path: Path) -> None:
    path = tmp_path / DESCRIPTION
    path.write_text(json.dumps({"format": "whisperport modules for neuron", "programs": {}}))

    with pytest.raises(ModuleError, match="has the format 'whisperport modules for neuron'"):
        modules.read_description(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda step: {"state": {}, "inputs": step["inputs"][:2]},
        lambda step: {"state": {**step["state"], "self_k_0": "new_k_9"}},
        lambda step: {"state": {**step["state"], "self_k_0": None}},
        lambda step: {"state": {**step["state"], "x": None}},
        lambda step: {"state": {"self_k_0": "new_k_0"}},
        lambda step: {"state": ["self_k_0"]},
        lambda step: {"inputs": step["inputs"][1:]},
        lambda step: {"inputs": [{**step["inputs"][0], "shape": [3, 1, 16]}, *step["inputs"][1:]]},
        lambda step: {"outputs": []},
        lambda step: {"nodes": [*step["nodes"], step["nodes"][0]]},
        lambda step: {"dtype": "float64"},
        lambda step: {"weights": 3},
    ],
)
def test_a_step_with_a_wrong_record_is_refused(change: Callable[[Any], dict[str, Any]]) -> None:
    step = description()["programs"]["step"]
    described = {"programs": {"step": {**step, **change(step)}}}

    with pytest.raises(ModuleError):
        modules.build(described, weights(), "step")


def test_a_program_that_is_not_described_is_refused_with_those_that_are() -> None:
    with pytest.raises(ModuleError, match="prefill_4, step"):
        modules.build(description(), weights(), "prefill_8")


# Graphs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "aten.from_file.default",
        "aten.add_.Tensor",
        "aten.save.default",
        "aten.item.default",
        "aten.__class__.default",
        "aten.add.__class__",
        "prims.add.default",
        "os.system.default",
        "aten",
        "",
    ],
)
def test_only_functions_of_tensors_are_operators_of_a_graph(name: str) -> None:
    with pytest.raises(ModuleError):
        modules.operator_of(name)


def graph(**changes: Any) -> dict[str, Any]:
    node = {"name": "y", "op": "aten.mul.Tensor", "args": [{"node": "x"}, 2], "kwargs": {}}
    tensor = {"shape": [2], "dtype": "float32"}
    record = {
        "dtype": "float32",
        "state": {},
        "weights": {},
        "results": [{"node": "y", "dtype": "float32"}],
        "inputs": [{"name": "x", **tensor}],
        "outputs": [{"name": "y", **tensor}],
        "nodes": [node],
    }
    return {"programs": {"g": {**record, **changes}}}


def test_a_result_is_kept_in_memory_only_until_its_last_reader() -> None:
    """The attention scores of large-v3's encoder would need 6 GB."""
    import weakref

    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []
    nodes = [
        {"name": f"y{i}", "op": "aten.relu.default", "args": [{"node": f"y{i - 1}"}], "kwargs": {}}
        for i in range(1, 9)
    ]
    results = [{"node": "y8", "dtype": "float32"}]
    inputs = [{"name": "y0", "shape": [2], "dtype": "float32"}]
    module, given, _ = modules.build(graph(nodes=nodes, results=results, inputs=inputs), {}, "g")

    def noting(function: Any) -> Any:
        def run(x: Tensor) -> Tensor:
            alive.append(sum(one() is not None for one in made))
            found: Tensor = function(x)
            made.append(weakref.ref(found))
            return found

        return run

    module.use([one._replace(function=noting(one.function)) for one in module.nodes], {})
    module(*given)

    assert max(alive) == 1


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"nodes": [{"name": "y", "op": op, "args": args, "kwargs": kwargs}]}
            for op, args, kwargs in (
                ("aten.relu.default", [{"node": "z"}], {}),
                ("aten.relu.default", [{"dtype": "x"}], {}),
                ("aten.gelu.default", [{"node": "x"}, "/"], {}),
                ("aten.gelu.default", [{"node": "x"}], {"approximate": "/"}),
                ("aten.mul.Tensor", [{"node": "x"}, {"float": "1"}], {}),
                ("aten.mul.Tensor", [{"node": "x"}, {"node": "x", "dtype": "bool"}], {}),
                ("aten.mul.Tensor", 3, {}),
            )
        ),
        {"nodes": [{"name": "y"}]},
        {"nodes": 3},
        {"results": [{"node": "z", "dtype": "float32"}]},
        {"results": ["y"]},
        {"weights": {"w": "missing"}},
        {"dtype": "int32"},
        {"inputs": [{"name": "x", "shape": [2], "dtype": "complex64"}]},
        {"inputs": [{"name": "x", "shape": "2", "dtype": "float32"}]},
        {"inputs": [{"name": "x", "shape": [-2], "dtype": "float32"}]},
    ],
)
def test_a_wrong_graph_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModuleError):
        modules.build(graph(**changes), {}, "g")
