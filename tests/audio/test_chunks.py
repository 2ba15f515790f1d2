"""Chunks hold all speech, fit a window, and end at silences."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.audio import Span, cut_chunks, fill_windows


def chunks(speech: list[tuple[int, int]], limit: int, **silences: int) -> list[tuple[int, int]]:
    found = cut_chunks([Span(*span) for span in speech], limit, **silences)
    return [(chunk.start, chunk.end) for chunk in found]


def test_speech_that_fits_one_window_is_one_chunk() -> None:
    assert chunks([(10, 20), (30, 40), (90, 100)], limit=100) == [(10, 100)]


def test_a_chunk_ends_at_the_longest_silence_of_its_second_half() -> None:
    speech = [(0, 10), (40, 60), (75, 80), (85, 95), (97, 120)]

    assert chunks(speech, limit=100) == [(0, 60), (75, 120)]


def test_with_no_silence_in_the_second_half_it_ends_before_what_does_not_fit() -> None:
    assert chunks([(0, 10), (15, 20), (60, 160)], limit=100) == [(0, 20), (60, 160)]


def test_speech_longer_than_a_window_is_a_chunk_of_its_own() -> None:
    assert chunks([(0, 10), (20, 500), (510, 520)], limit=100) == [(0, 10), (20, 500), (510, 520)]


def test_silence_around_a_chunk_is_shared_with_its_neighbour() -> None:
    assert chunks([(50, 100), (110, 200)], limit=120, pad=20) == [(30, 105), (105, 215)]


def test_before_the_first_chunk_there_is_no_audio_to_take() -> None:
    assert chunks([(5, 50)], limit=100, pad=20) == [(0, 70)]


def test_a_long_silence_ends_a_chunk_that_has_room() -> None:
    speech = [(0, 10), (20, 30), (60, 70), (80, 90)]

    assert chunks(speech, limit=100, pad=5, longest_silence=20) == [(0, 35), (55, 95)]


def test_no_speech_is_no_chunk() -> None:
    assert chunks([], limit=100, pad=20) == []


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
