"""Chunks of speech, each transcribed as a recording of its own, by any number of workers."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from whisperport.audio import (
    AudioStream,
    RecordingMel,
    Span,
    VadOptions,
    cut_chunks,
    load_audio,
    speech_spans,
)
from whisperport.bundle import Bundle
from whisperport.errors import IncompleteError, UsageError
from whisperport.exporting import ExportOptions, export
from whisperport.runner import Array, Runner
from whisperport.runtime import DecodeOptions, Engine
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber, Transcript, default_bundle
from whisperport.transcription.chunked import ChunkMel
from whisperport.verification import word_errors
from whisperport.verification.clips import Clip, Recording, shipped_recordings

SECOND = 16_000
ONE_THREAD = RunOptions(threads=1)
CHUNKED = TranscribeOptions(decode=DecodeOptions(language="en"), vad=VadOptions())
RECORDINGS = [r for r in shipped_recordings() if r.text and r.seconds < 10 and not r.held_out]


@pytest.fixture(scope="module")
def transcriber() -> Transcriber:
    return Transcriber(None, ONE_THREAD)


def with_gaps(recordings: list[Recording], gap_s: float) -> np.ndarray:
    gap = np.zeros(round(gap_s * SECOND), np.float32)
    parts = [piece for r in recordings for piece in (gap, load_audio(r.path))]
    return np.concatenate([*parts, gap])


@pytest.fixture(scope="module")
def sound() -> np.ndarray:
    """Six voices in 95 s, with 12 s of silence between them."""
    return with_gaps(RECORDINGS[:6], 12)


@pytest.fixture(scope="module")
def one_worker(transcriber: Transcriber, sound: np.ndarray) -> Transcript:
    return transcriber.transcribe(sound, CHUNKED)


def test_what_is_said_is_heard_and_where(one_worker: Transcript, sound: np.ndarray) -> None:
    spoken = " ".join(r.text for r in RECORDINGS[:6])
    assert word_errors(one_worker.text, spoken).errors == 0
    assert one_worker.duration_s == sound.size / SECOND

    begin = 12.0
    for recording in RECORDINGS[:6]:
        heard = [s for s in one_worker.segments if begin <= s.start < begin + recording.seconds]
        assert "".join(s.text for s in heard).strip() == recording.text
        assert heard[-1].end <= begin + recording.seconds + 1
        begin += recording.seconds + 12


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_workers_change_nothing(
    workers: int, transcriber: Transcriber, sound: np.ndarray, one_worker: Transcript
) -> None:
    assert transcriber.transcribe(sound, replace(CHUNKED, workers=workers)) == one_worker


def test_workers_draw_the_same_tokens(transcriber: Transcriber, sound: np.ndarray) -> None:
    drawn = replace(CHUNKED, temperatures=(0.8,))

    one, three = (
        transcriber.transcribe(sound, replace(drawn, workers=workers)) for workers in (1, 3)
    )

    assert one == three


def test_workers_of_programs_that_run_one_at_a_time_change_nothing(
    exported: Callable[[str], Bundle], sound: np.ndarray
) -> None:
    """ExecuTorch's methods are not made for several threads; a random model says a lot."""
    options = replace(
        CHUNKED,
        decode=DecodeOptions(language="en", timestamps=False, max_tokens=4),
        temperatures=(0.0,),
    )
    transcriber = Transcriber(exported("xnnpack"), ONE_THREAD)
    sound = sound[: 60 * SECOND]

    one, four = (
        transcriber.transcribe(sound, replace(options, workers=workers)) for workers in (1, 4)
    )

    assert one == four
    assert len(one.segments) >= 3


def test_a_chunk_is_transcribed_as_if_it_were_alone(
    transcriber: Transcriber, sound: np.ndarray, one_worker: Transcript
) -> None:
    """Neither the text before it nor the state it left changes anything."""
    with AudioStream(sound, look_back_s=0) as stream:
        speech = list(speech_spans(stream, VadOptions()))
    chunks = list(cut_chunks(speech, 3000, pad=30, longest_silence=200))
    plain = replace(CHUNKED, vad=None, condition_on_previous_text=False)

    alone = [
        transcriber.transcribe(sound, replace(plain, clips=(chunk.start / 100, chunk.end / 100)))
        for chunk in chunks
    ]

    assert len(chunks) == 6
    assert one_worker.segments == tuple(s for transcript in alone for s in transcript.segments)


def test_speech_after_a_long_silence_is_not_lost(transcriber: Transcriber) -> None:
    """In one window with both, the embedded model ends after the first."""
    recordings = RECORDINGS[:2]

    transcript = transcriber.transcribe(with_gaps(recordings, 20), CHUNKED)

    assert transcript.text == " ".join(r.text for r in recordings)


def test_silence_is_not_transcribed(transcriber: Transcriber) -> None:
    told: list[tuple[float, float | None]] = []

    transcript = transcriber.transcribe(
        np.zeros(40 * SECOND, np.float32), CHUNKED, progress=lambda *at: told.append(at)
    )

    assert (transcript.text, transcript.segments, transcript.duration_s) == ("", (), 40.0)
    assert transcript.language == "en"
    assert told == [(40.0, 40.0)]


