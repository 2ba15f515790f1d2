"""Realtime sessions over a WebSocket: OpenAI's events, resuming, limits and hostile clients."""

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import uvicorn
from httpx import AsyncClient
from starlette.testclient import TestClient
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from whisperport.apps.serving.app import create_app
from whisperport.apps.serving.keys import Keys
from whisperport.apps.serving.realtime import session as session_module
from whisperport.apps.serving.realtime.endpoint import realtime_routes
from whisperport.apps.serving.realtime.item import Item
from whisperport.apps.serving.realtime.sessions import Sessions
from whisperport.apps.serving.realtime.settings import TENTATIVE
from whisperport.apps.serving.serve_options import ServeOptions
from whisperport.apps.serving.server import MAX_MESSAGE
from whisperport.apps.serving.service import Service
from whisperport.speech.audio import load_audio
from whisperport.targets import RunOptions
from whisperport.transcription import Transcriber
from whisperport.verification.clips import shipped_audio

pytest.importorskip("starlette")
from ....embedded import default_bundle
from ....extent import core_or_all

# Realtime sessions over a WebSocket: OpenAI's events, resuming, limits and hostile clients.

TIMEOUT_S = 60
RATE = 16_000
CLIPS = [np.round(load_audio(clip.path) * 32767).astype("<i2") for clip in shipped_audio()[:2]]
PAUSE = np.zeros(RATE, "<i2")
ITEM = "conversation.item"
TRANSCRIPTION = f"{ITEM}.input_audio_transcription"
KEY = "a-key-of-the-server"

Event = dict[str, Any]


@pytest.fixture(scope="module")
def transcriber() -> Transcriber:
    return Transcriber(default_bundle(), RunOptions(threads=1))


@dataclass
class Server:
    service: Service
    sessions: Sessions
    port: int

    @asynccontextmanager
    async def client(
        self, query: str = "intent=transcription", **given: Any
    ) -> AsyncIterator["Client"]:
        url = f"ws://127.0.0.1:{self.port}/v1/realtime?{query}"
        async with connect(url, **given) as socket:
            yield Client(socket)


@dataclass
class Client:
    socket: ClientConnection

    async def send(self, kind: str, **members: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **members}))

    async def append(self, samples: np.ndarray) -> None:
        audio = base64.b64encode(samples.tobytes()).decode()
        await self.send("input_audio_buffer.append", audio=audio)

    async def set_up(self, include: tuple[str, ...] = (), **given: Any) -> Event:
        given = {"format": {"type": "audio/pcm", "rate": RATE}, **given}
        await self.send("session.update", session={"audio": {"input": given}, "include": include})
        return (await self.until("session.updated"))[-1]

    async def event(self) -> Event:
        return json.loads(await self.socket.recv())

    async def until(self, kind: str, count: int = 1) -> list[Event]:
        """All events up to the n-th of a kind."""
        events: list[Event] = []
        while sum(event["type"] == kind for event in events) < count:
            events.append(await self.event())
        return events


