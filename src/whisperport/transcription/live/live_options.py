"""Options of a live transcription."""

from dataclasses import dataclass, field
from typing import Annotated

from whisperport.errors import UsageError
from whisperport.system.option import Option, check_range, check_ranges
from whisperport.transcription import TranscribeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """How audio is transcribed while it arrives.

    Attributes:
        transcribe: transcription options, without `clip_timestamps`, `vad`, `prefix` and
            `hallucination_silence_threshold`.
        pause_s: silence that ends a segment, 0.1 to 10 seconds.

    Raises:
        UsageError: a time is out of its range, or an option needs the complete audio.
    """

    transcribe: TranscribeOptions = field(default_factory=TranscribeOptions)
    step_s: Annotated[
        float,
        Option(
            "Seconds of new audio between two passes of the model. A shorter step shows words earlier and "
            "needs more computation",
            0.1,
            10,
            metavar="SECONDS",
            flag="--step",
        ),
    ] = 0.5
    pause_s: float = 1.0

    def __post_init__(self) -> None:
        check_ranges(self)
        check_range("pause_s", self.pause_s, 0.1, 10)
        self.transcribe.check_for_one()
        whole = (self.transcribe.vad, self.transcribe.hallucination_silence_threshold)
        if self.transcribe.clip_timestamps or any(option is not None for option in whole):
            raise UsageError(
                "`clip_timestamps`, `vad` and `hallucination_silence_threshold` cannot be used live",
                why="they need the complete audio",
                hint="do not set them, or transcribe the audio file when it is complete",
            )
        if self.transcribe.prefix or self.transcribe.decode.prefix:
            raise UsageError(
                "`prefix` cannot be used live",
                why="the same audio is decoded several times, and each time may begin at another word",
                hint="set `initial_prompt` instead",
            )
