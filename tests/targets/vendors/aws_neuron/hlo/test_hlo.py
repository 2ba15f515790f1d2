"""HLO modules: those that XLA wrote are read, and those of the traced modules tell what a token costs.

jax lowers what torch.export makes of the very module that `torch_neuronx.trace` gets. XLA runs the result,
which computes the same numbers. With the SDK, the tracer writes its own HLO: test_torch_2_9.py reads that
of PyTorch/XLA, which torch-neuronx is built on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from whisperport.model.inspection.cost import cost_of
from whisperport.model.inspection.graph import Graph, Node
from whisperport.program.dims import Dims
from whisperport.targets.vendors.aws_neuron import neuron_modules

from .....extent import EVERYTHING, core_or_all
from .....micro import TURBO
from .. import micro_modules
from .hlo_of_torch import Lowered, lower
from .read_hlo import MODULE, UNBOUNDED, Hlo, read_hlo
from .traced_hlo import (
    CHECKS,
    Traced,
    broken,
    build,
    copied_caches,
    failures,
    named,
    projected_again,
    read,
    weight_inputs,
)
from .xla_modules import xla_module

MICRO = replace(micro_modules.DIMS, n_text_layer=1)
CROSS = ("cross_k", "cross_v")
# Measured: at most 1.5e-6 between XLA and torch on the CPU, for outputs of up to 5.
TOLERANCE = 1e-5


def lowered(module: nn.Module, inputs: tuple[Tensor, ...], aliases: Mapping[str, int]) -> Lowered:
    with torch.no_grad():
        return lower(torch.export.export(module, inputs, strict=False), aliases)


def traced(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    aliases: Mapping[str, int],
    dims: Dims = TURBO,
) -> Traced:
    made = lowered(module, inputs, aliases)
    return read(made.module, made.inputs, made.resident, dims)


@pytest.fixture(scope="module")
def turbo_step() -> Traced:
    """The step of large-v3-turbo."""
    return traced(*build("step"))


class Projecting(nn.Module):
    """A step that gets the encoder's output and projects it for every token, as before the split."""

    def __init__(self, step: nn.Module, cross: nn.Module) -> None:
        super().__init__()
        self.step, self.cross = step, cross

    def forward(self, x: Tensor, mask: Tensor, position: Tensor, features: Tensor) -> Any:
        made = self.cross(features)
        layers = len(made) // 2
        state = {f"cross_k.{i}": made[i][None] for i in range(layers)}
        state |= {f"cross_v.{i}": made[layers + i][None] for i in range(layers)}
        return torch.func.functional_call(self.step, state, (x, mask, position))


def projecting(dims: Dims) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, int]]:
    step, inputs, aliases = build("step", dims)
    cross, features, _ = build("cross_kv", dims)
    below = {f"step.{name}": place for name, place in aliases.items()}
    return Projecting(step, cross), (*inputs, *features), below


@pytest.mark.parametrize("check", CHECKS)
def test_the_step_of_turbo_has_nothing_that_a_token_must_not_cost(
    turbo_step: Traced, check: str
) -> None:
    assert CHECKS[check](turbo_step) == []


def test_a_token_of_turbo_moves_at_most_64_kb_to_the_device(turbo_step: Traced) -> None:
    sizes = [one.n_bytes or 0 for one in turbo_step.per_token.values()]

    assert sizes == [1280 * 4, 449 * 4, 4]  # x, mask, position
    assert sum(sizes) <= 64 * 1024
    state = [one.n_bytes or 0 for name, one in turbo_step.inputs.items() if name[:7] in CROSS]
    assert sum(state) == 2 * 4 * 1500 * 1280 * 4  # 61 MB that stay on the device


