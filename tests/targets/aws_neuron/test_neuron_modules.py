"""The modules compute what whisperport's programs compute, and no token needs the audio features."""

import ast
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from whisperport.model.decoder import Align, CrossKV, Decode, Prefill
from whisperport.model.whisper import Whisper
from whisperport.program.dims import Dims
from whisperport.targets.aws_neuron import neuron_modules as modules
from whisperport.targets.aws_neuron.neuron_modules import ModuleError

from ...extent import core_or_all
from .micro_modules import DESCRIPTION, WEIGHTS, description, weights, write

# True layer counts; the width and the length are narrowed so that a test takes a second.
NARROW = {"n_audio_ctx": 60, "n_text_ctx": 240, "n_vocab": 90}
TINY = {"n_mels": 80, "n_audio_layer": 4, "n_text_layer": 4}
TURBO = {"n_mels": 128, "n_audio_layer": 32, "n_text_layer": 4}
SIZES = {
    "tiny's layers": {**TINY, **NARROW, "width": 48, "heads": 6},
    "turbo's layers": {**TURBO, **NARROW, "width": 80, "heads": 20},
    "tiny": {
        **TINY,
        "n_audio_ctx": 1500,
        "n_text_ctx": 448,
        "n_vocab": 51865,
        "width": 384,
        "heads": 6,
    },
    "turbo, narrow": {
        **TURBO,
        "n_audio_ctx": 1500,
        "n_text_ctx": 448,
        "n_vocab": 51866,
        "width": 320,
        "heads": 20,
    },
}
HEADS = [(0, 1), (1, 0), (1, 2)]


def whisper(sizes: Mapping[str, int]) -> Whisper:
    """A model with random weights of a gain of about 1."""
    sizes = dict(sizes)
    width, heads = sizes.pop("width"), sizes.pop("heads")
    both = {f"n_{side}_{name}": n for side in ("audio", "text") for name, n in _both(width, heads)}
    model = Whisper(Dims(**both, **sizes)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
        parameter.copy_(noise * scale + float("ln" in name and name.endswith("weight")))
    return model


def _both(width: int, heads: int) -> list[tuple[str, int]]:
    return [("state", width), ("head", heads), ("ffn", 4 * width)]


def describe(dims: Dims, batch: int = 1, dtype: str = "float32") -> dict[str, Any]:
    """The description that `lower` writes for a model of these sizes."""
    d, row = dims.n_text_state, {"dtype": dtype, "batch": batch}
    heads, layers = dims.n_text_head, dims.n_text_layer
    text = {"heads": heads, "layers": layers, "inner": dims.n_text_ffn, "width": d, **row}
    decode = {**text, "cached": dims.n_text_ctx, "context": dims.n_audio_ctx}
    programs: dict[str, Any] = {
        "encoder": {
            **row,
            "kind": "encoder",
            "n_mels": dims.n_mels,
            "positions": dims.n_audio_ctx,
            "width": d,
            "heads": dims.n_audio_head,
            "layers": dims.n_audio_layer,
            "inner": dims.n_audio_ffn,
            "cross_heads": heads,
            "cross_layers": layers,
        },
        "cross_kv": {**text, "kind": "cross_kv", "positions": dims.n_audio_ctx},
        "step": {**decode, "kind": "step", "tokens": 1, "vocab": dims.n_vocab},
        "align": {
            **decode,
            "kind": "align",
            "tokens": 8,
            "vocab": 0,
            "alignment_heads": [*map(list, HEADS)],
        },
    }
    for tokens in (4, 64, 224):
        prefill = {"kind": "prefill", "tokens": tokens, "picked": 2, "vocab": dims.n_vocab}
        programs[f"prefill_{tokens}"] = {**decode, **prefill}
    return {"format": modules.FORMAT, "programs": programs}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text_inputs(dims: Dims, tokens: int, cached: int, seed: int = 0) -> tuple[Tensor, ...]:
    """x (1, P, d), mask (1, P, N + P) after `cached` tokens, and position (1, P)."""
    mask = torch.full((1, tokens, dims.n_text_ctx + tokens), -30_000.0)
    mask[..., :cached] = 0
    mask[..., dims.n_text_ctx :] = torch.full((tokens, tokens), -30_000.0).triu(1)
    position = torch.arange(cached, cached + tokens, dtype=torch.int32)[None]
    return noise(1, tokens, dims.n_text_state, seed=seed), mask, position


def caches(dims: Dims, seed: int = 0) -> dict[str, list[Tensor]]:
    """self_k, self_v, cross_k and cross_v of each layer, without the axis of batches."""
    heads, width = dims.n_text_head, dims.text_head_width
    lengths = {"self": dims.n_text_ctx, "cross": dims.n_audio_ctx}
    made = {}
    for index, (name, length) in enumerate(lengths.items()):
        for kind, shape in (("k", (heads, width, length)), ("v", (heads, length, width))):
            made[f"{name}_{kind}"] = [
                noise(*shape, seed=seed + 100 * index + layer) for layer in range(dims.n_text_layer)
            ]
    return made


def fill(module: nn.Module, states: Mapping[str, list[Tensor]], row: int = 0) -> None:
    for name, layers in states.items():
        for parameter, tensor in zip(getattr(module, name), layers, strict=True):
            parameter.data[row] = tensor


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    """Within 1e-4 of the largest value: the tolerance of a lowered program."""
    limit = 1e-4 * float(expected.abs().max())
    difference = float((found.reshape(expected.shape) - expected).abs().max())
    assert difference <= limit, f"{what}: {difference} is above {limit}"


@pytest.fixture(scope="module", params=core_or_all([*SIZES][:2], [*SIZES]))
def model(request: pytest.FixtureRequest) -> Whisper:
    return whisper(SIZES[request.param])


def built(model: Whisper, program: str, **options: Any) -> Any:
    tensors = dict(model.state_dict())
    return modules.build(describe(model.dims), tensors, program, **options)


# The file ----------------------------------------------------------------------------------------


def test_it_imports_nothing_but_torch_and_the_standard_library() -> None:
    tree = ast.parse(Path(modules.__file__).read_text(encoding="utf-8"), feature_version=(3, 10))
    nodes = list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}

    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"torch"}
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes)


