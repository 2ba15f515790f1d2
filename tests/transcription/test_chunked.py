"""Chunks of speech, each transcribed as a separate audio file, by any number of workers."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.errors import AudioError, IncompleteError, Interrupted, UsageError
from whisperport.program.bundle import Bundle
from whisperport.program.runner import Array, Runner
from whisperport.runtime import DecodeOptions, Engine, Thresholds
from whisperport.speech.audio import (
    AudioStream,
    MelWindows,
    Span,
    VadOptions,
    cut_chunks,
    load_audio,
    speech_spans,
)
from whisperport.speech.text import Segment, Word
from whisperport.targets import RunOptions
from whisperport.transcription import (
    TranscribeOptions,
    Transcriber,
    Transcript,
    session,
    speech_pipeline,
)
from whisperport.transcription import (
    transcriber as transcriber_module,
)
from whisperport.transcription.speech_pipeline import Chunk, ChunkMel
from whisperport.verification import text_errors
from whisperport.verification.clips import ShippedAudio, shipped_audio

from ..embedded import default_bundle
from ..extent import core_or_all

SECOND = 16_000
ONE_THREAD = RunOptions(threads=1)
CHUNKED = TranscribeOptions(decode=DecodeOptions(language="en"), vad=VadOptions(), batch=False)
TOGETHER = replace(CHUNKED, batch=True)
LITTLE = replace(
    CHUNKED,
    decode=DecodeOptions(language="en", without_timestamps=True, max_tokens=4),
    temperatures=(0.0,),
    thresholds=Thresholds(
        compression_ratio_threshold=None, logprob_threshold=None, no_speech_threshold=None
    ),
)
RECORDINGS = [r for r in shipped_audio() if r.text and r.seconds < 10 and not r.held_out]


@pytest.fixture(scope="module")
def transcriber() -> Transcriber:
    return Transcriber(default_bundle(), ONE_THREAD)


def with_gaps(recordings: list[ShippedAudio], gap_s: float) -> np.ndarray:
    gap = np.zeros(round(gap_s * SECOND), np.float32)
    parts = [piece for r in recordings for piece in (gap, load_audio(r.path))]
    return np.concatenate([*parts, gap])


@pytest.fixture(scope="module")
def audio() -> np.ndarray:
    """Six voices in 95 s, with 12 s of silence between them."""
    return with_gaps(RECORDINGS[:6], 12)


@pytest.fixture(scope="module")
def one_worker(transcriber: Transcriber, audio: np.ndarray) -> Transcript:
    return transcriber.transcribe(audio, CHUNKED)


def test_speech_is_found_where_it_is(one_worker: Transcript, audio: np.ndarray) -> None:
    spoken = " ".join(r.text for r in RECORDINGS[:6])
    assert text_errors(one_worker.text, spoken).errors == 0
    assert one_worker.duration_s == audio.size / SECOND

    begin = 12.0
    for recording in RECORDINGS[:6]:
        found = [s for s in one_worker.segments if begin <= s.start < begin + recording.seconds]
        assert "".join(s.text for s in found).strip() == recording.text
        assert found[-1].end <= begin + recording.seconds + 1
        begin += recording.seconds + 12


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_workers_change_nothing(
    workers: int, transcriber: Transcriber, audio: np.ndarray, one_worker: Transcript
) -> None:
    assert transcriber.transcribe(audio, replace(CHUNKED, workers=workers)) == one_worker


def check_same_text(found: Transcript, expected: Transcript, count: int | None = None) -> None:
    """Compare transcripts, of which the first may end early; probabilities are sums in another order."""
    count = len(expected.segments) if count is None else count
    assert len(found.segments) == count
    for one, other in zip(found.segments, expected.segments, strict=False):
        assert (one.tokens, one.start, one.end) == (other.tokens, other.start, other.end)
        assert one.avg_logprob == pytest.approx(other.avg_logprob, abs=1e-4)


@pytest.mark.parametrize("temperature", core_or_all([0.8], [0.0, 0.8]))
def test_chunks_decoded_together_have_the_text_of_chunks_decoded_singly(
    temperature: float, transcriber: Transcriber, audio: np.ndarray
) -> None:
    assert transcriber.engine.batch_size == 8
    alone, together = (
        transcriber.transcribe(audio, replace(options, temperatures=(temperature,)))
        for options in (CHUNKED, TOGETHER)
    )

    check_same_text(together, alone)


def test_the_text_before_the_failure_of_a_chunk_decoded_with_others_is_kept(
    transcriber: Transcriber, audio: np.ndarray, one_worker: Transcript, monkeypatch: Any
) -> None:
    on_window(4, fail, monkeypatch)

    with pytest.raises(IncompleteError) as caught:
        transcriber.transcribe(audio, TOGETHER)

    assert caught.value.why == "RuntimeError: the device is gone"
    check_same_text(caught.value.transcript, one_worker, 4)
    assert not threads()


def test_ctrl_c_keeps_the_chunks_that_are_decoded_together(
    transcriber: Transcriber, audio: np.ndarray, one_worker: Transcript, monkeypatch: Any
) -> None:
    on_window(3, interrupt, monkeypatch)

    with pytest.raises(Interrupted) as caught:
        transcriber.transcribe(audio, TOGETHER)

    found = caught.value.transcript
    assert len(found.segments) >= 3
    check_same_text(found, one_worker, len(found.segments))
    assert not threads()


def test_workers_draw_the_same_tokens(transcriber: Transcriber, audio: np.ndarray) -> None:
    sampled = replace(CHUNKED, temperatures=(0.8,))

    one, three = (
        transcriber.transcribe(audio, replace(sampled, workers=workers)) for workers in (1, 3)
    )

    assert one == three


def test_workers_of_programs_that_run_one_at_a_time_change_nothing(
    exported: Callable[[str], Bundle], audio: np.ndarray
) -> None:
    """ExecuTorch's methods are not made for several threads; a random model says a lot."""
    transcriber = Transcriber(exported("xnnpack"), ONE_THREAD)
    audio = audio[: 60 * SECOND]

    one, four = (
        transcriber.transcribe(audio, replace(LITTLE, workers=workers)) for workers in (1, 4)
    )

    assert one == four
    assert len(one.segments) >= 3


