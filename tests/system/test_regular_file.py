"""Texts that people write are read from any kind of file, but never without an end."""

import os
from pathlib import Path

import pytest

from whisperport.apps.serving.keys import Keys
from whisperport.errors import UsageError
from whisperport.system import regular_file
from whisperport.system.regular_file import read_short_text


def test_a_text_may_come_from_a_pipe() -> None:
    reading, writing = os.pipe()
    os.write(writing, "Straße\n".encode())
    os.close(writing)

    assert read_short_text(f"/dev/fd/{reading}") == "Straße\n"


def test_a_device_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_file, "MAX_TEXT_BYTES", 1000)

    for read in (read_short_text, Keys.load):
        with pytest.raises((OSError, UsageError), match="/dev/zero"):
            read(Path("/dev/zero"))
