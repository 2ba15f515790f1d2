"""Transcription of audio files: consecutive windows, bounded memory, no state from earlier calls."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest

from whisperport.program.bundle import Bundle
from whisperport.runtime import DecodeOptions, Thresholds
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber, transcribe

from ..extent import EVERYTHING, core_or_all

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
from whisperport.transcription import Transcriber, TranscribeOptions
from whisperport.runtime import DecodeOptions, Thresholds

class Silent(Engine):
    # Hears nothing: only the way of the sound is measured.
    def encode(self, mel): return np.zeros((self.dims.n_audio_ctx, self.dims.n_audio_state), "f4")
    def decoder(self): return SilentDecoder(self)

class SilentDecoder(Decoder):
    def listen(self, features): self.cache.clear()
    def prefill(self, tokens, **_):
        logits = np.zeros(self.engine.dims.n_vocab, "f4")
        logits[self.engine.generation.no_speech] = 30
        return logits, logits.copy()

transcriber = Transcriber(Bundle.open(sys.argv[2]))
transcriber.engine.__class__ = Silent
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
