"""Decoding settings of a checkpoint: special token ids, suppressed tokens and alignment heads."""

from dataclasses import dataclass, field
from typing import Annotated

from whisperport.program.json_records import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Token ids and settings for decoding, all read from the checkpoint.

    Attributes:
        start_of_transcript: id of <|startoftranscript|>: 50257 (.en) or 50258.
        end_of_text: id of <|endoftext|>: 50256 (.en) or 50257.
        start_of_previous: id of <|startofprev|>.
        no_speech: id of <|nocaptions|> or <|nospeech|>.
        no_timestamps: id of <|notimestamps|>; the id after it is <|0.00|>.
        languages: language code -> id, such as {"en": 50259, ...}; empty for an English-only checkpoint.
        tasks: task -> id: {"transcribe": 50359, "translate": 50358}; empty for an English-only checkpoint.
        suppressed: ids that are never emitted: symbols that are not speech, and special tokens.
        suppressed_at_start: ids that are not emitted as the first token: blank, and end of text.
        alignment_heads: (decoder layer, head) of the cross-attention heads that follow the audio; they give
            the word timestamps.
        language: code of the language that the checkpoint was fine-tuned for; used if the user names none.
            Empty: the language is detected.
    """

    start_of_transcript: int
    end_of_text: int
    start_of_previous: int
    no_speech: int
    no_timestamps: int
    languages: dict[str, int] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)
    suppressed: tuple[int, ...] = ()
    suppressed_at_start: tuple[int, ...] = ()
    alignment_heads: tuple[tuple[int, int], ...] = ()
    language: Annotated[str, Member(is_omitted=True)] = ""

    @property
    def is_multilingual(self) -> bool:
        """Whether the checkpoint has language tokens."""
        return bool(self.languages)

    @property
    def is_english_only(self) -> bool:
        """Whether the checkpoint only transcribes English, whatever tokens its vocabulary has."""
        return self.languages.keys() <= {"en"} and self.tasks.keys() <= {"transcribe"}

    @property
    def any_language(self) -> str:
        """A language that the checkpoint supports, for calls where any will do; English if possible."""
        return "en" if "en" in self.languages or not self.languages else next(iter(self.languages))

    @property
    def n_start_tokens(self) -> int:
        """Number of tokens before the text, without timestamps: start, language, task, no timestamps."""
        return 4 if self.is_multilingual else 2

    @property
    def timestamp_begin(self) -> int:
        """Id of <|0.00|>. Each following id is 20 ms later."""
        return self.no_timestamps + 1
