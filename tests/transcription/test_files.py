"""Several audio files in one call: the text of each is that of a call of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.errors import AudioError, NumericalError, UsageError
from whisperport.program.runner import Array, Runner
from whisperport.runtime import DecodeOptions
from whisperport.speech.audio import VadOptions
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber, Transcript, transcribe_files
from whisperport.verification.clips import shipped_audio

from ..embedded import default_bundle

ONE_THREAD = RunOptions(threads=1)
FILES = [clip.path for clip in shipped_audio() if clip.seconds < 8][:5]
GREEDY = TranscribeOptions(decode=DecodeOptions(language="en"))


class Counter(Runner):
    """A runner that counts its calls."""

    def __init__(self, inner: Runner) -> None:
        super().__init__(inner.spec, inner.run_lock)
        self.inner, self.calls = inner, 0

    def _run(self, inputs: Any) -> Any:
        self.calls += 1
        return self.inner._run(inputs)


@pytest.fixture(scope="module")
def counters() -> dict[str, Counter]:
    return {}


@pytest.fixture(scope="module")
def transcriber(counters: dict[str, Counter]) -> Transcriber:
    def counted(runner: Runner) -> Runner:
        counters[runner.spec.name] = Counter(runner)
        return counters[runner.spec.name]

    return Transcriber(default_bundle(), ONE_THREAD, wrap_runner=counted)


@pytest.fixture(scope="module")
def alone(transcriber: Transcriber) -> list[Transcript]:
    return [transcriber.transcribe(path, GREEDY) for path in FILES]


def check_equal(found: list[Any], expected: list[Transcript]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, Transcript)
        assert [s.tokens for s in one.segments] == [s.tokens for s in other.segments]
        assert (one.text, one.language, one.duration_s) == (
            other.text,
            other.language,
            other.duration_s,
        )
        for segment, wanted in zip(one.segments, other.segments, strict=True):
            assert (segment.start, segment.end) == (wanted.start, wanted.end)
            assert [w.word for w in segment.words or ()] == [w.word for w in wanted.words or ()]
            # Float32 sums in another order; the docstring of `transcribe_files` states this bound.
            assert segment.avg_logprob == pytest.approx(wanted.avg_logprob, abs=1e-4)
            assert segment.no_speech_prob == pytest.approx(wanted.no_speech_prob, abs=1e-4)


def test_files_decoded_together_have_the_transcripts_of_single_calls(
    transcriber: Transcriber, alone: list[Transcript], counters: dict[str, Counter]
) -> None:
    before = counters["step"].calls, counters["step_8"].calls

    found = list(transcribe_files(FILES, transcriber, GREEDY))

    check_equal(found, alone)
    singly, together = counters["step"].calls - before[0], counters["step_8"].calls - before[1]
    n_tokens = sum(len(s.tokens) for one in alone for s in one.segments)
    assert together > 0
    assert singly + together < 0.6 * n_tokens


@pytest.mark.parametrize("batch", [True, False])
def test_files_of_several_workers_have_the_transcripts_of_single_calls(
    transcriber: Transcriber,
    alone: list[Transcript],
    counters: dict[str, Counter],
    batch: bool,
) -> None:
    options = TranscribeOptions(decode=GREEDY.decode, workers=2, batch=batch)
    before = counters["step_8"].calls

    found = list(transcribe_files([*FILES, *FILES], transcriber, options))

    check_equal(found, [*alone, *alone])
    assert (counters["step_8"].calls > before) == batch


def test_one_file_without_chunks_has_no_use_for_workers(transcriber: Transcriber) -> None:
    with pytest.raises(UsageError, match="requires `vad` or several audio files"):
        transcriber.transcribe(FILES[0], TranscribeOptions(workers=2))


def test_beams_and_words_of_files_decoded_together_are_those_of_single_calls(
    transcriber: Transcriber,
) -> None:
    options = TranscribeOptions(
        decode=DecodeOptions(language="en", beam_size=3), word_timestamps=True
    )
    singly = TranscribeOptions(
        decode=DecodeOptions(language="en", beam_size=3), word_timestamps=True, batch=False
    )

    found = list(transcribe_files(FILES[:2], transcriber, options))

    check_equal(found, [transcriber.transcribe(path, singly) for path in FILES[:2]])


def test_without_a_batch_or_with_chunks_of_speech_the_files_follow_each_other(
    transcriber: Transcriber, alone: list[Transcript], counters: dict[str, Counter]
) -> None:
    before = counters["step_8"].calls

    singly = list(
        transcribe_files(
            FILES[:2], transcriber, TranscribeOptions(decode=GREEDY.decode, batch=False)
        )
    )
    chunked = TranscribeOptions(decode=GREEDY.decode, vad=VadOptions())

    assert counters["step_8"].calls == before
    assert singly == alone[:2]
    texts = [one.text for one in transcribe_files(FILES[:2], transcriber, chunked)]  # type: ignore[union-attr]
    assert texts == [transcriber.transcribe(path, chunked).text for path in FILES[:2]]


def test_a_file_that_fails_is_an_error_among_transcripts(
    transcriber: Transcriber, alone: list[Transcript], tmp_path: Path
) -> None:
    (tmp_path / "noise.wav").write_bytes(b"this is no audio")
    files = [FILES[0], tmp_path / "missing.wav", FILES[1], tmp_path / "noise.wav"]

    first, missing, second, damaged = transcribe_files(files, transcriber, GREEDY)

    check_equal([first, second], alone[:2])
    assert isinstance(missing, AudioError)
    assert isinstance(damaged, AudioError)


def test_files_are_read_only_as_far_ahead_as_the_batch_needs(transcriber: Transcriber) -> None:
    read: list[int] = []

    def sources() -> Iterator[Any]:
        for number in range(100):
            read.append(number)
            yield np.zeros(8000, np.float32)

    results = transcribe_files(sources(), transcriber, GREEDY)
    next(results)

    assert len(read) == 16
    results.close()  # type: ignore[attr-defined]
    assert transcriber.turns._running == set()


def test_a_nan_in_one_file_is_its_own_error(
    transcriber: Transcriber, alone: list[Transcript], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder fails for one file; the others are decoded to their ends."""
    encode, silent = transcriber.engine.encode, np.zeros(16_000, np.float32)

    def damaged(mel: Array) -> Array:
        features = encode(mel)
        return features * np.float32(np.nan) if np.ptp(mel[:, :90]) == 0 else features

    monkeypatch.setattr(transcriber.engine, "encode", damaged)

    first, failed, second = transcribe_files([FILES[0], silent, FILES[1]], transcriber, GREEDY)

    check_equal([first, second], alone[:2])
    assert isinstance(failed, NumericalError)
