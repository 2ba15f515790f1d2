"""Decode one window as openai-whisper does: prompt, rules, search, and what it all was worth.

Source: openai/whisper@v20250625, whisper/decoding.py:519-789.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whisperport.dims import SECONDS_PER_POSITION, Dims
from whisperport.errors import UsageError
from whisperport.generation import Generation
from whisperport.runtime.cache import Cache, Floats
from whisperport.runtime.decoder import Decoder
from whisperport.runtime.engine import Engine
from whisperport.runtime.guards import SHORT_WINDOW_PENALTY
from whisperport.runtime.options import DecodeOptions, check_combination
from whisperport.runtime.rules import Rules
from whisperport.runtime.search import (
    Beams,
    Path,
    Sampling,
    Search,
    TokenSampler,
    best,
    log_sum_exp,
    numpy_sampler,
)


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
    decoder: Decoder,
    features: Floats,
    options: DecodeOptions,
    *,
    sampler: TokenSampler | None = None,
) -> Decoded:
    """Decode features (T, d).

    Args:
        decoder: the state of this call; forgets what it decoded before.
        sampler: chooses tokens at temperatures above 0; None: numpy, seeded by the sound's features.

    Raises:
        UsageError: the checkpoint has no such language or task, the prompt is too long, or two
            options contradict each other.
        NumericalError: a program returned a NaN or an infinity.
    """
    check_combination(options)
    engine = decoder.engine
    generation = engine.generation
    decoder.start_window(features)
    language = options.language or detect_language(decoder)
    prompt = prompt_tokens(engine, language, options)
    start = prompt.index(generation.start_of_transcript)
    logits, at_start = decoder.prefill(prompt, second_index=start)
    no_speech = float(np.exp(at_start[generation.no_speech] - log_sum_exp(at_start)))

    # A number even of features whose sum is none: verification reports those.
    seed = abs(int(np.nan_to_num(features.sum() * 1e3)))
    sampler = sampler or numpy_sampler(np.random.default_rng(seed))
    search = _search(generation, options, sampler)
    limit = options.max_tokens or engine.dims.n_text_ctx // 2
    paths = _run(decoder, search, _rules(engine, options), logits, len(prompt), limit)
    chosen = best(search.finish(paths), options.length_penalty)
    return Decoded(
        tuple(chosen.said),
        language,
        chosen.logprob / (len(chosen.said) + 1),
        no_speech,
        options.temperature,
        chosen.ended,
    )


def detect_language(decoder: Decoder) -> str:
    """The most probable language of what `decoder` listens to.

    Not asked of a checkpoint that names its own, as in transformers, nor of an .en model: "en".
    """
    generation = decoder.engine.generation
    languages = generation.languages
    if not languages:
        return "en"
    if generation.language:
        return generation.language
    logits, _ = decoder.prefill([generation.start_of_transcript])
    decoder.cache.clear()
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
    """All ids before the first that is sampled: previous text, start tokens, prefix.

    Raises:
        UsageError: the prefix is too long, or an id is none of the vocabulary.
    """
    generation, half = engine.generation, engine.dims.n_text_ctx // 2
    _check_ids("prompt", options.prompt, engine.dims)
    _check_ids("prefix", options.prefix, engine.dims)
    tokens = start_tokens(
        generation, language, options.task, timestamps=not options.without_timestamps
    )
    prefix, room = options.prefix[-prefix_room(engine.dims, options) :], half - len(tokens)
    if len(prefix) >= room:
        raise UsageError(
            f"the prefix has {len(prefix)} tokens",
            why=f"it may have {room - 1}: half of the decoder's positions are for what is said",
            hint="shorten the prefix",
        )
    tokens += prefix
    if options.prompt:
        tokens = [
            generation.start_of_previous,
            *options.prompt[-prompt_room(engine.dims) :],
            *tokens,
        ]
    return tokens


def prompt_room(dims: Dims) -> int:
    """How many tokens of a prompt are used, its last ones."""
    return dims.n_text_ctx // 2 - 1


def prefix_room(dims: Dims, options: DecodeOptions) -> int:
    """How many tokens of a prefix are used, its last ones; 0: all.

    A room of 0 keeps all of them in the original, whose slice this is. Where `max_tokens` is above half
    of the positions the original cuts from the prefix's beginning; here all of it is used.
    """
    half = dims.n_text_ctx // 2
    return max(0, half - (options.max_tokens or half))


def _run(
    decoder: Decoder, search: Search, rules: Rules, logits: Floats, prompt: int, limit: int
) -> list[Path]:
    """Lead all paths of a search from the prompt to their ends, or to the limit."""
    engine = decoder.engine
    paths = [Path() for _ in range(search.width)]
    caches = [decoder.cache, *(decoder.cache.copy() for _ in paths[1:])]
    rows = [logits if i == 0 else logits.copy() for i in range(search.width)]
    while True:
        for path, row in zip(paths, rows, strict=True):
            rules.apply(row, path.said)
        paths, sources, done = search.advance(paths, rows)
        said = max(len(path.said) for path in paths)
        if done or said >= limit or prompt + said > engine.dims.n_text_ctx:
            return paths
        caches = _rearranged(caches, sources)
        for i, (path, cache) in enumerate(zip(paths, caches, strict=True)):
            if path.said[-1] != engine.generation.end_of_text:
                rows[i] = decoder.step(path.said[-1], cache)


def _rearranged(caches: list[Cache], sources: list[int]) -> list[Cache]:
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


def _search(generation: Generation, options: DecodeOptions, sampler: TokenSampler) -> Search:
    end = generation.end_of_text
    if options.beam_size is not None:
        return Beams(end, options.beam_size, options.patience or 1.0)
    return Sampling(end, options.temperature, options.best_of or 1, sampler)


def _penalty(engine: Engine, options: DecodeOptions) -> float:
    if options.repetition_penalty is not None:
        return options.repetition_penalty
    return 1.0 if engine.window is None else SHORT_WINDOW_PENALTY


def _rules(engine: Engine, options: DecodeOptions) -> Rules:
    latest = options.max_initial_timestamp
    return Rules(
        engine.generation,
        timestamps=not options.without_timestamps,
        suppressed=suppressed_ids(engine.generation, engine.dims, options.suppress_tokens),
        suppress_blank=options.suppress_blank,
        max_initial_timestamp=round(latest / SECONDS_PER_POSITION) if latest else None,
        latest_timestamp=engine.latest_timestamp,
        repetition_penalty=_penalty(engine, options),
        no_repeat_ngram_size=options.no_repeat_ngram_size,
    )


def suppressed_ids(generation: Generation, dims: Dims, asked: Sequence[int]) -> set[int]:
    """The ids that are never said, by openai-whisper's `suppress_tokens`.

    -1 stands for the checkpoint's list. Who names ids means these and those that are no speech and no
    time; who names none means none at all.

    Raises:
        UsageError: an id is none of the vocabulary.
    """
    _check_ids("suppress_tokens", [i for i in asked if i != -1], dims)
    if not asked:
        return set()
    listed = [i for i in generation.suppressed if -1 in asked or i > generation.end_of_text]
    special = (
        *generation.tasks.values(),
        generation.start_of_transcript,
        generation.start_of_previous,
        generation.no_speech,
    )
    return {*asked, *listed, *special} - {-1}


def _check_ids(name: str, ids: Sequence[int], dims: Dims) -> None:
    unknown = [i for i in ids if not 0 <= i < dims.n_vocab]
    if unknown:
        raise UsageError(
            f"`{name}` names token {unknown[0]}",
            why=f"the vocabulary has ids 0 to {dims.n_vocab - 1}",
            hint="take ids from this checkpoint's tokenizer",
        )


def _known(kind: str, name: str, ids: dict[str, int]) -> int:
    if name not in ids:
        raise UsageError(
            f"this checkpoint has no {kind} `{name}`", hint=f"it has {', '.join(sorted(ids))}"
        )
    return ids[name]
