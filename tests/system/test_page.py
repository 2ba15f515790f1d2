"""Pages of whisperport are told from all other files."""

import os
from pathlib import Path

import pytest

from whisperport.system.page import MAX_TEXT, html_page, is_page


@pytest.mark.parametrize("title", ["", "a" * MAX_TEXT, "&" * MAX_TEXT, "</title>\x00\u202e"])
def test_a_page_is_told_by_its_head(tmp_path: Path, title: str) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link"
    page.write_text(html_page(title, "<p>body"))
    link.symlink_to(page)

    assert is_page(page)
    assert is_page(link)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00" * 4000,
        b"<!doctype html>\n<html><head><title>mine</title>",
        b"<!doctype html>\n" + b"<p>mine" * 1000 + b'<meta name="generator" content="whisperport">',
        b'# notes\n`<meta name="generator" content="whisperport">`',
        b'<!doctype html>\n<meta name="generator" content="another">',
    ],
)
def test_a_file_of_another_origin_is_no_page(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file.html"
    file.write_bytes(content)

    assert not is_page(file)


def test_what_is_no_readable_file_is_no_page(tmp_path: Path) -> None:
    pipe, dangling = tmp_path / "pipe", tmp_path / "dangling"
    os.mkfifo(pipe)
    dangling.symlink_to(tmp_path / "missing")

    assert not any(map(is_page, (tmp_path, pipe, dangling, tmp_path / "missing", "a\x00b")))
