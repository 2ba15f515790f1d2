"""The page at `/`: what it consists of. What it does is in `test_page_in_browser.py`."""

import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest

from whisperport.apps.serving.keys import Keys

from ...terms import uses

FILES = {
    file.name: file.read_text("utf-8")
    for file in (files("whisperport.apps.serving") / "page").iterdir()
}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
STATIC = sorted(FILES.keys() - {"index.html"})


def test_the_page_forbids_all_that_is_not_of_this_server(client: Any) -> None:
    answer = client.get("/")

    policy = answer.headers["content-security-policy"].split("; ")
    assert answer.text == FILES["index.html"]
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert {"default-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"} <= set(policy)
    assert not re.search("unsafe|data:|https?:|[*]", answer.headers["content-security-policy"])


@pytest.mark.parametrize("name", STATIC)
def test_a_file_of_the_page_is_served_with_its_type(client: Any, name: str) -> None:
    types = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

    answer = client.get(f"/static/{name}")

    assert answer.text == FILES[name]
    assert answer.headers["content-type"].startswith(types[name.rpartition(".")[2]])
    assert "default-src 'self'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("name", ["", "none.js", "../web_page.py", "..%2fweb_page.py", "a/b"])
def test_nothing_else_is_served(client: Any, name: str) -> None:
    assert client.get(f"/static/{name}").status_code == 404


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_refers_to_nothing_outside(name: str) -> None:
    found = re.findall(r"\b[a-z]+://[^\"'\s]*", FILES[name])

    assert [url for url in found if url not in ("http://www.w3.org/2000/svg", "https://")] == []


def test_the_page_has_neither_scripts_nor_styles_inside_of_it() -> None:
    html = FILES["index.html"]

    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", html)
    assert re.findall(r"<script[^>]*>([^<]*)", html) == [""]
    for text in SCRIPTS.values():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_every_file_is_used_and_every_name_exists() -> None:
    html, text = FILES["index.html"], "".join(SCRIPTS.values())
    served = re.findall(r'"static/([\w.]+)"', html + text)
    imported = re.findall(r'from "\./([\w.]+)"', text)
    ids = set(re.findall(r'id="([\w-]+)"', html))

    assert {*served, *imported} == {*STATIC, "server.json"}
    assert set(re.findall(r'byId\("([\w-]+)"\)', text)) <= ids
    assert {*re.findall(r'(?:for|aria-\w+)="([a-z]+-[a-z-]+)"', html)} <= ids


@pytest.mark.parametrize("keys", [[], ["a-long-key"]])
def test_the_page_needs_no_key_and_knows_whether_the_api_does(
    serving: Callable[..., Any], keys: list[str]
) -> None:
    client = serving(keys=Keys(keys), model_id="my-model", max_body_mib=3)

    assert client.get("/").status_code == 200
    assert client.get("/static/server.json").json() == {
        "model": "my-model",
        "needs_key": bool(keys),
        "max_body_bytes": 3 * 2**20,
        "languages": {"en": "english"},
        "translates": False,
    }


def test_the_page_uses_the_projects_terms() -> None:
    html = re.sub(r"<[^>]*>|&\w+;", " ", FILES["index.html"])
    texts = re.findall(
        r'"([^"\n]* [^"\n]*)"|`([^`]* [^`]*)`|/\*\*(.*?)\*/', "".join(SCRIPTS.values()), re.S
    )

    assert [use.text for use in uses(html)] == []
    assert [use.text for parts in texts for text in parts for use in uses(text)] == []
