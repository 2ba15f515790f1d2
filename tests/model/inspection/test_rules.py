"""Every rule is checked on a program that breaks it and on a program that does not."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whisperport.model.inspection.graph import Graph, Node, Value
from whisperport.model.inspection.read import read_graphs
from whisperport.model.inspection.read_exported import read_exported
from whisperport.model.inspection.rejections import check_graph, limits_of, rejections
from whisperport.model.inspection.rules import RULES
from whisperport.model.inspection.rules.page import rule_index, rule_section
from whisperport.model.rewrites import HOST_REWRITES, REWRITES
from whisperport.program.spec import Limit
from whisperport.targets import TARGETS

from ...embedded import default_bundle
from ...extent import EVERYTHING, core_or_all
from .conftest import NPU, graph, node, quantized, value, weight

X = value("x", 1, 8, 16)
Y = value("y", 1, 8, 16)
OUT = value("out", 1, 8, 16)
FLOATS = frozenset({"float16", "float32"})


def one(op: str, *inputs: object, out: object = OUT, **attributes: object) -> Graph:
    return graph(node(op, list(inputs), out, **attributes))  # type: ignore[arg-type]


def matmul(right: object, *before: object, columns: int = 4) -> Graph:
    made = node("matmul", [X, right], value("out", 1, 8, columns))  # type: ignore[list-item]
    return graph(*before, made)  # type: ignore[arg-type]


def cross_attention(tokens: int, frames: int) -> Graph:
    """A decoder that computes the keys of its cross-attention from the encoder's output, `xa`."""
    x, xa = value("x", 1, tokens, 16), value("xa", 1, frames, 16)
    q, k = value("q", 1, tokens, 16), value("k", 1, frames, 16)
    scores, read = value("scores", 1, tokens, frames), value("read", 1, tokens, 16)
    return graph(
        node("linear", [x, weight("wq", 16, 16)], q),
        node("linear", [xa, weight("wk", 16, 16)], k),
        node("matmul", [q, k], scores),
        node("matmul", [scores, k], read),
        node("linear", [read, weight("wv", 40, 16)], value("logits", 1, tokens, 40)),
    )


STORED = weight("w", 40, 16)
TRANSPOSED = value("wt", 16, 40)


# code -> limit's value, a program that breaks it, the reason, a program that does not break it
def in_place(written: Value) -> Node:
    """Write to a tensor in place."""
    return replace(node("index_copy", [written, Y], OUT), original_op="aten.index_copy_.default")


