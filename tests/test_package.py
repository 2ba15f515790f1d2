"""What users install and call: the size of the package, the lock, and the public API."""

import ast
import importlib
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zlib
from importlib.resources import files
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

import whisperport
from whisperport import errors
from whisperport.apps.cli.main import cli
from whisperport.build.layouts import all_layouts

# The lock that `make demo` and `make test` install from.

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = (ROOT / "environments" / "lock.txt").read_text(encoding="utf-8")
PACKAGE = Path(whisperport.__file__).parent
EXTRAS = ["export", "xnnpack", "litert-export", "openvino-export", "fast", "dev"]


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "environments" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def requirements(extra: str) -> list[Requirement]:
    """What pyproject.toml wants for an extra, with the extras that it names."""
    found = []
    for line in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]:
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            found += [one for name in requirement.extras for one in requirements(name)]
        elif requirement.marker is None or requirement.marker.evaluate():
            found.append(requirement)
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_lock_has_what_pyproject_wants_for_an_extra(install: ModuleType, extra: str) -> None:
    entries = install.chosen(LOCK, extra)

    locked = dict(re.findall(r"^(\S+?)==(\S+)", entries, re.MULTILINE))

    for requirement in requirements(extra):
        version = locked[normal(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}: {version}; run `make lock`"


def test_every_entry_has_a_hash_and_the_lock_names_no_index() -> None:
    entries = re.findall(r"^[a-z0-9].*==.*$(?:\n +.*$)*", LOCK, re.MULTILINE)

    assert len(entries) > 100
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in LOCK
    assert "--index" not in LOCK
    assert "--find-links" not in LOCK


def test_the_libraries_of_cuda_are_left_out_where_torch_needs_none(install: ModuleType) -> None:
    for extra in EXTRAS[:-2]:
        assert "nvidia" not in install.chosen(LOCK, extra)
        assert "nvidia" in install.chosen(LOCK, f"{extra}+cuda")


def test_an_interpreter_without_wheels_is_an_error_that_names_those_with_wheels(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = "# dev has wheels on: 3.11 3.13\n"
    monkeypatch.setattr(sys, "version_info", (3, 14, 0, "final", 0))

    with pytest.raises(
        SystemExit, match=r"Python 3\.14\n(.|\n)*choose Python 3\.11 or 3\.13"
    ) as error:
        install.check_interpreter("dev", lock)

    assert "the extra dev cannot be installed" in str(error.value)


def test_every_environment_of_make_is_installed_from_a_lock() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    environments = re.findall(r"^\$\((\w+)\)/\.installed", makefile, re.MULTILINE)

    assert {"VENV", "FAST", "PEERS", "TOOLS"} <= set(environments)
    assert "pip install --" not in makefile
    assert not re.search(r"-m pip|uv pip|npm ", makefile)


def test_the_peers_have_a_lock_with_hashes(install: ModuleType) -> None:
    lock = install.PEERS.read_text(encoding="utf-8")
    wanted = re.findall(r"^# (\S+)==(\S+)$", lock, re.MULTILINE)
    entries = re.findall(r"^[a-z0-9].*==.*$(?:\n +.*$)*", lock, re.MULTILINE)

    chosen = dict(re.findall(r"^(\S+?)==(\S+)", install.chosen(lock, "peers"), re.MULTILINE))

    assert wanted
    assert all(chosen[normal(name)] == version for name, version in wanted), "run `make lock`"
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in lock


# The licences of what is shipped, installed or needed.

LICENCES = (ROOT / "environments" / "licences.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in LICENCES.splitlines() if line.startswith("| ")]


def test_the_page_of_licences_has_every_locked_package(install: ModuleType) -> None:
    locked = {
        (name, version)
        for path in (install.LOCK, install.PEERS)
        for name, version in re.findall(
            r"^([a-z0-9][a-z0-9-]*)(?:\[.*?\])?==(\S+)", path.read_text("utf-8"), re.MULTILINE
        )
    }
    table = LICENCES.split("## In the locks")[1].split("## Outside")[0]

    rows = re.findall(r"^\| ([a-z0-9]\S*) \| (\S+) \| \S.* \| \S.* \|$", table, re.MULTILINE)

    assert set(rows) == locked, "run `make licences`"


def test_the_page_of_licences_has_what_extras_and_apps_need() -> None:
    needed = {normal(re.split(r"[<>=\[;]", line)[0]) for line in PROJECT["dependencies"]}
    for lines in PROJECT["optional-dependencies"].values():
        needed |= {normal(re.split(r"[<>=\[;]", line)[0].strip()) for line in lines}
    for layout in all_layouts():
        for app in layout.apps.values():
            needed |= {normal(re.split(r"[<>=\[]|(?<!^)@", line)[0]) for line in app.packages}

    assert needed - {normal(row[0]) for row in ROWS} - {"whisperport"} == set(), (
        "run `make licences`"
    )


def test_the_page_of_licences_has_every_file_of_the_wheel_that_is_no_code() -> None:
    patterns = [row[0].strip("`") for row in ROWS if row[0].startswith("`")]
    paths = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file()]
    others = [path for path in paths if path.suffix not in (".py", ".pyc")]

    unknown = [
        path.as_posix()
        for path in others
        if not any(PurePosixPath(path).match(pattern) for pattern in patterns)
    ]

    assert others
    assert unknown == []


# What users download and install of whisperport itself.

MB = 1_000_000


def test_the_wheel_has_at_most_8_4_mb_and_is_installed_in_15() -> None:
    found = [p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    files = {path.relative_to(PACKAGE).as_posix(): path.read_bytes() for path in found}

    # A wheel is a zip file: it compresses each file alone, and names it twice in its own tables and once
    # with a hash in RECORD.
    packed = sum(len(zlib.compress(data)) + 3 * len(name) + 200 for name, data in files.items())

    assert packed <= 8.4 * MB  # 3.5 of it the model, 2.3 speech, 1.6 source
    assert sum(map(len, files.values())) <= 15 * MB


def built(files: list[str], folder: Path, umask: int, **environment: str) -> dict[str, bytes]:
    """The wheel and the source archive that are built from copies of the files in a folder."""
    old = os.umask(umask)
    try:
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
            (folder / name).chmod((ROOT / name).stat().st_mode & 0o777 & ~umask)
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-d", "dist"],
            cwd=folder, env={**os.environ, **environment}, capture_output=True, check=True,
        )  # fmt: skip
    finally:
        os.umask(old)
    return {path.name: path.read_bytes() for path in (folder / "dist").iterdir()}


def test_two_builds_are_equal_to_the_byte_and_have_the_tracked_files(tmp_path: Path) -> None:
    # given: another folder, time, umask, locale and time zone
    pytest.importorskip("hatchling")
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("this is no working copy of git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = [name for name in listed.stdout.decode().split("\0") if (ROOT / name).is_file()]

    first = built(names, tmp_path / "a", 0o022, TZ="UTC", LC_ALL="C.UTF-8")
    time.sleep(1.1)  # a time in a zip file has two seconds
    second = built(names[::-1], tmp_path / "another folder", 0o077, TZ="Asia/Tokyo", LC_ALL="C")

    # then
    assert {Path(name).suffix for name in first} == {".whl", ".gz"}
    assert first == second
    (archive,) = (tmp_path / "a" / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as source:
        inside = {name.partition("/")[2] for name in source.getnames()}
    assert inside == {*names, "PKG-INFO"}


def test_no_folder_of_the_package_is_ignored_by_git_and_so_left_out_of_the_wheel() -> None:
    lines = (Path(__file__).parents[1] / ".gitignore").read_text(encoding="utf-8").split()
    anywhere = {line.rstrip("/") for line in lines if not line.startswith("/")}

    folders = {path.name for path in PACKAGE.rglob("*") if path.is_dir()} - {"__pycache__"}

    assert "speech" in folders
    assert not folders & anywhere


# The public API is exactly what the package lists; all of it has types and docstrings.

STUB = Path(whisperport.__file__).with_suffix(".pyi")
MOST_NAMES = 60  # that a reader of the package has to choose from
PACKAGES = (
    *("speech.audio", "speech.text", "program.bundle", "model.checkpoint", "model.rewrites"),
    *("targets", "runtime", "verification", "apps.cli"),
)
FUNCTIONS = {"archive": "transcribe_archive", "import": "import_artifact"}  # of other names
LAZY = {"Checkpoint", "load_checkpoint"}  # they need torch, so they come when first asked for


def made_here(module: ModuleType) -> set[str]:
    """Public names of a module that this package made: no modules, nothing of other packages."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
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

    assert not [name for name, value in listed() if isinstance(value, ModuleType)]


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
