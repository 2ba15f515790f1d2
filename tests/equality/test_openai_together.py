"""Files and chunks of speech that are decoded together have openai-whisper's transcripts, token for token.

With one thread, a bundle with `step_B` decodes several texts in each run of that program. Chunks of speech
are encoded by another thread at the same time. openai-whisper transcribes one text at a time.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from threading import current_thread
from typing import Any

import pytest
import torch
import whisper
import whisper.audio

from whisperport.apps.bench.timed import Clock
from whisperport.program.bundle import Bundle
from whisperport.program.program_kind import kind_of
from whisperport.runtime import DecodeOptions
from whisperport.speech.audio import FRAMES_PER_SECOND, VadOptions
from whisperport.speech.text import Segment
from whisperport.targets import RunOptions, get_target
from whisperport.targets.target_options import with_target
from whisperport.transcription import (
    TranscribeOptions,
    Transcriber,
    Transcript,
    speech_pipeline,
    transcribe_files,
)
from whisperport.transcription.speech_pipeline import Chunk, ChunkMel

from ..embedded import default_bundle
from ..extent import core_or_all
from .conftest import ALL
from .test_openai_transcribe import (
    CASES,
    GAPS,
    RECORDINGS,
    SPECIAL,
    Case,
    Samples,
    audio,
    check_equal,
    segments_of,
)

WORDS = "words, not conditioned on previous text"
TOGETHER = {
    **{name: CASES[name] for name in ("greedy", "without timestamps", "words", WORDS)},
    # Each beam needs a row of the batch.
    "beam 2": Case(
        TranscribeOptions(temperatures=(0.0,), decode=DecodeOptions(beam_size=2)),
        {"temperature": 0.0, "beam_size": 2},
    ),
}
ROWS = 8  # of `step_B`
FILES = core_or_all(list(RECORDINGS)[: ROWS + 2], list(RECORDINGS))  # more than rows
# Each recording of the audio with gaps is a chunk of its own.
SHORT = VadOptions(max_silence_s=0.5)
PACKED = VadOptions(pack=True)

Original = Callable[..., dict[str, Any]]


class Threads(Clock):
    """The threads in which each program of a bundle runs, and how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, set[str]] = {}

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        self.names.setdefault(name, set()).add(current_thread().name)
        with super().timing(name):
            yield

    def reset(self) -> None:
        super().reset()
        self.names = {}


@pytest.fixture(scope="session")
def threads() -> Threads:
    return Threads()


@pytest.fixture(scope="session", params=core_or_all(["embedded"], ["embedded", *ALL]))
def together(
    request: pytest.FixtureRequest, exported: Callable[..., Bundle], threads: Threads
) -> Transcriber:
    """The embedded bundle; in test-all, also the embedded model with `step_B` for each target."""
    run = RunOptions(threads=1, short_windows=False)
    if request.param == "embedded":
        bundle = Bundle.open(default_bundle())
    else:
        spec = get_target(request.param).spec
        bundle = exported(request.param, "default", batch=ROWS)
        run = replace(run, options=with_target(spec.runs.emulation, request.param))
    return Transcriber(bundle, run, wrap_runner=threads.wrap_runner)


@pytest.fixture(scope="module")
def originals(openai_model: whisper.Whisper) -> Original:
    """Return the result of openai-whisper by the names of audio and case; once for all targets."""

    @cache
    def original(name: str, case: str, *clip: float) -> dict[str, Any]:
        """Transcribe the audio, or only its part from the first to the second number of seconds."""
        found: dict[str, Any] = openai_model.transcribe(
            audio(name), fp16=False, clip_timestamps=list(clip), **TOGETHER[case].theirs
        )
        return found

    return original


@pytest.mark.parametrize(
    "case", core_or_all(["greedy"], ["greedy", "without timestamps", "beam 2", "words"])
)
def test_files_decoded_together_are_openai_whispers(
    case: str,
    together: Transcriber,
    threads: Threads,
    originals: Original,
) -> None:
    threads.reset()

    found = list(
        transcribe_files([RECORDINGS[name] for name in FILES], together, TOGETHER[case].ours)
    )

    check_batch_was_used(threads, TOGETHER[case].ours.decode.beam_size or 1, found)
    for transcript, name in zip(found, FILES, strict=True):
        assert isinstance(transcript, Transcript)
        check_equal(transcript, originals(name, case))


