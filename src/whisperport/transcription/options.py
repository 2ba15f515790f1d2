"""Options of a transcription."""

from dataclasses import dataclass, field
from itertools import pairwise

from whisperport.audio import VadOptions
from whisperport.errors import UsageError
from whisperport.ranges import check_range
from whisperport.runtime import TEMPERATURES, DecodeOptions, Thresholds
from whisperport.runtime.words import APPENDED, PREPENDED
from whisperport.targets import RunOptions
from whisperport.window import Window

MAX_CLIP_S = 1e8  # latest clip timestamp in seconds: three years, longer than any audio file


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscribeOptions:
    """How audio is transcribed. Names and defaults are those of openai-whisper's `transcribe`.

    Attributes:
        decode: how a window is decoded. Its temperature is replaced by `temperatures`, its prompt by the
            previous text.
        run: CPU threads, trust, and the targets' run options.
        temperatures: each 0 to 10, at least one. They are tried in order until a window does not fail
            (openai-whisper: `temperature`).
        thresholds: when a window has failed, and when it is silence.
        condition_on_previous_text: whether the text of the previous windows is the prompt of the next.
            None: True for the checkpoint's own window, False for a shorter one (openai-whisper: True).
        initial_prompt: text that is the prompt of the first window, such as names and spellings.
        carry_initial_prompt: whether `initial_prompt` is part of the prompt of every window.
        prefix: text with which every window's text begins; it is not part of the transcript.
        word_timestamps: whether to compute the timestamps of words, and segment times from them.
        hallucination_silence_threshold: 0 to 1000 seconds. Silence longer than this is skipped if its text
            is probably a hallucination. Needs `word_timestamps`. None: off.
        prepend_punctuations: marks that are joined to the next word.
        append_punctuations: marks that are joined to the previous word.
        clip_timestamps: start, end, start, end, ... of the parts to transcribe, in seconds and in rising
            order. The last end may be omitted: the end of the audio. (): all audio.
        vad: transcribe chunks of speech found by a voice activity detector, each as if it were a separate
            audio file. None: windows, each of which begins where the text of the previous one ended.
        workers: threads that transcribe speech chunks or audio files in parallel, 1 to 64; with `batch`,
            each decodes several together. Above 1 needs `vad` or several files. Each uses as many CPU
            threads as `run` states: the fastest is 1 thread and a worker for each core.
        batch: whether speech chunks, audio files, beams and samples are decoded together, with the bundle's
            program `step_B`. It needs memory for B decoders in each worker; see `Transcriber`. True changes
            nothing if the bundle has no such program.

    Raises:
        UsageError: a value is out of its range, clip timestamps decrease, or options contradict each other.
    """

    decode: DecodeOptions = field(default_factory=DecodeOptions)
    run: RunOptions = field(default_factory=RunOptions)
    temperatures: tuple[float, ...] = TEMPERATURES
    thresholds: Thresholds = field(default_factory=Thresholds)
    condition_on_previous_text: bool | None = None
    initial_prompt: str = ""
    carry_initial_prompt: bool = False
    prefix: str = ""
    word_timestamps: bool = False
    hallucination_silence_threshold: float | None = None
    prepend_punctuations: str = PREPENDED
    append_punctuations: str = APPENDED
    clip_timestamps: tuple[float, ...] = ()
    vad: VadOptions | None = None
    workers: int = 1
    batch: bool = True

    def uses_previous_text(self, window: Window | None) -> bool:
        """Return whether previous text is the prompt of the next window, in a bundle with this window."""
        if self.condition_on_previous_text is not None:
            return self.condition_on_previous_text
        return window is None

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise UsageError(
                "`temperatures` is empty", hint="set at least one temperature, such as 0"
            )
        for temperature in self.temperatures:
            check_range("temperature", temperature, 0, 10)
        check_range(
            "hallucination_silence_threshold", self.hallucination_silence_threshold, 0, 1000
        )
        if self.hallucination_silence_threshold is not None and not self.word_timestamps:
            raise UsageError(
                "`hallucination_silence_threshold` requires word timestamps",
                hint="set `word_timestamps`",
            )
        rising = all(before <= after for before, after in pairwise((0, *self.clip_timestamps)))
        if not rising or (self.clip_timestamps and self.clip_timestamps[-1] > MAX_CLIP_S):
            raise UsageError(
                f"`clip_timestamps` are {', '.join(map(str, self.clip_timestamps))}",
                why="expected start, end, start, end, ... in seconds and rising order, at most "
                f"{MAX_CLIP_S:,.0f}",
                hint="omit the last end to transcribe to the end of the audio",
            )
        if self.vad is not None and self.clip_timestamps:
            raise UsageError(
                "`clip_timestamps` and `vad` cannot be used together",
                why="each selects the parts to transcribe",
                hint="set one of them",
            )
        check_range("workers", self.workers, 1, 64)

    def check_for_one(self) -> None:
        """Check the options of the transcription of one audio, not of several files.

        Raises:
            UsageError: there are several workers, and no chunks for them.
        """
        if self.workers > 1 and self.vad is None:
            raise UsageError(
                "`workers` above 1 requires `vad` or several audio files",
                why="without speech chunks, each window begins where the one before it ended",
                hint="set `vad`, or transcribe several files with one call",
            )