def test_a_token_of_turbo_costs_39_gflop_less_than_with_projections(turbo_step: Traced) -> None:
    unfixed = traced(*projecting(TURBO))

    saved = unfixed.flops - turbo_step.flops

    assert saved >= 39e9
    assert saved == pytest.approx(
        8 * 2 * 1500 * 1280 * 1280, rel=1e-3
    )  # and the bias of the values
    assert failures(unfixed) == {"audio_per_token", "audio_projections", "repeated_work"}
    assert len(CHECKS["audio_projections"](unfixed)) == 8
    assert sum("39.3 GFLOP" in reason for reason in CHECKS["repeated_work"](unfixed)) == 8


@pytest.mark.parametrize(
    "program", core_or_all(["prefill_4"], ["step_8", "step_4", "prefill_4", "align"])
)
def test_the_other_decode_programs_have_nothing_of_it_either(program: str) -> None:
    dims = TURBO if EVERYTHING else MICRO

    assert failures(traced(*build(program, dims), dims)) == set()


@pytest.mark.parametrize("program", core_or_all(["step_4"], list(micro_modules.PROGRAMS)))
def test_the_hlo_computes_what_the_module_computes(program: str) -> None:
    described, weights = micro_modules.description(), micro_modules.weights()
    module, inputs, aliases = named(*neuron_modules.build(described, weights, program))
    generator = torch.Generator().manual_seed(0)
    for name, state in module.named_parameters():
        if neuron_modules.is_state(name):
            state.data = torch.randn(state.shape, generator=generator)
    given = [
        torch.randn(one.shape, generator=generator) if one.is_floating_point() else one
        for one in inputs
    ]
    made = lowered(module, inputs, aliases)
    with torch.no_grad():
        expected = module(*given)

    parameters = dict(module.named_parameters())
    passed = iter(given)
    arrays = [parameters[n] if n in made.resident else next(passed) for n in made.inputs]
    outputs = made.run(*(one.detach().numpy() for one in arrays))

    assert len(outputs) == len(expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=TOLERANCE, rtol=0)
        assert np.abs(ours).max() > 0.1


# The reader: modules as XLA wrote them.

F32, S64, TUPLE = 11, 5, 13


def message_of_xla(name: str) -> Any:
    """A module as a message that can be changed."""
    return MODULE.FromString(xla_module(name))


class Written:
    """A module in the making."""

    def __init__(self) -> None:
        self.module = MODULE(name="written")
        self._ids = 0

    def computation(self, name: str = "main") -> Any:
        """Add a computation; the last one is the entry."""
        self._ids += 1
        made = self.module.computations.add(name=name, id=self._ids)
        self.module.entry_computation_id = made.id
        return made

    def add(
        self,
        computation: Any,
        opcode: str,
        operands: Sequence[Any] = (),
        shape: Sequence[int] = (2, 3),
        **fields: Any,
    ) -> Any:
        """Add an instruction, which becomes the root; `shape` is float32."""
        self._ids += 1
        ids = [one.id for one in operands]
        made = computation.instructions.add(
            name=f"{opcode}.{self._ids}", opcode=opcode, id=self._ids, operand_ids=ids
        )
        made.shape.element_type = F32
        made.shape.dimensions.extend(shape)
        for name, value in fields.items():
            if isinstance(value, list):
                getattr(made, name).extend(value)
            else:
                setattr(made, name, value)
        computation.root_id = made.id
        return made

    def tuple_of(self, computation: Any, operands: Sequence[Any]) -> Any:
        made = self.add(computation, "tuple", operands, ())
        made.shape.element_type = TUPLE
        for one in operands:
            made.shape.tuple_shapes.add().CopyFrom(one.shape)
        return made


def calls(depth: int, per_level: int) -> Any:
    """A module whose every computation calls the one before it several times."""
    written = Written()
    for level in range(depth):
        computation = written.computation(f"level_{level}")
        x = written.add(computation, "parameter")
        if not level:
            written.add(computation, "negate", [x])
        for _ in range(per_level if level else 0):
            callee = written.module.computations[level - 1].id
            x = written.add(computation, "call", [x], called_computation_ids=[callee])
    return written.module


def module_of_xla(name: str) -> Hlo:
    return read_hlo(xla_module(name))


def graph_of(name: str) -> Graph:
    return module_of_xla(name).graph


