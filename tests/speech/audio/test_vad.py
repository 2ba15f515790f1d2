"""Where somebody speaks, and the chunks that are cut there."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.errors import UsageError
from whisperport.speech.audio import (
    HOP_LENGTH,
    AudioStream,
    Span,
    SpeechTurns,
    VadOptions,
    cut_chunks,
    fill_windows,
    load_audio,
    speech_spans,
)
from whisperport.speech.audio.vad import BLOCK, HOP, spans_above, speech_probabilities
from whisperport.verification.clips import ShippedAudio, shipped_audio

# Where somebody speaks: Silero's probabilities, and the spans made of them.

SECOND = 16_000
SPOKEN = [r for r in shipped_audio() if r.text]
EXACT = VadOptions(min_speech_s=0, min_silence_s=0, pad_s=0)


def spans(samples: np.ndarray, options: VadOptions | None = None) -> list[Span]:
    with AudioStream(samples, look_back_s=0) as stream:
        return list(speech_spans(stream, options or VadOptions()))


@pytest.mark.parametrize("recording", SPOKEN, ids=lambda r: r.path.name)
def test_speech_is_found_in_every_audio_file_and_only_within_it(recording: ShippedAudio) -> None:
    samples = load_audio(recording.path)
    silence = np.zeros(2 * SECOND, np.float32)

    found = spans(np.concatenate([silence, samples, silence]))

    assert found
    assert found[0].start >= 190
    assert found[-1].end <= 210 + samples.size // 160


def test_probabilities_are_those_of_silero_s_own_network() -> None:
    """The expected values are of silero-vad 6.2.3, whose convolutions the package's network rewrites."""
    with AudioStream(SPOKEN[0].path, look_back_s=0) as stream:
        found = list(speech_probabilities(stream))

    assert len(found) == 149
    expected = {0: 0.00167, 5: 0.00596, 10: 0.00505, 20: 0.98226, 40: 1.0, 60: 0.07561, 148: 0.0064}
    # Five digits, and the difference of both networks, at most 2.3e-5 in 10 minutes of speech.
    assert {i: found[i] for i in expected} == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    "samples",
    [
        np.zeros(10 * SECOND, np.float32),
        0.05 * np.random.default_rng(0).standard_normal(10 * SECOND).astype(np.float32),
        0.3 * np.sin(np.arange(10 * SECOND, dtype=np.float32) * 0.17),
    ],
    ids=["silence", "noise", "a tone"],
)
def test_no_speech_is_found_where_there_is_none(samples: np.ndarray) -> None:
    assert spans(samples) == []


def test_probabilities_do_not_depend_on_where_the_blocks_are_cut() -> None:
    """State and context cross from one call of the network to the next."""
    samples = load_audio(SPOKEN[0].path)
    long = np.concatenate([samples, samples])[: 2 * BLOCK * HOP + 100]

    with AudioStream(long, look_back_s=0) as stream:
        whole = list(speech_probabilities(stream))
    with AudioStream(long[: BLOCK * HOP], look_back_s=0) as stream:
        first = list(speech_probabilities(stream))

    assert len(whole) == 2 * BLOCK + 1
    assert whole[:BLOCK] == pytest.approx(first, abs=1e-6)
    # A network that lost its state at the block would detect the start of the second clip at another time.
    with AudioStream(long[BLOCK * HOP :], look_back_s=0) as stream:
        anew = list(speech_probabilities(stream))
    assert np.abs(np.array(anew[:10]) - whole[BLOCK : BLOCK + 10]).max() > 1e-3


def test_the_audio_is_not_held() -> None:
    """Spans of the first minute come before the second is read."""
    minute = np.concatenate([load_audio(r.path) for r in SPOKEN])[: 60 * SECOND]
    read = 0

    class Counted(AudioStream):
        def read(self, start: int, n_samples: int) -> np.ndarray:
            nonlocal read
            read = max(read, start + n_samples)
            return super().read(start, n_samples)

    with Counted(np.concatenate([minute] * 3), look_back_s=0) as stream:
        first = next(speech_spans(stream, VadOptions()))

        assert read < (first.end + 2 * BLOCK * 4) * 160
        assert stream._kept.size <= 3 * minute.size  # an array source comes in one piece


