"""Options of the decoding of one window."""

from dataclasses import dataclass
from typing import Annotated, Literal

from whisperport.errors import UsageError
from whisperport.runtime.decoding.grammar import Grammar
from whisperport.runtime.decoding.phrases import Phrases
from whisperport.system.option import Option, check_range, check_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """How a window is decoded. Names and defaults are those of openai-whisper's `DecodingOptions`.

    `beam_size` and `best_of` may both be set if several temperatures are tried: beams are used at
    temperature 0, samples above 0. One window is decoded at one temperature with one of them.

    Attributes:
        temperature: 0 to 10. 0 chooses the most probable token; above 0, tokens are sampled.
        prompt: token ids of the text before this window. The last 223 are used.
        prefix: token ids with which this window's text begins.
        phrases: whose tokens are preferred; None: none. `TranscribeOptions` has them as text.
        grammar: of the only sentences that are possible; None: all. `TranscribeOptions` has it as text.
        grammar_threshold: highest score of such a sentence, in nats; None: no limit.

    The help text of every other option is beside its field. `repetition_penalty` and
    `no_repeat_ngram_size` are not in openai-whisper, whose name of `max_tokens` is `sample_len`.

    Raises:
        UsageError: an option is out of its range.
    """

    temperature: float = 0.0
    prompt: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()
    phrases: Phrases | None = None
    grammar: Grammar | None = None
    grammar_threshold: float | None = None
    language: Annotated[
        str | None,
        Option(
            "Language spoken in the audio, as a name or a code, such as German or de; auto: unknown",
            metavar="LANGUAGE",
            default="the checkpoint's own language if it has one, else detected",
        ),
    ] = None
    task: Annotated[
        Literal["transcribe", "translate"],
        Option("Write the text in the spoken language (transcribe) or in English (translate)"),
    ] = "transcribe"
    without_timestamps: Annotated[
        bool, Option("Do not let the model emit timestamps; each window is then one segment")
    ] = False
    max_tokens: Annotated[
        int | None,
        Option(
            "Maximum number of tokens decoded per window. The decoder's context, 448, also limits it",
            1,
            1000,
            default="half the decoder's context, 224",
        ),
    ] = None
    beam_size: Annotated[
        int | None,
        Option(
            "Number of beams in beam search. Used at temperature 0 only",
            1,
            1000,
            default="no beam search",
        ),
    ] = None
    # The factor of arXiv 2204.05424.
    patience: Annotated[
        float | None,
        Option(
            "Patience factor of beam search: the search ends when `beam_size` times this many "
            "candidates are complete. Requires `beam_size`",
            0.1,
            100,
            default="1",
        ),
    ] = None
    length_penalty: Annotated[
        float | None,
        Option(
            "Rank candidates of beam search or sampling by log-probability / ((5 + tokens) / 6)^A, as "
            "Google NMT does; this is A",
            0,
            1,
            default="none: by log-probability / tokens",
        ),
    ] = None
    best_of: Annotated[
        int | None,
        Option(
            "Number of samples drawn per window, of which the most probable is kept. Used at "
            "temperatures above 0 only",
            1,
            1000,
            default="1",
        ),
    ] = None
    suppress_tokens: Annotated[
        tuple[int, ...],
        Option(
            "Token ids that are never emitted, separated by commas. -1 stands for the checkpoint's "
            'own list; "" suppresses none',
            metavar="IDS",
        ),
    ] = (-1,)
    suppress_blank: Annotated[
        bool, Option("Forbid a lone space and the end of the text as the first token of a window")
    ] = True
    max_initial_timestamp: Annotated[
        float | None,
        Option(
            "Latest position in a window at which its first segment may start; `none` sets no limit",
            0,
            30,
            metavar="SECONDS",
            or_none=True,
        ),
    ] = 1.0
    repetition_penalty: Annotated[
        float | None,
        Option(
            "Factor that makes tokens already emitted in a window less probable; 1 changes nothing",
            1,
            10,
            default="1, or 1.1 if the bundle's window is shorter than the checkpoint's 30 s",
        ),
    ] = None
    no_repeat_ngram_size: Annotated[
        int,
        Option(
            "No sequence of N tokens may occur twice in a window; 0 turns this off",
            0,
            1000,
            default="0",
        ),
    ] = 0

    def __post_init__(self) -> None:
        if self.language is not None and self.language.strip().lower() == "auto":
            object.__setattr__(self, "language", None)  # as most other programs spell it
        check_range("temperature", self.temperature, 0, 10)
        check_ranges(self)


def check_combination(options: DecodeOptions) -> None:
    """Check that the options fit together for one window at one temperature.

    Raises:
        UsageError: two options contradict each other.
    """
    if options.beam_size is not None and options.best_of is not None:
        raise UsageError(
            "`beam_size` and `best_of` cannot be used together",
            why="one window is decoded with either beams or samples",
            hint="set one of them",
        )
    if options.patience is not None and options.beam_size is None:
        raise UsageError("`patience` requires beam search", hint="set `beam_size` too")
    if options.temperature == 0 and options.best_of is not None:
        raise UsageError(
            "`best_of` requires a temperature above 0",
            why="at temperature 0 all samples are the same",
            hint="set a temperature above 0, or do not set `best_of`",
        )
