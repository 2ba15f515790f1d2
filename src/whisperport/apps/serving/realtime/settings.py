"""The configuration of a realtime session, which a client changes in parts."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from whisperport.apps.serving.api_error import ApiError, one_line, unknown_model
from whisperport.errors import UsageError
from whisperport.program.generation import Generation
from whisperport.runtime import DecodeOptions
from whisperport.runtime.decoding.decode import check_language
from whisperport.runtime.decoding.phrases import checked_phrases
from whisperport.speech.text import language_code
from whisperport.transcription import TranscribeOptions
from whisperport.transcription.live.live_options import LiveOptions

KIND = "transcription"
RATES = (8_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)  # OpenAI documents 24,000 only
PCM_RATE = 24_000
CODECS = {"audio/pcm": "pcm_s16le", "audio/pcmu": "pcm_mulaw", "audio/pcma": "pcm_alaw"}
TELEPHONE_RATE = 8_000
STEPS_S = {"minimal": 0.2, "low": 0.3, "medium": 0.5, "high": 1.0, "xhigh": 2.0}
UNHURRIED_S = 1.0  # if no text is sent before the commit
TENTATIVE = "item.input_audio_transcription.tentative"
LOGPROBS = "item.input_audio_transcription.logprobs"
MAX_PROMPT = 8_192  # characters; the decoder uses the last 223 tokens


@dataclass(frozen=True, slots=True)
class ServerVad:
    """When the server commits by itself: after a pause. Names and defaults are OpenAI's."""

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500


@dataclass(frozen=True, slots=True)
class Settings:
    """The effective configuration of a session."""

    model: str
    kind: str = "audio/pcm"  # a key of CODECS
    rate: int = PCM_RATE  # Hz
    language: str | None = None
    prompt: str = ""
    keywords: tuple[str, ...] = ()
    delay: str | None = None  # None: no text before the commit
    vad: ServerVad | None = ServerVad()
    include: tuple[str, ...] = ()

    @property
    def is_live(self) -> bool:
        """Whether certain words are sent before the audio is committed."""
        return self.delay is not None or self.tentative

    @property
    def tentative(self) -> bool:
        """Whether words are sent that may still change."""
        return TENTATIVE in self.include

    @property
    def codec(self) -> str:
        """FFmpeg's name of the form of samples."""
        return CODECS[self.kind]

    def live_options(self) -> LiveOptions:
        """Return the options of the transcription of an item."""
        options = TranscribeOptions(
            decode=DecodeOptions(language=self.language),
            initial_prompt=self.prompt,
            phrases=checked_phrases(self.keywords),
        )
        unhurried_s = STEPS_S["low"] if self.tentative else UNHURRIED_S
        return LiveOptions(transcribe=options, step_s=STEPS_S.get(self.delay or "", unhurried_s))

    def document(self, session_id: str) -> dict[str, Any]:
        """Return the session as OpenAI's API shows it."""
        form: dict[str, Any] = {"type": self.kind}
        if self.kind == "audio/pcm":
            form["rate"] = self.rate
        vad = self.vad and {
            "type": "server_vad",
            "threshold": self.vad.threshold,
            "prefix_padding_ms": self.vad.prefix_padding_ms,
            "silence_duration_ms": self.vad.silence_duration_ms,
        }
        transcription = {
            "model": self.model,
            "language": self.language,
            "prompt": self.prompt,
            "keywords": list(self.keywords),
            "delay": self.delay,
        }
        audio_input = {
            "format": form,
            "noise_reduction": None,
            "transcription": transcription,
            "turn_detection": vad,
        }
        return {
            "type": KIND,
            "id": session_id,
            "object": "realtime.transcription_session",
            "audio": {"input": audio_input},
            "include": list(self.include),
        }


def updated(
    settings: Settings, session: Any, models: Collection[str], generation: Generation
) -> Settings:
    """Return the settings after a partial update.

    Args:
        settings: before it.
        session: of the client; what it lacks does not change.
        models: names of the model that is served.
        generation: of the checkpoint, whose languages can be asked for.

    Raises:
        ApiError: a value is wrong; then nothing changes.
    """
    members = _Members(session, "session")
    members.one_of("type", KIND, (KIND,))  # sessions that answer are not served
    settings = replace(settings, include=_include(members, settings))
    source = members.members("audio").members("input")
    settings = _formatted(settings, source)
    if "turn_detection" in source.values:
        settings = replace(settings, vad=_vad(source, settings.vad))
    return _transcribed(settings, source.members("transcription"), models, generation)


