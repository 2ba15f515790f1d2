"""Write a subtitle file for each transcript of an archive."""

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from whisperport.apps.archive.output_folder import SUBTITLES
from whisperport.apps.archive.rows import Row
from whisperport.speech.text import Segment, write_as
from whisperport.speech.text.segment import Word
from whisperport.system.atomic import clear_temporaries, write_atomic

FORMS = ("srt", "vtt")
MAX_NAME = 100  # characters of an id that are in the name of its file
MAX_BYTES = 242  # of them: file systems have names of 255 bytes, with the hash and the suffix


def write_subtitles(rows: Iterable[Row], folder: Path, form: str) -> list[Path]:
    """Write `subtitles/NAME.FORM` for each row that has segments, where there is no such file.

    A file is never replaced, because the user may have corrected it.

    Args:
        rows: with the columns `id` and `segments`.
        folder: output of the archive.
        form: "srt" or "vtt".

    Returns:
        The files that are there with another text.

    Raises:
        WhisperportError: a file cannot be written.
    """
    target, kept = folder / SUBTITLES, []
    target.mkdir(exist_ok=True)
    clear_temporaries(target)
    for row in rows:
        if row["segments"]:
            path, text = _path(row, target, form), _text(row, form)
            if not os.path.lexists(path):
                write_atomic(path, text)
            elif not _has(path, text):
                kept.append(path)
    return kept


def delete_subtitles(rows: Iterable[Row], folder: Path) -> None:
    """Delete the files of rows that are about to be deleted, unless the user has changed them."""
    for row in rows:
        for form in FORMS:
            path = _path(row, folder / SUBTITLES, form)
            if os.path.lexists(path) and _has(path, _text(row, form)):
                path.unlink()


def _path(row: Row, folder: Path, form: str) -> Path:
    return folder / f"{subtitle_name(row['id'])}.{form}"


def _text(row: Row, form: str) -> bytes:
    return write_as(form, [_segment(segment) for segment in row["segments"]]).encode()


def _has(path: Path, text: bytes) -> bool:
    """Return whether a path is a file, and no link, with this text."""
    try:
        status = path.lstat()
        is_as_long = stat.S_ISREG(status.st_mode) and status.st_size == len(text)
        return is_as_long and path.read_bytes() == text
    except OSError:  # it cannot be read
        return False


def subtitle_name(id: str) -> str:
    """Return the file name of an id without its suffix: readable, unique, and inside of the folder."""
    readable = re.sub(r"[^\w.-]+", "_", id).lstrip(".")[:MAX_NAME]
    readable = readable.encode()[:MAX_BYTES].decode(errors="ignore")
    return f"{readable}.{hashlib.sha256(id.encode()).hexdigest()[:8]}"


def _segment(values: Mapping[str, Any]) -> Segment:
    words = values["words"]
    return Segment(
        **{
            **values,
            "tokens": tuple(values["tokens"]),
            "logprobs": tuple(values["logprobs"]),
            "words": None if words is None else tuple(Word(**word) for word in words),
        }
    )