# Parity ------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_encoder_returns_features_and_cross_attention_k_v_of_the_reference(
    model: Whisper,
) -> None:
    module, (mel,), aliases = built(model, "encoder")
    mel = noise(*mel.shape)

    features, *cross = modules.run(module, [mel], aliases)

    assert_close(features, model.encode(mel), "features")
    expected = CrossKV(model.decoder)(model.encode(mel))
    for index, (one, wanted) in enumerate(zip(cross, expected, strict=True)):
        assert_close(one, wanted, f"cross-attention K/V {index}")


@torch.no_grad()
def test_cross_kv_returns_those_of_the_reference(model: Whisper) -> None:
    module, (features,), _ = built(model, "cross_kv")
    features = noise(*features.shape)

    for one, wanted in zip(module(features), CrossKV(model.decoder)(features), strict=True):
        assert_close(one, wanted, "cross-attention K/V")


REFERENCES = {"step": Decode, "prefill_4": Prefill, "prefill_64": Prefill, "prefill_224": Prefill}


@torch.no_grad()
@pytest.mark.parametrize("program", [*REFERENCES, "align"])
def test_a_decode_program_returns_what_the_reference_returns(model: Whisper, program: str) -> None:
    dims = model.dims
    module, examples, aliases = built(model, program)
    tokens, states = examples[0].shape[1], caches(dims)
    x, mask, position = text_inputs(dims, tokens, cached=7)
    fill(module, states)
    kind = REFERENCES.get(program)
    pick = (torch.eye(tokens)[None, [tokens - 1, 0]],) if kind is Prefill else ()

    found = modules.run(module, [x, mask, *pick, position], aliases)

    reference = Align(model.decoder, HEADS) if kind is None else kind(model.decoder)
    expected = reference(x, mask, *pick, *states.values())
    for index, (one, wanted) in enumerate(zip(found, expected, strict=True)):
        assert_close(one, wanted, f"output {index}")


@torch.no_grad()
def test_new_tokens_are_written_to_the_rows_that_position_names_and_to_no_others(
    model: Whisper,
) -> None:
    dims = model.dims
    module, _, aliases = built(model, "prefill_4")
    states = caches(dims)
    x, mask, position = text_inputs(dims, 4, cached=5)
    position[0, 2] = -1
    fill(module, states)

    (*_,) = found = modules.run(module, [x, mask, torch.zeros(1, 2, 4), position], aliases)

    layers = dims.n_text_layer
    for layer, (new_k, new_v) in enumerate(
        zip(found[1 : 1 + layers], found[1 + layers :], strict=True)
    ):
        expected_k, expected_v = states["self_k"][layer].clone(), states["self_v"][layer].clone()
        for token, row in ((0, 5), (1, 6), (3, 8)):
            expected_k[:, :, row] = new_k[0, :, :, token]
            expected_v[:, row] = new_v[0, :, token]
        assert torch.equal(module.self_k[layer][0], expected_k)
        assert torch.equal(module.self_v[layer][0], expected_v)
        assert torch.equal(module.cross_k[layer][0], states["cross_k"][layer])


