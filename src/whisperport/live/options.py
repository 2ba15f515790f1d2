"""What may be chosen about a live transcription."""

from dataclasses import dataclass, field

from whisperport.errors import UsageError
from whisperport.transcription import TranscribeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """How a stream is transcribed.

    Raises:
        UsageError: a time out of its range, or an option that needs the whole recording.
    """

    transcribe: TranscribeOptions = field(default_factory=TranscribeOptions)
    step_s: float = 0.5  # new sound from one pass to the next: less delay, or less work
    pause_s: float = 1.0  # silence that ends what was said before it

    def __post_init__(self) -> None:
        for name in ("step_s", "pause_s"):
            if not 0.1 <= getattr(self, name) <= 10:
                raise UsageError(f"`{name}` is {getattr(self, name)}", why="expected 0.1 to 10 s")
        whole = (self.transcribe.vad, self.transcribe.hallucination_silence_threshold)
        if self.transcribe.clip_timestamps or any(option is not None for option in whole):
            raise UsageError(
                "clips, `vad` and `hallucination_silence_threshold` need the whole recording",
                hint="leave them out, or transcribe the recording once it is complete",
            )
        if self.transcribe.prefix or self.transcribe.decode.prefix:
            raise UsageError(
                "`prefix` is not for a live transcription",
                why="the same sound is heard again and again, from wherever it is not yet certain",
                hint="give an `initial_prompt`",
            )
