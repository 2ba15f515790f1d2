"""Concurrent calls of one `Transcriber` return what single calls return, and forks cannot use it."""

import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from whisperport.errors import ForkError, IncompleteError, NumericalError, UsageError
from whisperport.program.bundle import Bundle
from whisperport.runtime import DecodeOptions, Decoder, Thresholds
from whisperport.speech.audio import VadOptions, load_audio
from whisperport.targets import TARGETS, RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber, Transcript
from whisperport.transcription.live.transcriber import LiveTranscriber
from whisperport.transcription.transcriber import Turns
from whisperport.verification.clips import shipped_audio

from ..embedded import default_bundle
from ..extent import core_or_all

ONE_THREAD = RunOptions(threads=1)
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
HERE = [target.spec.name for target in TARGETS if not target.spec.runs.emulation]
N_THREADS, N_CALLS = 8, 48

GREEDY, BEAMS, SAMPLED = WAYS = tuple(
    TranscribeOptions(
        decode=DecodeOptions(
            language=language, without_timestamps=True, max_tokens=4, beam_size=beams
        ),
        temperatures=(temperature,),
        thresholds=Thresholds(
            compression_ratio_threshold=None, logprob_threshold=None, no_speech_threshold=None
        ),
    )
    for language, beams, temperature in (
        ("en", None, 0.0),
        (None, 2, 0.0),
        ("en", None, 0.7),
    )
)


def noise(seed: int) -> np.ndarray:
    """Audio that fills most of a window of 2 s."""
    random = np.random.default_rng(seed)
    return (0.1 * random.standard_normal(random.integers(24_000, 32_000))).astype(np.float32)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Eight threads, between which Python switches often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    with ThreadPoolExecutor(N_THREADS) as pool:
        yield pool
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("target", HERE)
def test_concurrent_calls_return_what_single_calls_return(
    target: str, exported: Callable[[str], Bundle], threads: ThreadPoolExecutor
) -> None:
    transcriber = Transcriber(exported(target), ONE_THREAD, max_concurrent=N_THREADS)
    calls = [(noise(i % 12), WAYS[i % 3]) for i in range(N_CALLS)]
    single = [transcriber.transcribe(*call) for call in calls[:12]]
    assert len({transcript.segments for transcript in single}) == 12

    concurrent = list(threads.map(lambda call: transcriber.transcribe(*call), calls))

    assert concurrent == [single[i % 12] for i in range(N_CALLS)]


def random_options(seed: int) -> TranscribeOptions:
    """Options that concern decoding, text, times and windows, each at random."""
    choose = random.Random(seed)
    beams, vad = choose.choice((None, 2, 3)), choose.choice((None, VadOptions()))
    decode = DecodeOptions(
        language=choose.choice(("en", None)),
        without_timestamps=choose.random() < 0.3,
        max_tokens=choose.choice((5, 12)),
        beam_size=beams,
        patience=choose.choice((None, 1.5)) if beams else None,
        best_of=choose.choice((None, 2)),
        repetition_penalty=choose.choice((None, 1.2)),
        no_repeat_ngram_size=choose.choice((0, 3)),
        suppress_blank=choose.random() < 0.7,
    )
    return TranscribeOptions(
        decode=decode,
        temperatures=choose.choice(((0.0,), (0.0, 0.4), (0.6,))),
        phrases=choose.choice(((), ("garden lights", "nine o'clock"))),
        vad=vad,
        initial_prompt=choose.choice(("", "Turn on the lights.")),
        word_timestamps=choose.random() < 0.4,
        workers=choose.choice((1, 2)) if vad else 1,
        batch=choose.random() < 0.5,
    )


def test_32_threads_with_random_options_return_what_single_calls_return() -> None:
    transcriber = Transcriber(default_bundle(), ONE_THREAD, max_concurrent=32)
    clips = [load_audio(recording.path)[:40_000] for recording in shipped_audio()[:7]]
    n_options, n_calls = core_or_all((8, 32), (100, 400))
    calls = [(clips[n % len(clips)], random_options(n)) for n in range(n_options)]
    alone = [transcriber.transcribe(*call) for call in calls]
    assert len({transcript.text for transcript in alone}) >= len(clips)

    with ThreadPoolExecutor(32) as pool:
        numbers = random.Random(0).choices(range(n_options), k=n_calls)
        together = list(pool.map(lambda number: transcriber.transcribe(*calls[number]), numbers))

    assert together == [alone[number] for number in numbers]