@torch.no_grad()
def test_a_text_in_resident_caches_gets_the_logits_of_one_pass_without_a_cache() -> None:
    model = whisper(SIZES["tiny's layers"])
    dims, tokens = model.dims, torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    features = noise(1, dims.n_audio_ctx, dims.n_audio_state)
    module, _, aliases = built(model, "step")
    for name, layers in zip(
        ("cross_k", "cross_v"), zip(*model.cross_kv(features), strict=True), strict=True
    ):
        fill(module, {name: list(layers)})
    decoder = model.decoder

    logits = []
    for index, token in enumerate(tokens):
        _, mask, position = text_inputs(dims, 1, cached=index)
        x = (decoder.token_embedding(token) + decoder.positional_embedding[index])[None, None]
        logits.append(modules.run(module, [x, mask, position], aliases)[0][0, 0])

    assert_close(torch.stack(logits), model.logits(tokens, model.cross_kv(features)), "logits")


# Batches -----------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_batch_computes_what_single_runs_compute_with_a_position_for_each_row(
    model: Whisper,
) -> None:
    dims, cached = model.dims, (3, 9, 0, 5)
    batch, _, aliases = built(model, "step", batch=4)
    single, _, single_aliases = built(model, "step")
    rows = [text_inputs(dims, 1, count, seed=row) for row, count in enumerate(cached)]
    states = [caches(dims, seed=10 * row) for row in range(4)]
    for row, state in enumerate(states):
        fill(batch, state, row)
    inputs = [torch.cat(tensors) for tensors in zip(*rows, strict=True)]

    found = modules.run(batch, [*inputs, torch.arange(4, dtype=torch.int32)], aliases)

    for row, state in enumerate(states):
        fill(single, state)
        expected = modules.run(single, rows[row], single_aliases)
        for one, wanted in zip(found, expected, strict=True):
            assert_close(one[row : row + 1], wanted, f"row {row}")
        for name in ("self_k", "self_v"):
            for one, wanted in zip(getattr(batch, name), getattr(single, name), strict=True):
                assert_close(one[row], wanted[0], f"{name} of row {row}")


@torch.no_grad()
def test_source_reorders_the_caches_as_a_host_would(model: Whisper) -> None:
    dims, source = model.dims, torch.tensor([2, 0, 2], dtype=torch.int32)
    inputs = [
        torch.cat(rows)
        for rows in zip(*(text_inputs(dims, 1, 6, seed=r) for r in range(3)), strict=True)
    ]
    states = [caches(dims, seed=10 * row) for row in range(3)]
    found = []
    for order, given in (
        ([0, 1, 2], source),
        (source.tolist(), torch.arange(3, dtype=torch.int32)),
    ):
        module, _, aliases = built(model, "step", batch=3)
        for row, of in enumerate(order):
            own = {k: v for k, v in states[of].items() if k.startswith("self")}
            fill(module, own | {k: v for k, v in states[row].items() if k.startswith("cross")}, row)
        outputs = modules.run(module, [*inputs, given], aliases)
        found.append([*outputs, *module.self_k, *module.self_v])

    for one, wanted in zip(*found, strict=True):
        assert torch.equal(one, wanted)


