"""Fused operators: equal to the plain ones, on several simulated devices too; kernels with a fallback.

No kernel of AWS runs here. Fakes hold the calls to the signatures and limits in signatures.json, and
compute what the kernels' documents say, so that a wrong layout of an argument gives wrong numbers.
"""

import enum
import inspect
import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from whisperport.model.network.attention import Attention, CachedAttention
from whisperport.model.trace.program import trace
from whisperport.program.spec import ProgramSpec
from whisperport.targets.vendors.aws_neuron import lowering, neuron_fused, neuron_modules, stages
from whisperport.targets.vendors.aws_neuron.compiler import NeuronCompiler
from whisperport.targets.vendors.aws_neuron.flags import FUSED, CompileOptions
from whisperport.targets.vendors.aws_neuron.neuron_fused import (
    CPU_ONLY,
    Used,
    fuse,
    fused_state_dict,
    joined_rows,
    padded_rows,
    shard,
)

from . import micro_modules, test_compiler

KERNELS = json.loads(Path(__file__).with_name("signatures.json").read_text(encoding="utf-8"))[
    "kernels"
]
# float32 sums of up to 512 products in another order: 1e-5 is 80 roundings of 2⁻²³ of a value of 1
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
HEADS, HEAD_WIDTH = 20, 8
WIDTH = HEADS * HEAD_WIDTH


def built(program: str, fused: tuple[str, ...] = (), dtype: str = "float32") -> Any:
    """A module, its inputs with random numbers, its aliases, and what was fused."""
    module, examples, aliases = neuron_modules.build(
        micro_modules.description(dtype), micro_modules.weights(), program
    )
    used = fuse(module, fused)
    generator = torch.Generator().manual_seed(1)
    inputs = tuple(
        torch.randn(one.shape, generator=generator) if one.is_floating_point() else one
        for one in examples
    )
    return module, inputs, aliases, used


def ops(module: Any) -> list[str]:
    return [node.op for node in getattr(module, "program", module).nodes]


# The matmul of Q, K and V ------------------------------------------------------------------------


@pytest.mark.parametrize("program", list(micro_modules.PROGRAMS))
def test_one_matmul_for_q_k_and_v_gives_the_same_outputs_and_state(program: str) -> None:
    plain, inputs, aliases, _ = built(program)
    module, _, fused_aliases, used = built(program, ("qkv",))

    for _ in range(2):  # the second run reads the state of the first
        expected = neuron_modules.run(plain, inputs, aliases)
        actual = neuron_modules.run(module, inputs, fused_aliases)
        torch.testing.assert_close(actual, expected, **CLOSE)
    assert [*aliases.values()] == [*fused_aliases.values()]
    layers = 0 if program == "cross_kv" else micro_modules.LAYERS
    assert used.words() == {"qkv": f"one matmul in {layers} layers"}
    linear = "aten.linear.default"
    assert ops(plain).count(linear) - ops(module).count(linear) == 2 * layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_separate_projections_are_gone_and_the_bias_of_keys_is_zero(dtype: str) -> None:
    plain, module = built("step", dtype=dtype)[0], built("step", ("qkv",), dtype)[0]

    tensors = dict(zip(module.program.weights, module.program.tensors, strict=True))
    joined = {name: one for name, one in tensors.items() if name.endswith(("/weight", "/bias"))}
    separate = set(plain.program.weights) - set(tensors)
    assert len(joined) == 2 * micro_modules.LAYERS
    assert len(separate) == 5 * micro_modules.LAYERS  # three weights, and two biases
    assert {str(one.dtype) for one in joined.values()} == {f"torch.{dtype}"}
    for bias in (one for name, one in joined.items() if name.endswith("/bias")):
        q, k, v = bias.chunk(3)
        assert (bool(q.any()), bool(k.any()), bool(v.any())) == (True, False, True)


# Several devices ---------------------------------------------------------------------------------


def plain_attention(kind: type[Any] = Attention) -> Any:
    """A self-attention layer with random weights, and as many heads as large-v3-turbo."""
    generator = torch.Generator().manual_seed(2)
    attention = kind(WIDTH, HEADS).requires_grad_(False)
    for parameter in attention.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
    return attention


