"""What a `transcribe` event asks: a language, and words that are likely."""

from collections.abc import Iterable, Iterator
from itertools import chain

from wyoming.asr import Transcribe

from whisperport.apps.serving.wyoming.reader import FaultError
from whisperport.errors import UsageError
from whisperport.program.generation import Generation
from whisperport.runtime import DecodeOptions
from whisperport.runtime.decoding.decode import check_language, prompt_room
from whisperport.speech.text import Tokenizer, language_code
from whisperport.transcription import TranscribeOptions, Transcriber


def options_of(event: Transcribe, transcriber: Transcriber, default: str) -> TranscribeOptions:
    """Return the options of one utterance.

    Args:
        event: the event.
        transcriber: the loaded bundle.
        default: language if the event names none; empty: it is detected.

    Raises:
        FaultError: the model does not support the language, or the event has values of another type.
    """
    engine = transcriber.engine
    words = chain(_texts(event.transcript_names), _texts(event.transcript_terms))
    prompt = joined(words, transcriber.tokenizer, prompt_room(engine.dims))
    language = _language(event.language or default, engine.generation)
    return TranscribeOptions(decode=DecodeOptions(language=language), initial_prompt=prompt)


def joined(words: Iterable[str], tokenizer: Tokenizer, room: int) -> str:
    """Return as many of the words as fit into `room` tokens, the first ones first, with commas between."""
    kept: list[str] = []
    for word in words:
        # A space after a comma is always where the tokenizer splits, so that tokens can be added up.
        text = f" {word}"
        if len(tokenizer.encode(tokenizer.end_of(text, room + 1))) > room:
            break
        kept.append(word)
        room -= len(tokenizer.encode(f"{text},"))
    return ", ".join(kept)


def _language(language: object, generation: Generation) -> str | None:
    """Return the code of a language such as "en", "en-US" or "zh-hans"; None: it is detected.

    A language that Whisper does not have is detected. One that only this model does not have is an error.
    """
    if not isinstance(language, str) or language in ("", "auto"):
        return None
    try:
        code = language_code(language.replace("_", "-").split("-")[0], generation.languages)
    except UsageError:
        return None
    try:
        check_language(generation, DecodeOptions(language=code))
    except UsageError as error:
        raise FaultError("language", f"{error.what}: {error.why}") from error
    return code


def _texts(values: object) -> Iterator[str]:
    if values is None:
        return
    if not isinstance(values, list):
        raise FaultError("bad-event", "names and terms are lists of texts")
    for value in values:
        if not isinstance(value, str):
            raise FaultError("bad-event", "names and terms are lists of texts")
        if text := value.strip():
            yield text