@torch.no_grad()
def test_the_rows_of_a_window_share_its_cross_attention_k_v(model: Whisper) -> None:
    """6 rows of 2 windows need the K/V of 2 windows, and compute what they do with a copy for each row."""
    dims = model.dims
    shared, _, aliases = built(model, "step", batch=6, windows=2)
    copied, _, copied_aliases = built(model, "step", batch=6)
    windows = [caches(dims, seed=50 * window) for window in range(2)]
    for row in range(6):
        own = caches(dims, seed=row)
        self_only = {k: v for k, v in own.items() if k.startswith("self")}
        cross = {k: v for k, v in windows[row // 3].items() if k.startswith("cross")}
        fill(shared, self_only, row)
        fill(copied, self_only | cross, row)
    for window, state in enumerate(windows):
        fill(shared, {k: v for k, v in state.items() if k.startswith("cross")}, window)
    inputs = [
        torch.cat(rows)
        for rows in zip(*(text_inputs(dims, 1, 6, seed=r) for r in range(6)), strict=True)
    ]
    inputs.append(torch.arange(6, dtype=torch.int32))

    found = modules.run(shared, inputs, aliases)

    assert next(iter(shared.cross_k[0].shape)) == 2
    for one, wanted in zip(found, modules.run(copied, inputs, copied_aliases), strict=True):
        assert_close(one, wanted, "output")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"batch": 0}, "cannot be of"),
        ({"batch": 4, "windows": 3}, "4 rows cannot be of 3 windows"),
        ({"batch": 100_000}, "cannot be of"),
    ],
)
def test_an_impossible_batch_is_refused(options: dict[str, int], reason: str) -> None:
    with pytest.raises(ModuleError, match=reason):
        modules.build(description(), weights(), "step", **options)


# What travels for each token, and what it costs ----------------------------------------------------

TURBO_STEP = {
    "tokens": 1,
    "cached": 448,
    "context": 1500,
    "width": 1280,
    "heads": 20,
    "layers": 4,
    "inner": 5120,
    "vocab": 51866,
}


def turbo_step(batch: int = 1) -> modules.Step:
    """The step at turbo's true sizes, without memory for its numbers."""
    with torch.device("meta"):
        return modules.Step(batch=batch, windows=batch, **TURBO_STEP)


def turbo_inputs(batch: int = 1) -> tuple[Tensor, ...]:
    x, mask = torch.zeros(batch, 1, 1280), torch.zeros(batch, 1, 449)
    return x.to("meta"), mask.to("meta"), torch.zeros(batch, 1, dtype=torch.int32, device="meta")


class WithoutTheFix(nn.Module):
    """The decode graph before the fix: it projects the audio features again for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.step = turbo_step()
        del self.step.cross_k, self.step.cross_v
        with torch.device("meta"):
            self.cross = modules.CrossKV(width=1280, heads=20, layers=4)

    def forward(self, features: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        cross_kv = self.cross(features)
        self.step.cross_k, self.step.cross_v = cross_kv[:4], cross_kv[4:]
        return self.step(*inputs)


def flops(module: nn.Module, *inputs: Tensor) -> int:
    """Floating-point operations of one call; a multiplication with an addition counts as two."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(*inputs)
    return counter.get_total_flops()


def test_a_token_of_turbo_costs_39_gflop_less_than_with_projections_of_the_features() -> None:
    fixed = flops(turbo_step(), *turbo_inputs())
    features = torch.zeros(1, 1500, 1280, device="meta")

    saved = flops(WithoutTheFix(), features, *turbo_inputs()) - fixed

    assert saved == 4 * 2 * 2 * 1500 * 1280 * 1280  # layers × (keys, values) × 2 · T · d · d
    assert saved > 39e9
    assert fixed < 0.5e9


@pytest.mark.parametrize("batch", [1, 8])
def test_for_a_token_of_turbo_the_step_receives_less_than_8_kilobytes(batch: int) -> None:
    record = {"kind": "step", "dtype": "float32", "batch": batch, **TURBO_STEP}
    shapes = modules.weight_shapes({"programs": {"step": record}}, "step")
    with torch.device("meta"):
        tensors = {name: torch.empty(shape) for name, shape in shapes.items()}

    module, inputs, aliases = modules.build({"programs": {"step": record}}, tensors, "step")

    assert [tuple(one.shape) for one in inputs[:3]] == [
        (batch, 1, 1280),
        (batch, 1, 449),
        (batch, 1),
    ]
    assert all(1500 not in one.shape for one in inputs)  # no audio features
    received = sum(one.numel() * one.element_size() for one in inputs) / batch
    assert received <= 8_192 <= 65_536
    states = [one for name, one in module.named_parameters() if modules.is_state(name)]
    assert len(states) == 16
    assert len(aliases) == 8  # the self-attention caches; the cross-attention K/V are no outputs
    assert not any(one.shape[-1] == 1500 for one in aliases)


def test_nothing_in_the_step_can_project_audio_features() -> None:
    names = modules.weight_shapes(description(), "step")

    assert not [name for name in names if "cross_attn.key" in name or "cross_attn.value" in name]