def probabilities(pattern: str) -> Iterator[float]:
    """`#` speech, `-` in between, `.` silence; one character for 32 ms."""
    return iter([{"#": 0.9, "-": 0.4, ".": 0.1}[letter] for letter in pattern])


@pytest.mark.parametrize(
    ("pattern", "pause_s", "speech_s", "expected"),
    [
        ("", 0.0, 0.0, []),
        ("....", 0.0, 0.0, []),
        ("####", 0.0, 0.0, [(0, 13)]),
        (".##.##.", 0.0, 0.0, [(3, 10), (12, 20)]),
        (".##.##.", 0.064, 0.0, [(3, 20)]),
        (".##..##.", 0.064, 0.0, [(3, 10), (16, 23)]),
        (".##--##.", 0.0, 0.0, [(3, 23)]),  # unsure is no silence
        ("--##..", 0.0, 0.0, [(6, 13)]),  # nor speech
        ("#..####", 0.0, 0.064, [(9, 23)]),  # too short
    ],
)
def test_spans_begin_and_end_with_speech(
    pattern: str, pause_s: float, speech_s: float, expected: list[tuple[int, int]]
) -> None:
    options = VadOptions(min_silence_s=pause_s, min_speech_s=speech_s)

    found = list(spans_above(probabilities(pattern), options))

    assert [(span.start, span.end) for span in found] == expected


@given(st.text("#-.", max_size=200), st.floats(0, 1), st.floats(0, 1))
def test_spans_rise_and_hold_all_long_speech(pattern: str, pause_s: float, speech_s: float) -> None:
    options = VadOptions(min_silence_s=pause_s, min_speech_s=speech_s)

    found = list(spans_above(probabilities(pattern), options))

    assert all(span.start < span.end for span in found)
    assert all(a.end < b.start + 1 for a, b in pairwise(found))
    if speech_s == 0:
        for i, letter in enumerate(pattern):
            held = any(s.start <= i * 3.2 + 0.9 and s.end >= (i + 1) * 3.2 for s in found)
            assert held or letter != "#"


@pytest.mark.parametrize(
    "wrong", [{"threshold": 0.1}, {"threshold": 1.0}, {"min_silence_s": -1.0}, {"pad_s": 11.0}]
)
def test_a_value_out_of_range_is_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        VadOptions(**wrong)


# Speech that is found while audio arrives is the speech that is found in the complete audio.


@pytest.mark.parametrize("size", [160, 5_000])
def test_turns_are_the_spans_of_the_audio(size: int) -> None:
    clips = [load_audio(clip.path) for clip in shipped_audio()[:2]]
    gap = np.zeros(24_000, np.float32)
    audio = np.concatenate([gap, clips[0], gap, clips[1]])
    options, integers = VadOptions(), np.round(audio * 32768).astype(np.int16)
    spans = list(speech_spans(AudioStream(audio), options))

    turns = SpeechTurns(options)
    found = [turns.push(integers[at : at + size]) for at in range(0, audio.size, size)]
    edges = [turn for turns in [*found, turns.end()] for turn in turns]

    assert len(spans) > 1
    assert [turn.begins for turn in edges] == [True, False] * len(spans)
    starts = [turn.at for turn in edges if turn.begins]
    ends = [turn.at for turn in edges if not turn.begins]
    lags = [turn.known_at - turn.at for turn in edges[:-1]]
    assert [at // HOP_LENGTH for at in starts] == [span.start for span in spans]
    assert ends == pytest.approx([span.end * HOP_LENGTH for span in spans], abs=HOP)
    assert all(1_600 <= lag <= 4_800 + HOP for lag in lags)


def test_a_beginning_is_known_before_the_end() -> None:
    audio = np.round(load_audio(shipped_audio()[0].path) * 32768).astype(np.int16)
    turns = SpeechTurns(VadOptions())

    found = turns.push(audio[: audio.size // 2])

    assert [turn.begins for turn in found] == [True]


# Chunks hold all speech, fit a window, and end at silences.


def chunks(speech: list[tuple[int, int]], limit: int, **silences: int) -> list[tuple[int, int]]:
    found = cut_chunks([Span(*span) for span in speech], limit, **silences)
    return [(chunk.start, chunk.end) for chunk in found]


@pytest.mark.parametrize(
    ("speech", "sizes", "expected"),
    [
        ([(10, 20), (30, 40), (90, 100)], {"limit": 100}, [(10, 100)]),
        (
            [(0, 10), (40, 60), (75, 80), (85, 95), (97, 120)],
            {"limit": 100},
            [(0, 60), (75, 120)],
        ),
        ([(0, 10), (15, 20), (60, 160)], {"limit": 100}, [(0, 20), (60, 160)]),
        ([(0, 10), (20, 500), (510, 520)], {"limit": 100}, [(0, 10), (20, 500), (510, 520)]),
        ([(50, 100), (110, 200)], {"limit": 120, "pad": 20}, [(30, 105), (105, 215)]),
        ([(5, 50)], {"limit": 100, "pad": 20}, [(0, 70)]),
        (
            [(0, 10), (20, 30), (60, 70), (80, 90)],
            {"limit": 100, "pad": 5, "longest_silence": 20},
            [(0, 35), (55, 95)],
        ),
        ([], {"limit": 100, "pad": 20}, []),
    ],
    ids=[
        "speech that fits one window is one chunk",
        "it ends at the longest silence of its second half",
        "without silence there it ends before what does not fit",
        "speech longer than a window is a chunk of its own",
        "silence around a chunk is shared with its neighbour",
        "before the first chunk there is no audio to take",
        "a long silence ends a chunk that has room",
        "no speech is no chunk",
    ],
)
def test_speech_is_cut_at_silences(speech, sizes, expected) -> None:
    assert chunks(speech, **sizes) == expected


steps = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 150)), max_size=40)


