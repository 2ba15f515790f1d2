"""Transcription of audio files: consecutive windows, bounded memory, no state from earlier calls."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from whisperport.errors import AudioError, IncompleteError, Interrupted, NumericalError, UsageError
from whisperport.program.bundle import Bundle
from whisperport.runtime import DecodeOptions, Thresholds
from whisperport.speech.text import Tokenizer
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber, transcribe

from ..extent import EVERYTHING, core_or_all

# Transcription of audio files: consecutive windows, bounded memory, no state from earlier calls.

SECOND = 16_000
ONE_THREAD = RunOptions(threads=1)

# A random model is sure of nothing: no second try, no silence, unless a test asks for them.
NEVER = Thresholds(
    compression_ratio_threshold=None, logprob_threshold=None, no_speech_threshold=None
)
TEXT = TranscribeOptions(
    run=ONE_THREAD,
    decode=DecodeOptions(language="en", without_timestamps=True, max_tokens=4),
    temperatures=(0.0,),
    thresholds=NEVER,
    condition_on_previous_text=False,
)


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    samples = 0.1 * np.random.default_rng(seed).standard_normal(round(SECOND * seconds))
    return samples.astype(np.float32)


@pytest.fixture
def bundle(micro_bundle: Bundle) -> Bundle:
    """The micro model, with windows of 0.2 s, on a target that compiles nothing."""
    return micro_bundle


@pytest.fixture
def transcriber(bundle: Bundle) -> Transcriber:
    return Transcriber(bundle, ONE_THREAD)


def test_windows_follow_one_another_to_the_end(transcriber: Transcriber) -> None:
    transcript = transcriber.transcribe(noise(1.1), TEXT)

    assert [segment.start for segment in transcript.segments] == pytest.approx(
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    )
    assert transcript.segments[-1].end == pytest.approx(1.1)
    assert transcript.duration_s == pytest.approx(1.1)
    assert transcript.text == "".join(segment.text for segment in transcript.segments).strip()
    assert transcript.language == "en"


def test_a_window_is_what_it_is_alone(transcriber: Transcriber) -> None:
    """With text as no context: the second window of two is the first of one, but for its edges."""
    loud = noise(0.6, seed=1)
    both = transcriber.transcribe(loud, TEXT)

    later = transcriber.transcribe(loud, replace(TEXT, clip_timestamps=(0.2,)))

    assert [s.tokens for s in later.segments] == [s.tokens for s in both.segments[1:]]
    assert later.segments[0].start == pytest.approx(0.2)


def test_one_file_does_not_affect_the_next(transcriber: Transcriber) -> None:
    options = replace(TEXT, condition_on_previous_text=True)
    alone = transcriber.transcribe(noise(0.5, seed=2), options)

    transcriber.transcribe(noise(0.9, seed=3), options)
    after = transcriber.transcribe(noise(0.5, seed=2), options)

    assert after == alone


def test_progress_rises_to_the_duration(transcriber: Transcriber) -> None:
    reported: list[tuple[float, float | None]] = []

    transcript = transcriber.transcribe(
        noise(1.1), TEXT, progress=lambda done, of: reported.append((done, of))
    )

    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert len(reported) == 6
    assert reported[-1] == pytest.approx((transcript.duration_s, transcript.duration_s))


def test_windows_that_met_the_limit_are_listed(transcriber: Transcriber) -> None:
    transcript = transcriber.transcribe(noise(0.4), TEXT)

    assert len(transcript.truncated) > 0
    assert set(transcript.truncated) <= {segment.start for segment in transcript.segments}


@pytest.mark.parametrize(
    ("no_speech", "logprob", "emitted"),
    [(0.0, None, False), (0.0, -1e-9, False), (0.0, -100.0, True), (1.0, None, True)],
    ids=["probable", "probable and unsure", "probable but sure of its words", "improbable"],
)
def test_silence_is_passed_over(
    transcriber: Transcriber, no_speech: float, logprob: float | None, emitted: bool
) -> None:
    thresholds = replace(NEVER, no_speech_threshold=no_speech, logprob_threshold=logprob)

    transcript = transcriber.transcribe(noise(0.6), replace(TEXT, thresholds=thresholds))

    assert bool(transcript.segments) == emitted
    assert bool(transcript.text) == emitted
    assert transcript.duration_s == pytest.approx(0.6)


def test_silence_is_transcribed_without_a_crash(transcriber: Transcriber) -> None:
    transcript = transcriber.transcribe(np.zeros(SECOND, np.float32), TEXT)

    assert transcript.duration_s == 1.0


def test_an_array_at_another_rate_is_resampled(transcriber: Transcriber) -> None:
    transcript = transcriber.transcribe(noise(1.0), TEXT, sample_rate=8_000)

    assert transcript.duration_s == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize("target", ["onnxruntime", "xnnpack", "litert", "openvino"])
def test_a_real_bundle_transcribes_a_file(
    target: str, exported: Callable[[str], Bundle], tmp_path: Path
) -> None:
    path = tmp_path / "hiss.wav"
    write_audio(path, "pcm_s16le", [noise(2.5)])

    transcript = transcribe(path, exported(target), TEXT)

    assert [segment.start for segment in transcript.segments] == [0.0, 2.0]
    assert transcript.duration_s == pytest.approx(2.5)


@pytest.mark.skipif(not EVERYTHING, reason="takes ten seconds; run make test-all")
def test_a_long_file_takes_no_more_memory_than_three_minutes(
    exported: Callable[[str], Bundle], tmp_path: Path
) -> None:
    """In a process of its own, since its peak is what is measured. Most windows are skipped."""
    minute = noise(60.0)
    short, long = tmp_path / "short.flac", tmp_path / "long.flac"
    write_audio(short, "flac", [minute] * 3)
    write_audio(long, "flac", [minute] * core_or_all(40, 180))

    peaks = [peak_mib(path, exported("onnxruntime").folder) for path in (short, long)]

    # Forty minutes are 146 MiB of samples and 73 MiB of spectrogram; three hours, 660 and 330.
    assert peaks[1] - peaks[0] < 50


PEAK = """
import resource, sys
import numpy as np
from whisperport.program.bundle import Bundle
from whisperport.runtime import Decoder, Engine
from whisperport.transcription import Transcriber, TranscribeOptions, decoders
from whisperport.runtime import DecodeOptions

