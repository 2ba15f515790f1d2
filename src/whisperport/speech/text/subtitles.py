"""Make subtitles of segments: limit their width and lines, and highlight the spoken word.

    with a width and a line count      a subtitle may contain words of several segments
    otherwise                          every segment begins a new subtitle

Source: openai/whisper@v20250625, whisper/utils.py:109-230. The result is the same, except that the text of
a subtitle never contains `-->` or a line break of a word, which players would read as another subtitle.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated

from whisperport.errors import UsageError
from whisperport.speech.text.segment import Segment, Word
from whisperport.system.option import Option, check_ranges
from whisperport.system.printable import one_line

LONG_PAUSE_S = 3.0  # between the starts of two words; begins a new subtitle if segments are joined
NO_LIMIT = 1000  # characters or words; openai-whisper's value
_ARROW = re.compile("-{2,}>")  # separates the times of a subtitle
_SPOKEN = re.compile(r"^(\s*)(.*)$")  # a word after its space or line break


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtitleOptions:
    """How srt and vtt subtitles are cut. Names are those of openai-whisper. Each needs word timestamps.

    Raises:
        UsageError: a width or a count is below 1.
    """

    highlight_words: Annotated[bool, Option("Underline each word while it is spoken")] = False
    max_line_width: Annotated[
        int | None,
        Option(
            "Maximum number of characters per line; longer lines are broken between words",
            low=1,
            default="no limit",
        ),
    ] = None
    max_line_count: Annotated[
        int | None,
        Option(
            "Maximum number of lines per subtitle. One subtitle may then contain text of several "
            "segments. Has no effect without `max_line_width`",
            low=1,
            default="no limit",
        ),
    ] = None
    max_words_per_line: Annotated[
        int | None,
        Option(
            "Maximum number of words per subtitle. Has no effect if both `max_line_width` and "
            "`max_line_count` are given",
            low=1,
            default="no limit",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def set_options(self) -> tuple[str, ...]:
        """Names of the options that are set."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name))

    @property
    def joins_segments(self) -> bool:
        """Whether a subtitle may contain words of several segments."""
        return self.max_line_width is not None and self.max_line_count is not None


@dataclass(frozen=True, slots=True)
class Subtitle:
    """One subtitle."""

    start: float  # seconds
    end: float  # seconds
    text: str  # may have several lines


def subtitles(segments: Sequence[Segment], options: SubtitleOptions) -> Iterator[Subtitle]:
    """Yield subtitles: cut by words if all segments have word timestamps, otherwise one per segment.

    Raises:
        UsageError: an option is set, and a segment has no word timestamps.
    """
    if any(segment.words is None for segment in segments):
        if options.set_options:
            raise UsageError(
                f"`{options.set_options[0]}` requires word timestamps",
                why="the segments have no word timestamps",
                hint="transcribe with `word_timestamps`",
            )
        for segment in segments:
            text = _without_arrow(one_line(segment.text.strip()))
            yield Subtitle(segment.start, segment.end, text)
        return
    for words in _cut(segments, options):
        if options.highlight_words:
            yield from _highlighted(words)
        else:
            yield Subtitle(words[0].start, words[-1].end, _joined(words))


def _cut(segments: Sequence[Segment], options: SubtitleOptions) -> Iterator[list[Word]]:
    """Yield the words of each subtitle. The first word of each further line begins with a line break."""
    width = options.max_line_width or NO_LIMIT
    held: list[Word] = []
    length, lines = 0, 1  # characters in the last line; lines
    last = next((word.start for _, word in _in_pieces(segments, NO_LIMIT)), 0.0)
    for begins, word in _in_pieces(segments, options.max_words_per_line or NO_LIMIT):
        pause = options.joins_segments and word.start - last > LONG_PAUSE_S
        ends = begins and bool(held) and not options.joins_segments
        last = word.start
        if 0 < length <= width - len(word.word) and not pause and not ends:
            length += len(word.word)
            held.append(word)
            continue
        text = word.word.strip()
        full = options.max_line_count is not None and lines >= options.max_line_count
        if ends or (held and (full or pause)):
            yield held
            held, lines = [], 1
        elif length > 0:
            lines += 1
            text = f"\n{text}"
        length = len(text.strip())
        held.append(replace(word, word=text))
    if held:
        yield held


def _in_pieces(segments: Sequence[Segment], n_words: int) -> Iterator[tuple[bool, Word]]:
    """Yield all words, and whether each is the first of a segment or of a further `n_words` of it."""
    for segment in segments:
        for i, word in enumerate(segment.words or ()):
            yield i % n_words == 0, replace(word, word=one_line(word.word))


def _highlighted(words: Sequence[Word]) -> Iterator[Subtitle]:
    """Yield one subtitle per word, with that word underlined, and one per pause between words."""
    last = words[0].start
    for i, spoken in enumerate(words):
        if round(1000 * last) != round(1000 * spoken.start):  # rounded as they are written
            yield Subtitle(last, spoken.start, _joined(words))
        underlined = _SPOKEN.sub(r"\1<u>\2</u>", spoken.word)
        text = _joined(words[:i]) + underlined + _joined(words[i + 1 :])
        yield Subtitle(spoken.start, spoken.end, _without_arrow(text))
        last = spoken.end


def _joined(words: Sequence[Word]) -> str:
    return _without_arrow("".join(word.word for word in words))


def _without_arrow(text: str) -> str:
    return _ARROW.sub("->", text)