@given(steps, st.integers(20, 200), st.integers(0, 60), st.integers(0, 300))
def test_chunks_hold_all_speech_once_and_fit(
    steps: list[tuple[int, int]], limit: int, pad: int, longest: int
) -> None:
    speech, at = [], 0
    for silence, length in steps:
        speech.append((at + silence, at + silence + length))
        at += silence + length

    found = chunks(speech, limit, pad=pad, longest_silence=longest)

    assert all(0 <= start < end for start, end in found)
    assert all(a[1] <= b[0] for a, b in pairwise(found))
    for start, end in speech:
        assert sum(a <= start and end <= b for a, b in found) == 1
    for start, end in found:
        inside = [span for span in speech if start <= span[0] and span[1] <= end]
        assert end - start <= limit or len(inside) == 1
        assert all(b[0] - a[1] <= longest for a, b in pairwise(inside))


@given(st.integers(2, 50))
def test_chunks_come_before_all_speech_was_found(count: int) -> None:
    """No more than a window's spans are held."""
    taken = 0

    def speech():
        nonlocal taken
        for i in range(1000):
            taken += 1
            yield Span(i * 20, i * 20 + 10)

    found = cut_chunks(speech(), 100)
    for _ in range(count):
        next(found)

    assert taken <= 6 * (count + 1)


@pytest.mark.parametrize("limit", [500, 1000, 1500, 3000])
def test_windows_of_any_length_are_respected(limit: int) -> None:
    speech = [(i * 400, i * 400 + 350) for i in range(20)]

    assert all(end - start <= limit for start, end in chunks(speech, limit, pad=30))


def test_a_window_is_filled_with_the_chunks_that_fit_without_the_silence_between_them() -> None:
    chunks = [Span(0, 40), Span(500, 550), Span(900, 920), Span(930, 1000)]

    assert list(fill_windows(chunks, 100)) == [tuple(chunks[:2]), tuple(chunks[2:])]


def test_a_chunk_longer_than_a_window_is_alone() -> None:
    chunks = [Span(0, 10), Span(20, 500), Span(510, 520)]

    assert list(fill_windows(chunks, 100)) == [(chunk,) for chunk in chunks]


@given(steps, st.integers(20, 200))
def test_filled_windows_hold_all_chunks_in_order_and_no_next_one_would_fit(
    steps: list[tuple[int, int]], limit: int
) -> None:
    chunks, at = [], 0
    for silence, length in steps:
        chunks.append(Span(at + silence, at + silence + length))
        at += silence + length

    groups = list(fill_windows(chunks, limit))

    assert [chunk for group in groups for chunk in group] == chunks
    lengths = [sum(chunk.n_frames for chunk in group) for group in groups]
    assert all(n <= limit or len(group) == 1 for n, group in zip(lengths, groups, strict=True))
    assert all(n + after[0].n_frames > limit for n, after in zip(lengths, groups[1:], strict=False))
