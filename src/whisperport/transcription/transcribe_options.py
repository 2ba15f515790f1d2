"""Options of a transcription."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from whisperport.errors import UsageError
from whisperport.program.window import Window
from whisperport.runtime import TEMPERATURES, DecodeOptions, Thresholds
from whisperport.runtime.decoding.gbnf import checked_rules
from whisperport.runtime.decoding.phrases import Phrase, checked_phrases
from whisperport.runtime.segments.words import APPENDED, PREPENDED
from whisperport.speech.audio import VadOptions
from whisperport.system.option import Option, check_ranges
from whisperport.targets import RunOptions

MAX_CLIP_S = 1e8  # latest clip timestamp in seconds: three years, longer than any audio file


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscribeOptions:
    """How audio is transcribed. Names and defaults are those of openai-whisper's `transcribe`.

    Attributes:
        decode: how a window is decoded. Its temperature is replaced by `temperatures`, its prompt by the
            previous text.
        run: CPU threads, trust, and the targets' run options.
        thresholds: when a window has failed, and when it is silence.
        phrases: words and phrases that the decoding prefers, up to 10,000, each a text or a pair of a text
            and its bonus in nats per token, above 0 and at most 20. The default of the bonus is 0.8.
        grammar: text of a grammar in GBNF; only its sentences are decoded. Empty: any text.
        vad: transcribe chunks of speech found by a voice activity detector, each as if it were a separate
            audio file. None: windows, each of which begins where the text of the previous one ended.

    The help text of every other option is beside its field. The bundle's program `step_B` decodes together
    if `batch` is set: it needs memory for B decoders in each worker; see `Transcriber`. With several
    workers, the fastest is 1 CPU thread in `run` and a worker for each core.

    Raises:
        UsageError: a value is out of its range, clip timestamps decrease, or options contradict each other.
    """

    decode: DecodeOptions = field(default_factory=DecodeOptions)
    run: RunOptions = field(default_factory=RunOptions)
    thresholds: Thresholds = field(default_factory=Thresholds)
    phrases: tuple[Phrase, ...] = ()
    grammar: str = ""
    vad: VadOptions | None = None
    clip_timestamps: Annotated[
        tuple[float, ...],
        Option(
            "Transcribe only the audio between each START and END, in seconds. Without the last "
            "END, the last clip ends where AUDIO ends",
            metavar="START,END,...",
            default="all of AUDIO",
        ),
    ] = ()
    # openai-whisper: `temperature`
    temperatures: Annotated[
        tuple[float, ...],
        Option(
            "Sampling temperature; 0 picks the most probable token. Repeat the option to list the "
            "temperatures that are tried in order until a window passes the thresholds under Fallback",
            0,
            10,
            default="0, then 0.2, 0.4, 0.6, 0.8, 1",
            flag="--temperature",
            repeat=True,
        ),
    ] = TEMPERATURES
    initial_prompt: Annotated[
        str, Option("Text given to the model as if it preceded the audio, for names and style")
    ] = ""
    carry_initial_prompt: Annotated[
        bool, Option("Give the text of `initial_prompt` to every window, not to the first only")
    ] = False
    # openai-whisper's default is True for every window.
    condition_on_previous_text: Annotated[
        bool | None,
        Option(
            "Use the previous window's text as the prompt of the next",
            default="on, or off if the bundle's window is shorter than the checkpoint's 30 s",
        ),
    ] = None
    prefix: Annotated[
        str, Option("Text that every window's transcript must begin with; omitted from the output")
    ] = ""
    hallucination_silence_threshold: Annotated[
        float | None,
        Option(
            "Drop text that is probably a hallucination if silence longer than this is before or after "
            "it. Requires `word_timestamps`",
            0,
            1000,
            metavar="SECONDS",
            or_none=True,
        ),
    ] = None
    word_timestamps: Annotated[
        bool,
        Option(
            "Compute the start and end of every word, for --json, --output-format json and subtitles"
        ),
    ] = False
    prepend_punctuations: Annotated[
        str,
        Option(
            "Punctuation marks that are joined to the next word where words have timestamps",
            metavar="MARKS",
            default=f"`{PREPENDED}`",
        ),
    ] = PREPENDED
    append_punctuations: Annotated[
        str,
        Option(
            "Punctuation marks that are joined to the previous word where words have timestamps",
            metavar="MARKS",
            default=f"`{APPENDED}`",
        ),
    ] = APPENDED
    workers: Annotated[
        int,
        Option(
            "Number of threads that transcribe several files, or with `vad` the speech chunks of one, in "
            "parallel. Each uses --threads threads; without --threads, the cores are divided among them",
            1,
            64,
        ),
    ] = 1
    batch: Annotated[
        bool,
        Option(
            "Decode speech chunks, files, beams and samples together if the bundle has a program step_B; "
            "the text is the same, and more memory is needed"
        ),
    ] = True

    grammar_threshold: Annotated[
        float | None,
        Option(
            "Accept a sentence of the grammar up to this score: nats by which the model would rather have "
            "written other words. Above it, the text is `no match`; `none` accepts all",
            0,
            100,
            metavar="NATS",
            or_none=True,
        ),
    ] = 3.0  # benchmarks/words/grammars.py

    @property
    def tried_temperatures(self) -> tuple[float, ...]:
        """The temperatures that are tried: one if there is a grammar, whose verdict none changes."""
        return self.temperatures[:1] if self.grammar else self.temperatures

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
        check_ranges(self)
        object.__setattr__(self, "phrases", checked_phrases(self.phrases))
        if self.grammar != "":
            checked_rules(self.grammar)
            if self.temperatures != TEMPERATURES and any(self.temperatures):
                raise UsageError(
                    "a temperature above 0 cannot be used with a grammar",
                    why="the most probable sentence is written; other speech is no match",
                    hint="do not set a temperature",
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