def of_device(kind: type[Any], weights: dict[str, Tensor], heads: int) -> Any:
    """The same layer with the weights of one device; its output is a summand, without the bias."""
    part = kind(WIDTH, HEADS).requires_grad_(False)
    part.n_head = heads
    layers = (part.query, part.key, part.value)
    for name in ("weight", "bias"):
        rows = weights[f"attn.qkv.{name}"].tensor_split(3)
        for layer, own in zip(layers, rows, strict=True):
            setattr(layer, name, torch.nn.Parameter(own, requires_grad=False))
    part.out.weight = torch.nn.Parameter(weights["attn.out.weight"], requires_grad=False)
    part.out.bias = None
    return part


def on_devices(converted: dict[str, Tensor], degree: int) -> Any:
    """Functions that run the layer on `degree` simulated devices: of the encoder, and with a cache."""
    heads = -(-HEADS // degree)
    parts = [shard(converted, degree, rank) for rank in range(degree)]
    bias = converted["attn.out.bias"]

    def all_positions(x: Tensor) -> Tensor:
        return sum((of_device(Attention, part, heads)(x) for part in parts), bias)

    def cached(x: Tensor, mask: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each device has the cache of its own heads; padded heads have an empty one."""
        missing = degree * heads - HEADS
        k, v = (torch.cat([c, c.new_zeros(missing, *c.shape[1:])]) for c in (k, v))
        caches = zip(parts, k.chunk(degree), v.chunk(degree), strict=True)
        found = [of_device(CachedAttention, part, heads)(x, mask, *own) for part, *own in caches]
        new = [torch.cat([one[i] for one in found])[:HEADS] for i in (1, 2)]
        return sum((one[0] for one in found), bias), new[0], new[1]

    return all_positions, cached


def named(plain: Any) -> dict[str, Tensor]:
    return {f"attn.{name}": parameter.data for name, parameter in plain.named_parameters()}


# 3 and 8 do not divide 20 heads: one and four heads of zeros are added
DEGREES = [1, 2, 4, 5, 3, 8]


@pytest.mark.parametrize("degree", DEGREES)
def test_on_several_devices_the_joined_weights_give_what_one_device_gives(degree: int) -> None:
    plain, generator = plain_attention(), torch.Generator().manual_seed(3)
    converted = fused_state_dict(named(plain), HEADS, degree)
    everywhere, cached = on_devices(converted, degree)
    x = torch.randn(1, 7, WIDTH, generator=generator)
    new = torch.randn(1, 2, WIDTH, generator=generator)
    mask = torch.zeros(1, 2, 11).masked_fill(torch.rand(1, 2, 11, generator=generator) < 0.3, -64.0)
    k = torch.randn(HEADS, HEAD_WIDTH, 9, generator=generator)
    v = torch.randn(HEADS, 9, HEAD_WIDTH, generator=generator)

    assert -(-HEADS // degree) * degree * 3 * HEAD_WIDTH == converted["attn.qkv.weight"].shape[0]
    torch.testing.assert_close(everywhere(x), plain(x), **CLOSE)
    expected = plain_attention(CachedAttention)(new, mask, k, v)
    torch.testing.assert_close(cached(new, mask, k, v), expected, **CLOSE)


@pytest.mark.parametrize("degree", DEGREES)
def test_the_order_is_that_of_a_column_parallel_linear_with_a_stride_of_3(degree: int) -> None:
    plain = plain_attention()
    weights = [plain.query.weight, plain.key.weight, plain.value.weight]
    in_order = torch.cat([padded_rows(one, HEADS, degree) for one in weights])

    # when: `create_local_weight` of neuronx_distributed splits into 3 · R pieces; a device gets every R-th
    pieces = in_order.split(in_order.shape[0] // degree // 3)
    strided = [torch.cat(pieces[rank::degree]) for rank in range(degree)]

    contiguous = joined_rows(weights, HEADS, degree).chunk(degree)
    assert all(map(torch.equal, contiguous, strided))


def test_a_state_dict_is_converted_and_split_layer_by_layer() -> None:
    # given: 2 heads on 3 devices
    weights = micro_modules.whisper().state_dict()
    weights = {name: one for name, one in weights.items() if "blocks.0." in name or "conv" in name}

    converted = fused_state_dict(weights, 2, 3)
    weights_of = [
        shard({n: w for n, w in converted.items() if "mlp" not in n}, 3, r) for r in range(3)
    ]

    self_attention, cross = "decoder.blocks.0.attn.", "decoder.blocks.0.cross_attn."
    assert f"{self_attention}query.weight" not in converted
    assert converted[f"{self_attention}qkv.weight"].shape == (3 * 24, 16)
    assert converted[f"{self_attention}out.weight"].shape == (16, 24)
    assert converted[f"{cross}key.weight"].shape == (24, 16)
    assert converted[f"{cross}out.weight"].shape == (16, 24)
    assert f"{cross}qkv.weight" not in converted
    assert not weights_of[2][f"{cross}value.weight"].any()  # the added head
    assert torch.equal(weights_of[0]["encoder.conv1.weight"], weights["encoder.conv1.weight"])
    assert weights_of[1][f"{self_attention}out.weight"].shape == (16, 8)
    assert torch.equal(
        weights_of[1][f"{self_attention}out.bias"], weights[f"{self_attention}out.bias"]
    )
    with pytest.raises(ValueError, match=r"mlp\.0\.weight \(32, 16\) cannot be split into 3 parts"):
        shard(converted, 3, 0)


# Kernels -----------------------------------------------------------------------------------------


class Fakes:
    """Fakes of AWS's kernels, as importable modules; each call is bound to the recorded signature."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self._patch = monkeypatch

    def install_attention(self) -> None:
        self._install("attention", self._attention)

    def install_conv(self) -> None:
        self._install("conv", self._conv)
        gelu = enum.Enum("ActFnType", KERNELS["conv"]["activations"])
        self._module(KERNELS["conv"]["types"], ActFnType=gelu)

    def _install(self, name: str, compute: Any) -> None:
        recorded = KERNELS[name]
        signature = inspect.signature(eval(f"lambda {recorded['arguments']}: None"))

        def kernel(*args: Any, **kwargs: Any) -> Tensor:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self.calls.append(name)
            return compute(recorded, **bound.arguments)

        self._module(recorded["module"], **{recorded["function"]: kernel})

    def _module(self, name: str, **members: Any) -> None:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                self._patch.setitem(sys.modules, path, types.ModuleType(path))
        for member, value in members.items():
            self._patch.setattr(sys.modules[name], member, value, raising=False)

    @staticmethod
    def _attention(limits: Any, **given: Any) -> Tensor:
        Q, K, V, is_causal, scale = given.values()  # noqa: N806  # the kernel's names
        assert Q.dim() == K.dim() == V.dim() == 4
        assert Q.shape == K.shape == V.shape  # (B, H, T, D): none is transposed
        assert Q.shape[1] <= limits["most_heads"], f"Num heads must be <= {limits['most_heads']}"
        assert Q.shape[2] >= limits["shortest"], f"Seq len must be >= {limits['shortest']}"
        assert isinstance(scale, float)
        assert is_causal is False
        return F.scaled_dot_product_attention(Q, K, V, scale=scale)

    @staticmethod
    def _conv(limits: Any, x_in: Tensor, filters: Tensor, bias: Tensor, **given: Any) -> Tensor:
        assert x_in.dtype == filters.dtype == bias.dtype
        assert max(x_in.shape[1], filters.shape[2]) <= limits["most_channels"]
        assert x_in.shape[2] <= limits["longest"]
        assert filters.shape[1] == x_in.shape[1]
        assert given["activation_fn"].name == "GELU"
        assert (given["dilation"], given["lnc_shard"]) == (1, False)
        left, right = given["padding"]
        weight = filters.permute(2, 1, 0)  # from (K, C_in, C_out)
        return F.gelu(F.conv1d(F.pad(x_in, (left, right)), weight, bias, stride=given["stride"]))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(monkeypatch)


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat tensors on the CPU as those of a device, so that kernels run on numbers."""
    monkeypatch.setattr(neuron_fused, "HOST", "none")


def encoder(fused: tuple[str, ...], positions: int, dtype: str = "float32") -> Any:
    """An encoder, with one window of random numbers."""
    dims = replace(micro_modules.DIMS, n_audio_ctx=positions)
    described, weights = lowering.describe(micro_modules.programs(dims), dtype)
    module, inputs, _ = neuron_modules.build(described, weights, "encoder")
    generator = torch.Generator().manual_seed(4)
    return module, torch.randn(inputs[0].shape, generator=generator), fuse(module, fused)


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_get_the_layouts_that_their_documents_say(fakes: Fakes, dtype: str) -> None:
    fakes.install_attention()
    fakes.install_conv()
    plain, mel, _ = encoder((), 512, dtype)
    module, _, used = encoder(tuple(FUSED), 512, dtype)

    expected, actual = plain(mel), module(mel)

    # 16 roundings of bfloat16 (2⁻⁸): only the plain softmax rounds its weights to bfloat16
    tolerance = CLOSE if dtype == "float32" else {"rtol": 2**-4, "atol": 2**-4}
    torch.testing.assert_close(actual, expected, **tolerance)
    assert fakes.calls == ["conv", "conv", "attention", "attention"]
    assert used.words() == {
        "qkv": "one matmul in 2 layers",
        "attention": f"kernel: {KERNELS['attention']['module']}",
        "conv": f"kernel: {KERNELS['conv']['module']}",
    }


@pytest.mark.usefixtures("on_a_device")
def test_without_the_packages_the_plain_operators_run_and_the_reason_is_told() -> None:
    plain, mel, _ = encoder((), 8)
    module, _, used = encoder(("attention", "conv"), 8)

    assert all(map(torch.equal, module(mel), plain(mel)))
    for option in ("attention", "conv"):
        said = used.words()[option]
        assert said.startswith(f"plain: {KERNELS[option]['module']} cannot be imported: No module")


@pytest.mark.usefixtures("on_a_device")
def test_a_window_that_the_kernel_rejects_is_computed_by_plain_operators(fakes: Fakes) -> None:
    fakes.install_attention()
    plain, mel, _ = encoder((), 8)
    module, _, used = encoder(("attention",), 8)

    assert all(map(torch.equal, module(mel), plain(mel)))
    assert fakes.calls == ["attention", "attention"]
    assert used.words()["attention"].endswith(
        "does not support the program: Seq len must be >= 512"
    )


def test_on_the_cpu_no_kernel_runs_and_the_words_say_so(fakes: Fakes) -> None:
    fakes.install_attention()
    fakes.install_conv()
    plain, mel, _ = encoder((), 512)
    module, _, used = encoder(("attention", "conv"), 512)

    assert all(map(torch.equal, module(mel), plain(mel)))
    assert fakes.calls == []
    assert used.words() == {"attention": CPU_ONLY, "conv": CPU_ONLY}


@pytest.mark.usefixtures("on_a_device")
def test_another_error_of_a_kernel_is_not_hidden(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.install_attention()

    def broken(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("out of device memory")

    module_name, function = KERNELS["attention"]["module"], KERNELS["attention"]["function"]
    monkeypatch.setattr(sys.modules[module_name], function, broken)
    module, mel, _ = encoder(("attention",), 512)

    with pytest.raises(RuntimeError, match="out of device memory"):
        module(mel)


def test_only_the_encoder_has_kernels() -> None:
    module, _, _, used = built("step", tuple(FUSED))

    assert used.words() == {"qkv": "one matmul in 2 layers"}
    assert "kernel" not in ops(module)


def graph_of(module: torch.nn.Module, *inputs: Tensor) -> Any:
    """The graph of a third-party module."""
    traced = trace("theirs", module.eval().requires_grad_(False), inputs, ["y"])
    return neuron_modules.build(*lowering.describe([traced], "float32"), "theirs")[0]


class Several(torch.nn.Module):
    """An attention whose weights are read again, and convolutions that the kernel does not compute."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Conv1d(4, 4, 5, padding=1)
        self.grouped = torch.nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.unpadded = torch.nn.Conv1d(4, 4, 3)
        self.last = torch.nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.wide, self.grouped, self.unpadded):
            x = F.gelu(layer(x))
        x = F.gelu(self.last(x), approximate="tanh")
        weights = torch.softmax(torch.bmm(x, x.permute(0, 2, 1)), -1)
        return (
            torch.bmm(weights, x) + weights.sum() + torch.softmax(torch.bmm(x, x), 1).bmm(x).sum()
        )


class Computed(torch.nn.Module):
    """Three linear layers of one input; the bias of one is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.last = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (layer(x) for layer in self.layers)
        return q + k + F.linear(x, self.last.weight, self.last.bias * 2)


@pytest.mark.parametrize("kind", [Several, Computed])
def test_what_no_fused_operator_computes_stays_as_it_is(kind: Any) -> None:
    module = graph_of(kind(), torch.randn(1, 4, 8))
    before = ops(module)

    used = fuse(module, tuple(FUSED))

    assert used.words() == {"qkv": "one matmul in 0 layers"}
    assert ops(module) == before


def test_names_of_options() -> None:
    assert tuple(FUSED) == neuron_fused.OPTIONS
    assert CompileOptions().fused() == []
    assert CompileOptions(fused_qkv=True, fused_conv=True).fused() == ["qkv", "conv"]
    assert CompileOptions(flash_attention=True).fused() == ["attention"]
    with pytest.raises(ValueError, match="'softmax' is not one of"):
        fuse(built("step")[0], ["softmax"])
    assert Used([]).words() == {}


# The stage that compiles ---------------------------------------------------------------------------

sdk = test_compiler.sdk  # the fixture


def test_the_compile_stage_fuses_and_records_what_was_used(sdk: Any, tmp_path: Path) -> None:
    # given: the fake tracer runs on the CPU, where no kernel runs
    options = CompileOptions(fused_qkv=True, flash_attention=True, fused_conv=True)
    work = test_compiler.prepared(tmp_path / "work", "encoder", options)

    events = test_compiler.run(work)

    assert not [one for one in events if one["event"] == "failed"]
    traced = sdk.calls[-1][1]["func"]
    assert (ops(traced).count("kernel"), ops(traced).count("split")) == (2 + 2, 2)
    recorded = json.loads((work / "encoder" / stages.BUILT).read_text(encoding="utf-8"))["fused"]
    assert recorded == {"qkv": "one matmul in 2 layers", "attention": CPU_ONLY, "conv": CPU_ONLY}


def test_the_manifest_gets_what_was_used_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "whisperport.targets.vendors.aws_neuron.compiler.check_traced", lambda _: None
    )
    used = {"attention": "kernel: one\n\x1b[31m", "conv": "plain: no module nkilib", "other": "?"}
    (tmp_path / stages.BUILT).write_text(json.dumps({"fused": used}))

    facts = NeuronCompiler().check(tmp_path / "encoder.pt", ProgramSpec("encoder", (), ()))

    assert facts["fused"] == {
        "attention": "kernel: one  [31m",
        "conv": "plain: no module nkilib",
    }
    assert facts["notes"] == ["the option `fused-conv` had no effect: no module nkilib"]


@pytest.mark.parametrize("damaged", [3, [], None, {"other": "?"}])
def test_a_damaged_record_says_nothing_of_fused_operators(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damaged: Any
) -> None:
    monkeypatch.setattr(
        "whisperport.targets.vendors.aws_neuron.compiler.check_traced", lambda _: None
    )
    (tmp_path / stages.BUILT).write_text(json.dumps({"fused": damaged}))

    facts = NeuronCompiler().check(tmp_path / "encoder.pt", ProgramSpec("encoder", (), ()))

    assert not {"fused", "notes"} & set(facts)