def test_progress_moves_in_audio_time(transcriber: Transcriber, sound: np.ndarray) -> None:
    told: list[tuple[float, float | None]] = []

    transcriber.transcribe(sound, replace(CHUNKED, workers=2), progress=lambda *at: told.append(at))

    done = [at for at, _ in told]
    assert done == sorted(done)
    assert len(done) > 3
    assert told[-1] == (sound.size / SECOND, sound.size / SECOND)
    assert {of for _, of in told} == {sound.size / SECOND}


def test_words_have_the_times_of_the_recording(transcriber: Transcriber) -> None:
    sound = with_gaps(RECORDINGS[:2], 20)

    transcript = transcriber.transcribe(sound, replace(CHUNKED, word_timestamps=True))

    words = [word for segment in transcript.segments for word in segment.words]
    second = 40 + RECORDINGS[0].seconds
    assert 20 < words[0].start < 21
    assert any(second < word.start < second + 1 for word in words)
    assert words[-1].end < second + RECORDINGS[1].seconds


def noise(seconds: float) -> np.ndarray:
    samples = 0.1 * np.random.default_rng(0).standard_normal(round(SECOND * seconds))
    return samples.astype(np.float32)


@pytest.fixture
def short_windows(
    micro_checkpoint: object, fake_targets: object, quick_tracing: None, tmp_path: Path
) -> Transcriber:
    """The micro model: a window is 0.2 s, so every span of speech is longer."""
    options = ExportOptions(clips=[Clip("hiss", "", noise(0.2))], run=ONE_THREAD)
    return Transcriber(export(micro_checkpoint, "fake", tmp_path / "bundle", options), ONE_THREAD)


def test_speech_longer_than_a_window_is_read_window_by_window(short_windows: Transcriber) -> None:
    sound = with_gaps(RECORDINGS[:2], 1)
    options = replace(
        CHUNKED,
        decode=DecodeOptions(language="en", timestamps=False, max_tokens=4),
        temperatures=(0.0,),
    )

    one, three = (
        short_windows.transcribe(sound, replace(options, workers=workers)) for workers in (1, 3)
    )

    seeks = {segment.seek for segment in one.segments}
    assert one == three
    assert len(seeks) > 10
    assert min(seeks) > 100
    assert max(seeks) < sound.size // 160 - 100


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


def test_a_program_made_for_one_thread_is_run_by_one_at_a_time(sound: np.ndarray) -> None:
    watched: list[Watched] = []

    def watch(runner: Runner) -> Runner:
        watched.append(Watched(runner))
        return watched[-1]

    transcriber = Transcriber(default_bundle(), ONE_THREAD, around=watch)
    transcriber.transcribe(sound, replace(CHUNKED, workers=4))

    assert {runner.most for runner in watched if runner.spec.name != "prefill_64"} <= {0, 1}
    assert any(runner.most == 1 for runner in watched)


def test_few_chunks_are_held(transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the recording: chunks are taken as workers are done."""
    from whisperport.transcription import chunked

    alive, most = 0, 0

    class Counted(ChunkMel):
        def __init__(self, mel: RecordingMel, chunk: Span) -> None:
            nonlocal alive, most
            super().__init__(mel, chunk)
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    monkeypatch.setattr(chunked, "ChunkMel", Counted)
    transcriber.transcribe(with_gaps(RECORDINGS[:4] * 2, 3), replace(CHUNKED, workers=2))

    assert alive == 0
    assert 2 <= most <= 6  # of 8: those at work, those waiting, the one being taken


def test_what_was_said_before_a_failure_is_kept(
    transcriber: Transcriber,
    sound: np.ndarray,
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

    with pytest.raises(IncompleteError, match="only to") as caught:
        transcriber.transcribe(sound, CHUNKED)

    assert caught.value.why == "RuntimeError: the device is gone"
    assert caught.value.transcript.segments == one_worker.segments[:4]


def test_a_failure_in_a_worker_is_not_swallowed(
    transcriber: Transcriber, sound: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whisperport.transcription import session

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(session, "decode_with_fallback", fail)

    with pytest.raises(RuntimeError, match="the device is gone"):
        transcriber.transcribe(sound, replace(CHUNKED, workers=2))
    assert not [t for t in threading.enumerate() if "ThreadPool" in t.name]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"vad": VadOptions(), "clips": (0.0, 1.0)}, "clips and `vad`"),
        ({"workers": 2}, "needs chunks"),
        ({"vad": VadOptions(), "workers": 0}, "`workers` is 0"),
    ],
)
def test_options_that_contradict_each_other_are_refused(wrong: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TranscribeOptions(**wrong)


def test_sound_that_is_heard_only_once_is_refused(transcriber: Transcriber) -> None:
    with RECORDINGS[0].path.open("rb") as file, pytest.raises(UsageError, match="standard input"):
        transcriber.transcribe(file, CHUNKED)


def test_injected_draws_are_for_one_worker(transcriber: Transcriber, sound: np.ndarray) -> None:
    with pytest.raises(UsageError, match="one worker"):
        transcriber.transcribe(sound, replace(CHUNKED, workers=2), draw=lambda rows: [0])