def test_a_chunk_is_transcribed_as_if_it_were_alone(
    transcriber: Transcriber, audio: np.ndarray, one_worker: Transcript
) -> None:
    """Neither the text before it nor the state it left changes anything."""
    with AudioStream(audio, look_back_s=0) as stream:
        speech = list(speech_spans(stream, VadOptions()))
    chunks = list(cut_chunks(speech, 3000, pad=30, longest_silence=200))
    plain = replace(CHUNKED, vad=None, condition_on_previous_text=False)

    alone = [
        transcriber.transcribe(
            audio, replace(plain, clip_timestamps=(chunk.start / 100, chunk.end / 100))
        )
        for chunk in chunks
    ]

    assert len(chunks) == 6
    segments = tuple(s for transcript in alone for s in transcript.segments)
    check_same_text(replace(one_worker, segments=segments), one_worker)


def test_packed_chunks_are_fewer_windows_with_the_same_times(
    transcriber: Transcriber, audio: np.ndarray, one_worker: Transcript
) -> None:
    packed = replace(CHUNKED, vad=VadOptions(pack=True))

    found = transcriber.transcribe(audio, packed)

    windows, single = ({s.seek for s in t.segments} for t in (found, one_worker))
    assert (len(single), len(windows)) == (6, 1)
    assert (
        text_errors(found.text, one_worker.text).errors <= 4
    )  # of 47: the model is for single commands
    assert len(found.segments) == len(one_worker.segments)
    for one, other in zip(found.segments, one_worker.segments, strict=True):
        assert (one.start, one.end) == pytest.approx((other.start, other.end), abs=0.5)
    check_same_text(transcriber.transcribe(audio, replace(packed, batch=True)), found)


def test_speech_after_a_long_silence_is_not_lost(transcriber: Transcriber) -> None:
    """In one window with both, the embedded model ends after the first."""
    recordings = RECORDINGS[:2]

    transcript = transcriber.transcribe(with_gaps(recordings, 20), CHUNKED)

    assert transcript.text == " ".join(r.text for r in recordings)


def test_silence_is_not_transcribed(transcriber: Transcriber) -> None:
    reports: list[tuple[float, float | None]] = []

    transcript = transcriber.transcribe(
        np.zeros(40 * SECOND, np.float32), CHUNKED, progress=lambda *at: reports.append(at)
    )

    assert (transcript.text, transcript.segments, transcript.duration_s) == ("", (), 40.0)
    assert transcript.language == "en"
    assert reports == [(40.0, 40.0)]


def test_progress_moves_in_audio_time(transcriber: Transcriber, audio: np.ndarray) -> None:
    reports: list[tuple[float, float | None]] = []

    transcriber.transcribe(
        audio, replace(CHUNKED, workers=2), progress=lambda *at: reports.append(at)
    )

    done = [at for at, _ in reports]
    assert done == sorted(done)
    assert len(done) > 3
    assert reports[-1] == (audio.size / SECOND, audio.size / SECOND)
    assert {of for _, of in reports} == {audio.size / SECOND}


