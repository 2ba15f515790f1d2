"""Write a subtitle file for each transcript of an archive."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from whisperport.archive.rows import Row
from whisperport.system.atomic import write_atomic
from whisperport.text import Segment, write_as
from whisperport.text.segment import Word

MAX_NAME = 100  # characters of an id that are in the name of its file


def write_subtitles(rows: Iterable[Row], folder: Path, form: str) -> None:
    """Write `subtitles/NAME.FORM` for each row that has segments. Files with the same text are kept.

    Args:
        rows: with the columns `id` and `segments`.
        folder: output of the archive.
        form: "srt" or "vtt".

    Raises:
        WhisperportError: a file cannot be written.
    """
    target = folder / "subtitles"
    target.mkdir(exist_ok=True)
    for row in rows:
        if row["segments"]:
            path = target / f"{subtitle_name(row['id'])}.{form}"
            text = write_as(form, [_segment(one) for one in row["segments"]]).encode()
            if not path.is_file() or path.read_bytes() != text:
                write_atomic(path, text)


def subtitle_name(id: str) -> str:
    """Return the file name of an id without its suffix: readable, unique, and inside of the folder."""
    readable = re.sub(r"[^\w.-]+", "_", id).lstrip(".")[:MAX_NAME]
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