CASES: dict[str, tuple[object, Graph, str, Graph]] = {
    "WP101": (
        frozenset({"add"}),
        one("erf", X),
        "erf is not in the list of supported operators",
        one("add", X, Y),
    ),
    "WP102": (
        frozenset({"com.vendor"}),
        one("com.other.Fft", X),
        "com.other.Fft is a custom operator; supported custom operators: those of com.vendor",
        one("com.vendor.Fft", X),
    ),
    "WP103": (
        "any and where",
        one("scaled_dot_product_attention", X, X, X),
        "scaled_dot_product_attention is decomposed, and any and where are not delegated",
        one("softmax", X, dim=-1),
    ),
    "WP104": (
        frozenset({"add"}),
        one("erf", X),
        "erf was not seen in programs known to compile",
        one("add", X, Y),
    ),
    "WP201": (
        4,
        one("add", X, Y, out=value("out", 1, 1, 1, 8, 16)),
        "rank 5 is above the limit of 4; fold axes",
        one("add", X, Y, out=value("out", 1, 1, 8, 16)),
    ),
    "WP202": (
        frozenset({"float32"}),
        one("embedding", weight("w", 40, 16), value("x", 1, 8, dtype="int64")),
        "input of dtype int64; supported: float32",
        one("add", X, Y),
    ),
    "WP203": (
        FLOATS,
        one("add", value("x", 4, dtype="int64"), value("y", 4, dtype="int64")),
        "add on int64; the target computes in float16, float32",
        one("add", X, Y),
    ),
    "WP204": (
        None,
        one("add", value("x", 1, "n", 16), Y),
        "input of shape (1, n, 16); every axis must be a fixed number; export again with static shapes",
        one("add", X, Y),
    ),
    "WP205": (
        frozenset({4}),
        one("conv", X, weight("w", 4, 8, 3)),
        "convolution of rank 3; supported: rank 4",
        one("conv", value("x", 1, 8, 1, 16), weight("w", 4, 8, 1, 3)),
    ),
    "WP206": (
        511,
        one("add", X, Y),
        "a tensor of 512 bytes; the limit is 511 bytes",
        one("add", value("x", 8, 15), value("y", 8, 15), out=value("out", 8, 15)),
    ),
    "WP207": (
        20_000,
        matmul(weight("w", 16, 51_865), columns=51_865),
        "a matmul with 51,865 output columns; the limit is 20,000",
        matmul(weight("w", 16, 12_967), columns=12_967),
    ),
    "WP208": (
        1,
        one("add", value("x", 2, 8, 16), Y),
        "input of shape (2, 8, 16); its first axis must be 1",
        one("add", X, Y),
    ),
    "WP209": (
        None,
        one("mul", X, value("y", 1, 0, 16)),
        "mul on a tensor of shape (1, 0, 16); every axis needs a length of at least 1",
        one("mul", X, Y),
    ),
    "WP210": (
        65_535,
        one("add", value("x", 1, 65_536), value("y", 1, 65_536), out=value("out", 1, 65_536)),
        "an axis of length 65,536; the limit is 65,535",
        one("add", value("x", 1, 65_535), weight("w", 65_536), out=value("out", 1, 65_535)),
    ),
    "WP211": (
        frozenset({"linear"}),
        one("matmul", X, quantized(weight("w", 16, 4, dtype="int8"), scales=4)),
        "matmul on a tensor with 4 scales; one per channel: linear only",
        one("linear", X, quantized(weight("w", 4, 16, dtype="int8"), scales=4)),
    ),
    "WP212": (
        frozenset({"float32"}),
        one("add", X, value("i", 1, dtype="int64")),
        "add on int64; the target computes in float32",
        one("reshape", X, weight("shape", 3, dtype="int64")),
    ),
    "WP213": (
        None,
        one("add", quantized(value("a", 4, dtype="int16"), symmetric=False), Y),
        "add on int16 with a zero point that is not 0; supported: 0",
        one("add", quantized(value("a", 4, dtype="int16")), value("i", 4, dtype="int16")),
    ),
    "WP214": (
        None,
        one("linear", value("a", 1, 16, dtype="int16"), weight("w", 4, 16, dtype="int8")),
        "linear of int16 activations with int8 weights",
        one("linear", value("a", 1, 16, dtype="int8"), weight("w", 4, 16, dtype="int8")),
    ),
    "WP301": (
        None,
        matmul(TRANSPOSED, node("transpose", [STORED], TRANSPOSED), columns=40),
        "aten.mm (1, 8, 16) by (16, 40): its weight is computed by `transpose_of_wt` (transpose), "
        "not a stored constant",
        matmul(weight("w", 16, 40), columns=40),
    ),
    "WP302": (
        None,
        one("softmax", X, dim=1),
        "softmax along axis 1 of rank 3; supported: the last axis only",
        one("softmax", X, dim=2),
    ),
    "WP303": (
        None,
        one("mean", X, out=value("out", 1, 8, 1), dim=[-1], keepdim=True),
        "mean over axes [-1] of rank 3, keepdim=True; supported: axes [2, 3] of rank 4, keepdim=True",
        one(
            "mean",
            value("x", 1, 8, 4, 4),
            out=value("out", 1, 8, 1, 1),
            dim=[-1, -2],
            keepdim=True,
        ),
    ),
    "WP304": (
        None,
        matmul(value("r", 1, 16, 4)),
        "matmul (1, 8, 16) by (1, 16, 4) copies both operands; bmm of rank 3 does not",
        matmul(value("r", 16, 4)),
    ),
    "WP305": (
        ("exponent", frozenset({"2"})),
        one("pow", X, exponent=2.0),
        "pow with exponent=2.0; supported: 2",
        one("pow", X, exponent=2),
    ),
    "WP306": (
        None,
        one("mul", X, other=2),
        "mul with the integer 2; write it as a floating-point number",
        one("mul", X, other=2.0),
    ),
    "WP307": (
        None,
        one("to", value("x", 1, 8, 16, dtype="float16")),
        "conversion from float16 to float32; the target converts no dtypes: convert on the host",
        one("add", X, Y),
    ),
    "WP308": (
        None,
        one("cat", X, X),
        "cat of 1 distinct tensor; at least 2 are needed",
        one("cat", X, Y),
    ),
    "WP309": (
        None,
        one("constant_pad_nd", X, pad=[-1, 1]),
        "pad by [-1, 1]; widths must be 0 or more: use a slice",
        one("constant_pad_nd", X, pad=[0, 1]),
    ),
    "WP310": (
        frozenset({"slice"}),
        one("add", X, Y, written_views=("reshape", "slice")),
        "add writes in place through slice: torch adds a copy",
        one("add", X, Y, written_views=("reshape",)),
    ),
    "WP311": (
        2,
        one("cat", X, Y, value("z", 1, 8, 16)),
        "cat of 3 tensors; at most 2 are supported",
        one("cat", X, Y),
    ),
    "WP401": (
        frozenset({13, 17}),
        graph(node("add", [X, Y], OUT), format="onnx", opset=18),
        "opset 18; the target reads opsets 13, 17",
        graph(node("add", [X, Y], OUT), format="onnx", opset=17),
    ),
    "WP402": (
        frozenset({"torch"}),
        graph(node("add", [X, Y], OUT), format="tflite"),
        "the format is tflite; the target reads torch",
        one("add", X, Y),
    ),
    "WP404": (
        frozenset({13, 17}),
        graph(node("add", [X, Y], OUT), format="onnx", opset=18),
        "opset 18; programs known to compile use opsets 13, 17",
        graph(node("add", [X, Y], OUT), format="onnx", opset=17),
    ),
    "WP501": (
        None,
        one("gelu", X, approximate="tanh"),
        "gelu with approximate='tanh' is computed with erf; verify the outputs",
        one("gelu", X, approximate="none"),
    ),
    "WP502": (
        frozenset({1, 2, 4, 8}),
        one("linear", value("x", 1, 1_500, 16), weight("w", 4, 16)),
        "linear of 1500 rows is computed as a convolution; as a linear: 1, 2, 4, 8 rows",
        one("linear", value("x", 2, 4, 16), weight("w", 4, 16)),
    ),
    "WP601": (
        None,
        cross_attention(tokens=8, frames=1_500),
        "linear (1, 1500, 16) by (16, 16) reads only `xa`, which is the same for every token of a "
        "window: 0.00077 GFLOP and 0.193 MB per token",
        cross_attention(tokens=8, frames=8),  # as many frames as tokens: another token sequence
    ),
    "WP602": (
        None,
        graph(node("erf", [X], OUT), inputs=[X, value("xa", 1, 1_500, 1_280)]),
        "input of shape (1, 1500, 1280), 7.68 MB per call: nothing reads it",
        graph(node("erf", [X], OUT), inputs=[X]),
    ),
    "WP604": (
        None,
        graph(in_place(weight("cache", 1, 8, 16)), inputs=[Y]),
        "index_copy writes to the stored tensor `cache`",
        graph(in_place(X), inputs=[X, Y]),
    ),
}


