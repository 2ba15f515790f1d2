"""Options of targets have types and ranges, and errors list the allowed names and values."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from whisperport.errors import UsageError
from whisperport.targets import TARGETS, RunOptions
from whisperport.targets.options import NoOptions, Option, by_target, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    level: Annotated[int, Option("How much", low=0, high=3)] = 1
    epochs: Annotated[int | None, Option("How often", low=1)] = None
    fine_tune: Annotated[bool, Option("Whether")] = True
    effort: Annotated[Literal[0, "max"] | None, Option("How hard")] = None
    tables: Annotated[Path | None, Option("Where")] = None


def test_every_type_is_read():
    given = {"level": "3", "epochs": "12", "fine-tune": "off", "effort": "0", "tables": "a/b"}
    made = by_target({f"a.{name}": text for name, text in given.items()}, {"a": Options})
    assert made == {"a": Options(level=3, epochs=12, fine_tune=False, effort=0, tables=Path("a/b"))}


def test_two_targets_have_options_of_their_own():
    made = by_target({"b.level": "2"}, {"a": Options, "b": Options, "c": NoOptions})
    assert made == {"a": Options(), "b": Options(level=2), "c": NoOptions()}


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("a.level", "4", "expected 0 to 3"),
        ("a.level", "two", "expected 0 to 3"),
        ("a.level", "", "expected 0 to 3"),
        ("a.epochs", "0", "expected 1 or more"),
        ("a.fine-tune", "perhaps", "expected on or off"),
        ("a.effort", "1", "expected 0, max"),
        ("a.tables", "", "expected a path"),
        ("a.fine_tune", "on", "a.level, a.epochs, a.fine-tune, a.effort, a.tables"),
        ("b.level", "1", "a.level, a.epochs, a.fine-tune, a.effort, a.tables"),
        ("level", "1", "a.level, a.epochs, a.fine-tune, a.effort, a.tables"),
    ],
)
def test_what_is_no_option_or_no_value_is_refused_with_those_there_are(name, value, hint):
    with pytest.raises(UsageError) as caught:
        by_target({name: value}, {"a": Options})
    assert hint in caught.value.hint


def test_options_are_described_for_people():
    shown = {one.name: (one.values, one.default, one.help) for one in describe(Options)}
    assert shown == {
        "level": ("0 to 3", "1", "How much"),
        "epochs": ("1 or more", "", "How often"),
        "fine-tune": ("on or off", "on", "Whether"),
        "effort": ("0, max", "", "How hard"),
        "tables": ("a path", "", "Where"),
    }


def test_emulation_has_one_name_and_one_meaning() -> None:
    """In every target: `emulate=on` runs on the CPU, and `compile --option TARGET.emulate` counts clips."""
    for target in TARGETS:
        run = {one.name: one for one in describe(target.run_options)}
        assert target.spec.emulation in ({}, {"emulate": "on"})
        assert ("emulate" in run) == bool(target.spec.emulation)
        compiled = describe(target.compiler.options) if target.compiler else ()
        names = {one.name for one in (*run.values(), *compiled)}
        assert not names & {"emulation", "simulate", "simulation"}
        for one in compiled:
            assert one.name != "emulate" or one.values == "0 to 1000"


@pytest.mark.parametrize("threads", [0, 1025, 2**63])
def test_a_number_of_threads_that_no_runtime_takes_is_a_usage_error(threads: int) -> None:
    with pytest.raises(UsageError, match=f"`threads` is {threads}"):
        RunOptions(threads=threads)
