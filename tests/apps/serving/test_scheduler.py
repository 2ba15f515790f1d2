"""The scheduler gives what `Transcriber` gives, to many at a time, in the order of urgency."""

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.apps.serving.json_text import MAX_STRUCTURE, parsed
from whisperport.apps.serving.lanes import Urgency
from whisperport.apps.serving.scheduler import Scheduler
from whisperport.apps.serving.turns import LARGEST, SMALLEST, Connections, Pace, Turns
from whisperport.errors import AudioError, LongAudioError, QueueFullError, UsageError
from whisperport.runtime import DecodeOptions, Decoder, Steps
from whisperport.runtime.kv_cache.stepping import Step
from whisperport.speech.audio import VadOptions, load_audio
from whisperport.transcription import TranscribeOptions, Transcriber, Transcript
from whisperport.verification.clips import shipped_audio

# The scheduler gives what `Transcriber` gives, to many at a time, in the order of urgency.

TIMEOUT_S = 60
CLIPS = [clip.path for clip in shipped_audio()]


@pytest.fixture
def scheduler(transcriber: Transcriber) -> Iterator[Scheduler]:
    made = Scheduler(transcriber)
    yield made
    made.close(0)


def texts(transcript: Transcript) -> Any:
    """All of a transcript but probabilities."""
    segments = [(s.start, s.end, s.text, s.tokens, s.temperature) for s in transcript.segments]
    return transcript.text, segments, transcript.language, transcript.duration_s


def endless(begun: Event, decoder: Decoder) -> Steps[None]:
    """A decoding that never ends by itself."""
    decoder.start_window(np.zeros((1500, decoder.engine.dims.n_audio_state), np.float32))
    while True:
        decoder.cache.clear()
        yield [Step(1, decoder.cache)]
        begun.set()


def test_files_that_are_transcribed_together_have_the_texts_of_single_calls(
    transcriber: Transcriber, scheduler: Scheduler
) -> None:
    files = CLIPS[:4]
    expected = [transcriber.transcribe(file) for file in files]

    futures = [scheduler.transcribe(file) for file in [*files, *files]]
    found = [future.result(TIMEOUT_S) for future in futures]

    assert [texts(one) for one in found] == [texts(one) for one in [*expected, *expected]]
    assert scheduler.admission.requests == 0
    assert all(future.decoded_s > 0 for future in futures)


def test_files_without_a_batch_and_with_chunks_equal_single_calls_exactly(
    transcriber: Transcriber,
) -> None:
    scheduler, files = Scheduler(transcriber, batch=False), CLIPS[16:18]
    windows = TranscribeOptions(word_timestamps=True)
    chunks = TranscribeOptions(vad=VadOptions(), batch=False)
    asked = [(file, options) for file in files for options in (windows, chunks)]
    expected = [transcriber.transcribe(*one) for one in asked]

    found = [scheduler.transcribe(*one) for one in asked]

    assert [one.result(TIMEOUT_S) for one in found] == expected
    assert scheduler.close(TIMEOUT_S)


def test_a_short_file_passes_a_long_one_whose_windows_are_reported(
    transcriber: Transcriber, scheduler: Scheduler
) -> None:
    clip = load_audio(CLIPS[0])
    reports: list[Transcript] = []
    first = Event()

    def report(transcript: Transcript) -> None:
        reports.append(transcript)
        first.set()

    long = scheduler.transcribe(np.tile(clip, 15), on_window=report)
    assert first.wait(TIMEOUT_S)
    short = scheduler.transcribe(clip)

    assert short.result(TIMEOUT_S).text == transcriber.transcribe(clip).text
    assert not long.done()
    assert long.result(TIMEOUT_S).text.startswith(reports[0].text)
    assert reports[-1].text == long.result().text
    assert len(reports) > 1


