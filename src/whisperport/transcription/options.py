"""What may be chosen about a transcription."""

from dataclasses import dataclass, field
from itertools import pairwise

from whisperport.audio import VadOptions
from whisperport.errors import UsageError
from whisperport.ranges import check_range
from whisperport.runtime import TEMPERATURES, DecodeOptions, Thresholds
from whisperport.runtime.words import APPENDED, PREPENDED
from whisperport.targets import RunOptions
from whisperport.window import Window

MAX_CLIP_S = 1e8  # of a clip: three years, longer than any recording, and a number of frames


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscribeOptions:
    """How a recording is transcribed; defaults are those of openai-whisper's `transcribe`.

    Raises:
        UsageError: no temperature, clip times that go back, a value out of its range, or options
            that contradict each other.
    """

    decode: DecodeOptions = field(default_factory=DecodeOptions)  # but its temperature and prompt
    run: RunOptions = field(default_factory=RunOptions)
    temperatures: tuple[float, ...] = TEMPERATURES  # tried in order, until one does not fail
    thresholds: Thresholds = field(default_factory=Thresholds)
    # What was said is the prompt of what follows. None: it is, but not in short windows.
    condition_on_previous_text: bool | None = None
    initial_prompt: str = ""  # said, as it were, before the recording
    carry_initial_prompt: bool = False  # before every window, and not only before the first
    prefix: str = ""  # with which every window begins; the text does not repeat it
    word_timestamps: bool = False  # times of words, and times of segments from them
    hallucination_silence_threshold: float | None = None  # seconds; needs `word_timestamps`
    prepend_punctuations: str = PREPENDED  # each joined to the word after it
    append_punctuations: str = APPENDED  # each joined to the word before it
    clip_timestamps: tuple[
        float, ...
    ] = ()  # start, end, start, … in seconds; the last end may be left out
    vad: VadOptions | None = None  # transcribe chunks of speech, each as a recording of its own
    workers: int = 1  # chunks at once

    def uses_previous_text(self, window: Window | None) -> bool:
        """Whether what was said is the prompt of what follows, in a bundle of this window."""
        if self.condition_on_previous_text is not None:
            return self.condition_on_previous_text
        return window is None

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise UsageError("`temperatures` is empty", hint="give at least one, such as 0")
        for temperature in self.temperatures:
            check_range("temperature", temperature, 0, 10)
        check_range(
            "hallucination_silence_threshold", self.hallucination_silence_threshold, 0, 1000
        )
        if self.hallucination_silence_threshold is not None and not self.word_timestamps:
            raise UsageError(
                "`hallucination_silence_threshold` needs word times", hint="set `word_timestamps`"
            )
        rising = all(before <= after for before, after in pairwise((0, *self.clip_timestamps)))
        if not rising or (self.clip_timestamps and self.clip_timestamps[-1] > MAX_CLIP_S):
            raise UsageError(
                f"clip times are {', '.join(map(str, self.clip_timestamps))}",
                why=f"expected seconds in rising order, {MAX_CLIP_S:,.0f} at most: start, end, start, end",
                hint="leave out the last end for the end of the recording",
            )
        if self.vad is not None and self.clip_timestamps:
            raise UsageError(
                "clips and `vad` cannot be given together",
                why="both say which parts to transcribe",
                hint="give one of them",
            )
        check_range("workers", self.workers, 1, 64)
        if self.workers > 1 and self.vad is None:
            raise UsageError(
                "`workers` above 1 needs chunks",
                why="without them each window begins where the one before it ended",
                hint="set `vad` too",
            )