@pytest.mark.parametrize("clip", core_or_all([GAPS], [GAPS, "many windows", "19-long.flac"]))
@pytest.mark.parametrize("case", core_or_all(["greedy"], ["greedy", "beam 2", WORDS]))
def test_chunks_decoded_together_are_openai_whispers_clips(
    clip: str,
    case: str,
    together: Transcriber,
    threads: Threads,
    originals: Original,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """openai-whisper transcribes each chunk as the only clip of the audio, so that no text precedes it."""
    samples, options = audio(clip), replace(TOGETHER[case].ours, vad=SHORT)
    n_frames = len(samples) // whisper.audio.HOP_LENGTH  # it does not end if a clip ends later
    chunks = recorded_chunks(monkeypatch)
    threads.reset()

    found = together.transcribe(samples, options)

    check_batch_was_used(threads, options.decode.beam_size or 1, [found])
    assert threads.names["encoder"].isdisjoint(threads.names[batch_program(threads)])
    clips = [(chunk.start, min(chunk.parts[-1].end, n_frames)) for chunk in chunks]
    expected = [
        originals(clip, case, start / FRAMES_PER_SECOND, end / FRAMES_PER_SECOND)
        for start, end in clips
    ]
    assert len(expected) > 2
    check_equal(found, joined(expected))


@pytest.mark.parametrize("clip", core_or_all([GAPS], [GAPS, "many windows", "19-long.flac"]))
def test_packed_chunks_are_openai_whispers_with_the_same_spectrogram(
    clip: str,
    together: Transcriber,
    openai_model: whisper.Whisper,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """openai-whisper transcribes the parts of each chunk, joined in its own spectrogram of the audio."""
    samples, options = audio(clip), replace(TOGETHER["greedy"].ours, vad=PACKED)
    chunks = recorded_chunks(monkeypatch)

    found = together.transcribe(samples, options)

    expected: list[tuple[Any, ...]] = []
    for chunk in chunks:
        mel = spectrogram_of_parts(samples, chunk)
        module = sys.modules["whisper.transcribe"]  # `whisper.transcribe` is its function
        monkeypatch.setattr(module, "log_mel_spectrogram", lambda *_, mel=mel, **__: mel)
        theirs = openai_model.transcribe(samples, fp16=False, **TOGETHER["greedy"].theirs)
        expected += segments_of(chunk.in_audio(transcript_of(theirs, chunk)))
    assert segments_of(found) == expected
    assert any(len(chunk.parts) > 1 for chunk in chunks)


def recorded_chunks(monkeypatch: pytest.MonkeyPatch) -> list[Chunk]:
    """Return a list to which every chunk that is transcribed later is appended."""
    chunks: list[Chunk] = []

    class Recorded(ChunkMel):
        def __init__(self, mel: Any, chunk: Chunk, n_frames: int) -> None:
            chunks.append(chunk)
            super().__init__(mel, chunk, n_frames)

    monkeypatch.setattr(speech_pipeline, "ChunkMel", Recorded)
    return chunks


def batch_program(threads: Threads) -> str:
    """Return the name of the program `step_B` that ran."""
    (name,) = (name for name in threads.calls if kind_of(name).is_batch)
    return name


def check_batch_was_used(threads: Threads, beams: int, found: Sequence[Any]) -> None:
    """Check that `step_B` decoded most tokens: singly, each token of each beam is a run of `step`."""
    tokens = beams * sum(len(segment.tokens) for one in found for segment in one.segments)
    singly = len(threads.calls.get("step", []))
    assert len(threads.calls[batch_program(threads)]) + singly < 0.75 * tokens


def joined(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the results of consecutive clips of openai-whisper."""
    texts = (SPECIAL.sub("", result["text"]).strip() for result in results)
    return {
        "text": " ".join(text for text in texts if text),
        "segments": [segment for result in results for segment in result["segments"]],
        "language": results[0]["language"],
    }


def spectrogram_of_parts(samples: Samples, chunk: Chunk) -> torch.Tensor:
    """Return openai-whisper's spectrogram of a chunk's parts and, as in its `transcribe`, 30 s after it."""
    n_frames = len(samples) // whisper.audio.HOP_LENGTH
    mel = whisper.log_mel_spectrogram(samples, padding=whisper.audio.N_SAMPLES)
    parts = [mel[:, part.start : min(part.end, n_frames)] for part in chunk.parts]
    return torch.cat([*parts, torch.zeros(len(mel), whisper.audio.N_FRAMES)], dim=1)


def transcript_of(result: dict[str, Any], chunk: Chunk) -> Transcript:
    """Return a result of openai-whisper for a chunk, with the times that a chunk has."""
    segments = [
        Segment(
            start=s["start"] + chunk.start / FRAMES_PER_SECOND,
            end=s["end"] + chunk.start / FRAMES_PER_SECOND,
            text=s["text"],
            tokens=tuple(s["tokens"]),
            seek=s["seek"] + chunk.start,
        )
        for s in result["segments"]
    ]
    return Transcript(result["text"], tuple(segments), result["language"], 0.0, ())