def nodes(graph: Graph, op: str) -> list[Node]:
    return [node for node in graph.nodes if node.op == op]


# What XLA wrote ------------------------------------------------------------------------------------


def test_parameters_aliases_and_outputs_are_read() -> None:
    module = module_of_xla("cached_step")
    graph = module.graph

    assert [(v.name, v.shape, v.dtype) for v in graph.inputs] == [
        ("x.1", (1, 16), "float32"),
        ("position.1", (), "int32"),
        ("cache.1", (8, 16), "float32"),
        ("key.1", (16, 16), "float32"),
        ("query.1", (16, 16), "float32"),
        ("bias.1", (16,), "float32"),
    ]
    assert [v.shape for v in graph.outputs] == [(1, 16), (8, 16)]
    assert module.aliases == {1: "cache.1"}
    assert module_of_xla("copied_cache").aliases == {}


def test_a_dot_states_its_axes_and_its_cost_is_that_of_the_matmul() -> None:
    dots = nodes(graph_of("cached_step"), "matmul")

    shapes = [([v.shape for v in dot.tensors], dot.output.shape) for dot in dots]
    assert shapes == [
        ([(1, 16), (16, 16)], (1, 16)),  # query
        ([(1, 16), (16, 16)], (1, 16)),  # key
        ([(1, 16), (16, 8)], (1, 8)),  # scores
        ([(1, 8), (8, 16)], (1, 16)),
    ]
    costs = {counted.node.name: counted.flops for counted in cost_of(graph_of("cached_step")).nodes}
    assert [costs[dot.name] for dot in dots] == [2 * 16 * 16, 2 * 16 * 16, 2 * 16 * 8, 2 * 8 * 16]


def test_the_cost_of_a_dot_does_not_depend_on_the_order_of_its_axes() -> None:
    written = Written()
    entry = written.computation()
    left = written.add(entry, "parameter", shape=(5, 7))
    right = written.add(entry, "parameter", shape=(9, 5), parameter_number=1)
    dot = written.add(entry, "dot", [left, right], (7, 9))
    dot.dot.lhs_contracting.append(0)
    dot.dot.rhs_contracting.append(1)

    assert cost_of(read_hlo(written.module.SerializeToString()).graph).flops == 2 * 7 * 9 * 5


def test_operators_that_name_computations_are_read() -> None:
    graph = graph_of("operators")

    assert [n.original_op for n in graph.nodes if n.op == "reduce"] == ["reduce"]  # argmax: of two
    assert nodes(graph, "while")[0].outputs[0].name.endswith("[0]")
    assert len(nodes(graph, "conditional")) == len(nodes(graph, "sort")) == 1
    (conv,) = nodes(graph, "conv")
    assert conv.tensors[1].shape == (6, 4, 3)  # output channels first
    assert conv.output.shape == (1, 6, 6)
    assert {n.op for n in graph_of("cached_step").nodes} >= {
        "amax",
        "sum",
        "le",
        "lt",
        "slice_scatter",
    }


def test_calls_are_inlined_each_under_its_own_name() -> None:
    graph = read_hlo(calls(depth=3, per_level=2).SerializeToString()).graph

    assert [node.op for node in graph.nodes] == ["neg"] * 4
    assert len({node.name for node in graph.nodes}) == 4
    for before, after in zip(graph.nodes, graph.nodes[1:], strict=False):
        assert after.tensors == before.outputs


def test_tuples_are_taken_apart_and_aliases_name_their_elements() -> None:
    written = Written()
    entry = written.computation()
    given = written.add(entry, "parameter", shape=())
    given.shape.element_type = TUPLE
    for size in (2, 4):
        inner = given.shape.tuple_shapes.add(element_type=F32)
        inner.dimensions.append(size)
    second = written.add(entry, "get-tuple-element", [given], (4,), tuple_index=1)
    barrier = written.add(entry, "opt-barrier", [second], (4,))
    made = written.add(entry, "negate", [barrier], (4,))
    written.tuple_of(entry, [written.tuple_of(entry, [made]), second])
    alias = written.module.input_output_alias.entries.add(output_shape_index=[0, 0])
    alias.parameter_shape_index.append(1)

    module = read_hlo(written.module.SerializeToString())
    graph = module.graph

    assert [v.shape for v in graph.inputs] == [(2,), (4,)]
    assert [v.name for v in graph.nodes[0].tensors] == [graph.inputs[1].name]
    assert graph.outputs == (graph.nodes[0].output, graph.inputs[1])
    assert module.aliases == {0: graph.inputs[1].name}


