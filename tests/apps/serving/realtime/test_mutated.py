"""Thousands of damaged messages: a realtime session answers each, and goes on."""

import json
import random
from typing import Any

import pytest

from whisperport.transcription import Transcriber

from ....extent import core_or_all

pytest.importorskip("starlette")

from .test_realtime import run, served, transcriber  # noqa: F401

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


def test_a_damaged_message_harms_nobody(transcriber: Transcriber) -> None:  # noqa: F811
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
