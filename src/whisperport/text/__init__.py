"""Convert text to token ids and back, write transcript files, and normalize text for comparison."""

from whisperport.text.languages import LANGUAGES, WITHOUT_SPACES, language_code
from whisperport.text.normalize import normalize
from whisperport.text.segment import Segment, Word
from whisperport.text.subtitles import SubtitleOptions
from whisperport.text.tokenizer import SECONDS_PER_TIMESTAMP, Tokenizer
from whisperport.text.vocabulary import openai_generation, openai_tokenizer
from whisperport.text.writers import (
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