def test_chunks_and_live_streams_beside_other_calls_return_what_they_return_alone(
    threads: ThreadPoolExecutor,
) -> None:
    transcriber = Transcriber(default_bundle(), ONE_THREAD, max_concurrent=3)
    first, second = (load_audio(recording.path) for recording in shipped_audio()[:2])
    chunks = TranscribeOptions(vad=VadOptions(), workers=2)

    def live(samples: np.ndarray) -> Transcript:
        stream = LiveTranscriber(transcriber)
        stream.feed(samples)
        stream.finish()
        return stream.transcript()

    jobs: list[Callable[[], Transcript]] = [
        lambda: transcriber.transcribe(np.concatenate([first, second]), chunks),
        lambda: transcriber.transcribe(second, chunks),
        lambda: live(first),
        lambda: live(second),
        lambda: transcriber.transcribe(first),
    ]
    alone = [job() for job in jobs]

    together = [future.result() for future in [threads.submit(job) for job in jobs]]

    assert together == alone


# How many at once --------------------------------------------------------------------------------


def test_a_call_above_the_limit_waits_until_another_ends(exported: Callable[[str], Bundle]) -> None:
    transcriber = Transcriber(exported("onnxruntime"), ONE_THREAD, max_concurrent=1)
    order: list[str] = []
    begun, waited = threading.Event(), threading.Event()

    def first_progress(*_: object) -> None:
        begun.set()
        waited.wait(0.2)  # never set: time for a call that does not wait to be wrong
        order.append("progress of the first")

    def second() -> None:
        begun.wait()
        transcriber.transcribe(
            noise(1), GREEDY, progress=lambda *_: order.append("progress of the second")
        )

    thread = threading.Thread(target=second)
    thread.start()
    transcriber.transcribe(noise(0), GREEDY, progress=first_progress)
    thread.join()

    assert order == ["progress of the first", "progress of the second"]


def test_as_many_as_the_limit_run_at_once() -> None:
    turns, barrier = Turns(3), threading.Barrier(3, timeout=30)

    def hold() -> int:
        with turns.turn():
            return barrier.wait()

    with ThreadPoolExecutor(3) as pool:
        assert sorted(future.result() for future in [pool.submit(hold) for _ in range(3)]) == [
            *(0, 1, 2)
        ]


def test_the_limit_is_by_default_the_cores_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whisperport.transcription.transcriber.usable_cores", lambda: 7)

    assert Turns().limit == 7


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_an_error(limit: int) -> None:
    with pytest.raises(UsageError, match=f"`max_concurrent` is {limit}"):
        Transcriber(default_bundle(), max_concurrent=limit)


def test_a_call_that_fails_returns_its_turn(exported: Callable[[str], Bundle]) -> None:
    transcriber = Transcriber(exported("onnxruntime"), ONE_THREAD, max_concurrent=1)

    for _ in range(2):  # the second would wait permanently
        with pytest.raises(IncompleteError, match="progress failed"):
            transcriber.transcribe(noise(0), GREEDY, progress=failing)

    assert transcriber.transcribe(noise(0), GREEDY).text


def failing(*_: object) -> None:
    raise RuntimeError("progress failed")


def test_an_interrupt_while_waiting_for_a_turn_is_raised_and_takes_none() -> None:
    turns, held, end = Turns(1), threading.Event(), threading.Event()

    def hold() -> None:
        with turns.turn():
            held.set()
            end.wait(60)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt), turns.turn():
            pass
    finally:
        signal.signal(signal.SIGINT, before)
        end.set()
        thread.join()

    with turns.turn():
        pass


# Forks -------------------------------------------------------------------------------------------


