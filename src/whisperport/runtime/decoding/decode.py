"""Decode one window as openai-whisper does: prompt, logit rules, search and probabilities.

Source: openai/whisper@v20250625, whisper/decoding.py:519-789.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from whisperport.errors import UsageError
from whisperport.program.dims import SECONDS_PER_POSITION, Dims
from whisperport.program.generation import Generation
from whisperport.runtime.decoding.decode_options import DecodeOptions, check_combination
from whisperport.runtime.decoding.forks import BeamsAndForks, Forks
from whisperport.runtime.decoding.grammar import Grammar
from whisperport.runtime.decoding.phrases import Phrases
from whisperport.runtime.decoding.rules import SHORT_WINDOW_PENALTY, Rules
from whisperport.runtime.decoding.search import (
    IMPOSSIBLE,
    Beams,
    Candidate,
    Sampling,
    Search,
    Sentences,
    TokenSampler,
    Verdict,
    best_candidate,
    numpy_sampler,
)
from whisperport.runtime.engine.coarse import CoarseLogits
from whisperport.runtime.engine.engine import Engine
from whisperport.runtime.engine.scores import Floats, Scores, log_sum_exp
from whisperport.runtime.kv_cache.cache import Cache
from whisperport.runtime.kv_cache.decoder import Decoder
from whisperport.runtime.kv_cache.stepping import Scored, Step, Steps, complete
from whisperport.speech.text import language_code


@dataclass(frozen=True, slots=True)
class Decoded:
    """The decoding result of one window. Field names are those of openai-whisper's `DecodingResult`."""

    tokens: tuple[int, ...]  # text and timestamps, without the prompt and the end of text
    language: str  # code, as given or detected
    avg_logprob: float  # mean natural log-probability per token, the end of text included
    no_speech_prob: float  # probability of <|nospeech|> after <|startoftranscript|>, 0 to 1
    temperature: float  # at which the window was decoded
    ended: bool  # whether the model emitted the end of text; False: the token limit was reached
    # Natural log-probability of each token. `avg_logprob` stands for them in comparisons.
    logprobs: tuple[float, ...] = field(default=(), repr=False, compare=False)
    verdicts: tuple[Verdict, ...] = ()  # about its sentences, if there was a grammar


def decode_window(
    decoder: Decoder,
    features: Floats,
    options: DecodeOptions,
    *,
    sampler: TokenSampler | None = None,
) -> Decoded:
    """Decode the features of one window at one temperature.

    Args:
        decoder: the state of this call. Its state of earlier windows is replaced.
        features: (T, d) float32, the encoder's output.
        options: with one temperature, and either beams or samples.
        sampler: chooses tokens at temperatures above 0; None: a numpy generator, seeded by the features.

    Raises:
        UsageError: the checkpoint has no such language or task, the prefix is too long, or two
            options contradict each other.
        NumericalError: a program returned a NaN or an infinity.
    """
    return complete(decoder, decoding(decoder, features, options, sampler))


def decoding(
    decoder: Decoder,
    features: Floats,
    options: DecodeOptions,
    sampler: TokenSampler | None = None,
) -> Steps[Decoded]:
    """Decode one window as `decode_window` does, but let the caller run the steps; see `stepping`."""
    check_combination(options)
    engine = decoder.engine
    generation = engine.generation
    decoder.start_window(features)
    language = options.language or detect_language(decoder)[0]
    prompt = prompt_tokens(engine, language, options)
    start = prompt.index(generation.start_of_transcript)
    logits, at_start = yield from _prompted(decoder, prompt, start)
    no_speech = float(np.exp(at_start[generation.no_speech] - log_sum_exp(at_start)))

    if sampler is None and options.temperature > 0:
        # A valid seed even if the sum is NaN or infinite: verification reports such features.
        seed = abs(int(np.nan_to_num(features.sum() * 1e3)))
        sampler = numpy_sampler(np.random.default_rng(seed))
    search = _search(generation, options, sampler)
    limit = options.max_tokens or engine.dims.n_text_ctx // 2
    filters = _Filters(_rules(engine, options), options.phrases, options.grammar)
    candidates = yield from _run(decoder, search, filters, logits, len(prompt), limit)
    best = best_candidate(search.finish(candidates), options.length_penalty)
    return Decoded(
        tuple(best.tokens),
        language,
        best.logprob / (len(best.tokens) + 1),
        no_speech,
        options.temperature,
        best.ended,
        tuple(best.logprobs),
        best.verdicts,
    )


