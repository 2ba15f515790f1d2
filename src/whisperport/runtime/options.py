"""Options of the decoding of one window."""

from dataclasses import dataclass

from whisperport.errors import UsageError
from whisperport.ranges import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """How a window is decoded. Names and defaults are those of openai-whisper's `DecodingOptions`.

    `beam_size` and `best_of` may both be set if several temperatures are tried: beams are used at
    temperature 0, samples above 0. One window is decoded at one temperature with one of them.

    Attributes:
        language: code such as "en". None: the checkpoint's own language, or the most probable one.
        task: "transcribe", or "translate" for English text.
        without_timestamps: True makes the model emit no timestamps; a window is then one segment.
        temperature: 0 to 10. 0 chooses the most probable token; above 0, tokens are sampled.
        max_tokens: maximum number of tokens per window, 1 to 1000 (openai-whisper: `sample_len`). None:
            half of the decoder's positions, 224.
        best_of: number of independent samples at temperatures above 0, 1 to 1000; the best one is kept.
            None: 1.
        beam_size: number of beams at temperature 0, 1 to 1000. None: no beam search.
        patience: factor for the number of finished beams that end the search (arXiv 2204.05424), 0.1 to
            100. Needs `beam_size`. None: 1.
        length_penalty: exponent α of Google NMT's length penalty, 0 to 1. None: divide by the length.
        prompt: token ids of the text before this window. The last 223 are used.
        prefix: token ids with which this window's text begins.
        suppress_tokens: token ids that are never decoded. -1 adds the checkpoint's list; () suppresses
            nothing.
        suppress_blank: whether a space and the end of text are suppressed as the first token.
        max_initial_timestamp: latest first timestamp, 0 to 30 seconds. None or 0: no limit.
        repetition_penalty: 1 to 10. Above 1, text tokens of this window become less probable when
            repeated. None: 1 for the checkpoint's own window, 1.1 for a shorter one. Not in openai-whisper.
        no_repeat_ngram_size: 0 to 1000. No sequence of this many text tokens occurs twice in a window; 0
            turns this off. Not in openai-whisper.

    Raises:
        UsageError: an option is out of its range.
    """

    language: str | None = None
    task: str = "transcribe"
    without_timestamps: bool = False
    temperature: float = 0.0
    max_tokens: int | None = None
    best_of: int | None = None
    beam_size: int | None = None
    patience: float | None = None
    length_penalty: float | None = None
    prompt: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = (-1,)
    suppress_blank: bool = True
    max_initial_timestamp: float | None = 1.0
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0, 10)
        check_range("length_penalty", self.length_penalty, 0, 1)
        check_range("patience", self.patience, 0.1, 100)
        check_range("max_initial_timestamp", self.max_initial_timestamp, 0, 30)
        check_range("repetition_penalty", self.repetition_penalty, 1, 10)
        check_range("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, 1000)
        for name in ("max_tokens", "best_of", "beam_size"):
            check_range(name, getattr(self, name), 1, 1000)


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
