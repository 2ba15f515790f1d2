"""What users download and install: the package's size, and the lock."""

import importlib.util
import re
import sys
import tomllib
import zlib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

import whisperport

# The lock that `make demo` and `make test` install from.

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = (ROOT / "environments" / "lock.txt").read_text(encoding="utf-8")
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


# What users download and install of whisperport itself.

PACKAGE = Path(whisperport.__file__).parent
MB = 1_000_000


def test_the_wheel_has_at_most_8_2_mb_and_is_installed_in_15() -> None:
    found = [p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    files = {path.relative_to(PACKAGE).as_posix(): path.read_bytes() for path in found}

    # A wheel is a zip file: it compresses each file alone, and names it twice in its own tables and once
    # with a hash in RECORD.
    packed = sum(len(zlib.compress(data)) + 3 * len(name) + 200 for name, data in files.items())

    assert packed <= 8.2 * MB  # 8.0 before the files of other apps were written
    assert sum(map(len, files.values())) <= 15 * MB


def test_no_folder_of_the_package_is_ignored_by_git_and_so_left_out_of_the_wheel() -> None:
    lines = (Path(__file__).parents[1] / ".gitignore").read_text(encoding="utf-8").split()
    anywhere = {line.rstrip("/") for line in lines if not line.startswith("/")}

    folders = {path.name for path in PACKAGE.rglob("*") if path.is_dir()} - {"__pycache__"}

    assert "speech" in folders
    assert not folders & anywhere