# Operators of a limit, for rules that need them.
CONCERNS = {"WP103": {"scaled_dot_product_attention"}, "WP301": {"conv", "linear", "matmul"}}


@pytest.mark.parametrize("code", sorted(RULES))
def test_a_rule_finds_what_breaks_it_and_nothing_else(code: str) -> None:
    limit_value, broken, reason, whole = CASES[code]
    concerns = frozenset(CONCERNS.get(code, ()))
    limit = Limit(rule=code, value=limit_value, operators=concerns, source="a test")

    found = list(RULES[code].check(broken, limit))

    assert [finding.reason for finding in found][:1] == [reason]
    assert not list(RULES[code].check(whole, limit))


@pytest.mark.parametrize("code", sorted(RULES))
def test_a_section_says_what_to_do_and_who_has_the_limit_with_its_source(code: str) -> None:
    specs = [*(target.spec for target in TARGETS), NPU]

    section = rule_section(RULES[code], specs)

    assert section.startswith(f"## {code}\n\n**{RULES[code].title}.**\n")
    assert "What to do: " in section
    assert RULES[code].what_to_do
    names = {spec.name for spec in specs}
    holders = {spec.name for spec in specs if any(li.rule == code for li in limits_of(spec))}
    lines = re.findall(r"^- (.*)$", section, re.MULTILINE)
    words = {word for line in lines for word in re.findall(r"[\w-]+", line.split(". Source:")[0])}
    assert (names if {"all", "targets"} <= words else names & words) == holders
    built_in = rule_section(RULES[code], [target.spec for target in TARGETS])
    assert all(re.search(r"\. Source: \S", line) for line in re.findall(r"^- .*", built_in, re.M))
    assert len(RULES[code].title) < 90
    assert not RULES[code].title.endswith(".")


