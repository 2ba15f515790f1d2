"""Home Assistant's protocol, with the client of the package `wyoming` and with hostile peers."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.error import Error
from wyoming.event import Event
from wyoming.info import AsrProgram, Attribution, Describe, Info
from wyoming.ping import Ping
from zeroconf import ServiceStateChange
from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

from whisperport.apps.serving.serve_options import ServeOptions
from whisperport.apps.serving.service import Service
from whisperport.apps.serving.wyoming import connection, server
from whisperport.apps.serving.wyoming.reader import FaultError
from whisperport.apps.serving.wyoming.server import SERVICE, Discovery, WyomingServer, address_of
from whisperport.apps.serving.wyoming.utterance import joined, options_of
from whisperport.errors import UsageError
from whisperport.speech.audio import load_audio
from whisperport.targets import RunOptions
from whisperport.transcription import Transcriber
from whisperport.verification.clips import shipped_audio

pytest.importorskip("wyoming")
pytest.importorskip("zeroconf")
from ....embedded import default_bundle
from ....extent import core_or_all

# Home Assistant's protocol, with the client of the package `wyoming` and with hostile peers.

TIMEOUT_S = 60
FORM: dict[str, int] = {"rate": 16_000, "width": 2, "channels": 1}
CLIPS = [np.round(load_audio(clip.path) * 32768).astype("<i2") for clip in shipped_audio()[:2]]


@pytest.fixture(scope="module")
def transcriber() -> Transcriber:
    return Transcriber(default_bundle(), RunOptions(threads=1))


@asynccontextmanager
async def served(transcriber: Transcriber, **options: Any) -> AsyncIterator[tuple[Service, int]]:
    chosen = ServeOptions(wyoming="tcp://127.0.0.1:0", **options)
    service = Service(transcriber, chosen)
    running = WyomingServer(service)
    try:
        yield service, int((await running.start()).rpartition(":")[2])
    finally:
        await running.close(1)
        await asyncio.to_thread(service.scheduler.close, 1)


def run(test: Callable[[], Awaitable[None]], timeout_s: float = TIMEOUT_S) -> None:
    async def limited() -> None:
        async with asyncio.timeout(timeout_s):
            await test()

    asyncio.run(limited())


async def connected(port: int) -> AsyncTcpClient:
    client = AsyncTcpClient("127.0.0.1", port)
    await client.connect()
    return client


async def speak(client: AsyncTcpClient, samples: np.ndarray, *, stop: bool = True) -> None:
    await client.write_event(AudioStart(**FORM).event())
    for at in range(0, samples.size, 1024):
        data = samples[at : at + 1024].tobytes()
        await client.write_event(AudioChunk(audio=data, **FORM).event())
    if stop:
        await client.write_event(AudioStop().event())


async def answer(client: AsyncTcpClient) -> Event:
    event = await client.read_event()
    assert event is not None
    return event


def line(kind: str, **members: Any) -> bytes:
    return json.dumps({"type": kind, **members}).encode() + b"\n"


def test_utterances_of_one_connection_have_the_text_of_their_files(
    transcriber: Transcriber,
) -> None:
    expected = [transcriber.transcribe(clip).text for clip in CLIPS]

    async def test() -> None:
        async with served(transcriber) as (_, port):
            client = await connected(port)
            await client.write_event(Describe().event())
            (program,) = Info.from_event(await answer(client)).asr
            assert program.models[0].languages == ["en"]
            assert program.requires_external_vad
            for clip, text in zip(CLIPS, expected, strict=True):
                await client.write_event(Transcribe(language="en-US").event())
                await speak(client, clip)
                await client.write_event(Ping("now").event())
                events = [await answer(client), await answer(client)]
                assert {event.type for event in events} == {"pong", "transcript"}
                (found,) = [Transcript.from_event(e) for e in events if e.type == "transcript"]
                assert (found.text, found.language) == (text, "en")
            await client.disconnect()

    run(test)


def test_silence_and_no_audio_have_no_text(transcriber: Transcriber) -> None:
    noise = (np.random.default_rng(0).standard_normal(16_000) * 100).astype("<i2")

    async def test() -> None:
        async with served(transcriber) as (service, port):
            client = await connected(port)
            for samples in (noise, noise[:10], noise[:0]):
                await speak(client, samples)
                assert Transcript.from_event(await answer(client)).text == ""
            await client.write_event(AudioStop().event())
            assert Transcript.from_event(await answer(client)).text == ""
            assert service.metrics.text().count('endpoint="wyoming",status="transcript"} 4') == 1

    run(test)


def test_a_transcript_comes_at_the_end_of_speech_if_the_server_detects_it(
    transcriber: Transcriber,
) -> None:
    pause = np.zeros(16_000, "<i2")

    async def test() -> None:
        async with served(transcriber, wyoming_vad=True) as (_, port):
            client = await connected(port)
            await client.write_event(Describe().event())
            assert not Info.from_event(await answer(client)).asr[0].requires_external_vad
            for clip in CLIPS:
                await client.write_event(Transcribe(vad_sensitivity="aggressive").event())
                await speak(client, np.concatenate([clip, pause]), stop=False)
                assert Transcript.from_event(await answer(client)).text
                await client.write_event(AudioChunk(audio=bytes(2048), **FORM).event())
                await client.write_event(AudioStop().event())
            await client.write_event(Ping().event())
            assert (await answer(client)).type == "pong"  # and no second transcript

    run(test)


HOSTILE = {
    "not JSON": (b"GET / HTTP/1.1\r\n", "bad-event"),
    "no object": (b"[1]\n", "bad-event"),
    "deep": (b"[" * 60_000 + b"\n", "bad-event"),
    "no type": (b"{}\n", "bad-event"),
    "a type of a wrong type": (b'{"type": 5}\n', "bad-event"),
    "a line without end": (b"x" * 70_000, "bad-event"),
    "10 GiB of samples": (line("audio-chunk", payload_length=10 * 2**30), "bad-event"),
    "10 GiB of data": (line("transcribe", data_length=10 * 2**30), "bad-event"),
    "a negative length": (line("audio-chunk", payload_length=-1), "bad-event"),
    "a length of a wrong type": (line("audio-chunk", payload_length="9"), "bad-event"),
    "data of a wrong type": (line("audio-chunk", data=[1]), "bad-event"),
    "data that are no JSON": (line("ping", data_length=3) + b"abc", "bad-event"),
    "a start without form": (line("audio-start"), "bad-event"),
    "rate 0": (line("audio-start", data={**FORM, "rate": 0}), "bad-audio"),
    "a rate of a wrong type": (line("audio-start", data={**FORM, "rate": "x"}), "bad-audio"),
    "width 5": (line("audio-start", data={**FORM, "width": 5}), "bad-audio"),
    "99 channels": (line("audio-start", data={**FORM, "channels": 99}), "bad-audio"),
    "33 s in one chunk, twice": (
        2 * (line("audio-chunk", data=FORM, payload_length=2**20) + bytes(2**20)),
        "too-long",
    ),
    "names that are no list": (
        line("transcribe", data={"transcript_names": 5}) + line("audio-stop"),
        "bad-event",
    ),
    "a language that the model lacks": (
        line("transcribe", data={"language": "de"}) + line("audio-stop"),
        "language",
    ),
    "an utterance that stops": (line("audio-start", data=FORM), "too-long"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_peer_is_told_the_fault_and_the_connection_is_closed(
    case: str, transcriber: Transcriber
) -> None:
    data, code = HOSTILE[case]

    async def test() -> None:
        async with served(transcriber, idle_seconds=0.2) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            client = await connected(port)
            client._reader = reader
            assert Error.from_event(await answer(client)).code == code
            assert await reader.read() == b""
            writer.close()

    run(test)


@pytest.mark.parametrize("data", [b"", b'{"type"', line("ping", data_length=50) + b"{}"])
def test_a_peer_that_leaves_or_sends_nothing_is_forgotten(
    data: bytes, transcriber: Transcriber
) -> None:
    async def test() -> None:
        async with served(transcriber, idle_seconds=0.1) as (service, port):
            for leaves in (True, False):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(data)
                if leaves:
                    writer.close()
                while "wyoming_connections 0" not in service.metrics.text():
                    await asyncio.sleep(0.01)
                assert leaves or await reader.read() == b""

    run(test)


def test_a_client_that_leaves_ends_its_decoding(transcriber: Transcriber) -> None:
    async def test() -> None:
        async with served(transcriber) as (service, port):
            client = await connected(port)
            await speak(client, CLIPS[0])
            while not service.scheduler.admission.requests:
                await asyncio.sleep(0.001)
            await client.disconnect()
            while service.scheduler.admission.requests:
                await asyncio.sleep(0.001)
            assert 'status="transcript"' not in service.metrics.text()

    run(test)


def test_a_client_that_waits_longer_than_it_may_be_silent_gets_its_transcript(
    transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    transcribed = connection.Connection._transcribed

    async def slow(*arguments: Any) -> Transcript:
        await asyncio.sleep(2)
        return await transcribed(*arguments)

    monkeypatch.setattr(connection.Connection, "_transcribed", slow)
    monkeypatch.setattr(connection, "IDLE_FACTOR", 1)

    async def test() -> None:
        async with served(transcriber, idle_seconds=0.5) as (_, port):
            client = await connected(port)
            await speak(client, CLIPS[0])
            assert Transcript.from_event(await answer(client)).text
            assert await client.read_event() is None  # silent for too long

    run(test)


def test_there_is_a_limit_of_connections(
    transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 1)

    async def test() -> None:
        async with served(transcriber) as (_, port):
            first = await connected(port)
            await first.write_event(Ping().event())
            await answer(first)
            assert Error.from_event(await answer(await connected(port))).code == "busy"

    run(test)


def test_a_second_utterance_before_the_transcript_of_the_first_is_a_fault(
    transcriber: Transcriber,
) -> None:
    async def test() -> None:
        async with served(transcriber) as (_, port):
            client = await connected(port)
            await speak(client, CLIPS[0])
            await client.write_event(AudioStop().event())
            assert Error.from_event(await answer(client)).code == "busy"

    run(test)


def send_until_closed(peer: socket.socket) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):
        while True:
            peer.sendall(200 * line("describe"))


def test_a_client_that_does_not_read_is_closed(
    transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "WRITE_S", 0.1)
    large = Info(asr=[AsrProgram("x" * 10**6, Attribution("", ""), True, "", "", [])])
    monkeypatch.setattr(connection, "info_of", lambda _: large)

    async def test() -> None:
        async with served(transcriber) as (service, port):
            with socket.socket() as peer:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_000)
                peer.settimeout(TIMEOUT_S)
                peer.connect(("127.0.0.1", port))
                await asyncio.to_thread(send_until_closed, peer)
            assert "wyoming_connections 0" in service.metrics.text()

    run(test)


def test_a_server_that_ends_sends_the_last_transcript(transcriber: Transcriber) -> None:
    async def test() -> None:
        async with served(transcriber) as (service, port):
            running = service.metrics  # read below, after the server ended
            busy, idle = await connected(port), await connected(port)
            await speak(busy, CLIPS[0])
            while not service.scheduler.admission.requests:
                await asyncio.sleep(0.001)
            await idle.write_event(Ping().event())
            await answer(idle)
        assert Transcript.from_event(await answer(busy)).text
        assert await busy.read_event() is None
        assert await idle.read_event() is None
        assert "wyoming_connections 0" in running.text()

    run(test)


def test_names_come_before_terms_and_fit_into_the_prompt(transcriber: Transcriber) -> None:
    names, terms = [f"lamp {number}" for number in range(5)], ["  ", "ecobee"]
    asked = Transcribe(transcript_names=names, transcript_terms=terms)

    options = options_of(asked, transcriber, "")
    room = len(transcriber.tokenizer.encode(" lamp 0, lamp 1"))

    assert options.initial_prompt == "lamp 0, lamp 1, lamp 2, lamp 3, lamp 4, ecobee"
    assert joined([*names, *terms], transcriber.tokenizer, room) == "lamp 0, lamp 1"


@pytest.mark.parametrize(
    ("asked", "default", "expected"),
    [
        *((None, "", None), (None, "en", "en"), ("en_GB", "", "en"), ("English", "", "en")),
        *(("auto", "", None), ("tlh", "", None)),
    ],
)
def test_a_language_is_that_of_the_event_or_of_the_options_or_detected(
    asked: str | None, default: str, expected: str | None, transcriber: Transcriber
) -> None:
    options = options_of(Transcribe(language=asked), transcriber, default)

    assert options.decode.language == expected


def test_a_language_of_another_model_is_a_fault(transcriber: Transcriber) -> None:
    with pytest.raises(FaultError, match="cannot transcribe `de`"):
        options_of(Transcribe(language="de-DE"), transcriber, "")


def test_the_server_is_found_by_its_name_until_it_ends() -> None:
    async def test() -> None:
        seen: list[tuple[str, ServiceStateChange]] = []

        def note(name: str, state_change: ServiceStateChange, **_: Any) -> None:
            seen.append((name, state_change))

        discovery = Discovery("kitchen", "127.0.0.1", 10_300, interfaces=["127.0.0.1"])
        zeroconf = AsyncZeroconf(interfaces=["127.0.0.1"])
        await discovery.start()
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[note])
        while (f"kitchen.{SERVICE}", ServiceStateChange.Added) not in seen:
            await asyncio.sleep(0.05)
        found = await zeroconf.async_get_service_info(SERVICE, f"kitchen.{SERVICE}")
        assert found is not None
        assert (found.port, found.parsed_addresses()) == (10_300, ["127.0.0.1"])
        await discovery.close()
        while (f"kitchen.{SERVICE}", ServiceStateChange.Removed) not in seen:
            await asyncio.sleep(0.05)
        await browser.async_cancel()
        await zeroconf.async_close()

    run(test)


@pytest.mark.parametrize("uri", ["tcp://x", "http://a:1", "tcp://a:99999", "10300", "unix://"])
def test_an_address_of_another_form_is_rejected(uri: str) -> None:
    with pytest.raises(UsageError, match=r"expected tcp://ADDRESS:PORT or unix://PATH"):
        address_of(uri)


def test_a_socket_file_is_served_and_removed(transcriber: Transcriber, tmp_path: Any) -> None:
    async def test() -> None:
        path = tmp_path / "wyoming"
        service = Service(transcriber, replace(ServeOptions(), wyoming=f"unix://{path}"))
        running = WyomingServer(service)
        await running.start()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(line("describe"))
        assert b'"info"' in await reader.readline()
        writer.close()
        await running.close(1)
        assert not path.exists()
        await asyncio.to_thread(service.scheduler.close, 0)

    run(test)


# Thousands of damaged conversations: the Wyoming server ends each, and serves the next client.

ROUNDS = core_or_all(60, 5_000)


def conversation(random_: random.Random) -> bytes:
    """A valid conversation about silence."""
    parts = [line("describe"), line("ping", data={"text": "a"})]
    data = json.dumps({"language": "en", "transcript_names": ["Anna", "Ben"]}).encode()
    parts.append(line("transcribe", data_length=len(data)) + data)
    parts.append(line("audio-start", data=FORM))
    for _ in range(random_.randint(0, 3)):
        size = random_.choice([0, 1, 640, 2_048])
        parts.append(line("audio-chunk", data=FORM, payload_length=size) + bytes(size))
    parts.append(line("audio-stop"))
    if random_.random() < 0.3:
        random_.shuffle(parts)
    return b"".join(parts)


def mutated(data: bytes, random_: random.Random) -> bytes:
    """The same with some bytes, numbers or pieces changed."""
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(data))
        end = min(at + random_.randint(1, 40), len(data))
        data = random_.choice(
            [
                data[:at] + random_.randbytes(1) + data[at + 1 :],
                data[:at] + data[end:] or b"{",
                data[:at] + data[at:end] * 3 + data[end:],
                data[:end],
                data.replace(
                    b"1", random_.choice([b"-1", b"99999999999", b"0", b"1.5", b"null"]), 1
                ),
                data.replace(b'"en"', random_.choice([b"5", b"[]", b"{}", b'"\xff"', b'"x"']), 1),
                data[:at] + random_.choice([b"\n", b"{}", b"[", b'"', b"\x00"]) + data[at:],
            ]
        )
    return data


async def talk(port: int, data: bytes, random_: random.Random) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        middle = random_.randrange(len(data) + 1)
        for piece in (data[:middle], data[middle:]):
            writer.write(piece)
            await writer.drain()
        if random_.random() < 0.5:
            writer.write_eof()
            await reader.read()
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()


def test_a_damaged_conversation_harms_nobody(transcriber: Transcriber) -> None:
    random_ = random.Random(1)

    async def test() -> None:
        async with served(transcriber, idle_seconds=0.5) as (service, port):
            for _ in range(ROUNDS // 20):
                talks = [mutated(conversation(random_), random_) for _ in range(20)]
                await asyncio.gather(*(talk(port, one, random_) for one in talks))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(line("describe"))
            assert b'"info"' in await reader.readline()
            writer.close()
            assert 'status="internal"' not in service.metrics.text()
            while "wyoming_connections 0" not in service.metrics.text():
                await asyncio.sleep(0.05)

    run(test, 600)
