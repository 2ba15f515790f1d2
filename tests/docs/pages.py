"""Read the project's pages, their code blocks and their commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "benchmarks", "training", "src", "tests")


def pages() -> list[Path]:
    """List every Markdown file of the project."""
    found = list(ROOT.glob("*.md"))
    for folder in FOLDERS:
        found += (ROOT / folder).rglob("*.md")
    return sorted(page for page in found if "work" not in page.relative_to(ROOT).parts)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def code_blocks(page: Path, language: str) -> Iterator[str]:
    """Return the code blocks of one language, without their indentation."""
    text = page.read_text(encoding="utf-8")
    for block in re.finditer(rf"^( *)```{language}\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        yield "\n".join(line.removeprefix(block[1]) for line in block[2].splitlines())


def shell_commands(page: Path) -> Iterator[list[str]]:
    """Return each line of the shell blocks, split into words and without comments."""
    for block in code_blocks(page, "sh"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words