def test_words_have_the_times_of_the_audio(transcriber: Transcriber) -> None:
    audio = with_gaps(RECORDINGS[:2], 20)

    transcript = transcriber.transcribe(audio, replace(CHUNKED, word_timestamps=True))

    words = [word for segment in transcript.segments for word in segment.words]
    second = 40 + RECORDINGS[0].seconds
    assert 20 < words[0].start < 21
    assert any(second < word.start < second + 1 for word in words)
    assert words[-1].end < second + RECORDINGS[1].seconds


def noise(seconds: float) -> np.ndarray:
    samples = 0.1 * np.random.default_rng(0).standard_normal(round(SECOND * seconds))
    return samples.astype(np.float32)


@pytest.fixture
def short_windows(micro_bundle: Bundle) -> Transcriber:
    """The micro model: a window is 0.2 s, so every span of speech is longer."""
    return Transcriber(micro_bundle, ONE_THREAD)


def test_speech_longer_than_a_window_is_read_window_by_window(short_windows: Transcriber) -> None:
    audio = with_gaps(RECORDINGS[:2], 1)

    one, three = (
        short_windows.transcribe(audio, replace(LITTLE, workers=workers)) for workers in (1, 3)
    )

    seeks = {segment.seek for segment in one.segments}
    assert one == three
    assert len(seeks) > 10
    assert min(seeks) > 100
    assert max(seeks) < audio.size // 160 - 100


class Watched(Runner):
    """How many threads are in it at once, at most."""

    def __init__(self, inner: Runner) -> None:
        super().__init__(inner.spec)
        self.inner, self.inside, self.most = inner, 0, 0

    def _run(self, inputs: list[Array]) -> list[Array]:
        self.inside += 1
        self.most = max(self.most, self.inside)
        names = [tensor.name for tensor in self.spec.inputs]
        outputs = list(self.inner.run(dict(zip(names, inputs, strict=True))).values())
        self.inside -= 1
        return outputs


def test_a_program_made_for_one_thread_is_run_by_one_at_a_time(audio: np.ndarray) -> None:
    watched: list[Watched] = []

    def watch(runner: Runner) -> Runner:
        watched.append(Watched(runner))
        return watched[-1]

    transcriber = Transcriber(default_bundle(), ONE_THREAD, wrap_runner=watch)
    transcriber.transcribe(audio, replace(CHUNKED, workers=4))

    assert {runner.most for runner in watched if runner.spec.name != "prefill_64"} <= {0, 1}
    assert any(runner.most == 1 for runner in watched)


