"""Bundles of short windows: exported, verified against a reference of the same window, transcribing."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.errors import UsageError
from whisperport.program.bundle import Bundle
from whisperport.program.window import DEFAULT_PADDING, Window, WindowOptions
from whisperport.runtime import DecodeOptions, compression_ratio
from whisperport.speech.audio import load_audio
from whisperport.speech.text import Segment
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber, Transcript
from whisperport.verification import LEVELS, Report, TextErrors, text_errors
from whisperport.verification.bundle_check import verify
from whisperport.verification.clips import clips_of, shipped_audio
from whisperport.verification.reference import Reference

from ...extent import core_or_all

ONE_THREAD = RunOptions(threads=1)
TARGETS = core_or_all(["onnxruntime"], ["onnxruntime", "xnnpack"])
ENGLISH = TranscribeOptions(decode=DecodeOptions(language="en"), run=ONE_THREAD)

# Short ones repeat one behaviour; of these, `make test` has noise, hiss and no speech.
FILES = core_or_all(
    [f for f in shipped_audio() if f.path.name[:2] in ("14", "15", "17", "19")],
    list(shipped_audio()),
)

# Of all shipped recordings in windows of 5 s. Measured: 2 of 314 words (docs/explanation/short-windows.md);
# other processors round otherwise, and may hear a few words more wrong.
MAX_WER_5_S = 0.03


@pytest.fixture(scope="module")
def short(
    exported: Callable[..., Bundle],
) -> Callable[[str], Bundle]:
    """`short("xnnpack")`: a random model of 2 s windows and one layer, with windows of 1 s."""
    window = WindowOptions(seconds=1.0, audio_s=1.0)
    return lambda target: exported(target, "one layer", window=window)


@pytest.fixture(scope="module")
def five_seconds(exported: Callable[..., Bundle]) -> Transcriber:
    """The embedded model in windows of 5 s."""
    window = WindowOptions(seconds=5.0)
    return Transcriber(exported("onnxruntime", "default", window=window), ONE_THREAD)


def windows(transcript: Transcript) -> list[list[Segment]]:
    """The segments of each window that has text."""
    return [list(group) for _, group in groupby(transcript.segments, lambda s: s.seek)]


@pytest.mark.parametrize("target", TARGETS)
def test_a_short_bundle_is_verified_and_says_its_window(
    target: str, short: Callable[[str], Bundle]
) -> None:
    manifest = Bundle.open(short(target).folder).manifest

    report = Report.from_json(manifest.verification)
    assert manifest.verified
    assert {check.level for check in report.checks} == set(LEVELS)
    assert manifest.window == Window(
        positions=50, audio_positions=50, context_positions=100, padding=DEFAULT_PADDING
    )
    assert manifest.dims.n_audio_ctx == 50
    shapes = {t.name: t.shape for t in manifest.program("cross_kv").spec.outputs}
    assert manifest.program("encoder").spec.inputs[0].shape == (1, 80, 100)
    assert (shapes["cross_k_0"], shapes["cross_v_0"]) == ((2, 32, 100), (2, 100, 32))


@pytest.mark.parametrize("target", TARGETS)
def test_a_short_bundle_verifies_again_and_transcribes_what_is_longer(
    target: str, short: Callable[[str], Bundle]
) -> None:
    folder = short(target).folder
    audio = 0.1 * np.random.default_rng(2).standard_normal(3 * 16_000).astype(np.float32)
    greedy = replace(
        ENGLISH, decode=DecodeOptions(language="en", max_tokens=8), temperatures=(0.0,)
    )

    transcript = Transcriber(folder, ONE_THREAD).transcribe(audio, greedy)

    assert verify(folder, run=ONE_THREAD)
    assert transcript.duration_s == pytest.approx(3.0)
    assert all(0 <= s.start <= s.end <= s.seek / 100 + 1 for s in transcript.segments)


def test_the_reference_is_of_the_short_window(short: Callable[[str], Bundle]) -> None:
    reference = Reference.from_arrays(short("onnxruntime").reference())

    assert [clip.samples.size for clip in reference.clips] == [16_000, 16_000]
    assert reference.clips[0].features.shape == (50, 64)


def test_a_window_the_checkpoint_cannot_have_is_rejected_before_any_work(
    tiny_checkpoint: Any, tmp_path: Any
) -> None:
    options = ExportOptions(window=WindowOptions(seconds=10))

    with pytest.raises(UsageError, match="cannot be 10 s"):
        export(tiny_checkpoint, "onnxruntime", tmp_path / "out", options)

    assert list(tmp_path.iterdir()) == []


def test_audio_of_any_length_is_transcribed_in_windows_of_5_s_without_a_loop(
    five_seconds: Transcriber,
) -> None:
    assert five_seconds.bundle.manifest.verified
    errors, longest = TextErrors(), 0.0
    for clip in clips_of(FILES):
        transcript = five_seconds.transcribe(clip.samples, ENGLISH)

        longest = max(longest, transcript.duration_s)
        errors += text_errors(transcript.text, clip.text)
        assert not transcript.truncated, clip.name
        assert re.search(r"\b((?:\S+ ){3}\S+)( \1){2}", transcript.text) is None, clip.name
        for window in windows(transcript):
            text = "".join(segment.text for segment in window)
            assert not text or compression_ratio(text.strip()) <= 2.4, clip.name
        for before, after in pairwise(transcript.segments):
            assert before.start <= after.start, clip.name
    assert longest > 60
    assert errors.rate <= MAX_WER_5_S


def test_segments_and_words_stay_inside_of_their_window(five_seconds: Transcriber) -> None:
    long = next(r for r in shipped_audio() if r.seconds > 60)
    seconds = core_or_all(30, 60)
    samples = load_audio(long.path)[: seconds * 16_000]

    transcript = five_seconds.transcribe(samples, replace(ENGLISH, word_timestamps=True))

    assert len(windows(transcript)) >= seconds / 5 - 1
    for segment in transcript.segments:
        begin = segment.seek / 100
        assert begin <= segment.start <= segment.end <= begin + 5.0 + 1e-6
        assert all(begin <= word.start <= word.end <= begin + 5.0 + 1e-6 for word in segment.words)
    assert sum(len(segment.words) for segment in transcript.segments) > 1.5 * seconds
