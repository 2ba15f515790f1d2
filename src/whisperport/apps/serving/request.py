"""What a request for a transcription asks: the fields of OpenAI's API as transcription options."""

from dataclasses import dataclass
from typing import Any, Literal

from whisperport.apps.serving.api_error import one_line
from whisperport.apps.serving.form import MAX_SHOWN, Fields, checked_number, wrong
from whisperport.errors import UsageError
from whisperport.program.generation import Generation
from whisperport.runtime import TEMPERATURES, DecodeOptions
from whisperport.runtime.decoding.decode import check_language
from whisperport.runtime.decoding.gbnf import checked_rules
from whisperport.runtime.decoding.phrases import Phrase, checked_phrases, with_commas
from whisperport.speech.audio import VadOptions
from whisperport.speech.text import language_code
from whisperport.transcription import TranscribeOptions

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
STREAMED = ("json", "text", "verbose_json")
Task = Literal["transcribe", "translate"]
GRANULARITIES = ("segment", "word")
PREFIX_PADDING_MS, SILENCE_MS = 300, 200  # OpenAI's defaults for `server_vad` in this API


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """The fields of a request, checked."""

    options: TranscribeOptions
    form: str = "json"  # one of FORMATS
    granularities: tuple[str, ...] = ("segment",)
    stream: bool = False
    logprobs: bool = False


def read_request(fields: Fields, generation: Generation, task: Task) -> TranscriptionRequest:
    """Read the fields of a request. `model` and `file` are read elsewhere.

    Args:
        fields: of the form.
        generation: of the checkpoint, whose languages and tasks can be asked for.
        task: "transcribe" or "translate".

    Raises:
        ApiError: a field has a wrong value, or contradicts another.
    """
    form = _form(fields)
    granularities = _granularities(fields, form)
    stream = fields.flag("stream")
    if stream and form not in STREAMED:
        raise wrong("stream", f"`stream` cannot be used with response_format {form}")
    for name in ("known_speaker_names", "known_speaker_references"):
        if fields.many(name):
            raise wrong(name, "This model does not distinguish speakers", code="unsupported_value")
    temperature, grammar = fields.number("temperature", 0, 1), _grammar(fields)
    if temperature and grammar:
        raise wrong("temperature", "`temperature` cannot be above 0 with a `grammar`")
    options = TranscribeOptions(
        decode=DecodeOptions(task=task, language=_language(fields, generation, task)),
        # As OpenAI documents 0: "the model will use log probability to automatically increase the
        # temperature".
        temperatures=(temperature,) if temperature else TEMPERATURES,
        initial_prompt=fields.one("prompt") or "",  # the last tokens are used, if it is long
        phrases=_phrases(fields),
        grammar=grammar,
        word_timestamps="word" in granularities,
        vad=_vad(fields),
    )
    return TranscriptionRequest(options, form, granularities, stream, _logprobs(fields, form))


def _form(fields: Fields) -> str:
    form = fields.one("response_format") or "json"
    if form == "diarized_json":
        message = "This model does not distinguish speakers: response_format diarized_json"
        raise wrong("response_format", message, code="unsupported_value")
    if form not in FORMATS:
        raise wrong(
            "response_format", f"`response_format` is {form[:MAX_SHOWN]!r}; expected {_or(FORMATS)}"
        )
    return form


def _granularities(fields: Fields, form: str) -> tuple[str, ...]:
    name = "timestamp_granularities"
    granularities = tuple(fields.many(name))
    if unknown := [value for value in granularities if value not in GRANULARITIES]:
        raise wrong(name, f"`{name}` has {unknown[0][:MAX_SHOWN]!r}; expected {_or(GRANULARITIES)}")
    if granularities and form != "verbose_json":
        raise wrong(name, f"`{name}` requires response_format verbose_json")
    return granularities or ("segment",)


def _logprobs(fields: Fields, form: str) -> bool:
    included = fields.many("include")
    if unknown := [value for value in included if value != "logprobs"]:
        raise wrong("include", f"`include` has {unknown[0][:MAX_SHOWN]!r}; expected logprobs")
    if included and form != "json":
        raise wrong("include", "`include` requires response_format json")
    return bool(included)


def _language(fields: Fields, generation: Generation, task: Task) -> str | None:
    name, language = "language", fields.one("language")
    if not language and (several := fields.many("languages")):
        name, language = "languages", several[0]
        if len(several) > 1:
            message = "This model detects one of all languages, or is told one: give one language"
            raise wrong(name, message, code="unsupported_value")
    try:
        options = DecodeOptions(task=task, language=language and language[:MAX_SHOWN])
        check_language(generation, options)
        code = options.language and language_code(options.language, generation.languages)
    except UsageError as error:
        hint = f". {error.hint}" if error.hint else ""
        param = name if language else "model"
        raise wrong(param, f"{error.what}{hint}", code="unsupported_value") from error
    return code


def _phrases(fields: Fields) -> tuple[Phrase, ...]:
    """Return the phrases to prefer: OpenAI's `keywords`, and `hotwords`, a list or a text with commas."""
    phrases: dict[str, float] = {}
    for name in ("keywords", "hotwords"):
        texts = fields.many(name)
        if name == "hotwords":
            texts = [phrase for text in texts for phrase in with_commas(text)]
        try:
            phrases.update(checked_phrases(texts))
        except UsageError as error:
            raise wrong(name, one_line(error)) from error
    return tuple(phrases.items())


def _grammar(fields: Fields) -> str:
    """Return the grammar whose sentences alone are possible; empty: any text is."""
    grammar = fields.one("grammar") or ""
    try:
        if grammar:
            checked_rules(grammar)
    except UsageError as error:
        raise wrong("grammar", one_line(error)) from error
    return grammar


def _vad(fields: Fields) -> VadOptions | None:
    """Return how speech is detected; None: in Whisper's own windows."""
    name = "chunking_strategy"
    strategy: Any = fields.members(name)
    if strategy is None:
        return None
    members = {"type": "server_vad"} if strategy == "auto" else strategy
    if not isinstance(members, dict) or members.get("type") != "server_vad":
        raise wrong(
            name,
            f"`{name}` is {str(strategy)[:50]!r}; expected auto or an object of type server_vad",
        )
    padding = checked_number(name, members.get("prefix_padding_ms", PREFIX_PADDING_MS), 0, 10_000)
    silence = checked_number(name, members.get("silence_duration_ms", SILENCE_MS), 0, 10_000)
    threshold = checked_number(name, members.get("threshold", 0.5), 0, 1)
    try:
        pad_s = padding / 1000
        return VadOptions(threshold=threshold, min_silence_s=silence / 1000, pad_s=pad_s)
    except UsageError as error:
        raise wrong(name, f"{error.what}; {error.why}") from error


def _or(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
