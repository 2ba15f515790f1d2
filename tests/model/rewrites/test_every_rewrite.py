"""Properties of every registered rewrite; special cases of single rewrites are in their own files."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import whisperport.model.rewrites
from whisperport.errors import LoweringError
from whisperport.model.rewrites import HOST_REWRITES, REWRITES, Outcome, Rewrite, run_rewrites
from whisperport.model.rewrites.rewrite import rewrite
from whisperport.model.trace.program import Program, trace
from whisperport.model.trace.trial import eager_outputs

from ...extent import core_or_all
from .conftest import Calls, Step, drawn_writes, function_of

# `exact` means the same function in real arithmetic, so only float32's rounding may differ: 6e-8 a
# sum, relative to the largest value, through a handful of layers.
EXACT = 1e-6

# The core leaves out programs whose patterns another one has, too.
PROGRAMS = core_or_all(("encoder", "step"), ("encoder", "cross_kv", "prefill_4", "step"))
STRANGERS = (
    *("openai-whisper's encoder", "openai-whisper's decoder"),
    *("transformers' eager decoder", "transformers' sdpa decoder"),
    *("decomposed decoder", "fused attention"),
    *core_or_all((), ("transformers' eager encoder", "transformers' sdpa encoder", "decomposed")),
)

# What a target's list begins with: the others see the graph after it. A test below says why.
FIRST = ("drop-no-ops", "fold-constants")
EXACT_REWRITES = [one for one in REWRITES.values() if one.exact]


@pytest.fixture(params=REWRITES.values(), ids=lambda rewrite: rewrite.name)
def chosen(request: pytest.FixtureRequest) -> Rewrite:
    return request.param


@pytest.fixture(params=[*PROGRAMS, *STRANGERS])
def of(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def prepared(programs: dict[str, Program]) -> Callable[..., Program]:
    """`prepared(rewrite's name, program's name)`: the program as the rewrite is given it."""

    @cache
    def prepare(of: str) -> Program:
        return run_rewrites(programs[of], FIRST)[0]

    return lambda name, of: programs[of] if name in FIRST else prepare(of)


@pytest.fixture
def program(chosen: Rewrite, of: str, prepared: Any) -> Program:
    return prepared(chosen.name, of)


@pytest.fixture(scope="module")
def rewrite_once(prepared: Any) -> Callable[..., tuple[Program, Outcome]]:
    """`rewrite_once(rewrite's name, program's name)`: seconds of work, done once."""

    @cache
    def once(name: str, of: str) -> tuple[Program, Outcome]:
        after, (outcome,) = run_rewrites(prepared(name, of), [name])
        return after, outcome

    return once


@pytest.fixture
def rewritten(chosen: Rewrite, rewrite_once: Any, of: str) -> tuple[Program, Outcome]:
    return rewrite_once(chosen.name, of)


def test_it_fires_somewhere(chosen: Rewrite, rewrite_once: Any) -> None:
    outcomes = [rewrite_once(chosen.name, of)[1] for of in (*PROGRAMS, *STRANGERS)]

    assert any(outcome.changed for outcome in outcomes)


def test_values_agree(
    chosen: Rewrite, program: Program, run: Any, largest_error: Any, rewritten: Any
) -> None:
    after, outcome = rewritten
    if not outcome.changed:
        assert after is program
        return
    expected = run(program)

    error = largest_error(run(after), expected)

    assert chosen.exact, "a rewrite that is not exact states its error, and a tolerance here"
    assert error <= EXACT


def test_a_second_run_changes_nothing(chosen: Rewrite, rewritten: Any) -> None:
    once, _ = rewritten

    twice, (outcome,) = run_rewrites(once, [chosen.name])

    assert outcome.changed == ()
    assert twice is once


@pytest.mark.parametrize("of", ["step", "decomposed"])
def test_the_program_given_is_left_as_it_was(chosen: Rewrite, program: Program, run: Any) -> None:
    graph, spec, outputs = str(program.exported.graph), program.spec, run(program)
    names = set(program.exported.state_dict) | set(program.exported.constants)

    run_rewrites(program, [chosen.name])

    assert str(program.exported.graph) == graph
    assert program.spec == spec
    assert set(program.exported.state_dict) | set(program.exported.constants) == names
    assert all(map(torch.equal, run(program), outputs))


def test_names_shapes_and_dtypes_are_kept(
    chosen: Rewrite, program: Program, rewritten: Any
) -> None:
    after, _ = rewritten

    assert after.spec.inputs == program.spec.inputs
    assert [t.name for t in after.spec.outputs] == [t.name for t in program.spec.outputs]
    assert after.spec == program.spec
    assert tuple(after.exported.graph_signature.user_inputs) == tuple(
        program.exported.graph_signature.user_inputs
    )


def test_no_weight_is_stored_twice(program: Program, rewritten: Any) -> None:
    after, outcome = rewritten

    grown = stored_bytes(after) - stored_bytes(program)

    # Masks, rows of positions, averages, zeros for a missing bias: each far smaller than a weight.
    assert grown <= 4096 * len(outcome.changed)
    assert grown < 48 * 48 * 4  # bytes of the smallest matrix


def stored_bytes(program: Program) -> int:
    """Of parameters, buffers and constants, each stretch of memory once."""
    tensors = [*program.exported.state_dict.values(), *program.exported.constants.values()]
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(memory.values())


def test_a_program_without_its_pattern_is_given_back(chosen: Rewrite) -> None:
    program = trace("plain", torch.nn.ReLU(), (torch.zeros(1, 3),))

    after, (outcome,) = run_rewrites(program, [chosen.name])

    assert after is program
    assert outcome == Outcome(chosen.name, (), ())


def test_every_file_registers_one_rewrite_of_its_name(chosen: Rewrite) -> None:
    folder = Path(whisperport.model.rewrites.__file__).parent
    shared = {"__init__", "graph_edits", "host", "rewrite"}
    files = {path.stem for path in folder.glob("*.py")} - shared

    assert {name.replace("-", "_") for name in (*REWRITES, *HOST_REWRITES)} == files
    assert chosen.apply.__module__ == f"whisperport.model.rewrites.{chosen.name.replace('-', '_')}"


def test_every_file_shows_its_picture_and_says_why(chosen: Rewrite) -> None:
    words = __import__(chosen.apply.__module__, fromlist=["x"]).__doc__

    for part in ("before ", "after ", "Why: ", "Exact: " if chosen.exact else "Error: "):
        assert part in words


def test_a_name_that_is_not_registered_is_rejected() -> None:
    program = trace("plain", torch.nn.ReLU(), (torch.zeros(1, 3),))

    with pytest.raises(LoweringError, match="layer-norm-by-hand") as rejected:
        run_rewrites(program, ["layer-norm-by-linear", "layer-norm-by-hand"])

    assert "layer-norm-by-linear" in rejected.value.hint


@pytest.mark.parametrize("asked", ["layer-norm-by-linear=2", "split-vocab-projection=0"])
def test_a_number_that_cannot_be_is_rejected(asked: str) -> None:
    program = trace("plain", torch.nn.ReLU(), (torch.zeros(1, 3),))

    with pytest.raises(LoweringError, match="number"):
        run_rewrites(program, [asked])


def test_a_cast_of_a_weight_hides_it_so_no_ops_are_dropped_first(
    programs: dict[str, Program],
) -> None:
    program = programs["openai-whisper's decoder"]

    _, (hidden,) = run_rewrites(program, ["matmul-by-linear"])
    _, (*_, seen) = run_rewrites(program, [*FIRST, "matmul-by-linear"])

    assert len(hidden.changed) == 0
    assert len(seen.changed) == 1


def test_two_rewrites_of_one_name_are_rejected() -> None:
    with pytest.raises(ValueError, match="layer_norm_by_linear"):
        rewrite("layer-norm-by-linear", exact=True)(lambda module: ([], []))

    assert len(REWRITES) == len({rewrite.apply for rewrite in REWRITES.values()})


def test_a_rewrite_that_breaks_the_graph_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_it(module: Any) -> tuple[list[str], list[Any]]:
        for node in module.graph.nodes:
            if node.op == "call_function":
                node.target = torch.ops.aten.mm.default  # takes two matrices
        return ["relu"], []

    apply: Callable[..., Any] = break_it
    monkeypatch.setitem(REWRITES, "break", Rewrite("break", exact=True, apply=apply))
    program = trace("plain", torch.nn.ReLU(), (torch.zeros(1, 3),))

    with pytest.raises(
        LoweringError, match=r"cannot export the program `plain` after the rewrite `break`"
    ):
        run_rewrites(program, ["break"])


class Chain(torch.nn.Module):
    """Each of these feeds one of its own kind, so the second is judged after the first was replaced.

    The scores stay near one: a softmax of large ones would multiply float32's rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Conv1d(6, 6, 3), torch.nn.Conv1d(6, 6, 3))
        self.mix = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        self.norm = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.LayerNorm(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.mix(self.stem(x)))[:, None]
        x = (x @ x.transpose(2, 3)) @ x / 36
        once = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return torch.nn.functional.scaled_dot_product_attention(once, once, once)


