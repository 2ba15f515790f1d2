"""Chunks hold all speech, fit a window, and end at silences."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.speech.audio import Span, cut_chunks, fill_windows


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
