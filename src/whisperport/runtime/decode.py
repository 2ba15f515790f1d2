"""Decode one window as openai-whisper does: prompt, rules, search, and what it all was worth.

Source: openai/whisper@v20250625, whisper/decoding.py:519-789.
"""

from dataclasses import dataclass

import numpy as np

from whisperport.dims import SECONDS_PER_POSITION
from whisperport.errors import UsageError
from whisperport.generation import Generation
from whisperport.runtime.cache import Cache, Floats
from whisperport.runtime.engine import Engine
from whisperport.runtime.rules import Rules
from whisperport.runtime.search import (
    Beams,
    Draw,
    Path,
    Sampling,
    Search,
    best,
    draw_with,
    log_sum_exp,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """How a window is decoded; defaults are openai-whisper's.

    `beam_size` and `best_of` may stand together where several temperatures are tried: beams are for
    0, paths for those above. One window is decoded at one temperature, with one of them.

    Raises:
        UsageError: an option is out of its range.
    """

    language: str | None = None  # "en", "de", ...; None: the most probable one
    task: str = "transcribe"  # or "translate", to English
    timestamps: bool = True  # ask for times; without, only text is said
    temperature: float = 0.0  # 0: the most probable token; above: drawn
    max_tokens: int | None = None  # per window; None: half the decoder's positions, 224
    best_of: int | None = None  # independent drawn paths, the best of which is kept
    beam_size: int | None = None  # beams at temperature 0
    patience: float | None = None  # of beam search; None: 1
    length_penalty: float | None = None  # alpha between 0 and 1; None: by length alone
    prompt: tuple[int, ...] = ()  # tokens of what was said before
    prefix: tuple[int, ...] = ()  # tokens with which this window begins
    suppressed: tuple[int, ...] | None = None  # ids never said; None: the checkpoint's list
    suppress_blank: bool = True  # not a space or the end first
    max_initial_timestamp: float | None = 1.0  # seconds into the window; None: any
    repetition_penalty: float = 1.0  # above 1: what was said in this window is less probable
    no_repeat_ngram_size: int = 0  # so many tokens in a row are not said twice; 0: they may

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0, 10)
        _check_range("length_penalty", self.length_penalty, 0, 1)
        _check_range("patience", self.patience, 0.1, 100)
        _check_range("max_initial_timestamp", self.max_initial_timestamp, 0, 30)
        _check_range("repetition_penalty", self.repetition_penalty, 1, 10)
        _check_range("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, 1000)
        for name in ("max_tokens", "best_of", "beam_size"):
            _check_range(name, getattr(self, name), 1, 1000)


@dataclass(frozen=True, slots=True)
class Decoded:
    """What was heard in one window."""

    tokens: tuple[int, ...]  # text and timestamps: no prompt, no end
    language: str
    avg_logprob: float  # natural logarithm, per token, the end included
    no_speech_prob: float  # probability of <|nospeech|> after the start token
    temperature: float
    ended: bool  # the model said end of text; False: the limit was met


def decode_window(
    engine: Engine, features: Floats, options: DecodeOptions, *, draw: Draw | None = None
) -> Decoded:
    """Decode features (T, d).

    Args:
        draw: chooses tokens at temperatures above 0; None: numpy, seeded by the sound's features.

    Raises:
        UsageError: the checkpoint has no such language or task, the prompt is too long, or two
            options contradict each other.
    """
    _check_combination(options)
    generation = engine.generation
    engine.listen(features)
    language = options.language or detect_language(engine)
    prompt = prompt_tokens(engine, language, options)
    start = prompt.index(generation.start_of_transcript)
    logits, at_start = engine.prefill(prompt, also=start)
    no_speech = float(np.exp(at_start[generation.no_speech] - log_sum_exp(at_start)))

    # A number even of features that are none, as from a float16 overflow: verification reports those.
    seed = abs(int(np.nan_to_num(features.sum() * 1e3)))
    draw = draw or draw_with(np.random.default_rng(seed))
    search = _search(generation, options, draw)
    limit = options.max_tokens or engine.dims.n_text_ctx // 2
    paths = _run(engine, search, _rules(engine, options), logits, len(prompt), limit)
    chosen = best(search.finish(paths), options.length_penalty)
    return Decoded(
        tuple(chosen.said),
        language,
        chosen.logprob / (len(chosen.said) + 1),
        no_speech,
        options.temperature,
        chosen.ended,
    )


def detect_language(engine: Engine) -> str:
    """The most probable language of what `engine` listens to; "en" for an .en model."""
    languages = engine.generation.languages
    if not languages:
        return "en"
    logits, _ = engine.prefill([engine.generation.start_of_transcript])
    engine.cache.clear()
    return max(languages, key=lambda code: float(logits[languages[code]]))


def start_tokens(
    generation: Generation, language: str, task: str, *, timestamps: bool = False
) -> list[int]:
    """The ids before the first spoken word: start, language, task, and no timestamps.

    Raises:
        UsageError: the checkpoint has no such language or task.
    """
    tokens = [generation.start_of_transcript]
    if generation.is_multilingual:
        tokens += [
            _known("language", language, generation.languages),
            _known("task", task, generation.tasks),
        ]
    elif language != "en" or task != "transcribe":
        raise UsageError(
            f"this checkpoint cannot {task} `{language}`",
            why="it is an English-only model: it has no languages and no tasks",
            hint="use a multilingual checkpoint, or language `en` and task `transcribe`",
        )
    return tokens if timestamps else [*tokens, generation.no_timestamps]


def prompt_tokens(engine: Engine, language: str, options: DecodeOptions) -> list[int]:
    """All ids before the first that is sampled: previous text, start tokens, prefix."""
    generation, half = engine.generation, engine.dims.n_text_ctx // 2
    tokens = start_tokens(generation, language, options.task, timestamps=options.timestamps)
    if options.prefix:
        room = half - (options.max_tokens or half)
        # A room of 0 keeps the whole prefix: so does the original's slice.
        tokens += options.prefix[-room:] if room > 0 else options.prefix
    if options.prompt:
        tokens = [generation.start_of_previous, *options.prompt[-(half - 1) :], *tokens]
    if len(tokens) >= engine.dims.n_text_ctx:
        raise UsageError(
            f"prompt and prefix have {len(tokens)} tokens",
            why=f"the decoder has {engine.dims.n_text_ctx} positions for them and what is said",
            hint="shorten the prefix",
        )
    return tokens


def _run(
    engine: Engine, search: Search, rules: Rules, logits: Floats, prompt: int, limit: int
) -> list[Path]:
    """Lead all paths of a search from the prompt to their ends, or to the limit."""
    paths = [Path() for _ in range(search.width)]
    caches = [engine.cache]
    for _ in paths[1:]:
        caches.append(Cache(engine.dims))
        caches[-1].copy_of(engine.cache)
    rows = [logits if i == 0 else logits.copy() for i in range(search.width)]
    while True:
        for path, row in zip(paths, rows, strict=True):
            rules.apply(row, path.said)
        paths, sources, done = search.advance(paths, rows)
        said = max(len(path.said) for path in paths)
        if done or said >= limit or prompt + said > engine.dims.n_text_ctx:
            return paths
        caches = _rearranged(caches, sources, engine)
        for i, (path, cache) in enumerate(zip(paths, caches, strict=True)):
            if path.said[-1] != engine.generation.end_of_text:
                rows[i] = engine.step(path.said[-1], cache)


def _rearranged(caches: list[Cache], sources: list[int], engine: Engine) -> list[Cache]:
    """The cache of each path's source: moved where one path follows it, copied for the others."""
    if sources == list(range(len(caches))):
        return caches
    spare = [cache for i, cache in enumerate(caches) if i not in sources]
    taken: set[int] = set()
    arranged = []
    for source in sources:
        if source in taken:
            cache = spare.pop()
            cache.copy_of(caches[source])
        else:
            cache = caches[source]
            taken.add(source)
        arranged.append(cache)
    return arranged


def _search(generation: Generation, options: DecodeOptions, draw: Draw) -> Search:
    end = generation.end_of_text
    if options.beam_size is not None:
        return Beams(end, options.beam_size, options.patience or 1.0)
    return Sampling(end, options.temperature, options.best_of or 1, draw)


def _rules(engine: Engine, options: DecodeOptions) -> Rules:
    latest = options.max_initial_timestamp
    return Rules(
        engine.generation,
        timestamps=options.timestamps,
        suppressed=engine.generation.suppressed
        if options.suppressed is None
        else options.suppressed,
        suppress_blank=options.suppress_blank,
        max_initial_timestamp=round(latest / SECONDS_PER_POSITION) if latest else None,
        repetition_penalty=options.repetition_penalty,
        no_repeat_ngram_size=options.no_repeat_ngram_size,
    )


def _known(kind: str, name: str, ids: dict[str, int]) -> int:
    if name not in ids:
        raise UsageError(
            f"this checkpoint has no {kind} `{name}`", hint=f"it has {', '.join(sorted(ids))}"
        )
    return ids[name]


def _check_combination(options: DecodeOptions) -> None:
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


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise UsageError(f"`{name}` is {value}", why=f"expected {low} to {high}", hint="correct it")