def test_codes_are_of_one_form_and_listed_in_order() -> None:
    codes = [code for code, _ in rule_index()]

    assert codes == sorted(CASES)
    assert all(re.fullmatch(r"WP[1-6]\d\d", code) for code in codes)


@pytest.mark.parametrize("spec", [t.spec for t in TARGETS], ids=lambda spec: spec.name)
def test_every_limit_of_a_target_names_a_rule_a_source_and_a_rewrite_that_exists(spec) -> None:
    for limit in limits_of(spec):
        assert limit.rule in RULES
        assert limit.source, limit.rule
        assert limit.rewrite == "" or limit.rewrite in REWRITES
    assert set(spec.supports.suggested_rewrites.values()) <= {*REWRITES, *HOST_REWRITES}
    assert set(spec.lowering.rewrites) <= set(REWRITES)
    assert set(spec.lowering.host_rewrites) <= set(HOST_REWRITES)


# A processor that supports little ---------------------------------------------------------------------


def test_a_spec_is_all_that_a_new_target_needs() -> None:
    tokens = value("tokens", 1, 8, dtype="int64")
    mel = value("mel", 1, 80, 100)
    program = graph(
        node("embedding", [weight("e", 51_865, 16), tokens], X),
        node("linear", [X, weight("e", 51_865, 16)], value("logits", 1, 8, 51_865)),
        node("conv", [mel, weight("c", 16, 80, 3)], value("h", 1, 16, 100)),
        node("cat", [value("logits", 1, 8, 51_865), value("h", 1, 16, 100)], OUT),
        format="onnx",
        opset=18,
    )

    found = {(rejection.rule, rejection.node) for rejection in rejections(program, NPU)}

    assert found == {
        ("WP202", "tokens"),
        ("WP101", "embedding_of_x"),
        ("WP101", "cat_of_out"),
        ("WP207", "linear_of_logits"),
        ("WP205", "conv_of_h"),
        ("WP401", ""),
    }


# Grouping ------------------------------------------------------------------------------------------


def test_findings_of_a_kind_are_one_group_and_the_most_expensive_node_is_first() -> None:
    small, large = value("a", 1, 2, 4), value("b", 1, 200, 4)
    program = graph(
        node("erf", [value("x", 1, 2, 4)], small),
        node("erf", [value("z", 1, 200, 4)], large),
        node("add", [small, large], OUT),
    )

    checked = check_graph(program, NPU)

    (kind,) = checked.findings
    assert (kind.rule, kind.operator) == ("WP101", "erf")
    assert [found.name for found in kind.occurrences] == ["erf_of_b", "erf_of_a"]
    assert checked.rejected_nodes == 2
    assert checked.share(kind)[0] == pytest.approx(808 / (808 + 128))


def test_a_node_is_counted_once_by_the_first_limit_that_it_breaks() -> None:
    deep = value("deep", 1, 1, 1, 8, 16)

    found = rejections(graph(node("erf", [X], deep)), NPU)

    assert [rejection.rule for rejection in found] == ["WP101"]


def test_a_warning_rejects_nothing() -> None:
    spec = next(t.spec for t in TARGETS if t.spec.name == "xnnpack")
    program = graph(node("gelu", [X], OUT, approximate="tanh"))

    checked = check_graph(program, spec)

    assert [(kind.rule, kind.kind) for kind in checked.findings] == [("WP501", "warning")]
    assert checked.rejected == ()
    assert rejections(program, spec) == []