def _prompted(decoder: Decoder, prompt: list[int], start: int) -> Steps[tuple[Floats, Floats]]:
    """Decode the prompt: logits (V,) after its last token, and after token `start`."""
    if len(prompt) > decoder.joined_prompt:
        return decoder.prefill(prompt, second_index=start)
    scored_indices = {start, len(prompt) - 1}
    logits: list[Floats] = []
    for index, token in enumerate(prompt):
        (scored,) = yield [Step(token, decoder.cache, scored=index in scored_indices)]
        assert not isinstance(scored, CoarseLogits)
        logits.append(scored.logits.copy())  # the next step may overwrite them
    return logits[-1], logits[start]


def detect_language(decoder: Decoder) -> tuple[str, float | None]:
    """Return the code of the most probable language of the decoder's audio, and its probability.

    A checkpoint whose generation settings name a language returns that one, as in transformers. An
    English-only model returns "en". Such a language has no probability.
    """
    generation = decoder.engine.generation
    if own := own_language(generation):
        return own, None
    languages = generation.languages
    logits, _ = decoder.prefill([generation.start_of_transcript])
    decoder.cache.clear()
    scores = {code: float(logits[token]) for code, token in languages.items()}
    best = max(scores, key=scores.__getitem__)
    # The softmax over the languages, as in openai-whisper.
    return best, 1 / sum(math.exp(score - scores[best]) for score in scores.values())


def own_language(generation: Generation) -> str | None:
    """Return the code of the only language that a checkpoint transcribes; None: it has several."""
    return (generation.language or None) if generation.languages else "en"


def check_language(generation: Generation, options: DecodeOptions) -> None:
    """Check before the work that the checkpoint has the language and the task.

    openai-whisper's command warns and uses English for an English-only model; it ignores the task.

    Raises:
        UsageError: the checkpoint has no such language or task.
    """
    language = options.language
    code = language_code(language, generation.languages) if language else generation.any_language
    start_tokens(generation, code, options.task)


def start_tokens(
    generation: Generation, language: str, task: str, *, timestamps: bool = False
) -> list[int]:
    """Return the ids before the first text token: start, language, task, and no timestamps.

    Raises:
        UsageError: the checkpoint has no such language or task.
    """
    if generation.is_english_only and (language, task) != ("en", "transcribe"):
        raise UsageError(
            f"this checkpoint cannot {task} `{language}`",
            why="it is an English-only model, and does not translate",
            hint="use a multilingual checkpoint, or language `en` and task `transcribe`",
        )
    tokens = [generation.start_of_transcript]
    if generation.is_multilingual:
        tokens += [
            _known("language", language, generation.languages),
            _known("task", task, generation.tasks),
        ]
    return tokens if timestamps else [*tokens, generation.no_timestamps]


