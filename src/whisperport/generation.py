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

    @property
    def is_multilingual(self) -> bool:
        return bool(self.languages)

    @property
    def timestamp_begin(self) -> int:
        """Id of <|0.00|>; each id after it is 20 ms later."""
        return self.no_timestamps + 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

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
