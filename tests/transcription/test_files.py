"""Several audio files in one call, their language, and openai-whisper's argument names."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from whisperport.errors import AudioError, NumericalError, UsageError
from whisperport.program.runner import Array, Runner
from whisperport.runtime import DecodeOptions, Decoder, Engine, Thresholds
from whisperport.speech.audio import VadOptions
from whisperport.speech.text import Tokenizer
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber, Transcript, transcribe_files
from whisperport.transcription.session import Session, spoken_language
from whisperport.transcription.transcriber import TranscribeArguments, with_arguments
from whisperport.verification.clips import shipped_audio

from ..embedded import default_bundle
from ..micro import DIMS, GENERATION, tokenizer_json

# Several audio files in one call: the text of each is that of a call of its own.

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


# The language in which a session transcribes an audio file.


class UnreadMel:
    """A spectrogram of which no window may be asked for."""

    duration_s = None

    def window(self, start: int) -> Any:
        raise AssertionError("no window is needed")


@pytest.mark.parametrize(
    ("generation", "language"),
    [
        (replace(GENERATION, language="de"), "de"),
        (replace(GENERATION, languages={}, tasks={}), "en"),
    ],
)
def test_no_window_is_encoded_for_a_language_that_is_known_beforehand(
    generation: Any, language: str
) -> None:
    decoder: Any = SimpleNamespace(engine=SimpleNamespace(generation=generation))

    assert spoken_language(decoder, None, UnreadMel(), 0).code == language


class Counting(Runner):
    """A runner that keeps what it was given."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.spec)
        self.runner, self.given = runner, []

    def _run(self, inputs: Any) -> Any:
        self.given.append([array.copy() for array in inputs])
        return list(self.runner.run(dict(zip(self.names, inputs, strict=True))).values())

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensor in self.spec.inputs]


class Noise:
    """The spectrogram of an audio file of so many frames; silence is -1."""

    def __init__(self, frames: int) -> None:
        self.frames, self.duration_s = frames, frames / 100
        self.whole = np.random.default_rng(0).standard_normal((8, frames)).astype(np.float32)

    def window(self, start: int) -> Any:
        found = np.full((8, 20), -1, np.float32)
        rest = self.whole[:, start : start + 20]
        found[:, : rest.shape[1]] = rest
        return found, rest.shape[1]


@pytest.mark.parametrize(
    ("frames", "runs"),
    [(20, 1), (60, 3), (10, 2)],  # of the last, language and text are read from unequal windows
)
def test_the_window_in_which_the_language_is_detected_is_not_encoded_again(
    micro: Any, eager_runners: Any, frames: int, runs: int
) -> None:
    runners = eager_runners(micro)
    encoder = Counting(runners["encoder"])
    tables = (
        part.numpy()
        for part in (micro.decoder.token_embedding.weight, micro.decoder.positional_embedding)
    )
    engine = Engine(DIMS, GENERATION, {**runners, "encoder": encoder}, *tables)
    decode = DecodeOptions(max_tokens=4, without_timestamps=True)
    options = TranscribeOptions(decode=decode, temperatures=(0.0,))
    tokenizer = Tokenizer.from_json(tokenizer_json(), GENERATION)
    session = Session(engine, tokenizer, options, Noise(frames), None, [(0, None)])

    session.run(Decoder(engine), lambda *_: None)

    assert len(encoder.given) == runs
    windows = [given[0].tobytes() for given in encoder.given]
    assert len(set(windows)) == len(windows)


# openai-whisper's argument names are keyword arguments of `transcribe`.


def test_the_arguments_are_the_fields_of_the_options() -> None:
    parts = (TranscribeOptions, DecodeOptions, Thresholds)
    names = {field.name for part in parts for field in fields(part)}

    assert set(TranscribeArguments.__annotations__) == names - {
        *("decode", "run", "thresholds", "prompt")
    }


def test_arguments_replace_the_values_of_the_options() -> None:
    options = TranscribeOptions(decode=DecodeOptions(language="de", beam_size=2), prefix="a")

    found = with_arguments(
        options,
        {"language": "en", "temperature": 0.2, "logprob_threshold": None, "initial_prompt": None},
    )

    assert found == TranscribeOptions(
        decode=DecodeOptions(language="en", beam_size=2),
        prefix="a",
        temperatures=(0.2,),
        thresholds=Thresholds(logprob_threshold=None),
    )


@pytest.mark.parametrize(("name", "hint"), [("langage", "`language`"), ("qqq", "word_timestamps")])
def test_an_unknown_argument_is_a_usage_error_with_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        with_arguments(None, {name: 1})

    assert hint in raised.value.hint


def test_a_transcriber_accepts_arguments(exported: Any) -> None:
    transcriber = Transcriber(exported("onnxruntime").folder, RunOptions(trust=True))

    found = transcriber.transcribe(
        np.zeros(16_000, np.float32),
        language="de",
        max_tokens=2,
        temperature=0,
        without_timestamps=True,
    )

    assert found.language == "de"
