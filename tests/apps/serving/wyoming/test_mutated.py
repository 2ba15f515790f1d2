"""Thousands of damaged conversations: the Wyoming server ends each, and serves the next client."""

import asyncio
import json
import random

import pytest

from whisperport.transcription import Transcriber

from ....extent import core_or_all

pytest.importorskip("wyoming")

from .test_wyoming import FORM, line, run, served, transcriber  # noqa: F401

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


def test_a_damaged_conversation_harms_nobody(transcriber: Transcriber) -> None:  # noqa: F811
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
