"""Text that is safe to show."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.system.printable import escaped_json, is_printable, one_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("talk.wav", "talk.wav"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nhint: b\r\tc", r"a\nhint: b\r\tc"),
        ("\x00\x7f\x9b\x85", r"\x00\x7f\x9b\x85"),
        ("a\u2028b\u2029c", r"a\u2028b\u2029c"),
        ("\u202egpj.exe\u2066", r"\u202egpj.exe\u2066"),
        ("caf\udce9", r"caf\xe9"),  # as `os.fsdecode` gives a name that is not UTF-8
        ("\ud800", r"\ud800"),
        ("日本\u3000👩\u200d🚒 می\u200cخواهم\u200f", "日本\u3000👩\u200d🚒 می\u200cخواهم\u200f"),
    ],
)
def test_what_a_terminal_obeys_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters(exclude_categories=[])))
def test_nothing_unsafe_is_left(text: str) -> None:
    assert is_printable(printable(text))
    assert is_printable(one_line(text))
    assert len(printable(text).splitlines()) <= 1


def test_line_breaks_and_tabs_of_a_transcript_are_spaces() -> None:
    assert one_line("a\tb\nc\r\nd\u2028e\x1b") == r"a b c  d e\x1b"


@given(st.recursive(st.text(st.characters(exclude_categories=[])) | st.none(), st.lists))
def test_json_is_the_same_and_printable(data: object) -> None:
    document = escaped_json(json.dumps(data, ensure_ascii=False, indent=1))

    assert json.loads(document) == data
    assert is_printable(document.replace("\n", ""))