class Silent(Engine):
    # Hears nothing: only the way of the sound is measured.
    def encode(self, mel): return np.zeros((self.dims.n_audio_ctx, self.dims.n_audio_state), "f4")

class SilentDecoder(Decoder):
    def start_window(self, features): self.cache.clear()
    def prefill(self, tokens, **_):
        logits = np.zeros(self.engine.dims.n_vocab, "f4")
        logits[self.engine.generation.no_speech] = 30
        return logits, logits.copy()

transcriber = Transcriber(Bundle.open(sys.argv[2]))
transcriber.engine.__class__ = Silent
decoders.Decoder = SilentDecoder
options = TranscribeOptions(
    decode=DecodeOptions(language="en", without_timestamps=True, max_tokens=1), temperatures=(0.0,)
)
done = []
transcript = transcriber.transcribe(
    sys.argv[1], options, progress=lambda *reported: done.append(reported)
)
assert done[-1][0] == done[-1][1] == transcript.duration_s, done[-1]
assert not transcript.segments
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def peak_mib(path: Path, bundle: Path) -> float:
    done = subprocess.run(
        [sys.executable, "-c", PEAK, path, bundle], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def write_audio(path: Path, codec: str, parts: list[np.ndarray]) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=SECOND, layout="mono")
        for part in parts:
            integers = np.round(part * 32767).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(integers[None], format="s16", layout="mono")
            frame.sample_rate = SECOND
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


# A transcription that fails in the middle keeps the text so far.

TEXT_ALONE = TranscribeOptions(
    decode=DecodeOptions(language="en", without_timestamps=True, max_tokens=4),
    temperatures=(0.0,),
    thresholds=Thresholds(
        compression_ratio_threshold=None, logprob_threshold=None, no_speech_threshold=None
    ),
    condition_on_previous_text=False,
)
NOISE = (0.1 * np.random.default_rng(0).standard_normal(16_000)).astype(np.float32)  # 5 windows


@pytest.fixture
def micro_transcriber(micro_bundle: Bundle) -> Transcriber:
    """The micro model, with windows of 0.2 s, on a target that compiles nothing."""
    return Transcriber(micro_bundle, ONE_THREAD)