def test_dynamic_axes_and_int64_are_found() -> None:
    module = message_of_xla("cached_step")
    entry = module.computations[-1]
    position = next(one for one in entry.instructions if one.name == "position.1")
    position.shape.element_type = S64
    x = next(one for one in entry.instructions if one.name == "x.1")
    x.shape.is_dynamic[:] = [1, 0]
    bias = next(one for one in entry.instructions if one.name == "bias.1")
    bias.shape.is_dynamic[:] = [1]
    bias.shape.dimensions[0] = UNBOUNDED

    graph = read_hlo(module.SerializeToString()).graph

    assert [v.shape for v in graph.inputs][::5] == [("<=1", 16), ("?",)]
    assert broken(graph, "WP204")[0].startswith("input of shape (<=1, 16); ")
    assert any("int64" in reason for reason in broken(graph, "WP203", frozenset({"float32"})))
    assert not broken(graph_of("cached_step"), "WP204")


# What the rules find in it -------------------------------------------------------------------------


def test_inputs_of_an_hlo_module_that_are_weights_are_told_from_others() -> None:
    assert weight_inputs(module_of_xla("cached_step")) == {"key.1", "query.1", "bias.1"}
    assert weight_inputs(module_of_xla("projected_step")) == {"key.1", "value.1", "query.1"}
    assert weight_inputs(module_of_xla("operators")) == {"kernel.1"}


def test_a_projection_of_audio_per_token_is_found_with_its_cost() -> None:
    reasons = projected_again(module_of_xla("projected_step"))

    assert reasons == 2 * [
        "matmul (1500, 16) by (16, 16) reads only `xa.1`, which is the same for every token of a window: "
        "0.00077 GFLOP and 0.193 MB per token; all 2 of `xa.1`: 0.00154 GFLOP and 0.386 MB"
    ]
    assert not projected_again(module_of_xla("cached_step"))


def test_an_unused_parameter_is_found() -> None:
    assert broken(graph_of("projected_step"), "WP602") == [
        "input of shape (1, 1500, 16), 0.10 MB per call: nothing reads it"
    ]
    assert not broken(graph_of("cached_step"), "WP602")


def test_a_cache_without_an_alias_is_found() -> None:
    assert copied_caches(module_of_xla("copied_cache")) == ["cache.1"]
    assert not copied_caches(module_of_xla("cached_step"))


def test_a_cache_whose_memory_another_output_takes_is_found() -> None:
    written = Written()
    entry = written.computation()
    caches = [written.add(entry, "parameter", parameter_number=n) for n in range(2)]
    row = written.add(entry, "constant", shape=(1, 3))
    made = [written.add(entry, "dynamic-update-slice", [cache, row]) for cache in caches]
    written.tuple_of(entry, made)
    entries = written.module.input_output_alias.entries
    for output, parameter in ((0, 1), (1, 0)):
        entries.add(output_shape_index=[output], parameter_number=parameter)

    assert len(copied_caches(read_hlo(written.module.SerializeToString()))) == 2
    for entry in entries:
        entry.parameter_number = 1 - entry.parameter_number
    assert not copied_caches(read_hlo(written.module.SerializeToString()))


def test_a_cache_that_is_returned_unchanged_is_found() -> None:
    written = Written()
    entry = written.computation()
    x = written.add(entry, "parameter")
    written.tuple_of(entry, [written.add(entry, "negate", [x]), x])

    assert copied_caches(read_hlo(written.module.SerializeToString())) == [x.name]
