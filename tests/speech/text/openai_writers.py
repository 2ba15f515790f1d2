"""What openai-whisper's own writers write of our segments."""

import io
from dataclasses import asdict
from typing import Any

from whisper.utils import get_writer

from whisperport.speech.text import Segment, SubtitleOptions


def as_openai(segments: list[Segment], language: str | None) -> dict[str, Any]:
    """What openai-whisper's `transcribe()` would have returned."""
    order = "seek start end text tokens temperature avg_logprob compression_ratio no_speech_prob"
    dicts = [asdict(segment) for segment in segments]
    return {
        "text": "".join(segment.text for segment in segments),
        "segments": [
            {"id": i, **{name: d[name] for name in order.split()}}
            | ({} if d["words"] is None else {"words": list(d["words"])})
            for i, d in enumerate(dicts)
        ],
        "language": language,
    }


def written_by_openai(
    form: str,
    segments: list[Segment],
    language: str | None = None,
    options: SubtitleOptions | None = None,
) -> str:
    file = io.StringIO(newline="")
    chosen = asdict(options) if options else {}
    get_writer(form, ".").write_result(as_openai(segments, language), file=file, **chosen)
    return file.getvalue()
