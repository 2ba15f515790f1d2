"""The page at `/`: what it consists of. What it does is in `test_page_in_browser.py`."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib.resources import as_file, files
from typing import Any

import pytest

from whisperport.apps.serving.keys import Keys
from whisperport.speech.text import write_srt

from ...terms import uses

# The page at `/`: what it consists of. What it does is in `test_page_in_browser.py`.

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


@pytest.mark.parametrize("name", ["", "none.js", "../app.py", "..%2fapp.py", "a/b"])
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


# What the page does with transcripts, in node: editing, searching, and files without speech.

NODE = shutil.which("node")
WORDS = ["One", "two", "three.", "Four."]
DOCUMENT: dict[str, Any] = {
    "text": "One two three. Four.",
    "segments": [
        {"text": " One two three.", "start": 0, "end": 3},
        {"text": " ", "start": 3, "end": 3},
        {"text": " Four.", "start": 3, "end": 4},
    ],
    "words": [
        {"word": word, "start": n, "end": n + 1, "probability": 0.2} for n, word in enumerate(WORDS)
    ],
}


def evaluated(expression: str, document: dict[str, Any] = DOCUMENT) -> Any:
    """The value of an expression, in which `d` is a document and `page` is the module."""
    with as_file(files("whisperport.apps.serving") / "page" / "formats.js") as path:
        script = (
            f"import * as page from {json.dumps(path.as_uri())};\n"
            f"const d = {json.dumps(document)}; console.log(JSON.stringify({expression}))"
        )
        assert NODE
        command = [NODE, "--input-type=module", "--experimental-default-type=module", "-"]
        found = subprocess.run(command, input=script, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.skipif(not NODE, reason="node is not installed")
def test_an_edited_word_is_in_the_text_its_segment_and_the_words() -> None:
    found = evaluated("page.edited(d, 1, '  too   many ')")

    assert found["text"].split() == ["One", "too", "many", "three.", "Four."]
    assert [one["text"] for one in found["segments"]] == [" One too many three.", " ", " Four."]
    assert found["words"][1] == {"word": "too many", "start": 1, "end": 2, "probability": 1}
    assert [*found["words"][:1], *found["words"][2:]] == [
        *DOCUMENT["words"][:1],
        *DOCUMENT["words"][2:],
    ]
    assert (
        evaluated("page.edited(page.edited(d, 1, 'x y'), 1, 'two').segments")
        == DOCUMENT["segments"]
    )


@pytest.mark.skipif(not NODE, reason="node is not installed")
def test_a_word_without_text_is_removed() -> None:
    found = evaluated("page.edited(page.edited(d, 3, ''), 0, ' ')")

    assert found["text"] == "two three."
    assert [one["word"] for one in found["words"]] == ["two", "three."]
    assert evaluated("page.FORMS.txt[1](page.edited(d, 3, ''))") == "One two three.\n"


@pytest.mark.skipif(not NODE, reason="node is not installed")
def test_a_segment_whose_words_differ_from_its_text_is_edited_too() -> None:
    document = DOCUMENT | {"words": DOCUMENT["words"][:3]}

    found = evaluated("page.edited(d, 3, 'Five.')", document)

    assert [one["text"] for one in found["segments"]] == [" One two three.", " ", " Five."]
    assert found["words"] == document["words"]


@pytest.mark.skipif(not NODE, reason="node is not installed")
@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("TWO", [[1, 1]]),
        (" two  three", [[1, 2]]),
        ("o t", [[1, 2]]),
        ("e", [[0, 0], [2, 2], [2, 2]]),
        ("three. four", [[2, 3]]),
        ("five", []),
        (" ", []),
        (".*", []),
    ],
)
def test_a_text_is_found_in_one_word_or_several(text: str, places: list[list[int]]) -> None:
    words = "page.segmentsOf(d).flatMap((s) => s.words.map((w, n) => n ? w : {...w, before: ' '}))"

    assert evaluated(f"page.places({words}, {json.dumps(text)})") == places


@pytest.mark.skipif(not NODE, reason="node is not installed")
def test_a_transcript_without_speech_is_written_as_by_the_package() -> None:
    document = DOCUMENT | {"segments": [], "words": [], "text": ""}

    assert evaluated("page.FORMS.srt[1](d)", document) == write_srt([])
    assert evaluated("page.FORMS.vtt[1](d)", document) == "WEBVTT\n\n"