def test_one_that_feeds_another_of_its_kind_does_not_hide_it(
    chosen: Rewrite, run: Any, largest_error: Any
) -> None:
    program = trace("chain", Chain(), (torch.zeros(1, 6, 10),))

    after, (outcome,) = run_rewrites(program, [chosen.name])

    assert len(outcome.changed) % 2 == 0
    assert largest_error(run(after), run(program)) <= EXACT


def traced(function: Callable[[Tensor, Tensor], Any]) -> Program:
    return trace("program", Calls(function), (torch.randn(1, 8, 8), torch.randn(1, 8, 8)))


def operators(program: Program) -> list[str]:
    calls = (node for node in program.exported.graph.nodes if node.op == "call_function")
    return [str(node.target) for node in calls]


def assert_equal_in_every_run(first: Program, second: Program) -> None:
    for seed in (0, 1, 1):
        torch.manual_seed(seed)
        given = [torch.randn(1, 8, 8), torch.randn(1, 8, 8)]
        expected = eager_outputs(first, [one.clone() for one in given])
        actual = eager_outputs(second, [one.clone() for one in given])
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def counted(x: Tensor, y: Tensor) -> Tensor:
    """As T5 computes buckets of relative positions."""
    buckets = torch.zeros(8, dtype=torch.int64) + 1
    buckets += torch.where(torch.arange(8) > 3, 2, 1)
    return x + y[0, buckets, 0]


