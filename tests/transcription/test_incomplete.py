"""A transcription that fails in the middle keeps the text so far."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from whisperport.errors import AudioError, IncompleteError, Interrupted, NumericalError, UsageError
from whisperport.program.bundle import Bundle
from whisperport.runtime import DecodeOptions, Thresholds
from whisperport.speech.text import Tokenizer
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber

ONE_THREAD = RunOptions(threads=1)
TEXT = TranscribeOptions(
    decode=DecodeOptions(language="en", without_timestamps=True, max_tokens=4),
    temperatures=(0.0,),
    thresholds=Thresholds(
        compression_ratio_threshold=None, logprob_threshold=None, no_speech_threshold=None
    ),
    condition_on_previous_text=False,
)
NOISE = (0.1 * np.random.default_rng(0).standard_normal(16_000)).astype(np.float32)  # 5 windows


@pytest.fixture
def transcriber(micro_bundle: Bundle) -> Transcriber:
    """The micro model, with windows of 0.2 s, on a target that compiles nothing."""
    return Transcriber(micro_bundle, ONE_THREAD)


def failing(transcriber: Transcriber, error: BaseException, *, after: int) -> None:
    """Let the encoder fail after some windows."""
    encode: Callable[..., Any] = transcriber.engine.encode
    windows = iter(range(after))

    def encode_some(mel: Any) -> Any:
        if next(windows, None) is None:
            raise error
        return encode(mel)

    transcriber.engine.encode = encode_some  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (AudioError("the sound broke off", hint="mend it"), "the sound broke off"),
        (NumericalError("a NaN", "encoder", hint="verify it"), "a NaN"),
        (RuntimeError("device lost"), "RuntimeError: device lost"),
    ],
    ids=["a known failure", "a NaN", "any other"],
)
def test_the_text_before_a_failure_comes_with_it(
    transcriber: Transcriber, error: Exception, why: str
) -> None:
    whole = transcriber.transcribe(NOISE, TEXT)
    failing(transcriber, error, after=2)

    with pytest.raises(IncompleteError, match=r"stopped at 0\.4 s") as caught:
        transcriber.transcribe(NOISE, TEXT)

    assert caught.value.transcript.segments == whole.segments[:2]
    assert whole.text.startswith(caught.value.transcript.text)
    assert caught.value.transcript.language == "en"
    assert caught.value.why == why
    assert caught.value.__cause__ is error


def test_the_text_before_an_interrupt_comes_with_it(transcriber: Transcriber) -> None:
    whole = transcriber.transcribe(NOISE, TEXT)
    failing(transcriber, KeyboardInterrupt(), after=3)

    with pytest.raises(KeyboardInterrupt) as caught:
        transcriber.transcribe(NOISE, TEXT)

    assert isinstance(caught.value, Interrupted)
    assert caught.value.transcript.segments == whole.segments[:3]


def test_a_failure_before_the_first_word_is_itself(transcriber: Transcriber) -> None:
    error = AudioError("nothing to hear")
    failing(transcriber, error, after=0)

    with pytest.raises(AudioError) as caught:
        transcriber.transcribe(NOISE, TEXT)

    assert caught.value is error


def test_a_failure_does_not_change_the_next_transcription(transcriber: Transcriber) -> None:
    whole, encode = transcriber.transcribe(NOISE, TEXT), transcriber.engine.encode
    failing(transcriber, RuntimeError(), after=2)
    with pytest.raises(IncompleteError):
        transcriber.transcribe(NOISE, TEXT)

    transcriber.engine.encode = encode  # type: ignore[method-assign]

    assert transcriber.transcribe(NOISE, TEXT) == whole


# Options -----------------------------------------------------------------------------------------


def test_a_prompt_that_is_too_long_is_cut_with_a_warning(transcriber: Transcriber) -> None:
    room = transcriber.engine.dims.n_text_ctx // 2 - 1
    text = "ab" * room

    with pytest.warns(UserWarning, match="the initial prompt has 22 tokens, of which the last 11"):
        cut = transcriber.transcribe(NOISE[:3200], replace(TEXT, initial_prompt=text))

    kept = transcriber.transcribe(
        NOISE[:3200],
        replace(TEXT, decode=replace(TEXT.decode, prompt=()), initial_prompt=text[-room:]),
    )
    assert cut.segments == kept.segments


@pytest.mark.parametrize("name", ["initial_prompt", "prefix"])
def test_of_a_long_text_only_what_can_be_used_is_encoded(
    transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    encode, lengths = Tokenizer.encode, list[int]()

    def counted(self: Tokenizer, text: str) -> list[int]:
        lengths.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    options = replace(TEXT, decode=replace(TEXT.decode, max_tokens=8), **{name: "ab " * 1_000_000})

    with pytest.warns(UserWarning, match=r"has more than \d+ tokens, .* not used: ab ab"):
        transcriber.transcribe(NOISE[:3200], options)

    assert lengths
    assert max(lengths) < 1000


def test_a_language_may_be_named(transcriber: Transcriber) -> None:
    by_code = transcriber.transcribe(
        NOISE, replace(TEXT, decode=replace(TEXT.decode, language="de"))
    )

    by_name = transcriber.transcribe(
        NOISE, replace(TEXT, decode=replace(TEXT.decode, language="German"))
    )

    assert by_name == by_code
    assert by_name.language == "de"


@pytest.mark.parametrize(
    ("language", "words"), [("fr", "no language `fr`"), ("Klingon", "no language `Klingon`")]
)
def test_a_language_that_is_not_there_is_rejected(
    transcriber: Transcriber, language: str, words: str
) -> None:
    options = replace(TEXT, decode=replace(TEXT.decode, language=language))

    with pytest.raises(UsageError, match=words):
        transcriber.transcribe(NOISE, options)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperatures": ()}, "is empty"),
        ({"temperatures": (float("nan"),)}, "`temperatures` is nan"),
        ({"hallucination_silence_threshold": -1.0, "word_timestamps": True}, "threshold` is -1"),
        ({"hallucination_silence_threshold": 1.0}, "requires word timestamps"),
        ({"clip_timestamps": (2.0, 1.0)}, "`clip_timestamps` are"),
        ({"clip_timestamps": (-1.0,)}, "`clip_timestamps` are"),
        ({"clip_timestamps": (0.0, float("nan"))}, "`clip_timestamps` are"),
        ({"clip_timestamps": (0.0, float("inf"))}, "`clip_timestamps` are"),
    ],
    ids=str,
)
def test_options_out_of_their_range_are_rejected(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TranscribeOptions(**wrong)
