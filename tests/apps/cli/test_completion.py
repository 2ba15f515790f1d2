"""Completion in bash and zsh: the lines of the documentation are evaluated, and the Tab key is pressed."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whisperport.targets import TARGETS

ROOT = Path(__file__).parents[3]
LINE = re.compile(
    r'^(eval "\$\(_WHISPERPORT_COMPLETE=(\w+)_source whisperport\)") *#', re.MULTILINE
)
LINES = {shell: line for line, shell in LINE.findall((ROOT / "docs" / "README.md").read_text())}
START = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}
PREPARE = {"bash": "", "zsh": "autoload -Uz compinit && compinit -D -u; "}
LIMIT_S = 60.0


def completed(shell: str, typed: str, expected: str, folder: Path) -> str:
    """What a shell shows on its terminal after `typed` and the Tab key, until `expected` is there."""
    (folder / "whisperport").write_text(f'#!/bin/sh\nexec {sys.executable} -m whisperport "$@"\n')
    (folder / "whisperport").chmod(0o755)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PS1": "$ "}
    environment |= {"TERM": "dumb", "HOME": str(folder)}
    ran = subprocess.Popen(
        [shell, *START[shell]], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    try:
        os.write(ours, f"{PREPARE[shell]}{LINES[shell]}; echo re''ady\n".encode())
        shown = _until(ours, "ready")
        assert "ready" in shown, shown
        os.write(ours, f"{typed}\t".encode())
        return _until(ours, expected)
    finally:
        ran.kill()
        ran.wait()
        os.close(ours)


def _until(terminal: int, expected: str) -> str:
    shown, end = "", time.monotonic() + LIMIT_S
    while expected not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace").replace("\r", "")
    return shown


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_verbs_and_targets(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")

    for typed, expected in (
        ("whisperport transc", "transcribe"),
        ("whisperport check x.pt2 --target hailo10", "hailo10h"),
    ):
        assert expected in completed(shell, typed, expected, tmp_path)


def test_the_readme_has_a_line_for_each_shell() -> None:
    assert set(LINES) == {"bash", "zsh"}


@pytest.mark.parametrize(
    ("words", "some"),
    [
        (["whisperport", ""], ["export", "demo"]),
        (["whisperport", "check", "--target", ""], [one.spec.name for one in TARGETS]),
        (["whisperport", "transcribe", "--model", "large"], ["large-v3", "large-v3-turbo"]),
        (["whisperport", "transcribe", "--word-t"], ["--word-timestamps"]),
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_completion_imports_no_package_for_export(words: list[str], some: list[str]) -> None:
    script = (
        "import sys; from whisperport.apps.cli import main\n"
        "try: main()\n"
        "finally: print({'torch', 'onnx', 'onnxruntime'} & set(sys.modules), file=sys.stderr)"
    )
    asked = {"_WHISPERPORT_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words)}
    asked["COMP_CWORD"] = str(len(words) - 1)

    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=True,
    )

    assert {f"plain,{one}" for one in some} <= set(ran.stdout.splitlines())
    assert ran.stderr.strip() == "set()"
