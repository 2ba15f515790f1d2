"""Write transcripts as txt, srt, vtt, tsv and json, with the same bytes as openai-whisper.

Two things differ. Without speech, srt has one empty subtitle. Control characters, which a hostile or
damaged tokenizer may produce, become spaces or visible escapes in the line-based formats, so that a segment
cannot forge a line, a row or a subtitle; in json, they become JSON escapes.

Source: openai/whisper@c0d2f62, whisper/utils.py. Every writer returns the text of the file, which ends in a
newline except for json. Write it as UTF-8, with `write_atomic`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from whisperport.errors import UsageError
from whisperport.speech.text.segment import Segment
from whisperport.speech.text.subtitles import Subtitle, SubtitleOptions, subtitles
from whisperport.system.printable import escaped_json, one_line

DEFAULT_SUBTITLES = SubtitleOptions()  # one subtitle per segment
# An empty SubRip file is none for FFmpeg and for players that use it. They do not show an empty subtitle.
NO_SPEECH = (Subtitle(0.0, 0.001, ""),)


def write_txt(segments: Sequence[Segment]) -> str:
    """Return the text with one segment per line."""
    return "".join(f"{one_line(segment.text.strip())}\n" for segment in segments)


def write_srt(segments: Sequence[Segment], options: SubtitleOptions = DEFAULT_SUBTITLES) -> str:
    """Return SubRip text: numbered, with a comma before the milliseconds. Raises: see `subtitles`."""
    return "".join(
        f"{number}\n{_span(subtitle, always_hours=True, marker=',')}\n{subtitle.text}\n\n"
        for number, subtitle in enumerate(list(subtitles(segments, options)) or NO_SPEECH, start=1)
    )


def write_vtt(segments: Sequence[Segment], options: SubtitleOptions = DEFAULT_SUBTITLES) -> str:
    """Return WebVTT text, with hours only from one hour on. Raises: see `subtitles`."""
    return "WEBVTT\n\n" + "".join(
        f"{_span(subtitle, always_hours=False, marker='.')}\n{subtitle.text}\n\n"
        for subtitle in subtitles(segments, options)
    )


def write_tsv(segments: Sequence[Segment]) -> str:
    """Return tab-separated rows: start and end in milliseconds, and text."""
    return "start\tend\ttext\n" + "".join(
        f"{round(1000 * s.start)}\t{round(1000 * s.end)}\t{one_line(s.text.strip())}\n"
        for s in segments
    )


def write_json(segments: Sequence[Segment], *, language: str | None = None) -> str:
    """Return openai-whisper's JSON result: `text`, `segments`, `language` (a code or null). ASCII only."""
    document = json.dumps(
        {
            "text": "".join(segment.text for segment in segments),
            "segments": [
                {**segment_fields(number, segment), **_words(segment)}
                for number, segment in enumerate(segments)
            ],
            "language": language,
        }
    )
    return escaped_json(document)  # `json.dumps` does not escape DEL


def segment_fields(number: int, segment: Segment) -> dict[str, Any]:
    """Return the members of one segment in openai-whisper's JSON, without words, and `match`."""
    match = {} if segment.match is None else {"match": asdict(segment.match)}
    return {
        "id": number,
        "seek": segment.seek,
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
        **match,
    }


def _words(segment: Segment) -> dict[str, list[dict[str, object]]]:
    """Return the member `words`, if word timestamps were requested."""
    return {} if segment.words is None else {"words": [asdict(word) for word in segment.words]}


WRITERS: dict[str, Callable[[Sequence[Segment]], str]] = {
    "txt": write_txt,
    "srt": write_srt,
    "vtt": write_vtt,
    "tsv": write_tsv,
    "json": write_json,
}


def write_as(
    form: str,
    segments: Sequence[Segment],
    *,
    language: str | None = None,
    options: SubtitleOptions = DEFAULT_SUBTITLES,
) -> str:
    """Return the text of a transcript file in one of the formats of `WRITERS`.

    Args:
        form: format, such as "srt".
        segments: of the transcript, in order.
        language: language code, written to json only.
        options: for srt and vtt.

    Raises:
        UsageError: the format is unknown, an option is set for a format other than srt and vtt, or an
            option needs word timestamps.
    """
    if form == "srt":
        return write_srt(segments, options)
    if form == "vtt":
        return write_vtt(segments, options)
    if form not in WRITERS:
        raise UsageError(
            f"unknown transcript format `{form}`", hint=f"choose one of {', '.join(WRITERS)}"
        )
    if options.set_options:
        raise UsageError(
            f"`{options.set_options[0]}` is for subtitles, not for {form}",
            hint="write srt or vtt",
        )
    if form == "json":
        return write_json(segments, language=language)
    return WRITERS[form](segments)


def format_time(seconds: float, *, always_hours: bool = False, marker: str = ".") -> str:
    """Format seconds (0 or more) as [hh:]mm:ss.mmm, with `marker` before the milliseconds."""
    milliseconds = round(seconds * 1000.0)
    hours, milliseconds = divmod(milliseconds, 3_600_000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    whole, milliseconds = divmod(milliseconds, 1_000)
    hours_part = f"{hours:02d}:" if always_hours or hours > 0 else ""
    return f"{hours_part}{minutes:02d}:{whole:02d}{marker}{milliseconds:03d}"


def _span(subtitle: Subtitle, *, always_hours: bool, marker: str) -> str:
    """Return the line with the start and end of a subtitle."""
    start = format_time(subtitle.start, always_hours=always_hours, marker=marker)
    end = format_time(subtitle.end, always_hours=always_hours, marker=marker)
    return f"{start} --> {end}"
