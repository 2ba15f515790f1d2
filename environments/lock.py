"""`make lock`: renew lock.txt, the exact versions and hashes that the README's environments install.

It needs the package `uv`. Before each entry are the extras that install it. `export+cuda` means: `export`
needs it only where torch is a build for CUDA. The lock names no index.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
LOCK = Path(__file__).with_name("lock.txt")
EXTRAS = ("export", "xnnpack", "litert-export", "openvino-export", "fast", "dev")
BUILD = (
    "hatchling",
    "editables",
    "setuptools",
    "wheel",
)  # what builds this package, and those below
SOURCE_ONLY = ("antlr4-python3-runtime", "openai-whisper")  # published without wheels, pure Python
# uv does not read that a version is for older interpreters only, and pip does.
LIMITS = ("backports-strenum<1.3",)
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORM = "x86_64-manylinux_2_36"
CUDA = re.compile(r"nvidia-|cuda-|triton$")
HEAD = """\
# Written by `make lock`; see CONTRIBUTING.md. Before each entry: the extras that install it.
"""


def compiled(*arguments: str, text: str = "") -> str:
    """Return what `uv pip compile` writes for the text of a requirements file."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", *arguments]
    done = subprocess.run([*command, "-"], input=text, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def resolved(*arguments: str, text: str) -> str:
    """Return one version per package for all interpreters and systems, where one serves all."""
    oldest = ("--python-version", PYTHONS[0])
    return compiled("--universal", "--fork-strategy", "fewest", *oldest, *arguments, text=text)


def entries(lock: str) -> Iterator[tuple[str, str]]:
    """Return name and text of each entry."""
    for entry in re.split(r"\n(?=[a-z0-9])", lock.strip()):
        yield re.split(r"[=\[ ]", entry, maxsplit=1)[0], entry


def needed_by(lines: str) -> dict[str, str]:
    """Return the packages of lines `NAME==VERSION  # via A, B`: "+cuda" if only torch for CUDA needs it."""
    via: dict[str, set[str]] = {}
    for name, line in entries(lines):
        sources = line.partition("# via ")[2].split(", ")
        via.setdefault(name, set()).update(s for s in sources if not s.startswith("-c "))
    cuda: set[str] = set()
    while found := {n for n in via.keys() - cuda if CUDA.match(n) and via[n] <= {"torch", *cuda}}:
        cuda |= found
    return {name: "+cuda" if name in cuda else "" for name in via}


def has_wheels(lock: str, python: str) -> bool:
    """Whether every package has a wheel for an interpreter, on the most common system."""
    source = [f"--no-binary={name}" for name in SOURCE_ONLY]
    where = ("--python-version", python, "--python-platform", PLATFORM)
    try:
        compiled("--offline", "--no-deps", "--only-binary=:all:", *source, *where, text=lock)
    except SystemExit:
        return False
    return True


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = f"{project['name']}[%s] @ file://{ROOT}"
    skip = ("--no-emit-package", project["name"])
    with TemporaryDirectory() as folder:
        pins = Path(folder) / "pins.txt"
        everything = "\n".join((*BUILD, *LIMITS, own % ",".join(EXTRAS)))
        lock = resolved("--generate-hashes", "--no-annotate", *skip, text=everything)
        pins.write_text(resolved("--no-annotate", *skip, text=everything))
        style = ("--annotation-style", "line", "--constraint", str(pins), *skip)
        wanted = {extra: needed_by(resolved(*style, text=own % extra)) for extra in EXTRAS}
        wanted["build"] = dict.fromkeys(needed_by(resolved(*style, text="\n".join(BUILD))), "")

    head, body = HEAD, ""
    for extra, names in wanted.items():
        part = "\n".join(entry for name, entry in entries(lock) if name in names)
        head += f"# {extra} has wheels on: {' '.join(p for p in PYTHONS if has_wheels(part, p))}\n"
    for name, entry in entries(with_known_hashes(lock)):
        extras = (f"{extra}{names[name]}" for extra, names in wanted.items() if name in names)
        body += f"\n# for: {' '.join(extras)}\n{entry}\n"
    LOCK.write_text(head + body, encoding="utf-8")


def with_known_hashes(lock: str) -> str:
    """Return the lock with the hashes of the last one, where the version is the same.

    Builds that another index serves under the same version, as torch's for the CPU, are added by hand.
    """
    last = dict(entries(LOCK.read_text(encoding="utf-8"))) if LOCK.exists() else {}
    merged = []
    for name, entry in entries(lock):
        first, *hashes = re.split(r" \\\n\s+", entry)
        if last.get(name, "").startswith(first):
            hashes += re.findall(r"--hash=\S+", last[name])
        merged.append(" \\\n    ".join((first, *sorted(set(hashes)))))
    return "\n".join(merged)


if __name__ == "__main__":
    main()