def test_live_decodings_begin_before_those_of_short_files_and_these_before_long_ones(
    transcriber: Transcriber,
) -> None:
    scheduler, go, order = Scheduler(transcriber, batch=False), Event(), list[Urgency]()

    def blocks(_: Decoder) -> Steps[None]:
        assert go.wait(TIMEOUT_S)
        yield from ()

    def records(urgency: Urgency, _: Decoder) -> Steps[None]:
        order.append(urgency)
        yield from ()

    scheduler.lanes.submit(blocks, Urgency.FILE)
    futures = [scheduler.lanes.submit(partial(records, one), one) for one in reversed(Urgency)]
    go.set()
    for future in futures:
        future.result(TIMEOUT_S)
    scheduler.close(0)

    assert order == list(Urgency)


def test_a_live_decoding_begins_while_all_rows_are_in_use(scheduler: Scheduler) -> None:
    begun = [Event() for _ in range(scheduler.lanes.rows + 1)]
    running = [scheduler.lanes.submit(partial(endless, each), Urgency.FILE) for each in begun]
    assert all(each.wait(TIMEOUT_S) for each in begun[:-1])
    live = Event()

    one = scheduler.lanes.submit(partial(endless, live), Urgency.LIVE)

    assert live.wait(TIMEOUT_S)
    assert not begun[-1].is_set()
    for future in [*running, one]:
        future.cancel()


@pytest.mark.parametrize("batch", [True, False])
def test_a_cancelled_decoding_frees_its_row_at_its_next_step(
    transcriber: Transcriber, batch: bool
) -> None:
    scheduler = Scheduler(transcriber, batch=batch)
    for _ in range(2 * scheduler.lanes.rows):
        begun = Event()
        future = scheduler.lanes.submit(partial(endless, begun), Urgency.FILE)
        assert begun.wait(TIMEOUT_S)
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result()
    assert scheduler.close(TIMEOUT_S)


@pytest.mark.parametrize("options", [TranscribeOptions(), TranscribeOptions(vad=VadOptions())])
def test_a_cancelled_file_ends_wherever_it_is(
    scheduler: Scheduler, options: TranscribeOptions
) -> None:
    audio = np.tile(load_audio(CLIPS[0]), 60)
    for wait_s in (0.0, 0.05, 0.3):
        future = scheduler.transcribe(audio, options)
        time.sleep(wait_s)

        assert future.cancel()

        until = time.monotonic() + TIMEOUT_S
        while scheduler.admission.requests and time.monotonic() < until:
            time.sleep(0.01)
        assert not scheduler.admission.requests


def test_a_full_queue_rejects_a_file_and_says_when_there_is_room(transcriber: Transcriber) -> None:
    scheduler, audio = Scheduler(transcriber, max_queue_s=0.01), np.zeros(16_000 * 300, np.float32)
    first = scheduler.transcribe(audio)
    while not scheduler.admission.audio_s:  # until its duration is known
        time.sleep(0.01)

    with pytest.raises(QueueFullError, match="the queue is full") as found:
        scheduler.transcribe(audio)

    assert 1 <= found.value.retry_after_s <= 120
    first.cancel()
    scheduler.close(TIMEOUT_S)


def test_closing_waits_for_files_or_fails_them(transcriber: Transcriber) -> None:
    clip = load_audio(CLIPS[0])
    patient, impatient = Scheduler(transcriber), Scheduler(transcriber)
    short, long = patient.transcribe(clip), impatient.transcribe(np.tile(clip, 200))

    assert patient.close(TIMEOUT_S)
    assert not impatient.close(0)

    assert short.result(0).text
    with pytest.raises(QueueFullError, match="shutting down"):
        long.result(0)
    with pytest.raises(QueueFullError, match="shutting down"):
        patient.transcribe(clip)


