"""What every rewrite promises. A new one gets these by being registered; its own cases are beside it."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import whisperport.rewrites
from whisperport.errors import LoweringError
from whisperport.programs.program import Program, trace
from whisperport.rewrites import REWRITES, Outcome, Rewrite, run_rewrites
from whisperport.rewrites.base import rewrite

# `exact` means the same function in real arithmetic, so only float32's rounding may differ: 6e-8 a
# sum, relative to the largest value, through a handful of layers.
EXACT = 1e-6

PROGRAMS = ("encoder", "cross_kv", "prefill_4", "step")
STRANGERS = ("openai-whisper's encoder", "transformers' encoder", "decomposed")

# Program without anything that a rewrite looks for; a rewrite of `linear` will need another.
NOTHING_TO_DO = {name: torch.nn.ReLU() for name in REWRITES}


@pytest.fixture(params=REWRITES.values(), ids=lambda rewrite: rewrite.name)
def chosen(request: pytest.FixtureRequest) -> Rewrite:
    return request.param


@pytest.fixture(params=[*PROGRAMS, *STRANGERS])
def of(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def program(of: str, programs: dict[str, Program]) -> Program:
    return programs[of]


@pytest.fixture(scope="module")
def rewrite_once(programs: dict[str, Program]) -> Callable[..., tuple[Program, Outcome]]:
    """`rewrite_once(rewrite's name, program's name)`: seconds of work, done once."""

    @cache
    def once(name: str, of: str) -> tuple[Program, Outcome]:
        after, (outcome,) = run_rewrites(programs[of], [name])
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
    after, _ = rewritten

    error = largest_error(run(after), run(program))

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


def test_names_shapes_and_dtypes_are_kept(program: Program, rewritten: Any) -> None:
    after, _ = rewritten

    assert after.spec == program.spec
    assert tuple(after.exported.graph_signature.user_inputs) == tuple(
        program.exported.graph_signature.user_inputs
    )


def test_weights_are_shared_and_not_copied(program: Program, rewritten: Any) -> None:
    after, outcome = rewritten
    before = {tensor.data_ptr() for tensor in program.exported.state_dict.values()}

    large = [t for t in after.exported.state_dict.values() if t.numel() > 1024]

    assert large or not outcome.changed
    assert all(tensor.data_ptr() in before for tensor in large)


def test_a_program_without_its_pattern_is_given_back(chosen: Rewrite) -> None:
    program = trace("plain", NOTHING_TO_DO[chosen.name], (torch.zeros(1, 3),))

    after, (outcome,) = run_rewrites(program, [chosen.name])

    assert after is program
    assert outcome == Outcome(chosen.name, (), ())


def test_every_file_registers_one_rewrite_of_its_name(chosen: Rewrite) -> None:
    folder = Path(whisperport.rewrites.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "base"}

    assert {name.replace("-", "_") for name in REWRITES} == files
    assert chosen.apply.__module__ == f"whisperport.rewrites.{chosen.name.replace('-', '_')}"


def test_every_file_shows_its_picture_and_says_why(chosen: Rewrite) -> None:
    words = __import__(chosen.apply.__module__, fromlist=["x"]).__doc__

    for part in ("before ", "after ", "Why: ", "Exact: " if chosen.exact else "Error: "):
        assert part in words


def test_a_name_that_is_not_registered_is_refused() -> None:
    program = trace("plain", torch.nn.ReLU(), (torch.zeros(1, 3),))

    with pytest.raises(LoweringError, match="layer-norm-by-hand") as refused:
        run_rewrites(program, ["layer-norm-by-linear", "layer-norm-by-hand"])

    assert "layer-norm-by-linear" in refused.value.hint


def test_two_rewrites_of_one_name_are_refused() -> None:
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
    monkeypatch.setitem(REWRITES, "break", Rewrite("break", True, apply))
    program = trace("plain", torch.nn.ReLU(), (torch.zeros(1, 3),))

    with pytest.raises(LoweringError, match=r"`break` broke the program `plain`"):
        run_rewrites(program, ["break"])
