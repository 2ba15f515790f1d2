"""Segments as subtitles: how wide, of how many lines, and which word is spoken now.

    joined       a width and a number of lines are given: words flow from segment to segment
    not joined   every segment begins a subtitle; it is cut into lines, or after so many words

Source: openai/whisper@v20250625, whisper/utils.py:109-230; the same for the same segments, except that
no subtitle's text holds `-->` or a line break of its own, which players would read as another subtitle.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from whisperport.errors import UsageError
from whisperport.text.printable import one_line
from whisperport.text.segment import Segment, Word

LONG_PAUSE_S = 3.0  # from one word's beginning to the next: another subtitle, where they are joined
NO_LIMIT = 1000  # characters or words: the original's
_ARROW = re.compile("-{2,}>")  # stands between the times of a subtitle
_SPOKEN = re.compile(r"^(\s*)(.*)$")  # a word, without the space or the new line before it


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtitleOptions:
    """How srt and vtt are cut. Anything asked for needs times of words.

    Raises:
        UsageError: a width or a count below 1.
    """

    highlight_words: bool = False  # once for every word, the one that is spoken underlined
    max_line_width: int | None = None  # characters; a longer word has a line of its own
    max_line_count: int | None = None  # lines of a subtitle; without a width it has no effect
    max_words_per_line: int | None = None  # of a segment; no effect with a width and a count

    def __post_init__(self) -> None:
        for name in ("max_line_width", "max_line_count", "max_words_per_line"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"`{name}` is {value}", why="expected 1 or more")

    @property
    def asked(self) -> tuple[str, ...]:
        """Names of the options that are set."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name))

    @property
    def joined(self) -> bool:
        """Whether a subtitle may hold words of several segments."""
        return self.max_line_width is not None and self.max_line_count is not None


@dataclass(frozen=True, slots=True)
class Subtitle:
    """What is shown, and when, in seconds."""

    start: float
    end: float
    text: str


def subtitles(segments: Sequence[Segment], options: SubtitleOptions) -> Iterator[Subtitle]:
    """By the words, where all segments have their times; otherwise a segment each.

    Raises:
        UsageError: something is asked for, and there are no times of words.
    """
    if any(segment.words is None for segment in segments):
        if options.asked:
            raise UsageError(
                f"cannot cut subtitles by `{options.asked[0]}`",
                why="the segments have no times of words",
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
    """Words of each subtitle; the first of each line but the first has its new line before it."""
    width = options.max_line_width or NO_LIMIT
    held: list[Word] = []
    length, lines = 0, 1  # characters of the last line that is held; lines
    last = next((word.start for _, word in _in_pieces(segments, NO_LIMIT)), 0.0)
    for begins, word in _in_pieces(segments, options.max_words_per_line or NO_LIMIT):
        pause = options.joined and word.start - last > LONG_PAUSE_S
        ends = begins and bool(held) and not options.joined
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
    """All words, and whether each begins a segment or, `n_words` later, another piece of it."""
    for segment in segments:
        for i, word in enumerate(segment.words or ()):
            yield i % n_words == 0, replace(word, word=one_line(word.word))


def _highlighted(words: Sequence[Word]) -> Iterator[Subtitle]:
    """A subtitle for every word, with that word underlined, and one for every pause between."""
    last = words[0].start
    for i, spoken in enumerate(words):
        if round(1000 * last) != round(1000 * spoken.start):  # as they are written
            yield Subtitle(last, spoken.start, _joined(words))
        underlined = _SPOKEN.sub(r"\1<u>\2</u>", spoken.word)
        text = _joined(words[:i]) + underlined + _joined(words[i + 1 :])
        yield Subtitle(spoken.start, spoken.end, _without_arrow(text))
        last = spoken.end


def _joined(words: Sequence[Word]) -> str:
    return _without_arrow("".join(word.word for word in words))


def _without_arrow(text: str) -> str:
    return _ARROW.sub("->", text)