@asynccontextmanager
async def served(transcriber: Transcriber, **options: Any) -> AsyncIterator[Server]:
    service = Service(transcriber, ServeOptions(**options))
    sessions = Sessions(service)
    app = create_app(service, realtime_routes(sessions))
    config = uvicorn.Config(
        app,
        port=0,
        ws="websockets-sansio",
        ws_max_size=MAX_MESSAGE,
        lifespan="off",
        log_config=None,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield Server(service, sessions, server.servers[0].sockets[0].getsockname()[1])
    finally:
        await sessions.close(1)
        server.should_exit = True
        await task
        await asyncio.to_thread(service.scheduler.close, 1)


def run(test: Callable[[], Awaitable[None]], timeout_s: float = TIMEOUT_S) -> None:
    async def limited() -> None:
        async with asyncio.timeout(timeout_s):
            await test()

    asyncio.run(limited())


def of_type(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["type"] == kind]


def joined(events: list[Event], item_id: str) -> str:
    deltas = of_type(events, f"{TRANSCRIPTION}.delta")
    return "".join(event["delta"] for event in deltas if event["item_id"] == item_id)


def test_each_utterance_is_an_item_with_its_text(transcriber: Transcriber) -> None:
    expected = [transcriber.transcribe(clip).text for clip in CLIPS]

    async def test() -> None:
        async with served(transcriber) as server, server.client() as client:
            assert (await client.event())["type"] == "session.created"
            updated = await client.set_up()
            assert updated["session"]["audio"]["input"]["format"]["rate"] == RATE
            for clip in CLIPS:
                await client.append(np.concatenate([clip, PAUSE]))
            events = await client.until(f"{TRANSCRIPTION}.completed", 2)

        completed = of_type(events, f"{TRANSCRIPTION}.completed")
        assert [event["transcript"] for event in completed] == expected
        assert all(event["usage"]["type"] == "duration" for event in completed)
        for before, event in zip([None, completed[0]["item_id"]], completed, strict=True):
            own = [
                e
                for e in events
                if event["item_id"] in (e.get("item_id"), e.get("item", {}).get("id"))
            ]
            assert [e["type"] for e in own if not e["type"].endswith("delta")] == [
                "input_audio_buffer.speech_started",
                "input_audio_buffer.speech_stopped",
                "input_audio_buffer.committed",
                f"{ITEM}.added",
                f"{ITEM}.done",
                f"{TRANSCRIPTION}.completed",
            ]
            assert own[2]["previous_item_id"] == before
            types = [e["type"] for e in own]
            assert types.index("input_audio_buffer.committed") < types.index(
                f"{TRANSCRIPTION}.delta"
            )
            assert joined(events, event["item_id"]) == event["transcript"]
            assert event["usage"]["seconds"] == np.ceil(
                (own[1]["audio_end_ms"] - own[0]["audio_start_ms"]) / 1000
            )

    run(test)


def test_with_a_delay_certain_words_come_before_the_commit_and_tentative_ones_if_asked(
    transcriber: Transcriber,
) -> None:
    async def test() -> None:
        async with served(transcriber) as server, server.client() as client:
            await client.set_up(
                (TENTATIVE,), turn_detection=None, transcription={"delay": "medium"}
            )
            pieces = np.array_split(CLIPS[0], 4)
            for piece in pieces:
                await client.append(piece)
                await asyncio.sleep(0.3)
            before = await client.until(f"{TRANSCRIPTION}.delta")
            await client.send("input_audio_buffer.commit")
            events = before + await client.until(f"{TRANSCRIPTION}.completed")

        assert of_type(before, f"{TRANSCRIPTION}.tentative")
        assert not of_type(before, "input_audio_buffer.committed")
        (completed,) = of_type(events, f"{TRANSCRIPTION}.completed")
        assert completed["transcript"] == transcriber.transcribe(CLIPS[0]).text
        assert joined(events, completed["item_id"]) == completed["transcript"]

    run(test)


def test_silence_has_no_text_a_cleared_buffer_no_item_and_an_empty_one_cannot_be_committed(
    transcriber: Transcriber,
) -> None:
    async def test() -> None:
        async with served(transcriber) as server, server.client() as client:
            await client.set_up(turn_detection=None)
            await client.append(PAUSE)
            await client.send("input_audio_buffer.commit")
            silent = (await client.until(f"{TRANSCRIPTION}.completed"))[-1]
            assert (silent["transcript"], silent["usage"]["seconds"]) == ("", 1)
            await client.append(CLIPS[0])
            await client.send("input_audio_buffer.clear")
            assert (await client.event())["type"] == "input_audio_buffer.cleared"
            await client.send("input_audio_buffer.commit", event_id="mine")
            error = (await client.event())["error"]
            assert error["code"] == "input_audio_buffer_commit_empty"
            assert error["event_id"] == "mine"

    run(test)


def test_an_update_of_the_format_commits_what_was_said_before(transcriber: Transcriber) -> None:
    async def test() -> None:
        async with served(transcriber) as server, server.client() as client:
            await client.set_up(turn_detection=None)
            await client.append(CLIPS[0])
            await client.set_up(format={"type": "audio/pcma"}, turn_detection=None)
            events = await client.until(f"{TRANSCRIPTION}.completed")
            assert events[-1]["transcript"] == transcriber.transcribe(CLIPS[0]).text

    run(test)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("x", "invalid_json"),
        ("[" * 100_000, "invalid_json"),
        ("[]", "invalid_event"),
        ('{"type": 5}', "invalid_event"),
        (b"\0\1", "invalid_json"),
        ('{"type": "response.create"}', "unsupported_event"),
        (r'{"type": "\ud800"}', "invalid_json"),
        (r'{"type": "response.create", "event_id": "\udfff"}', "invalid_json"),
        (r'{"type": "session.update", "session": {"\ud800": 1}}', "invalid_json"),
        ('{"type": NaN}', "invalid_json"),
        ('{"type": ' + "9" * 5_000 + "}", "invalid_json"),
        ('{"type": "x", "y": [' + "[]," * 50_000 + "0]}", "invalid_json"),
        ('{"type": "session.update"}', "invalid_value"),
        ('{"type": "input_audio_buffer.append"}', "invalid_value"),
        ('{"type": "input_audio_buffer.append", "audio": "?"}', "invalid_value"),
        ('{"type": "input_audio_buffer.commit"}', "input_audio_buffer_commit_empty"),
    ],
)
def test_a_wrong_event_is_answered_and_the_session_goes_on(
    message: str | bytes, code: str, transcriber: Transcriber
) -> None:
    async def test() -> None:
        async with served(transcriber) as server, server.client() as client:
            await client.event()
            await client.socket.send(message)
            event = await client.event()
            assert event["error"]["code"] == code
            assert {"type", "code", "message", "param", "event_id"} == event["error"].keys()
            await client.set_up()

    run(test)


