"""Every link inside the project leads to an existing file and heading."""

import re
from pathlib import Path

import pytest

from .pages import name_of, pages

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the anchors of headings, as GitHub makes them."""
    headings = HEADING.findall(re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """List the links of `page` to missing files or missing headings."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in LINK.finditer(CODE.sub("", text)):
        link = match[1] or match[2]
        if re.match(r"[a-z]+:", link):
            continue  # elsewhere: tests are offline
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (
            anchor and anchor not in anchors(target.read_text(encoding="utf-8"))
        ):
            found.append(link)
    return found


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_relative_links_resolve(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n[ok](#a-heading) [no](#none) [gone](gone.md) [far](https://x.org)\n"
        "`[code](no.md)`\n[ref]: lost.md\n"
    )

    assert broken_links(page) == ["#none", "gone.md", "lost.md"]
