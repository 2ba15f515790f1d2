"""The tutorial and the how-tos can be followed: what their commands print is what the pages show.

The blocks of a page run in order, in a new folder that has the package's `src` in it as a copy of the
repository has. A block runs unless it needs a network, a device or a file of the reader's own.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..embedded import default_bundle
from ..extent import core_or_all
from .pages import ROOT

HOW_TO = "docs/how-to/"
CORE = (f"{HOW_TO}write-subtitles.md",)
OTHERS = (
    "docs/tutorials/first-bundle.md",
    f"{HOW_TO}find-undelegated-nodes.md",
    f"{HOW_TO}fix-a-program.md",
    f"{HOW_TO}lower-a-third-party-model.md",
    f"{HOW_TO}export-a-fine-tuned-model.md",
    f"{HOW_TO}measure-speed.md",
    f"{HOW_TO}mediatek-genio.md",
    f"{HOW_TO}place-programs.md",
    f"{HOW_TO}raspberry-pi-hailo.md",
    f"{HOW_TO}share-a-transcriber.md",
    f"{HOW_TO}transcribe-an-archive.md",
    f"{HOW_TO}transcribe-live.md",
    f"{HOW_TO}use-a-short-window.md",
    f"{HOW_TO}verify-on-a-board.md",
    f"{HOW_TO}aws-neuron.md",
    "docs/explanation/cross-attention-kv.md",
)
FIRST = f"{HOW_TO}find-undelegated-nodes.md"  # makes the decoder.pt2 of other pages

# Shell lines that need a network, a device, or a file of the reader's own.
NOT_RUN = re.compile(
    r"^(make|pip|ray|source|scp|sudo|hailortcli|arecord|ffmpeg|python3? |cd )"
    r"|^whisperport transcribe --live$|/shared/|openai/|my-audio|tiny-whisper-encoder"
    r"|talk\.|build/tiny|mine\.pt|(inputs|call)\.npz|encoder\.(onnx|xml)|words-hailo8l talk"
    r"|verify words-hailo8l|words-neuron-on-inf2|=/path/to/|--record"
)
# Python that shows a part: its names are defined elsewhere.
PARTS = re.compile(r"module\.eval\(\)|^torch\.save|greeting\.wav|trace\(\"decoder\", Logits")
BLOCK = re.compile(r"^( *)```(sh|python|text)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
MEASURED = ("whisperport inspect", "whisperport bench")
NUMBER = re.compile(
    r"[≈<]?\d+\.\d[\d.e+-]*( ?%)?|\d[\d.,]*(e-\d+)?( ?(ms|s|MB|MiB|GB|dB|GFLOP)\b| ?%)"
)


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and content of each block, without its indentation."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        (match[2], "\n".join(line.removeprefix(match[1]) for line in match[3].splitlines()))
        for match in BLOCK.finditer(text)
    ]


def runs(language: str, code: str) -> str:
    """What of a block is run."""
    if language == "sh":
        return "\n".join(line for line in code.splitlines() if not NOT_RUN.search(line))
    return "" if PARTS.search(code) else code


def run(language: str, code: str, folder: Path) -> str:
    """What a block prints: standard output, or the error if there is none."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1"}
    environment.pop("COLUMNS", None)
    (folder / "block.py").write_text(code)  # a file: `multiprocessing` needs one
    command = ["bash", "-c", code] if language == "sh" else [sys.executable, "block.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    error = [
        line for line in done.stderr.splitlines() if not re.match(r" *\d+\.\d s  |next:", line)
    ]
    printed = done.stdout if done.stdout.strip() else "\n".join(error)
    return printed.replace(f"{ROOT}/", "")  # paths of the package as the project's folder has them


def comparable(text: str) -> str:
    """`text` without measured numbers, and without spaces, which depend on their width."""
    return re.sub(r"\s+", " ", NUMBER.sub("N", text)).strip()


def agrees(shown: str, printed: str, code: str) -> bool:
    """Whether a page shows what was printed; in the page, a line of `…` is any text."""
    if code.startswith(MEASURED):  # other nodes may be the most expensive ones on another machine
        lines = [line for line in shown.splitlines() if line.strip() not in ("", "…")]
        fixed = [line for line in lines if not re.search(r"\d", line)]
        return all(comparable(line) in comparable(printed) for line in fixed)
    parts = [re.escape(comparable(part)) for part in re.split(r"^\s*…\s*$", shown, flags=re.M)]
    return re.fullmatch(" ?.* ?".join(parts), comparable(printed)) is not None


@pytest.mark.parametrize("page", core_or_all(CORE, CORE + OTHERS))
def test_the_commands_of_a_page_print_what_it_shows(page, tmp_path):
    (tmp_path / "src").symlink_to(ROOT / "src")
    shutil.copytree(default_bundle(), tmp_path / "build" / "first")
    if page != FIRST:
        needed = "decoder.pt2" in (ROOT / page).read_text(encoding="utf-8")
        for language, code in blocks(FIRST)[: 1 if needed else 0]:
            run(language, code, tmp_path)

    printed, code, wrong, compared = "", "", [], 0
    for language, content in blocks(page):
        if language != "text":
            code = runs(language, content)
            printed = run(language, code, tmp_path) if code.strip() else ""
        elif code.strip():
            compared += 1
            wrong += [] if agrees(content, printed, code) else [(code, content, printed)]

    assert compared
    assert wrong == []


def test_a_page_that_shows_something_else_is_found():
    assert agrees("a  1.5 ms\n…\nend", "a 22.1 ms\nb\nc\nend", "whisperport verify x")
    assert not agrees("a  1.5 ms\n…\nend", "b 22.1 ms\nc\nend", "whisperport verify x")
    assert not agrees("node  ms\nx  1", "nodes  time\nx  1", "whisperport inspect x")
