"""`make lock`: renew the locks, the exact versions and hashes that every environment of `make` installs.

`lock.txt` is for the extras, for what builds the package, and for the tools of `make lock` and
`make licences`; benchmarks/peers/requirements.txt is for the programs that whisperport is compared with.
Before each entry are the extras that install it. `export+cuda` means: `export` needs it only where torch is
a build for CUDA. A lock names no index. This script needs the package `uv`.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
LOCK = Path(__file__).with_name("lock.txt")
PEERS = ROOT / "benchmarks" / "peers" / "requirements.txt"
EXTRAS = ("export", "xnnpack", "litert-export", "openvino-export", "fast", "dev")
BUILD = (
    "hatchling",
    "editables",
    "setuptools",
    "wheel",
)  # what builds this package, and those below
TOOLS = ("pip", "uv")  # 23.2 of pip, which Python 3.11 has, downloads a package to read its licence
SOURCE_ONLY = ("antlr4-python3-runtime", "openai-whisper")  # published without wheels, pure Python
# uv does not read that a version is for older interpreters only, and pip does.
LIMITS = ("backports-strenum<1.3",)
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORM = "x86_64-manylinux_2_36"
CUDA = re.compile(r"nvidia-|cuda-|triton$")
HEAD = """\
# Written by `make lock`; see CONTRIBUTING.md. Before each entry: the extras that install it.
"""
PEERS_HEAD = """\
# What `make bench-peers` compares whisperport with. After a change of these lines, run `make lock`:
{}
# Written by `make lock`:
"""
# A dependency of optimum-intel that nothing here uses. One of another build than torch's cannot be
# imported, and then transformers cannot either.
UNUSED_BY_PEERS = "torchvision"


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
    sources = {extra: own % extra for extra in EXTRAS}
    sources |= {"build": "\n".join(BUILD), "tools": "\n".join(TOOLS)}
    everything = "\n".join((*BUILD, *TOOLS, *LIMITS, own % ",".join(EXTRAS)))
    LOCK.write_text(HEAD + locked(everything, sources, project["name"]), encoding="utf-8")

    wanted = re.findall(r"^# (\S+==\S+)$", PEERS.read_text(encoding="utf-8"), re.MULTILINE)
    head = PEERS_HEAD.format("\n".join(f"# {line}" for line in wanted))
    peers = "\n".join(wanted)
    PEERS.write_text(head + locked(peers, {"peers": peers}, UNUSED_BY_PEERS), encoding="utf-8")


def locked(everything: str, sources: Mapping[str, str], left_out: str) -> str:
    """Return the lock of requirements: which interpreters have wheels for each part, then the entries.

    Args:
        everything: the requirements of all parts, which get one set of versions.
        sources: the requirements of each part, by its name.
        left_out: the package that gets no entry.
    """
    skip = ("--no-emit-package", left_out)
    with TemporaryDirectory() as folder:
        pins = Path(folder) / "pins.txt"
        lock = resolved("--generate-hashes", "--no-annotate", *skip, text=everything)
        pins.write_text(resolved("--no-annotate", *skip, text=everything))
        style = ("--annotation-style", "line", "--constraint", str(pins), *skip)
        parts = {name: needed_by(resolved(*style, text=text)) for name, text in sources.items()}

    head, body = "", ""
    for name, packages in parts.items():
        part = "\n".join(entry for package, entry in entries(lock) if package in packages)
        head += f"# {name} has wheels on: {' '.join(p for p in PYTHONS if has_wheels(part, p))}\n"
    for package, entry in entries(with_known_hashes(lock)):
        users = (f"{name}{part[package]}" for name, part in parts.items() if package in part)
        body += f"\n# for: {' '.join(users)}\n{entry}\n"
    return head + body


def with_known_hashes(lock: str) -> str:
    """Return the lock with the hashes of the last locks, where the version is the same.

    Builds that another index serves under the same version, as torch's for the CPU, are added by hand.
    """
    known: dict[str, set[str]] = {}
    for file in (LOCK, PEERS):
        for _, entry in entries(file.read_text(encoding="utf-8") if file.exists() else ""):
            known.setdefault(entry.split(" ")[0], set()).update(re.findall(r"--hash=\S+", entry))
    merged = []
    for _, entry in entries(lock):
        first, *hashes = re.split(r" \\\n\s+", entry)
        hashes += known.get(first.split(" ")[0], set())
        merged.append(" \\\n    ".join((first, *sorted(set(hashes)))))
    return "\n".join(merged)


if __name__ == "__main__":
    main()
