"""`check` rejects for XNNPACK exactly the nodes that ExecuTorch's partitioner does not delegate."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whisperport.model.inspection.read_exported import read_exported
from whisperport.model.inspection.rejections import check_graph
from whisperport.model.trace.program import Program, as_program, trace
from whisperport.targets import get_target

from ...extent import core_or_all
from ..rewrites.third_party import third_party_programs


def undelegated(exported: Any) -> set[str]:
    """Return the names of the nodes of `exported` with an undelegated part, after a real lowering.

    `from_node` of a lowered node lists the nodes that it was made from, back to the first export. If
    `exported` was decomposed after that, the last listed node that is in its graph counts.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    graph = id(exported.graph)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
        logging.disable(logging.NOTSET)
    return {
        name
        for node in edge.exported_program().graph.nodes
        if node.op == "call_function"
        and "getitem" not in str(node.target)
        and "executorch_call_delegate" not in str(node.target)
        for name in _origins(node, graph) or {f"{node.name}, of unknown origin"}
    }


def _origins(node: Any, graph: int) -> set[str]:
    found: set[str] = set()
    sources = list(node.meta.get("from_node", []))
    while sources:
        source = sources.pop()
        if source.graph_id == graph or not source.from_node:
            found.add(source.name)
        else:
            sources += source.from_node
    return found


XNNPACK = get_target("xnnpack").spec


def rejected(program: Program) -> set[str]:
    checked = check_graph(read_exported(program.name, program.exported), XNNPACK)
    return {place.name for kind in checked.rejected for place in kind.occurrences if place.cost}


class Everything(nn.Module):
    """Each operator of a rule, in a form that is delegated and in a form that is not.

    Nodes read the inputs directly, so that each is checked separately: x, y (1, 8, 16); z (1, 2, 8, 16).
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(16, 16))
        self.conv = nn.Parameter(torch.rand(4, 8, 3))
        self.kernel = nn.Parameter(torch.rand(4, 2, 3, 3))
        self.cube = nn.Parameter(torch.rand(2, 1, 1, 1, 1))
        self.table = nn.Parameter(torch.rand(40, 16))

    def forward(self, x: Tensor, y: Tensor, z: Tensor, half: Tensor, n: Tensor) -> list[Tensor]:
        w = self.w
        return [
            *(F.linear(x, w), F.linear(x, w, y[0, 0]), F.linear(x, w * 0.5), F.linear(x, y[0])),
            *(x @ w, x @ w.T, x @ y.transpose(1, 2), z @ z.transpose(2, 3), x @ y[0, 0]),
            *(torch.bmm(x, y.transpose(1, 2)), torch.mm(x[0], w), torch.mm(x[0], y[0].t())),
            *(F.conv1d(x, self.conv), F.conv2d(z, self.kernel), F.conv3d(z[None], self.cube)),
            *(F.conv1d(x, x[:, :, :3]), F.layer_norm(x, (16,)), x.softmax(-1), x.softmax(1)),
            *(x.mean(-1, keepdim=True), z.mean((2, 3), keepdim=True), z.mean((2, 3))),
            *(x.unsqueeze(-1), x.unsqueeze(1), x.squeeze(0), x.reshape(8, 16), x.transpose(1, 2)),
            *(x**2, x**3, x**2.0, x**y, x.square(), x.rsqrt(), x.sqrt(), x.erf(), x.tanh()),
            *(x + y, x + 1.5, x * 2, torch.mul(x, 3.0), x - y, 1.0 - x, 1 - x, x / 3.0),
            *(torch.add(x, y, alpha=2), torch.div(x, y, rounding_mode="floor"), x / y),
            *(
                x[:, :4],
                x[:, ::2],
                x[:, 0],
                x.split(4, 1)[0],
                x.expand(3, 8, 16),
                x.repeat(2, 1, 1),
            ),
            *(torch.cat([x, y], 1), torch.cat([x, x], 1), torch.stack([x, y])),
            *(F.pad(x, (1, 1)), F.pad(x, (-1, 1)), torch.where(x > 0, x, y), x.clamp(-1, 1)),
            *(
                x.double(),
                x.half(),
                half + half,
                F.gelu(half),
                F.gelu(x),
                F.gelu(x, approximate="tanh"),
            ),
            *(F.embedding(n, self.table), n + n, x + torch.arange(16), x.cumsum(-1), x.sum(-1)),
            *(F.silu(x), F.glu(x), x.relu(), F.elu(x), x.sigmoid(), torch.maximum(x, y), -x),
            *(x.triu(), x.masked_fill(x > 0, 0.5), x.argmax(-1), x.var(-1), x.exp(), x.log()),
        ]


def test_each_operator_is_rejected_where_the_partitioner_does_not_delegate_it() -> None:
    inputs = (torch.rand(1, 8, 16), torch.rand(1, 8, 16), torch.rand(1, 2, 8, 16))
    others = (torch.rand(1, 8, 16).half(), torch.ones(1, 8, dtype=torch.int64))
    program = trace("everything", Everything(), (*inputs, *others))

    not_delegated = undelegated(program.exported)

    assert len(not_delegated) > 30  # a check of `undelegated` itself
    assert rejected(program) == not_delegated


@pytest.fixture(scope="module")
def their_programs(
    random_hf_whisper: Callable[..., Any], random_openai_whisper: Callable[..., Any]
) -> dict[str, Program]:
    return third_party_programs(random_hf_whisper, random_openai_whisper)


@pytest.mark.parametrize(
    "name",
    [
        "transformers' sdpa decoder",
        *core_or_all(
            [],
            [
                "openai-whisper's encoder",
                "openai-whisper's decoder",
                "transformers' eager encoder",
            ],
        ),
    ],
)
def test_third_party_whisper_is_rejected_where_the_partitioner_does_not_delegate_it(
    their_programs: dict[str, Program], name: str
) -> None:
    program = their_programs[name]

    assert rejected(program) == undelegated(program.exported) != set()


def test_a_decomposed_program_is_rejected_where_the_partitioner_does_not_delegate_it(
    their_programs: dict[str, Program],
) -> None:
    whole = their_programs["transformers' eager encoder"]
    program = as_program("decomposed", whole.exported.run_decompositions())

    assert rejected(program) == undelegated(program.exported) != set()
