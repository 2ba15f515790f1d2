"""Convert text to token ids and back, write transcript files, and normalize text for comparison."""

from whisperport.speech.text.languages import LANGUAGES, WITHOUT_SPACES, language_code
from whisperport.speech.text.normalize import normalize
from whisperport.speech.text.segment import Match, Segment, Word
from whisperport.speech.text.subtitles import SubtitleOptions
from whisperport.speech.text.tokenizer import SECONDS_PER_TIMESTAMP, Tokenizer
from whisperport.speech.text.vocabulary import openai_generation, openai_tokenizer
from whisperport.speech.text.writers import (
    WRITERS,
    format_time,
    write_as,
    write_json,
    write_srt,
    write_tsv,
    write_txt,
    write_vtt,
)

__all__ = [
    "LANGUAGES",
    "SECONDS_PER_TIMESTAMP",
    "WITHOUT_SPACES",
    "WRITERS",
    "Match",
    "Segment",
    "SubtitleOptions",
    "Tokenizer",
    "Word",
    "format_time",
    "language_code",
    "normalize",
    "openai_generation",
    "openai_tokenizer",
    "write_as",
    "write_json",
    "write_srt",
    "write_tsv",
    "write_txt",
    "write_vtt",
]