def test_few_chunks_are_held(transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the duration: chunks are submitted as workers finish."""
    alive, most = 0, 0

    class Counted(ChunkMel):
        def __init__(self, mel: MelWindows, chunk: Chunk, n_frames: int) -> None:
            nonlocal alive, most
            super().__init__(mel, chunk, n_frames)
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    monkeypatch.setattr(speech_pipeline, "ChunkMel", Counted)
    transcriber.transcribe(with_gaps(RECORDINGS[:4] * 2, 3), replace(CHUNKED, workers=2))

    assert alive == 0
    assert 2 <= most <= 6  # of 8: those at work, those waiting, the one being taken


class Meeting(Runner):
    """A program that, on one of its calls, is left only after another has come in."""

    def __init__(self, inner: Runner, call: int, barrier: threading.Barrier) -> None:
        super().__init__(inner.spec)
        self.inner, self.call, self.barrier = inner, call, barrier
        self.free_axes = inner.free_axes

    def _run(self, inputs: list[Array]) -> list[Array]:
        if self.call == 0:
            self.barrier.wait(timeout=30)
        self.call -= 1
        return list(self.inner._run(inputs))


def test_the_next_chunk_is_encoded_while_one_is_decoded(
    audio: np.ndarray, one_worker: Transcript
) -> None:
    barrier = threading.Barrier(2)

    def meet(runner: Runner) -> Runner:
        calls = {"encoder": 1, "step": 0}  # of the second chunk, and of the first
        name = runner.spec.name
        return Meeting(runner, calls[name], barrier) if name in calls else runner

    transcriber = Transcriber(default_bundle(), ONE_THREAD, wrap_runner=meet)

    assert transcriber.transcribe(audio, CHUNKED) == one_worker


def test_the_text_before_a_failure_is_kept(
    transcriber: Transcriber,
    audio: np.ndarray,
    one_worker: Transcript,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = Engine.encode
    calls = iter(range(100))

    def fail_in_the_end(self: Engine, mel: np.ndarray) -> np.ndarray:
        if next(calls) == 4:
            raise RuntimeError("the device is gone")
        return encode(self, mel)

    monkeypatch.setattr(Engine, "encode", fail_in_the_end)

    with pytest.raises(IncompleteError, match="stopped at") as caught:
        transcriber.transcribe(audio, CHUNKED)

    assert caught.value.why == "RuntimeError: the device is gone"
    assert caught.value.transcript.segments == one_worker.segments[:4]


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_audio_before_a_failure_is_kept(
    transcriber: Transcriber,
    audio: np.ndarray,
    one_worker: Transcript,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
) -> None:
    """Chunks are found ahead, also before the spectrogram is open; those are decoded still."""

    def late(*arguments: Any, **options: Any) -> MelWindows:
        time.sleep(seconds)
        return MelWindows(*arguments, **options)

    monkeypatch.setattr(transcriber_module, "MelWindows", late)

    def broken_off(*arguments: object, **options: object) -> Iterator[Span]:
        yield from islice(cut_chunks(*arguments, **options), 3)
        raise AudioError("the sound broke off")

    monkeypatch.setattr(speech_pipeline, "cut_chunks", broken_off)

    with pytest.raises(IncompleteError) as caught:
        transcriber.transcribe(audio, CHUNKED)

    assert caught.value.why == "the sound broke off"
    assert caught.value.transcript.segments == one_worker.segments[:3]


@pytest.mark.parametrize("workers", [1, 3])
def test_what_a_chunk_decoded_before_it_failed_is_kept(
    workers: int, short_windows: Transcriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    audio, options = with_gaps(RECORDINGS[:2], 1), replace(LITTLE, workers=workers)
    whole = short_windows.transcribe(audio, options)
    seeks = sorted({segment.seek for segment in whole.segments})
    middle = len(seeks) * 3 // 4  # of the second span of speech, which is one chunk
    on_window(middle, fail, monkeypatch)

    with pytest.raises(IncompleteError) as caught:
        short_windows.transcribe(audio, options)

    assert caught.value.why == "RuntimeError: the device is gone"
    before = tuple(s for s in whole.segments if s.seek < seeks[middle])
    assert caught.value.transcript.segments == before


@pytest.mark.parametrize("workers", [1, 3])
def test_ctrl_c_ends_a_long_chunk_and_keeps_its_text(
    workers: int, short_windows: Transcriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    audio, options = with_gaps(RECORDINGS[:2], 1), replace(LITTLE, workers=workers)
    whole = short_windows.transcribe(audio, options)
    on_window(5, interrupt, monkeypatch)

    with pytest.raises(Interrupted) as caught:
        short_windows.transcribe(audio, options)

    segments = caught.value.transcript.segments
    assert 0 < len(segments) < len(whole.segments)
    assert segments == whole.segments[: len(segments)]
    assert not threads()


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_keeps_every_chunk_that_was_at_work(
    workers: int,
    transcriber: Transcriber,
    audio: np.ndarray,
    one_worker: Transcript,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_window(3, interrupt, monkeypatch)

    with pytest.raises(Interrupted) as caught:
        transcriber.transcribe(audio, replace(CHUNKED, workers=workers))

    segments = caught.value.transcript.segments
    assert len(segments) >= 4
    assert segments == one_worker.segments[: len(segments)]
    assert not threads()


def on_window(number: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Act before a window is decoded, counted from 0."""
    decode, windows = session.Session.decode_window, count()

    def decode_window(*arguments: Any) -> Any:
        if next(windows) == number:
            act()
        return decode(*arguments)

    monkeypatch.setattr(session.Session, "decode_window", decode_window)


def fail() -> None:
    raise RuntimeError("the device is gone")


def interrupt() -> None:
    """Ctrl-C, which the main thread hears."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith(("encoder", "decoder"))]


def test_a_failure_in_a_worker_is_not_swallowed(
    transcriber: Transcriber, audio: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_window(0, fail, monkeypatch)

    with pytest.raises(RuntimeError, match="the device is gone"):
        transcriber.transcribe(audio, CHUNKED)
    assert not threads()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"vad": VadOptions(), "clip_timestamps": (0.0, 1.0)}, "`clip_timestamps` and `vad`"),
        ({"vad": VadOptions(), "workers": 0}, "`workers` is 0"),
    ],
)
def test_options_that_contradict_each_other_are_rejected(wrong: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TranscribeOptions(**wrong)


def test_audio_that_can_be_read_only_once_is_rejected(transcriber: Transcriber) -> None:
    with RECORDINGS[0].path.open("rb") as file, pytest.raises(UsageError, match="standard input"):
        transcriber.transcribe(file, CHUNKED)


def test_injected_draws_are_for_one_worker(transcriber: Transcriber, audio: np.ndarray) -> None:
    with pytest.raises(UsageError, match="one worker"):
        transcriber.transcribe(audio, replace(CHUNKED, workers=2), sampler=lambda rows: [0])


# A chunk of several parts of the audio: its spectrogram, and times in the audio.


# In the chunk: 1 to 5 s, 5 to 7 s and 7 to 10 s.
CHUNK = Chunk((Span(100, 500), Span(2500, 2700), Span(6000, 6300)), pad=30)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ((1.3, 4.7), (1.3, 4.7)),
        ((5.3, 6.7), (25.3, 26.7)),
        ((7.3, 9.7), (60.3, 62.7)),
        ((2.0, 8.0), (2.0, 61.0)),  # of several parts
        ((1.3, 5.0), (1.3, 5.0)),  # at the border: with the part before
        ((5.0, 6.7), (25.0, 26.7)),  # at the border: with the part after
        ((1.3, 5.2), (1.3, 5.2)),  # in the silence after the border: with the part before
        ((4.8, 6.7), (24.8, 26.7)),  # in the silence before the border: with the part after
        ((9.0, 10.5), (62.0, 63.5)),  # after the end
    ],
)
def test_a_text_has_the_times_of_the_part_that_holds_it(
    text: tuple[float, float], expected: tuple[float, float]
) -> None:
    assert CHUNK.times(*text) == pytest.approx(expected)


def test_a_text_within_the_silence_between_two_parts_does_not_end_before_it_begins() -> None:
    assert CHUNK.times(4.9, 4.95) == pytest.approx((4.9, 4.95))
    assert CHUNK.times(4.9, 5.1) == pytest.approx((4.9, 25.1))


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 400)), min_size=1, max_size=6),
    st.integers(0, 100),
    st.lists(st.integers(0, 2500), min_size=2, max_size=12),
)
def test_times_in_the_audio_keep_their_order(
    steps: list[tuple[int, int]], pad: int, frames: list[int]
) -> None:
    parts, at = [], 0
    for silence, length in steps:
        parts.append(Span(at + silence, at + silence + length))
        at += silence + length
    chunk = Chunk(tuple(parts), pad)
    times = sorted(chunk.start / 100 + frame / 100 for frame in frames)

    texts = [chunk.times(*pair) for pair in zip(times[::2], times[1::2], strict=False)]

    in_order = [time for text in texts for time in text]
    assert all(before <= after + 1e-9 for before, after in pairwise(in_order))


def test_segments_words_and_truncated_windows_are_at_their_times_in_the_audio() -> None:
    words = (Word(" one", 1.5, 2.0, 0.5), Word(" two", 5.5, 6.0, 0.5))
    segment = Segment(1.5, 6.0, " one two", seek=100, words=words)
    later = Segment(7.5, 8.0, " three", seek=700)

    found = CHUNK.in_audio(Transcript("one two three", (segment, later), "en", 90.0, (7.0,)))

    assert [(s.start, s.end, s.seek) for s in found.segments] == [
        (1.5, 26.0, 100),
        (60.5, 61.0, 6000),
    ]
    assert [(w.start, w.end) for w in found.segments[0].words or ()] == [(1.5, 2.0), (25.5, 26.0)]
    assert found.truncated == (60.0,)
    assert found.duration_s == 90.0


def test_the_spectrogram_of_a_chunk_is_that_of_its_parts_and_silence() -> None:
    audio = np.random.default_rng(0).standard_normal(16_000 * 9).astype(np.float32) * 0.1
    all_frames, _ = MelWindows(audio, 80, 1000).window(0)
    chunk = Chunk((Span(50, 180), Span(400, 470), Span(880, 930)))  # ends 0.3 s after the audio

    found = ChunkMel(MelWindows(audio, 80, 1000), chunk, 1000)

    assert found.frames.shape == (80, 1000)
    parts = [all_frames[:, 50:180], all_frames[:, 400:470], all_frames[:, 880:900]]
    np.testing.assert_allclose(found.frames[:, :220], np.concatenate(parts, axis=1), atol=1e-6)
    assert not found.frames[:, 220:].any()
    later, n_frames = found.window(50 + 200)
    assert n_frames == 20
    assert np.array_equal(later[:, :20], found.frames[:, 200:220])
    assert not later[:, 20:].any()