def failing(micro_transcriber: Transcriber, error: BaseException, *, after: int) -> None:
    """Let the encoder fail after some windows."""
    encode: Callable[..., Any] = micro_transcriber.engine.encode
    windows = iter(range(after))

    def encode_some(mel: Any) -> Any:
        if next(windows, None) is None:
            raise error
        return encode(mel)

    micro_transcriber.engine.encode = encode_some  # type: ignore[method-assign]


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
    micro_transcriber: Transcriber, error: Exception, why: str
) -> None:
    whole = micro_transcriber.transcribe(NOISE, TEXT_ALONE)
    failing(micro_transcriber, error, after=2)

    with pytest.raises(IncompleteError, match=r"stopped at 0\.4 s") as caught:
        micro_transcriber.transcribe(NOISE, TEXT_ALONE)

    assert caught.value.transcript.segments == whole.segments[:2]
    assert whole.text.startswith(caught.value.transcript.text)
    assert caught.value.transcript.language == "en"
    assert caught.value.why == why
    assert caught.value.__cause__ is error


def test_the_text_before_an_interrupt_comes_with_it(micro_transcriber: Transcriber) -> None:
    whole = micro_transcriber.transcribe(NOISE, TEXT_ALONE)
    failing(micro_transcriber, KeyboardInterrupt(), after=3)

    with pytest.raises(KeyboardInterrupt) as caught:
        micro_transcriber.transcribe(NOISE, TEXT_ALONE)

    assert isinstance(caught.value, Interrupted)
    assert caught.value.transcript.segments == whole.segments[:3]


def test_a_failure_before_the_first_word_is_itself(micro_transcriber: Transcriber) -> None:
    error = AudioError("nothing to hear")
    failing(micro_transcriber, error, after=0)

    with pytest.raises(AudioError) as caught:
        micro_transcriber.transcribe(NOISE, TEXT_ALONE)

    assert caught.value is error


def test_a_failure_does_not_change_the_next_transcription(micro_transcriber: Transcriber) -> None:
    whole, encode = micro_transcriber.transcribe(NOISE, TEXT_ALONE), micro_transcriber.engine.encode
    failing(micro_transcriber, RuntimeError(), after=2)
    with pytest.raises(IncompleteError):
        micro_transcriber.transcribe(NOISE, TEXT_ALONE)

    micro_transcriber.engine.encode = encode  # type: ignore[method-assign]

    assert micro_transcriber.transcribe(NOISE, TEXT_ALONE) == whole


# Options -----------------------------------------------------------------------------------------


def test_a_prompt_that_is_too_long_is_cut_with_a_warning(micro_transcriber: Transcriber) -> None:
    room = micro_transcriber.engine.dims.n_text_ctx // 2 - 1
    text = "ab" * room

    with pytest.warns(UserWarning, match="the initial prompt has 22 tokens, of which the last 11"):
        cut = micro_transcriber.transcribe(NOISE[:3200], replace(TEXT_ALONE, initial_prompt=text))

    kept = micro_transcriber.transcribe(
        NOISE[:3200],
        replace(
            TEXT_ALONE, decode=replace(TEXT_ALONE.decode, prompt=()), initial_prompt=text[-room:]
        ),
    )
    assert cut.segments == kept.segments


@pytest.mark.parametrize("name", ["initial_prompt", "prefix"])
def test_of_a_long_text_only_what_can_be_used_is_encoded(
    micro_transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    encode, lengths = Tokenizer.encode, list[int]()

    def counted(self: Tokenizer, text: str) -> list[int]:
        lengths.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    options = replace(
        TEXT_ALONE, decode=replace(TEXT_ALONE.decode, max_tokens=8), **{name: "ab " * 1_000_000}
    )

    with pytest.warns(UserWarning, match=r"has more than \d+ tokens, .* not used: ab ab"):
        micro_transcriber.transcribe(NOISE[:3200], options)

    assert lengths
    assert max(lengths) < 1000


def test_a_language_may_be_named(micro_transcriber: Transcriber) -> None:
    by_code = micro_transcriber.transcribe(
        NOISE, replace(TEXT_ALONE, decode=replace(TEXT_ALONE.decode, language="de"))
    )

    by_name = micro_transcriber.transcribe(
        NOISE, replace(TEXT_ALONE, decode=replace(TEXT_ALONE.decode, language="German"))
    )

    assert by_name == by_code
    assert by_name.language == "de"


@pytest.mark.parametrize(
    ("language", "words"), [("fr", "no language `fr`"), ("Klingon", "no language `Klingon`")]
)
def test_a_language_that_is_not_there_is_rejected(
    micro_transcriber: Transcriber, language: str, words: str
) -> None:
    options = replace(TEXT_ALONE, decode=replace(TEXT_ALONE.decode, language=language))

    with pytest.raises(UsageError, match=words):
        micro_transcriber.transcribe(NOISE, options)


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