def test_audio_beyond_the_limit_is_rejected(
    transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "MAX_WAITING_S", 1.5)

    async def test() -> None:
        async with served(transcriber) as server, server.client() as client:
            await client.set_up()
            await client.append(np.zeros(2 * RATE, "<i2"))
            assert (await client.event())["error"]["code"] == "input_audio_buffer_full"

    run(test)


def test_a_failed_item_is_told_and_the_session_goes_on(
    transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Item.work

    def fails() -> str:
        raise MemoryError

    async def test() -> None:
        async with served(transcriber) as server, server.client() as client:
            await client.set_up()
            monkeypatch.setattr(Item, "work", lambda _: fails)
            await client.append(CLIPS[0])
            events = await client.until(f"{TRANSCRIPTION}.failed")
            failed = events[-1]
            assert failed["error"]["code"] == "internal"
            monkeypatch.setattr(Item, "work", work)
            await client.append(np.concatenate([PAUSE, CLIPS[1], PAUSE]))
            events += await client.until(f"{TRANSCRIPTION}.completed")
            assert events[-1]["item_id"] != failed["item_id"]
            assert len(of_type(events, "input_audio_buffer.committed")) == 2

    run(test)


def test_a_client_whose_connection_broke_resumes_its_session(transcriber: Transcriber) -> None:
    async def test() -> None:
        async with served(transcriber) as server:
            async with server.client() as client:
                session_id = (await client.event())["session"]["id"]
                await client.set_up()
                await client.append(np.concatenate([CLIPS[0], PAUSE]))
                events = await client.until("input_audio_buffer.committed")
                await client.append(CLIPS[1])
                await asyncio.sleep(0.3)
                client.socket.transport.abort()
            last = events[-1]["event_id"]
            async with server.client(f"session_id={session_id}&after={last}") as client:
                created = await client.event()
                assert (created["session"]["id"], created["event_id"]) == (session_id, last)
                await client.append(PAUSE)
                events += await client.until(f"{TRANSCRIPTION}.completed", 2)

        texts = [event["transcript"] for event in of_type(events, f"{TRANSCRIPTION}.completed")]
        assert texts == [transcriber.transcribe(clip).text for clip in CLIPS]
        ids = [event["event_id"] for event in events]
        assert len(set(ids)) == len(ids)

    run(test)


def test_a_session_moves_to_the_connection_that_resumes_it_and_ends_when_its_client_leaves(
    transcriber: Transcriber,
) -> None:
    async def test() -> None:
        async with served(transcriber, resume_seconds=0.2) as server:
            async with server.client() as first:
                session_id = (await first.event())["session"]["id"]
                async with server.client(f"session_id={session_id}") as second:
                    assert (await second.event())["session"]["id"] == session_id
                    with pytest.raises(ConnectionClosed):
                        await first.event()
                    await second.set_up()
            for leave in ("at once", "later"):
                async with server.client() as client:
                    session_id = (await client.event())["session"]["id"]
                    if leave == "later":
                        client.socket.transport.abort()
                while "realtime_sessions 0" not in server.service.metrics.text():
                    await asyncio.sleep(0.02)
                with pytest.raises(InvalidStatus, match="404"):
                    async with server.client(f"session_id={session_id}"):
                        pass

    run(test)


def test_there_is_a_limit_of_sessions_which_those_without_a_client_make_room_for(
    transcriber: Transcriber,
) -> None:
    async def test() -> None:
        async with served(transcriber, max_sessions=1) as server:
            async with server.client() as client:
                await client.event()
                with pytest.raises(InvalidStatus, match="429"):
                    async with server.client():
                        pass
                client.socket.transport.abort()
            await asyncio.sleep(0.1)
            async with server.client() as client:
                await client.set_up()

    run(test)


def test_a_secret_opens_sessions_with_its_settings_and_nothing_else(
    transcriber: Transcriber,
) -> None:
    asked = {
        "expires_after": {"anchor": "created_at", "seconds": 60},
        "session": {
            "type": "transcription",
            "audio": {"input": {"format": {"type": "audio/pcmu"}}},
        },
    }
    path = "/v1/realtime/client_secrets"

    async def test() -> None:
        async with (
            served(transcriber, keys=Keys([KEY])) as server,
            AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as http,
        ):
            headers = {"authorization": f"Bearer {KEY}"}
            answer = (await http.post(path, json=asked, headers=headers)).json()
            protocols = ["realtime", f"openai-insecure-api-key.{answer['value']}"]
            async with server.client(subprotocols=protocols) as client:
                assert client.socket.subprotocol == "realtime"
                created = (await client.event())["session"]
            assert created["audio"] == answer["session"]["audio"]
            assert created["audio"]["input"]["format"] == {"type": "audio/pcmu"}
            own = {"authorization": f"Bearer {answer['value']}"}
            assert (await http.post(path, json={}, headers=own)).status_code == 401
            assert (await http.get("/v1/models", headers=own)).status_code == 401

    run(test)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ("[]", None),
        ("{", None),
        ('{"expires_after": {"seconds": 1}}', "expires_after.seconds"),
        ('{"session": {"type": "realtime"}}', "session.type"),
    ],
)
def test_a_wrong_request_for_a_secret_is_rejected(
    body: str, param: str | None, transcriber: Transcriber
) -> None:
    service = Service(transcriber, ServeOptions())
    client = TestClient(create_app(service, realtime_routes(Sessions(service))), "http://localhost")

    answer = client.post("/v1/realtime/client_secrets", content=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    service.scheduler.close(0)


@pytest.mark.parametrize(
    ("query", "headers", "status"),
    [
        ("", {}, 401),
        ("", {"authorization": "Bearer ek_wrong"}, 401),
        ("model=gpt-5", {"authorization": "Bearer " + KEY}, 404),
        ("", {"origin": "https://foreign.example"}, 403),
    ],
)
def test_a_connection_that_is_not_allowed_is_answered_before_it_begins(
    query: str, headers: dict[str, str], status: int, transcriber: Transcriber
) -> None:
    async def test() -> None:
        async with served(transcriber, keys=Keys([KEY])) as server:
            with pytest.raises(InvalidStatus, match=str(status)):
                async with server.client(query, additional_headers=headers):
                    pass

    run(test)


@pytest.mark.parametrize(
    ("path", "address"),
    [
        ("//v1/realtime", "/v1/realtime"),
        ("/realtime/", "/v1/realtime"),
        ("/v1/audio/transcriptions", None),
    ],
)
def test_the_right_address_is_told_of_a_websocket_that_is_nearly_one(
    path: str, address: str | None, transcriber: Transcriber
) -> None:
    async def test() -> None:
        async with served(transcriber) as server:
            with pytest.raises(InvalidStatus) as raised:
                await connect(f"ws://127.0.0.1:{server.port}{path}")

            answer = raised.value.response
            message = json.loads(answer.body or b"")["error"]["message"]
            assert answer.status_code == 404
            assert message == (
                f"Unknown URL: the address is {address}" if address else "Unknown URL"
            )

    run(test)


def test_a_server_that_ends_sends_the_last_transcripts(transcriber: Transcriber) -> None:
    async def test() -> None:
        async with served(transcriber) as server:
            async with server.client() as client:
                await client.set_up()
                await client.append(CLIPS[0])
                await client.until("input_audio_buffer.speech_started")
                closing = asyncio.create_task(server.sessions.close(TIMEOUT_S))
                events = await client.until(f"{TRANSCRIPTION}.completed")
                assert events[-1]["transcript"] == transcriber.transcribe(CLIPS[0]).text
                with pytest.raises(ConnectionClosed) as found:
                    await client.event()
                assert found.value.rcvd is not None
                assert found.value.rcvd.code == 1001
                await closing
            with pytest.raises(InvalidStatus, match="503"):
                async with server.client():
                    pass

    run(test)


# Thousands of damaged messages: a realtime session answers each, and goes on.

MESSAGES = core_or_all(300, 10_000)
STRANGE: list[Any] = [
    None,
    -1,
    0,
    1e308,
    2**70,
    "",
    "x" * 300,
    "\ud800",
    -0.0,
    10**399,
    float("nan"),
    float("-inf"),
    [],
    {},
    True,
    "server_vad",
    "audio/pcma",
]

VALID: list[dict[str, Any]] = [
    {"type": "input_audio_buffer.append", "event_id": "a", "audio": "AAAA" * 500},
    {"type": "input_audio_buffer.commit"},
    {"type": "input_audio_buffer.clear"},
    {
        "type": "session.update",
        "session": {
            "type": "transcription",
            "audio": {
                "input": {
                    "format": {"type": "audio/pcm", "rate": 24_000},
                    "noise_reduction": None,
                    "transcription": {"model": "whisper-1", "language": "en", "keywords": ["a"]},
                    "turn_detection": {"type": "server_vad", "threshold": 0.5},
                }
            },
            "include": [],
        },
    },
]


def mutated(value: Any, random_: random.Random) -> Any:
    """The same with a member replaced, somewhere."""
    if isinstance(value, dict) and value and random_.random() < 0.9:
        name = random_.choice(list(value))
        return {**value, name: mutated(value[name], random_)}
    return random_.choice(STRANGE)


def damaged(text: str, random_: random.Random) -> str | bytes:
    at = random_.randrange(len(text))
    return random_.choice(
        [text, text, text[:at], text[:at] + "\x00" + text[at:], text.encode()[at:]]
    )


def test_a_damaged_message_harms_nobody(transcriber: Transcriber) -> None:
    random_ = random.Random(1)

    async def test() -> None:
        async with served(transcriber) as server, server.client() as client:
            for number in range(MESSAGES):
                event = random_.choice(VALID)
                if random_.random() < 0.7:
                    event = mutated(event, random_)
                await client.socket.send(damaged(json.dumps(event), random_))
                if number % 100 == 99:
                    await client.send("bogus", event_id=str(number))
                    while True:
                        error = (await client.event()).get("error") or {}
                        assert error.get("code") != "internal"
                        if error.get("event_id") == str(number):
                            break

    run(test, 600)