class _Members:
    """A JSON object of a client, and its path for messages."""

    def __init__(self, values: Any, path: str) -> None:
        if not isinstance(values, Mapping):
            raise invalid(path, "expected an object")
        self.values, self.path = values, path

    def members(self, name: str) -> "_Members":
        """Return a member that is an object; an empty one, if there is none."""
        return _Members(self.values.get(name) or {}, f"{self.path}.{name}")

    def text(self, name: str, default: str, *, null: str | None = None) -> str:
        """Return a member that is a text; `null`, if it is null."""
        value = self.values.get(name, default)
        value = null if value is None else value
        if not isinstance(value, str) or len(value) > MAX_PROMPT:
            raise self.wrong(name, f"expected a text of at most {MAX_PROMPT} characters")
        return value

    def texts(self, name: str, default: tuple[str, ...]) -> tuple[str, ...]:
        """Return a member that is a list of texts; null is an empty one."""
        values = self.values.get(name, list(default)) or []
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.wrong(name, "expected a list of texts")
        if sum(map(len, values)) > MAX_PROMPT:
            raise self.wrong(name, f"the texts have more than {MAX_PROMPT} characters")
        return tuple(values)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Return a member that is a number within a range."""
        value = self.values.get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise self.wrong(name, f"expected a number from {low:g} to {high:g}")
        return value

    def one_of(self, name: str, default: Any, choices: Collection[Any]) -> Any:
        """Return a member that is one of some values."""
        value = self.values.get(name, default)
        for choice in choices:
            if value == choice and not isinstance(value, bool):
                return choice
        raise self.wrong(name, f"expected one of {', '.join(map(json.dumps, choices))}")

    def wrong(self, name: str, message: str) -> ApiError:
        return invalid(f"{self.path}.{name}", message)


def invalid(path: str, message: str, code: str = "invalid_value") -> ApiError:
    """Return the error of a wrong value."""
    return ApiError(400, f"`{path}`: {message}", code=code, param=path)


def _include(source: _Members, settings: Settings) -> tuple[str, ...]:
    include = source.texts("include", settings.include)
    if LOGPROBS in include:
        message = "log-probabilities are in the answers of /v1/audio/transcriptions only"
        raise invalid("session.include", message, "unsupported_value")
    if set(include) - {TENTATIVE}:
        raise source.wrong("include", f"expected {TENTATIVE}")
    return include


def _formatted(settings: Settings, source: _Members) -> Settings:
    form = source.members("format")
    kind = form.one_of("type", settings.kind, CODECS)
    if kind != "audio/pcm":
        return replace(settings, kind=kind, rate=TELEPHONE_RATE)
    default = settings.rate if settings.kind == kind else PCM_RATE
    return replace(settings, kind=kind, rate=form.one_of("rate", default, RATES))


def _vad(source: _Members, before: ServerVad | None) -> ServerVad | None:
    if source.values["turn_detection"] is None:
        return None
    detection, vad = source.members("turn_detection"), before or ServerVad()
    if detection.text("type", "server_vad") != "server_vad":
        message = "only server_vad is served, which detects pauses"
        raise invalid(f"{detection.path}.type", message, "unsupported_value")
    return ServerVad(
        detection.number("threshold", vad.threshold, 0.16, 0.99),
        round(detection.number("prefix_padding_ms", vad.prefix_padding_ms, 0, 5_000)),
        round(detection.number("silence_duration_ms", vad.silence_duration_ms, 50, 10_000)),
    )


def _transcribed(
    settings: Settings, source: _Members, models: Collection[str], generation: Generation
) -> Settings:
    model = source.text("model", settings.model, null=settings.model) or settings.model
    if model not in models:
        raise invalid(f"{source.path}.model", unknown_model(model, models), "model_not_found")
    language = settings.language
    if {"language", "languages"} & source.values.keys():
        language = _language(source, generation)
    return replace(
        settings,
        model=model,
        language=language,
        prompt=source.text("prompt", settings.prompt, null=""),
        keywords=_keywords(source, settings.keywords),
        delay=source.one_of("delay", settings.delay, (*STEPS_S, None)),
    )


def _keywords(source: _Members, before: tuple[str, ...]) -> tuple[str, ...]:
    keywords = source.texts("keywords", before)
    try:
        checked_phrases(keywords)
    except UsageError as error:
        raise invalid(f"{source.path}.keywords", one_line(error)) from error
    return keywords


def _language(source: _Members, generation: Generation) -> str | None:
    several = source.texts("languages", ())
    if len(several) > 1:
        message = "the model detects one of all languages, or is told one: give one language"
        raise invalid(f"{source.path}.languages", message, "unsupported_value")
    language = source.values.get("language") or (several[0] if several else None)
    if language is None:
        return None
    if not isinstance(language, str):
        raise source.wrong("language", "expected a text")
    try:
        options = DecodeOptions(language=language[:50])
        check_language(generation, options)
        code = options.language and language_code(options.language, generation.languages)
    except UsageError as error:
        message = f"{error.what}. {error.hint}"
        raise invalid(f"{source.path}.language", message, "unsupported_value") from error
    return code