def part(x: Tensor, y: Tensor) -> Tensor:
    mask = torch.ones(8, 8) + 1.0
    mask[:2].mul_(3.0)
    return x * mask + y


def read_before(x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(x)
    before = z + y
    z.add_(1.0).mul_(2.0)
    return before * z


def scaled_by_one(x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(x)
    copy = z * 1.0
    copy.add_(y)
    return z * copy


@pytest.mark.parametrize("function", [counted, part, read_before, scaled_by_one])
def test_results_stay(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    program = traced(function)

    rewritten, _ = run_rewrites(program, [one.name for one in EXACT_REWRITES])

    assert_equal_in_every_run(rewritten, program)


def test_a_constant_that_is_written_to_is_folded_with_the_write() -> None:
    rewritten, (outcome,) = run_rewrites(traced(counted), ["fold-constants"])

    assert "add" in outcome.changed[0]
    assert [name for name in operators(rewritten) if "_." in name] == []
    assert "aten.where.ScalarOther" not in operators(rewritten)


def test_a_constant_with_a_view_that_is_written_to_is_not_folded() -> None:
    rewritten, _ = run_rewrites(traced(part), ["fold-constants"])

    assert "aten.mul_.Tensor" in operators(rewritten)


@given(drawn_writes())
@settings(max_examples=core_or_all(6, 200), deadline=None)
def test_any_writes_give_the_same_results_once_rewritten(drawn: list[Step]) -> None:
    program = traced(function_of(drawn, constant=True))

    rewritten, _ = run_rewrites(program, ["drop-no-ops", "fold-constants", "merge-permutes"])

    assert_equal_in_every_run(rewritten, program)