class Upload:
    """Bytes that can be opened any number of times."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def reopen(self) -> BinaryIO:
        return io.BytesIO(self.data)


def test_a_file_without_a_path_is_read_as_one_with_a_path(
    transcriber: Transcriber, scheduler: Scheduler
) -> None:
    path = Path(CLIPS[0])

    found = scheduler.transcribe(Upload(path.read_bytes())).result(TIMEOUT_S)

    assert texts(found) == texts(transcriber.transcribe(path))


def test_errors_of_a_file_are_those_of_its_future(transcriber: Transcriber) -> None:
    scheduler = Scheduler(transcriber, longest_s=100)

    damaged = scheduler.transcribe(Upload(b"text, not audio"))
    too_long = scheduler.transcribe(np.zeros(16_000 * 131, np.float32))

    with pytest.raises(AudioError, match="the audio file is not an audio file"):
        damaged.result(TIMEOUT_S)
    with pytest.raises(LongAudioError, match="longer than 100 s"):
        too_long.result(TIMEOUT_S)
    with pytest.raises(UsageError, match="cannot transcribe `de`"):
        scheduler.transcribe(Upload(b""), TranscribeOptions(decode=DecodeOptions(language="de")))
    assert scheduler.close(TIMEOUT_S)


# Requests that are slow to parse: others are not kept waiting, and what is too much is not parsed.

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab"), inner),
    max_leaves=10,
)


class Connection:
    """Has data that takes long to parse, or not."""

    def __init__(self, n_pieces: int, seconds: float, order: list["Connection"]) -> None:
        self.pace, self.left, self.order = Pace(), n_pieces, order
        self.pace._spent = seconds

    def parse_some(self) -> bool:
        self.order.append(self)
        self.left -= 1
        return self.left > 0


def test_connections_that_were_slow_wait_for_the_others() -> None:
    order: list[Connection] = []
    slow, fast = Connection(1000, 1, order), Connection(3, 0, order)

    async def test() -> None:
        connections = Connections()
        connections.add(slow)
        connections.add(fast)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order[0] is fast
        while slow.left:
            await asyncio.sleep(0)

    asyncio.run(test())

    assert order.count(fast) == 3
    assert order.count(slow) == 1000


def test_a_connection_that_fails_does_not_stop_the_others() -> None:
    order: list[Connection] = []
    failing, other = Connection(1, 0, order), Connection(2, 0, order)
    failing.parse_some = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        connections = Connections()
        connections.add(failing)
        connections.add(other)
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(test())

    assert order == [other, other]


def test_one_request_has_a_turn_in_a_pass_of_the_loop() -> None:
    turns, taken = Turns(), 0

    async def request() -> None:
        nonlocal taken
        await turns.wait()
        taken += 1

    async def test() -> list[int]:
        tasks = [asyncio.create_task(request()) for _ in range(5)]
        counts = []
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            counts.append(taken)
        return counts

    counts = asyncio.run(test())

    assert all(after - before <= 1 for before, after in pairwise(counts))
    assert counts[-1] == 5


def test_pieces_of_a_body_are_small_at_first_and_join_to_it() -> None:
    body = bytes(range(256)) * 2000

    async def stream() -> AsyncIterator[bytes]:
        yield body[:300_000]
        yield b""
        yield body[300_000:]

    async def test() -> list[bytes]:
        return [piece async for piece in Turns().pieces(stream())]

    pieces = asyncio.run(test())

    assert b"".join(pieces) == body
    assert len(pieces[0]) == SMALLEST
    assert max(map(len, pieces)) <= LARGEST


@given(JSON)
def test_json_is_read_as_python_does(value: object) -> None:
    for ascii_only in (True, False):
        assert parsed(json.dumps(value, ensure_ascii=ascii_only)) == value


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "[",
            "{}x",
            "NaN",
            "[Infinity]",
            "-Infinity",
            "[" * 100_000,
            "9" * 401,
            "-" + "9" * 5_000,
        ),
        *(
            r'"\ud800"',
            r'{"\uDFFF": 0}',
            r'["\udc00\ud800"]',
            b"\xff",
            "[" + "0," * MAX_STRUCTURE + "0]",
        ),
    ],
)
def test_json_that_could_harm_is_an_error_of_value(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parsed(text)


def test_a_character_of_two_surrogates_is_no_error() -> None:
    assert parsed(r'"\ud83d\ude00"') == "\U0001f600"
