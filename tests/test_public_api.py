"""The public API is exactly what the package lists; all of it has types and docstrings."""

import ast
import importlib
import inspect
import types
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import whisperport
from whisperport import errors
from whisperport.apps.cli.main import cli

STUB = Path(whisperport.__file__).with_suffix(".pyi")
MOST_NAMES = 60  # that a reader of the package has to choose from
PACKAGES = (
    *("speech.audio", "speech.text", "program.bundle", "model.checkpoint", "model.rewrites"),
    *("targets", "runtime", "verification", "apps.cli"),
)
FUNCTIONS = {"archive": "transcribe_archive", "import": "import_artifact"}  # of other names
LAZY = {"Checkpoint", "load_checkpoint"}  # they need torch, so they come when first asked for


def made_here(module: types.ModuleType) -> set[str]:
    """Public names of a module that this package made: no modules, nothing of other packages."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", "").startswith("whisperport")
    }


def listed() -> list[tuple[str, Any]]:
    return [(name, getattr(whisperport, name)) for name in whisperport.__all__]


def test_public_names_are_exactly_all() -> None:
    assert sorted(whisperport.__all__) == sorted(made_here(whisperport) | LAZY)


def test_there_are_few_public_names() -> None:
    assert len(whisperport.__all__) <= MOST_NAMES


def test_errors_are_in_one_module_alone() -> None:
    classes = {name for name in made_here(errors) if inspect.isclass(getattr(errors, name))}

    assert whisperport.errors is errors
    assert classes
    assert not [name for name in classes if hasattr(whisperport, name)]


def test_a_name_of_the_stub_is_public_to_type_checkers_and_found_at_run_time() -> None:
    # given
    stub = ast.parse(STUB.read_text(encoding="utf-8"))
    aliases = [a for node in stub.body if isinstance(node, ast.ImportFrom) for a in node.names]

    # then
    assert all(alias.name == alias.asname for alias in aliases)  # else a checker sees it as private
    assert {alias.name for alias in aliases} == {*whisperport.__all__, "errors"}
    assert {*dir(whisperport)} == {*whisperport.__all__, "errors", "__version__"}


def test_the_stub_is_a_part_of_the_package() -> None:
    assert (files("whisperport") / "__init__.pyi").is_file()


def test_what_a_verb_does_is_a_public_function() -> None:
    verbs = set(cli.commands) - {
        "apps",
        "bench",
        "demo",
        "doctor",
        "explain",
        "targets",
    }  # they report

    functions = {FUNCTIONS.get(verb, verb) for verb in verbs}
    assert functions <= set(whisperport.__all__)
    assert all(inspect.isfunction(getattr(whisperport, name)) for name in functions)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_every_name_it_lists(package: str) -> None:
    module = importlib.import_module(f"whisperport.{package}")

    assert all(hasattr(module, name) for name in module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)


def test_no_function_is_shadowed_by_a_module_of_its_name() -> None:
    for name in (
        "build.export.export",
        "transcription",
        "verification.bundle_check",
        "apps.demo",
        "apps.cli",
    ):
        importlib.import_module(f"whisperport.{name}")

    assert not [name for name, value in listed() if isinstance(value, types.ModuleType)]


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = whisperport.no_such_name  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "value"), listed(), ids=whisperport.__all__)
def test_every_public_name_has_words(name: str, value: Any) -> None:
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}("), "the docstring is a dataclass's own signature"
    for method in methods_of(value):
        assert method.__doc__, f"{name}.{method.__name__} has no docstring"


@pytest.mark.parametrize(("name", "value"), listed(), ids=whisperport.__all__)
def test_every_public_function_has_types(name: str, value: Any) -> None:
    functions = [value] if inspect.isfunction(value) else methods_of(value)
    for function in functions:
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty, name
        for parameter in signature.parameters.values():
            if parameter.name not in ("self", "cls"):
                assert parameter.annotation is not inspect.Parameter.empty, parameter


def methods_of(value: Any) -> list[Any]:
    """Its own public methods, written by hand."""
    if not inspect.isclass(value):
        return []
    members = [getattr(m, "__func__", m) for m in vars(value).values()]
    return [m for m in members if inspect.isfunction(m) and not m.__name__.startswith("_")]


def test_type_checkers_are_told_that_there_are_types() -> None:
    assert (files("whisperport") / "py.typed").is_file()
