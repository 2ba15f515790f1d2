"""Install an extra of whisperport into the environment of this interpreter, from the lock.

    ENVIRONMENT/bin/python environments/install.py EXTRA

Exact versions with hashes, and this package as an editable one, but not beside `tools` and `peers`, which
have environments of their own. A torch that is there already stays. A file
of torch in a folder that pip is set up to search (`find-links`) goes before that of the index: most indexes
serve a build for CUDA, which is larger by gigabytes with its libraries.
"""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
LOCK = Path(__file__).with_name("lock.txt")
PEERS = ROOT / "benchmarks" / "peers" / "requirements.txt"
WITHOUT_PACKAGE = ("tools", "peers")
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--quiet", "--no-input", "--no-deps"]
PIP += ["--disable-pip-version-check", "--no-build-isolation"]


def main(extra: str) -> None:
    lock = (PEERS if extra == "peers" else LOCK).read_text(encoding="utf-8")
    check_interpreter(extra, lock)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "requirements.txt"
        from_lock = [*PIP, "--require-hashes", "--requirement", str(file)]
        file.write_text(chosen(LOCK.read_text(encoding="utf-8"), "build"))
        run(from_lock)
        entries = chosen(lock, extra)
        if torch := re.search(r"^torch==(?:.*\\\n)+.*", entries, re.MULTILINE):
            file.write_text(torch[0])
            subprocess.run([*from_lock, "--no-index"], capture_output=True)
            if torch_needs_cuda():
                entries += chosen(lock, f"{extra}+cuda")
        file.write_text(entries)
        run(from_lock)
    if extra not in WITHOUT_PACKAGE:
        run([*PIP, "--editable", str(ROOT)])


def run(command: list[str]) -> None:
    """Run pip, which says what is wrong; end with its status."""
    if status := subprocess.run(command).returncode:
        raise SystemExit(status)


def check_interpreter(extra: str, lock: str) -> None:
    """End with an error if a package of the extra has no wheel for this interpreter."""
    line = re.search(rf"^# {re.escape(extra)} has wheels on: (.*)$", lock, re.MULTILINE)
    known = line[1].split() if line else []
    version = "{}.{}".format(*sys.version_info)
    if version not in known:
        raise SystemExit(
            f"error: the extra {extra} cannot be installed on Python {version}\n"
            f"  why: a package that it needs has no wheel for this interpreter\n\n"
            f"hint: choose Python {' or '.join(known)}: "
            f"make clean, then make PYTHON=/path/to/python{known[-1]}"
        )


def chosen(lock: str, extra: str) -> str:
    """Return the lock's entries of an extra."""
    parts = lock.split("\n# for: ")[1:]
    return "".join(
        part.partition("\n")[2] for part in parts if extra in part.split("\n")[0].split()
    )


def torch_needs_cuda() -> bool:
    """Whether torch needs the libraries of CUDA, or is not installed yet: then the index's build does."""
    try:
        return any(need.startswith("nvidia-") for need in metadata.requires("torch") or [])
    except metadata.PackageNotFoundError:
        return True


if __name__ == "__main__":
    main(sys.argv[1])
