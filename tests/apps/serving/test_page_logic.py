"""What the page does with transcripts, in node: editing, searching, and files without speech."""

import json
import shutil
import subprocess
from importlib.resources import as_file, files
from typing import Any

import pytest

from whisperport.speech.text import write_srt

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(not NODE, reason="node is not installed")
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


def test_a_word_without_text_is_removed() -> None:
    found = evaluated("page.edited(page.edited(d, 3, ''), 0, ' ')")

    assert found["text"] == "two three."
    assert [one["word"] for one in found["words"]] == ["two", "three."]
    assert evaluated("page.FORMS.txt[1](page.edited(d, 3, ''))") == "One two three.\n"


def test_a_segment_whose_words_differ_from_its_text_is_edited_too() -> None:
    document = DOCUMENT | {"words": DOCUMENT["words"][:3]}

    found = evaluated("page.edited(d, 3, 'Five.')", document)

    assert [one["text"] for one in found["segments"]] == [" One two three.", " ", " Five."]
    assert found["words"] == document["words"]


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


def test_a_transcript_without_speech_is_written_as_by_the_package() -> None:
    document = DOCUMENT | {"segments": [], "words": [], "text": ""}

    assert evaluated("page.FORMS.srt[1](d)", document) == write_srt([])
    assert evaluated("page.FORMS.vtt[1](d)", document) == "WEBVTT\n\n"