def test_an_operator_that_was_not_seen_to_compile_is_no_rejection() -> None:
    spec = next(t.spec for t in TARGETS if t.spec.name == "hailo8l")
    program = graph(node("relu", [X], OUT), format="onnx", opset=18)

    checked = check_graph(program, spec)

    found = {(kind.rule, kind.kind, kind.operator) for kind in checked.findings}
    assert found == {("WP104", "not seen", "relu"), ("WP404", "not seen", "")}
    assert (checked.rejected_nodes, checked.not_seen_nodes) == (0, 1)
    assert checked.rejected == ()
    assert rejections(program, spec) == []
    found_json = checked.to_json()
    assert (found_json["rejected_nodes"], found_json["not_seen_nodes"]) == (0, 1)
    assert {group["kind"] for group in found_json["findings"]} == {"not seen"}


def test_an_operator_that_is_known_to_be_rejected_is_so_even_where_no_list_is_published() -> None:
    spec = next(t.spec for t in TARGETS if t.spec.name == "hailo8l")
    tokens = value("tokens", 1, 8, dtype="int64")
    program = graph(node("embedding", [weight("e", 40, 16), tokens], OUT))

    checked = check_graph(program, spec)

    assert {(kind.rule, kind.operator) for kind in checked.rejected} == {
        ("WP101", "embedding"),
        ("WP202", ""),
    }
    assert next(k.rewrite for k in checked.rejected if k.rule == "WP101") == "lookup-on-host"


def test_nodes_that_depend_on_no_input_are_fixed_by_folding() -> None:
    mask = value("mask", 1, 8, 16)
    program = graph(
        node("arange", [], value("n", 16, dtype="float32")),
        node("triu", [value("n", 16)], mask),
        node("add", [X, mask], OUT),
    )

    kinds = check_graph(program, NPU).findings

    assert {(kind.operator, kind.rewrite) for kind in kinds} == {
        ("arange", "fold-constants"),
        ("triu", "fold-constants"),
    }


def test_a_computed_weight_that_is_no_stored_one_transposed_has_no_rewrite() -> None:
    spec = next(t.spec for t in TARGETS if t.spec.name == "xnnpack")
    other = value("other", 16, 4)
    from_input = check_graph(graph(node("matmul", [X, other], value("out", 1, 8, 4))), spec)
    transposed = check_graph(
        matmul(TRANSPOSED, node("transpose", [STORED], TRANSPOSED), columns=40), spec
    )

    assert [(kind.rule, kind.rewrite) for kind in from_input.findings] == [("WP301", "")]
    assert [(kind.rule, kind.rewrite) for kind in transposed.findings] == [
        ("WP301", "matmul-by-linear")
    ]


LAYERS, WIDTH, AUDIO, TOKENS, VOCABULARY = 2, 16, 30, 8, 50
# A projection is 2 · T · d · d operations, and moves features, weight and result in float32.
GFLOP = 2 * AUDIO * WIDTH * WIDTH / 1e9
MEGABYTES = 4 * (2 * AUDIO * WIDTH + WIDTH * WIDTH) / 1e6


def found(graph: Graph) -> dict[str, list[str]]:
    """Rule -> the reasons of its findings."""
    return {
        code: [one.reason for one in RULES[code].check(graph, Limit(rule=code, source="a test"))]
        for code in ("WP601", "WP602")
    }


def exported(module: nn.Module, *inputs: Tensor) -> Any:
    with torch.no_grad():
        return torch.export.export(module.eval(), inputs, strict=False)


def as_torch(program: Any, folder: Path) -> Graph:
    return read_exported("decoder", program)


def as_onnx(program: Any, folder: Path) -> Graph:
    torch.onnx.export(program, f=folder / "decoder.onnx", dynamo=True, verbose=False)
    return read_graphs(folder / "decoder.onnx")[0]


FORMATS: dict[str, Callable[[Any, Path], Graph]] = {
    "torch": as_torch,
    "ONNX": as_onnx,
}
every_format = pytest.mark.parametrize("form", core_or_all(["torch"], [*FORMATS]))


@pytest.fixture(scope="module")
def openai_decoder() -> Any:
    """The decoder of openai-whisper: tokens and xa in, logits out."""
    from whisper.model import TextDecoder

    torch.manual_seed(0)
    decoder = TextDecoder(VOCABULARY, 2 * TOKENS, WIDTH, 2, LAYERS)
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    return exported(decoder, tokens, torch.zeros(1, AUDIO, WIDTH))


