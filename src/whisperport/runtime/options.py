"""How a window is decoded, as data."""

from dataclasses import dataclass

from whisperport.errors import UsageError
from whisperport.ranges import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """How a window is decoded; defaults are those of openai-whisper's `DecodingOptions`.

    `beam_size` and `best_of` may stand together where several temperatures are tried: beams are for
    0, paths for those above. One window is decoded at one temperature, with one of them.

    Raises:
        UsageError: an option is out of its range.
    """

    language: str | None = None  # "en", "de", ...; None: the checkpoint's own, or the most probable
    task: str = "transcribe"  # or "translate", to English
    without_timestamps: bool = False  #
    temperature: float = 0.0  # 0: the most probable token; above: drawn
    max_tokens: int | None = None  # the original's `sample_len`; None: half the positions, 224
    best_of: int | None = None  # independent drawn paths, the best of which is kept
    beam_size: int | None = None  # beams at temperature 0
    patience: float | None = None  # of beam search; None: 1
    length_penalty: float | None = None  # alpha between 0 and 1; None: by length alone
    prompt: tuple[int, ...] = ()  # tokens of what was said before
    prefix: tuple[int, ...] = ()  # tokens with which this window begins
    suppress_tokens: tuple[int, ...] = (-1,)  # ids never said; -1: the checkpoint's; (): none
    suppress_blank: bool = True  # not a space or the end first
    max_initial_timestamp: float | None = 1.0  # seconds into the window; None or 0: any
    # Above 1: what was said in this window is less probable. None: 1, and 1.1 in a short window.
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int = 0  # so many tokens in a row are not said twice; 0: they may

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
    """Of one window at one temperature.

    Raises:
        UsageError: two options contradict each other.
    """
    if options.beam_size is not None and options.best_of is not None:
        raise UsageError(
            "`beam_size` and `best_of` cannot be given together",
            why="one window is searched in one way",
            hint="give one of them",
        )
    if options.patience is not None and options.beam_size is None:
        raise UsageError("`patience` is for beam search", hint="give `beam_size` too")
    if options.temperature == 0 and options.best_of is not None:
        raise UsageError(
            "`best_of` is for temperatures above 0",
            why="at 0 all paths are the same",
            hint="give a temperature, or leave `best_of` out",
        )
