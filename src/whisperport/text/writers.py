"""Transcripts as txt, srt, vtt, tsv and json: byte for byte what openai-whisper writes.

Text with control characters, which only a hostile or damaged tokenizer has, differs: in a line-based
format line breaks and tabs become spaces and other control characters visible escapes, so that a
segment cannot forge a line, a row or a subtitle; json has them as its own escapes.

Source: openai/whisper@c0d2f62, whisper/utils.py. Every writer returns the text of the file, which
ends in a newline except for json; write it as UTF-8, with `write_atomic`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from whisperport.errors import UsageError
from whisperport.text.printable import escaped_json, one_line
from whisperport.text.segment import Segment
from whisperport.text.subtitles import Subtitle, SubtitleOptions, subtitles

DEFAULT_SUBTITLES = SubtitleOptions()  # a subtitle a segment


def write_txt(segments: Sequence[Segment]) -> str:
    """One segment a line."""
    return "".join(f"{one_line(segment.text.strip())}\n" for segment in segments)


def write_srt(segments: Sequence[Segment], options: SubtitleOptions = DEFAULT_SUBTITLES) -> str:
    """SubRip: numbered, with a comma before the milliseconds. Raises as `subtitles`."""
    return "".join(
        f"{number}\n{_span(subtitle, always_hours=True, marker=',')}\n{subtitle.text}\n\n"
        for number, subtitle in enumerate(subtitles(segments, options), start=1)
    )


def write_vtt(segments: Sequence[Segment], options: SubtitleOptions = DEFAULT_SUBTITLES) -> str:
    """WebVTT: hours only where there are any. Raises as `subtitles`."""
    return "WEBVTT\n\n" + "".join(
        f"{_span(subtitle, always_hours=False, marker='.')}\n{subtitle.text}\n\n"
        for subtitle in subtitles(segments, options)
    )


def write_tsv(segments: Sequence[Segment]) -> str:
    """Tab-separated: start and end in whole milliseconds, text."""
    return "start\tend\ttext\n" + "".join(
        f"{round(1000 * s.start)}\t{round(1000 * s.end)}\t{one_line(s.text.strip())}\n"
        for s in segments
    )


def write_json(segments: Sequence[Segment], *, language: str | None = None) -> str:
    """openai-whisper's result: `text`, `segments`, `language` (a code, or null). ASCII only."""
    document = json.dumps(
        {
            "text": "".join(segment.text for segment in segments),
            "segments": [
                {
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
                    **_words(segment),
                }
                for number, segment in enumerate(segments)
            ],
            "language": language,
        }
    )
    return escaped_json(document)  # `json.dumps` leaves DEL as it is


def _words(segment: Segment) -> dict[str, list[dict[str, object]]]:
    """`words`, where times of words were asked for."""
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
    """The text of a transcript file in one of `WRITERS`.

    Args:
        language: goes into json alone.
        options: of srt and vtt.

    Raises:
        UsageError: there is no such form, or it does not take what `options` asks for.
    """
    if form == "srt":
        return write_srt(segments, options)
    if form == "vtt":
        return write_vtt(segments, options)
    if form not in WRITERS:
        raise UsageError(
            f"cannot write a transcript as `{form}`", hint=f"choose one of {', '.join(WRITERS)}"
        )
    if options.asked:
        raise UsageError(
            f"`{options.asked[0]}` is for subtitles, and {form} has none", hint="write srt or vtt"
        )
    if form == "json":
        return write_json(segments, language=language)
    return WRITERS[form](segments)


def format_time(seconds: float, *, always_hours: bool = False, marker: str = ".") -> str:
    """Seconds, not negative, as [hh:]mm:ss.mmm; `marker` stands before the milliseconds."""
    milliseconds = round(seconds * 1000.0)
    hours, milliseconds = divmod(milliseconds, 3_600_000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    whole, milliseconds = divmod(milliseconds, 1_000)
    hours_part = f"{hours:02d}:" if always_hours or hours > 0 else ""
    return f"{hours_part}{minutes:02d}:{whole:02d}{marker}{milliseconds:03d}"


def _span(subtitle: Subtitle, *, always_hours: bool, marker: str) -> str:
    start = format_time(subtitle.start, always_hours=always_hours, marker=marker)
    end = format_time(subtitle.end, always_hours=always_hours, marker=marker)
    return f"{start} --> {end}"