@pytest.fixture(scope="module")
def transformers_decoder() -> Any:
    """The decoder of transformers without a cache: all tokens at every call."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperDecoder

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        decoder_layers=LAYERS,
        decoder_attention_heads=2,
        decoder_ffn_dim=2 * WIDTH,
        max_target_positions=2 * TOKENS,
        pad_token_id=0,
    )

    class Uncached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = WhisperDecoder(config)

        def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
            result = self.decoder(tokens, encoder_hidden_states=features, use_cache=False)
            return result.last_hidden_state @ self.decoder.embed_tokens.weight.T

    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    return exported(Uncached(), tokens, torch.zeros(1, AUDIO, WIDTH))


class CachedCrossAttention(nn.Module):
    """A step as in NxDI before its pull request 70: keys and values are projected, then overwritten."""

    def __init__(self, *, overwritten: bool) -> None:
        super().__init__()
        self.overwritten = overwritten
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, xa: Tensor, cache_k: Tensor, cache_v: Tensor) -> Tensor:
        k, v = self.key(xa), self.value(xa)
        if self.overwritten:
            k, v = cache_k, cache_v
        scores = torch.softmax(self.query(x) @ k.mT, dim=-1)
        return self.out(scores @ v)


def step(*, overwritten: bool) -> Any:
    caches = [torch.zeros(1, AUDIO, WIDTH) for _ in range(2)]
    audio = torch.zeros(1, AUDIO, WIDTH)
    return exported(
        CachedCrossAttention(overwritten=overwritten), torch.zeros(1, 1, WIDTH), audio, *caches
    )


def check_every_layer(reasons: Mapping[str, list[str]]) -> None:
    """Two projections per layer are found, with the cost of each and of all."""
    assert len(reasons["WP601"]) == 2 * LAYERS
    assert reasons["WP602"] == []
    total = f"{2 * LAYERS * GFLOP:.3g} GFLOP"
    for reason in reasons["WP601"]:
        assert f"{GFLOP:.2g} GFLOP" in reason
        assert f"all {2 * LAYERS} of `" in reason
        assert total in reason


@every_format
def test_the_decoder_of_openai_whisper_projects_audio_for_every_token(
    openai_decoder: Any, tmp_path: Path, form: str
) -> None:
    reasons = found(FORMATS[form](openai_decoder, tmp_path))

    check_every_layer(reasons)
    assert f"{MEGABYTES:.3g} MB per token" in reasons["WP601"][0]


@pytest.mark.skipif(not EVERYTHING, reason="make test-all: as the decoder of openai-whisper")
@every_format
def test_the_decoder_of_transformers_without_cache_projects_audio_for_every_token(
    transformers_decoder: Any, tmp_path: Path, form: str
) -> None:
    check_every_layer(found(FORMATS[form](transformers_decoder, tmp_path)))


@every_format
def test_a_projection_that_is_overwritten_is_no_longer_in_the_program(
    tmp_path: Path, form: str
) -> None:
    """What remains is its input, which nothing reads."""
    read = FORMATS[form]

    overwritten = found(read(step(overwritten=True), tmp_path))
    used = found(read(step(overwritten=False), tmp_path))

    assert overwritten["WP601"] == []
    (reason,) = overwritten["WP602"]
    assert reason.startswith(f"input of shape (1, {AUDIO}, {WIDTH})")
    assert len(used["WP601"]) == 2
    assert len(used["WP602"]) == 2  # the caches


def test_our_decode_programs_project_no_audio_and_use_every_input(
    micro_programs: tuple[Any, ...], tmp_path: Path
) -> None:
    clean: dict[str, list[str]] = {"WP601": [], "WP602": []}
    programs = {program.name: program for program in micro_programs}

    for name in ("step", "prefill_4", "align"):
        assert found(as_torch(programs[name].exported, tmp_path)) == clean
    bundle = default_bundle() / "onnxruntime"
    assert found(read_graphs(bundle / "step.onnx")[0]) == clean


def test_the_programs_of_a_window_are_no_decoders(
    micro_programs: tuple[Any, ...], tmp_path: Path
) -> None:
    """The encoder and cross_kv read audio, and run once per window."""
    programs = {program.name: program for program in micro_programs}

    for name in ("encoder", "cross_kv"):
        assert found(as_torch(programs[name].exported, tmp_path))["WP601"] == []