def forked(*jobs: Callable[[], object]) -> list[str]:
    """What each job raises in a fork of this process, by name and in words; killed after a minute."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        for job in jobs:
            try:
                job()
            except Exception as error:
                os.write(writing, f"{type(error).__name__}: {error}\0".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as file:
        raised = file.read()
    assert os.waitpid(child, 0)[1] == 0, f"the fork did not end by itself; before: {raised}"
    return raised.split("\0")[:-1]


@needs_fork
@pytest.mark.parametrize("target", HERE)
def test_a_fork_that_uses_the_bundle_of_its_parent_gets_an_error(
    target: str, exported: Callable[[str], Bundle]
) -> None:
    bundle = exported(target)
    transcriber = Transcriber(bundle, RunOptions(threads=2))
    live = LiveTranscriber(transcriber)
    before = transcriber.transcribe(noise(0), GREEDY)
    dims = transcriber.engine.dims
    decoder = Decoder(transcriber.engine)
    decoder.start_window(np.zeros((dims.n_audio_ctx, dims.n_audio_state), np.float32))
    decoder.step(0)

    errors = forked(
        lambda: transcriber.transcribe(noise(0), GREEDY),
        lambda: transcriber.engine.encode(np.zeros((dims.n_mels, dims.n_frames), np.float32)),
        lambda: live.feed(noise(0)),
        lambda: decoder.step(0),
        *([lambda: Transcriber(bundle, ONE_THREAD)] if target == "xnnpack" else []),
    )

    subjects = [
        *("a `Transcriber`", "the program `encoder`", "a `Transcriber`", "the program `step`"),
        "ExecuTorch",
    ]
    assert len(errors) == (5 if target == "xnnpack" else 4)
    for error, subject in zip(errors, subjects, strict=False):
        assert error.startswith(f"ForkError: {subject} cannot be used in a fork")
        assert "spawn" in error
    assert transcriber.transcribe(noise(0), GREEDY) == before


OWN = """
import multiprocessing, os, signal, sys
from whisperport.errors import ForkError
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber

def text():
    return transcriber.transcribe(sys.argv[1], TranscribeOptions(temperatures=(0.0,))).text

def in_the_pool():
    try:
        return text()
    except ForkError as error:
        return error

transcriber = Transcriber("default", RunOptions(threads=2))
expected = text()
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert isinstance(pool.apply(in_the_pool), ForkError)
if os.fork() == 0:
    signal.alarm(60)
    # The last reference to the inherited one is gone.
    transcriber = Transcriber("default", RunOptions(threads=2))
    print(text() == expected, flush=True)
    sys.exit(0)  # ends as every program does, with the destructors of all that is loaded
print(os.wait()[1], text() == expected)
"""


@needs_fork
def test_a_fork_loads_a_bundle_of_its_own_and_ends_without_a_hang() -> None:
    default_bundle()  # is in the cache before the process starts
    recording = shipped_audio()[0].path

    done = subprocess.run(
        [sys.executable, "-c", OWN, recording], capture_output=True, text=True, timeout=300
    )

    assert done.stdout.split() == ["True", "0", "True"], done.stderr


@pytest.mark.parametrize(
    "error",
    [
        ForkError("a program", why="a fork", hint="spawn"),
        NumericalError("a NaN", "encoder", why="damage", hint="verify"),
        IncompleteError("broken off", Transcript("so far", (), "en", 1.0, ()), why="damage"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_back_from_another_process_as_it_was(error: Any) -> None:
    """A pool waits permanently for a result that it cannot unpickle."""
    back = pickle.loads(pickle.dumps(error))

    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


# State of the whole process ----------------------------------------------------------------------


def test_bundles_that_are_loaded_at_once_leave_the_output_as_it_was() -> None:
    from whisperport.model.inspection.quiet import quiet

    before = sys.stdout, sys.stderr
    first, second = contextlib.ExitStack(), contextlib.ExitStack()

    first.enter_context(quiet())
    second.enter_context(quiet())
    assert sys.stdout is not before[0]
    first.close()  # before the second, as threads may end
    assert sys.stdout is not before[0]
    second.close()

    assert (sys.stdout, sys.stderr) == before