def prompt_tokens(engine: Engine, language: str, options: DecodeOptions) -> list[int]:
    """Return all ids before the first decoded token: previous text, start tokens, prefix.

    Raises:
        UsageError: the prefix is too long, or an id is not in the vocabulary.
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
            f"the prefix has more than {room - 1} tokens",
            why=f"at most {room - 1} are possible: the prefix and the decoded text share half of the "
            "decoder's positions",
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
    """Return how many tokens of a prompt are used: the last ones."""
    return dims.n_text_ctx // 2 - 1


def prefix_room(dims: Dims, options: DecodeOptions) -> int:
    """Return how many tokens of a prefix are used: the last ones; 0: all.

    0 means all because openai-whisper slices with `prefix[-0:]`. Difference: if `max_tokens` is above half
    of the positions, openai-whisper cuts the beginning of the prefix. This code uses all of it.
    """
    half = dims.n_text_ctx // 2
    return max(0, half - (options.max_tokens or half))


def _run(
    decoder: Decoder, search: Search, filters: "_Filters", logits: Floats, prompt: int, limit: int
) -> Steps[list[Candidate]]:
    """Extend all candidates of a search token by token, to the end of text or to the limit.

    Args:
        logits: (V,) after the prompt.
        prompt: number of tokens of the prompt.
        limit: maximum number of tokens after the prompt.
    """
    engine = decoder.engine
    candidates = [Candidate() for _ in range(search.width)]
    scores: Sequence[Scored] = [Scores(logits.copy()) for _ in range(search.width)]
    exact = not search.greedy
    with decoder.copies() as copy:
        caches = [decoder.cache, *(copy() for _ in range(search.width - 1))]
        while True:
            allowed = [
                filters.apply(each, candidate)
                for candidate, each in zip(candidates, scores, strict=True)
            ]
            candidates, sources, is_finished = search.advance(candidates, allowed)
            longest = max((len(candidate.tokens) for candidate in candidates), default=0)
            if is_finished or longest >= limit or prompt + longest > engine.dims.n_text_ctx:
                return candidates
            caches = _rearranged(caches, sources, copy)
            last = [candidate.tokens[-1] for candidate in candidates]
            unfinished = [
                i
                for i, token in enumerate(last)
                if token != engine.generation.end_of_text and not candidates[i].waits
            ]
            after = yield [Step(last[i], caches[i], exact) for i in unfinished]
            scored = dict(zip(unfinished, after, strict=True))
            scores = [  # of a candidate that has ended, those before its end
                scored[i] if i in scored else Scores(allowed[source].logits)
                for i, source in enumerate(sources)
            ]


@dataclass(frozen=True, slots=True)
class _Filters:
    """What decides about the next token beside the model."""

    rules: Rules
    phrases: Phrases | None
    grammar: Grammar | None

    def apply(self, scored: Scored, candidate: Candidate) -> Scores:
        """Return scores after the rules, with bonuses; coarse, if float32 would choose the same token."""
        tokens = candidate.tokens
        if candidate.waits and isinstance(scored, Scores):  # after the rules already
            return scored
        bonus = None if self.phrases is None else self.phrases.after(tokens)
        if isinstance(scored, CoarseLogits):
            scores = Scores(scored.logits)
            if scored.decides(self.rules.apply(scores, tokens), bonus):
                scores.bonus = bonus
                return scores
            scored = Scores(scored.complete())
        self.rules.apply(scored, tokens, None if candidate.is_free else self.grammar)
        scored.bonus = bonus
        return scored


def _rearranged(caches: list[Cache], sources: list[int], copy: Callable[[], Cache]) -> list[Cache]:
    """Return a cache for each candidate, with the tokens of the one that it continues, and then others.

    The first candidate that continues a source takes its cache; the others get copies.

    Args:
        caches: at least one for each candidate before.
        sources: index of the continued candidate, for each candidate.
        copy: returns one more cache.
    """
    if sources == list(range(len(caches))):
        return caches
    spare = [cache for i, cache in enumerate(caches) if i not in sources]
    moved: set[int] = set()
    arranged = []
    for source in sources:
        if source in moved:
            cache = spare.pop() if spare else copy()
            cache.copy_of(caches[source])
        else:
            cache = caches[source]
            moved.add(source)
        arranged.append(cache)
    return arranged + spare


def _search(generation: Generation, options: DecodeOptions, sampler: TokenSampler | None) -> Search:
    end = generation.end_of_text
    if options.grammar is not None:
        highest = IMPOSSIBLE / 2 if options.grammar_threshold is None else options.grammar_threshold
        timestamps = not options.without_timestamps
        return Sentences(generation, options.beam_size or 1, highest, timestamps=timestamps)
    if options.beam_size is not None:
        beams = Beams if options.phrases is None else BeamsAndForks
        return beams(end, options.beam_size, options.patience or 1.0)
    if options.phrases is not None and options.temperature == 0:
        return Forks(end)
    return Sampling(end, options.temperature, options.best_of or 1, sampler)


def _penalty(engine: Engine, options: DecodeOptions) -> float:
    """Return the repetition penalty: as given, or the default for the bundle's window."""
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


def suppressed_ids(generation: Generation, dims: Dims, token_ids: Sequence[int]) -> set[int]:
    """Return the ids that are never decoded, by the rules of openai-whisper's `suppress_tokens`.

    Args:
        token_ids: ids to suppress; -1 adds the checkpoint's own list. If there is any id, special tokens of
            that list and the task, start, previous-text and no-speech tokens are suppressed too. An empty
            sequence suppresses nothing.

    Raises:
        UsageError: an id is not in the vocabulary.
    """
    _check_ids("suppress_tokens", [i for i in token_ids if i != -1], dims)
    if not token_ids:
        return set()
    listed = [i for i in generation.suppressed if -1 in token_ids or i > generation.end_of_text]
    special = (
        *generation.tasks.values(),
        generation.start_of_transcript,
        generation.start_of_previous,
        generation.no_speech,
    )
    return {*token_ids, *listed, *special} - {-1}


def _check_ids(name: str, ids: Sequence[int], dims: Dims) -> None:
    unknown = [i for i in ids if not 0 <= i < dims.n_vocab]
    if unknown:
        raise UsageError(
            f"`{name}` contains token id {unknown[0]}, which is not in the vocabulary",
            why=f"the vocabulary has ids 0 to {dims.n_vocab - 1}",
            hint="use ids of this checkpoint's tokenizer",
        )


def _known(kind: str, name: str, ids: dict[str, int]) -> int:
    if name not in ids:
        raise UsageError(
            f"this checkpoint has no {kind} `{name}`", hint=f"it has {', '.join(sorted(ids))}"
        )
    return ids[name]
