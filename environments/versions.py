"""`make test-versions`: the fast tests with the newest and the lowest versions that pyproject.toml admits.

    python environments/versions.py FOLDER

On each interpreter that is found, in an environment of FOLDER each. It needs the package `uv`. The exit
status is 1 if a test failed.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SETS = {"newest": "highest", "lowest": "lowest-direct"}
SHOWN = (
    "av",
    "click",
    "jiwer",
    "numpy",
    "onnxruntime",
    "protobuf",
    "rich",
    "tokenizers",
    "whisper-normalizer",
)
TESTS = (
    "-m",
    "pytest",
    "-q",
    "--numprocesses=auto",
    "--dist=loadfile",
    "--max-worker-restart=0",
    "-p",
    "no:cacheprovider",
)


def interpreters(version: str) -> Iterator[str]:
    """Where an interpreter may be: on the path, and where pyenv keeps those that its shims do not run."""
    if found := shutil.which(f"python{version}"):
        yield found
    folder = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from map(str, sorted(folder.glob(f"{version}.*/bin/python")))


def interpreter(version: str) -> str:
    """Return one that runs, or an empty string."""
    for path in interpreters(version):
        if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return ""


def uv(*arguments: str) -> str:
    command = [sys.executable, "-m", "uv", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def tried(python: str, folder: Path, resolution: str) -> bool:
    """Make an environment and run the tests in it; print its versions and the result."""
    uv("venv", "--quiet", "--clear", "--python", python, str(folder))
    here = ("--quiet", "--python", str(folder / "bin" / "python"))
    uv("pip", "install", *here, "--upgrade", "--resolution", resolution, "--editable", ".[fast]")
    installed = dict(
        line.split("==") for line in uv("pip", "freeze", *here).split() if "==" in line
    )
    print(f"{folder.name}: {', '.join(f'{name} {installed[name]}' for name in SHOWN)}", flush=True)
    began = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [str(folder / "bin" / "python"), *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    (folder / "tests.log").write_text(done.stdout, encoding="utf-8")
    for line in re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE):
        print(f"  {line}")
    result = done.stdout.strip().splitlines()[-1].strip("= ")
    print(f"  {result} ({time.monotonic() - began:.0f} s; {folder / 'tests.log'})", flush=True)
    return done.returncode == 0


def main(folder: Path) -> int:
    passed = True
    for version in PYTHONS:
        if not (python := interpreter(version)):
            print(f"Python {version}: not found", flush=True)
            continue
        for name, resolution in SETS.items():
            passed &= tried(python, folder.absolute() / f"{version}-{name}", resolution)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
