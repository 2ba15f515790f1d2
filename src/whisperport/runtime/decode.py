"""Greedy decoding of one window."""

from dataclasses import dataclass

import numpy as np

from whisperport.errors import UsageError
from whisperport.generation import Generation
from whisperport.runtime.cache import Floats
from whisperport.runtime.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """How a window is decoded; defaults are openai-whisper's."""

    language: str | None = None  # "en", "de", ...; None: the most probable one
    task: str = "transcribe"  # or "translate", to English
    max_tokens: int | None = None  # per window; None: half the decoder's positions, 224


@dataclass(frozen=True, slots=True)
class Decoded:
    """What was heard in one window."""

    tokens: tuple[int, ...]  # text only: no prompt, no end
    language: str
    avg_logprob: float  # natural logarithm, per token, the end included
    no_speech_prob: float  # probability of <|nospeech|> after the start token
    ended: bool  # the model said end of text; False: the limit was met


def decode_greedy(engine: Engine, features: Floats, options: DecodeOptions) -> Decoded:
    """The most probable token, again and again, from features (T, d).

    Raises:
        UsageError: the checkpoint has no such language or task.
    """
    generation = engine.generation
    engine.listen(features)
    language = options.language
    if language is None:
        language = detect_language(engine)
        engine.cache.clear()
    prompt = start_tokens(generation, language, options.task)
    logits, at_start = engine.prefill(prompt)
    no_speech_prob = float(np.exp(_log_prob(at_start, generation.no_speech)))

    room = engine.dims.n_text_ctx - len(prompt)
    limit = min(options.max_tokens or engine.dims.n_text_ctx // 2, room)
    never = list(generation.suppressed)
    tokens: list[int] = []
    total = 0.0
    logits[list(generation.suppressed_at_start)] = -np.inf
    while True:
        logits[never] = -np.inf
        token = int(logits.argmax())
        total += _log_prob(logits, token)
        if token == generation.end_of_text:
            break
        tokens.append(token)
        if len(tokens) >= limit:
            break
        logits = engine.step(token)
    ended = token == generation.end_of_text
    return Decoded(tuple(tokens), language, total / (len(tokens) + 1), no_speech_prob, ended)


def detect_language(engine: Engine) -> str:
    """The most probable language of the sound that `engine` listens to; "en" for an .en model."""
    languages = engine.generation.languages
    if not languages:
        return "en"
    logits, _ = engine.prefill([engine.generation.start_of_transcript])
    return max(languages, key=lambda code: float(logits[languages[code]]))


def start_tokens(generation: Generation, language: str, task: str) -> list[int]:
    """The ids before the first spoken word: start, language, task, no timestamps.

    Raises:
        UsageError: the checkpoint has no such language or task.
    """
    if not generation.is_multilingual:
        if language != "en" or task != "transcribe":
            raise UsageError(
                f"this checkpoint cannot {task} `{language}`",
                why="it is an English-only model: it has no languages and no tasks",
                hint="use a multilingual checkpoint, or language `en` and task `transcribe`",
            )
        return [generation.start_of_transcript, generation.no_timestamps]
    if language not in generation.languages:
        raise UsageError(
            f"this checkpoint has no language `{language}`",
            hint=f"it has {', '.join(sorted(generation.languages))}",
        )
    if task not in generation.tasks:
        raise UsageError(
            f"this checkpoint has no task `{task}`",
            hint=f"it has {', '.join(sorted(generation.tasks))}",
        )
    return [
        generation.start_of_transcript,
        generation.languages[language],
        generation.tasks[task],
        generation.no_timestamps,
    ]


def _log_prob(logits: Floats, token: int) -> float:
    peak = logits.max()
    return float(logits[token] - peak - np.log(np.exp(logits - peak).sum()))
