"""What a checkpoint says about decoding: which ids mean what, which are never spoken."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Token ids and lists that steer decoding; all from the checkpoint, none assumed.

    An English-only checkpoint has no languages and no tasks: both mappings are empty.
    """

    start_of_transcript: int  # <|startoftranscript|>: 50257 (.en) or 50258
    end_of_text: int  # <|endoftext|>: 50256 (.en) or 50257
    start_of_previous: int  # <|startofprev|>
    no_speech: int  # <|nocaptions|> or <|nospeech|>
    no_timestamps: int  # <|notimestamps|>; <|0.00|> is the id after it
    languages: dict[str, int] = field(default_factory=dict)  # {"en": 50259, ...}
    tasks: dict[str, int] = field(default_factory=dict)  # {"transcribe": 50359, "translate": 50358}
    suppressed: tuple[int, ...] = ()  # never emitted: symbols that are not speech, special ids
    suppressed_at_start: tuple[int, ...] = ()  # not emitted as the first token: blank, end of text
    alignment_heads: tuple[tuple[int, int], ...] = ()  # (decoder layer, head) that follow the sound
    language: str = ""  # what it was tuned for, and hears unless told otherwise; "": it is detected

    @property
    def is_multilingual(self) -> bool:
        return bool(self.languages)

    @property
    def any_language(self) -> str:
        """One that it knows, for what any will do: English where it can."""
        return "en" if "en" in self.languages or not self.languages else next(iter(self.languages))

    @property
    def timestamp_begin(self) -> int:
        """Id of <|0.00|>; each id after it is 20 ms later."""
        return self.no_timestamps + 1

    def to_json(self) -> dict[str, Any]:
        """Without `language` where there is none, as before there was such a member."""
        return {name: value for name, value in asdict(self).items() if name != "language" or value}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Generation":
        """Raises TypeError for a missing or unknown name, or a list that holds no pairs."""
        data = dict(data)
        for name in ("suppressed", "suppressed_at_start"):
            data[name] = tuple(int(i) for i in data.get(name, ()))
        data["alignment_heads"] = tuple(
            (int(a), int(b)) for a, b in data.get("alignment_heads", ())
        )
        return cls(**data)