def test_no_tensor_in_the_step_has_64_bit_integers() -> None:
    module, inputs, _ = modules.build(description(), weights(), "step_3")

    exported = torch.export.export(module, inputs, strict=False)

    values = [node.meta.get("val") for node in exported.graph.nodes]
    dtypes = {one.dtype for one in values if isinstance(one, Tensor)}
    assert dtypes == {torch.float32, torch.int32, torch.bool}
    assert all(isinstance(n, int) for one in values if isinstance(one, Tensor) for n in one.shape)


# Precision ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_bfloat16_has_bfloat16_state_and_float32_inputs_and_outputs(model: Whisper) -> None:
    tensors = dict(model.state_dict())
    module, _, aliases = modules.build(describe(model.dims, dtype="bfloat16"), tensors, "step")
    single, _, single_aliases = built(model, "step")
    inputs, states = text_inputs(model.dims, 1, cached=7), caches(model.dims)
    fill(module, states)
    fill(single, states)

    found = modules.run(module, inputs, aliases)

    assert {one.dtype for one in module.parameters()} == {torch.bfloat16}
    assert {one.dtype for one in found} == {torch.float32}
    for one, wanted in zip(found, modules.run(single, inputs, single_aliases), strict=True):
        assert float((one - wanted).abs().max()) < 0.05 * float(wanted.abs().max())


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


@pytest.mark.parametrize(
    ("program", "change"),
    [
        ("step", {"kind": "steps"}),
        ("step", {"kind": ["step"]}),
        ("step", {"width": 15}),
        ("step", {"width": True}),
        ("step", {"width": "16"}),
        ("step", {"heads": 3}),
        ("step", {"layers": 10**6}),
        ("step", {"layers": 3}),
        ("step", {"cached": 0}),
        ("step", {"vocab": 12}),
        ("step", {"batch": 0}),
        ("step", {"dtype": "float64"}),
        ("step", {"alignment_heads": [[0, 0]]}),
        ("prefill_4", {"tokens": 9}),
        ("prefill_4", {"picked": None}),
        ("align", {"alignment_heads": []}),
        ("align", {"alignment_heads": [[2, 0]]}),
        ("align", {"alignment_heads": [[0, 0, 0]]}),
        ("align", {"alignment_heads": 1}),
        ("encoder", {"positions": 7}),
        ("encoder", {"cross_layers": 3}),
        ("encoder", {"cross_heads": 3}),
        ("encoder", {"cross_heads": 0}),
        ("cross_kv", {"positions": -1}),
    ],
)
def test_a_description_with_wrong_sizes_is_refused(program: str, change: dict[str, Any]) -> None:
    described = description()
    described["programs"][program] |= change

    with pytest.raises(ModuleError):
        modules.build(described, weights(), program)


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
        modules.operator(name)


def graph(**changes: Any) -> dict[str, Any]:
    node = {"name": "y", "op": "aten.mul.Tensor", "args": [{"node": "x"}, 2], "kwargs": {}}
    tensor = {"shape": [2], "dtype": "float32"}
    record = {
        "kind": "graph",
        "dtype": "float32",
        "batch": 1,
        "weights": {},
        "results": ["y"],
        "inputs": [{"name": "x", **tensor}],
        "outputs": [{"name": "y", **tensor}],
        "nodes": [node],
    }
    return {"programs": {"g": {**record, **changes}}}


def test_a_graph_runs() -> None:
    module, _, aliases = modules.build(graph(), {}, "g")

    (found,) = modules.run(module, [torch.tensor([1.0, 2.0])], aliases)

    assert found.tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    "changes",
    [
        {
            "nodes": [
                {"name": "y", "op": "aten.relu.default", "args": [{"node": "z"}], "kwargs": {}}
            ]
        },
        {
            "nodes": [
                {"name": "y", "op": "aten.gelu.default", "args": [{"node": "x"}, "/"], "kwargs": {}}
            ]
        },
        {"nodes": [{"name": "y"}]},
        {"nodes": 3},
        {
            "nodes": [
                {"name": "y", "op": "aten.relu.default", "args": [{"dtype": "x"}], "kwargs": {}}
            ]
        },
        {"results": ["z"]},
        {"weights": {"w": "missing"}},
        {"dtype": "int32"},
        {"inputs": [{"name": "x", "shape": [2], "dtype": "complex64"}]},
        {"inputs": [{"name": "x", "shape": "2", "dtype": "float32"}]},
        {"inputs": [{"name": "x", "shape": [-2], "dtype": "float32"}]},
        {"batch": 2},
    ],
)
def test_a_wrong_graph_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModuleError):
        modules.build(graph(**changes), {}, "g")
