"""Ask a server for `/health` every 20 ms while clients send what is slow to handle.

    python -m benchmarks.serving.hostile [--seconds 4] [--clients 32] [--kinds NAME ...]

Starts `whisperport serve` with the embedded model on this machine. For each kind of request, 32 clients
repeat it for 4 seconds. Prints the longest time of an answer of `/health`, and exits with 1 if one took
more than 0.2 s, or the server has ended. `idle` is without requests: what the machine takes.
"""

import argparse
import asyncio
import base64
import json
import multiprocessing
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

from fuzz.server_process import ServerProcess

from whisperport.verification.clips import shipped_audio

LIMIT_S, EVERY_S = 0.2, 0.02
PATH = "/v1/audio/transcriptions"
CLIP = shipped_audio()[0].path.read_bytes()
UPGRADE = (
    b"GET /v1/realtime?intent=transcription HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\n"
    b"connection: upgrade\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def field(name: str, value: bytes, more: bytes = b"") -> bytes:
    head = f'--b\r\ncontent-disposition: form-data; name="{name}"'.encode()
    return head + more + b"\r\n\r\n" + value + b"\r\n"


def post(*fields: bytes, kind: bytes = b"multipart/form-data; boundary=b") -> bytes:
    """A request for a transcription of a clip."""
    file = field("file", CLIP, b'; filename="x"')
    body = b"".join((field("model", b"whisper-1"), *fields, file, b"--b--\r\n"))
    return head(kind, b"content-length: %d" % len(body)) + body


def head(kind: bytes, *more: bytes) -> bytes:
    lines = (f"POST {PATH} HTTP/1.1".encode(), b"host: localhost", b"content-type: " + kind, *more)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def frame(data: bytes, first: int = 0x81) -> bytes:
    """A WebSocket frame of a client, whose mask is 0."""
    n = len(data)
    size = (
        bytes([0x80 | n])
        if n < 126
        else b"\xfe" + n.to_bytes(2)
        if n < 2**16
        else b"\xff" + n.to_bytes(8)
    )
    return bytes([first]) + size + b"\0\0\0\0" + data


def session(**transcription: object) -> bytes:
    update = {"session": {"audio": {"input": {"transcription": transcription}}}}
    return frame(json.dumps({"type": "session.update", **update}).encode())


def keywords() -> bytes:
    texts = random.Random(1)
    return b"".join(
        field("keywords[]", "".join(texts.choices("abcdefghij .,", k=65_000)).encode())
        for _ in range(60)
    )


def wyoming(data: bytes, kind: str = "transcribe") -> bytes:
    """An event with data, and an utterance without audio, which encodes its names."""
    line = json.dumps({"type": kind, "data_length": len(data)}).encode() + b"\n"
    return line + data + b'{"type": "audio-stop"}\n'


KINDS: dict[str, Callable[[], bytes]] = {
    "idle": lambda: b"",
    "clips": lambda: post(),
    "keywords": lambda: post(keywords()),
    "prompt": lambda: post(field("prompt", b"x" * 65_000)),
    "emoji": lambda: post(field("prompt", "\U0001f600".encode() * 16_000)),
    "json list": lambda: post(field("keywords", b"[" + b'"a",' * 16_000 + b'"a"]')),
    "deep json": lambda: post(field("chunking_strategy", b'{"a":' * 10_000)),
    "language": lambda: post(field("language", b"x" * 65_000)),
    "number": lambda: post(field("temperature", b"9" * 65_000)),
    "members": lambda: post(*(field(f"chunking_strategy[{n}]", b"1") for n in range(60))),
    "charset": lambda: post(
        *(field("prompt", b"a9b8" * 16_000) for _ in range(60)),
        kind=b"multipart/form-data; boundary=b; charset=punycode",
    ),
    "many parts": lambda: post(*(field("x", b"") for _ in range(100_000))),
    "part heads": lambda: post(*(field("x", b"", b";" * 4_000) for _ in range(64))),
    "type": lambda: head(b"multipart/form-data; boundary=b" + b";" * 15_000, b"content-length: 0"),
    "heads": lambda: b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a:b\r\n" * 13_000,
    "query": lambda: b"GET /v1/models?" + b"a&" * 8_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "pipelined": lambda: b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2_000,
    "chunks": lambda: (
        head(b"multipart/form-data; boundary=b", b"transfer-encoding: chunked")
        + b"".join(b"1\r\n%c\r\n" % one for one in field("prompt", b"x" * 60_000) * 8)
    ),
    "socket frames": lambda: UPGRADE + frame(b"", 0x01) + frame(b"", 0x00) * 200_000,
    "socket pings": lambda: UPGRADE + frame(b"", 0x89) * 200_000,
    "socket texts": lambda: UPGRADE + frame(b"1") * 50_000,
    "socket lists": lambda: UPGRADE + frame(b"[" + b"[]," * 7_000_000 + b"0]"),
    "socket list": lambda: UPGRADE + frame(b"[" + b"[]," * 20_000 + b"0]") * 50,
    "socket numbers": lambda: UPGRADE + frame(b"[" + (b"9" * 4_000 + b",") * 5_000 + b"0]"),
    "socket audio": lambda: (
        UPGRADE
        + frame(
            b'{"type": "input_audio_buffer.append", "audio": "%s"}'
            % base64.b64encode(bytes(15 * 2**20))
        )
    ),
    "socket prompt": lambda: UPGRADE + session(prompt="x" * 8_192, keywords=["y"] * 4_000) * 50,
    "wyoming names": lambda: (
        wyoming(json.dumps({"transcript_names": ["x" * 1_000_000]}).encode()) * 8
    ),
    "wyoming many": lambda: wyoming(json.dumps({"transcript_names": ["x"] * 9_000}).encode()) * 50,
    "wyoming lists": lambda: wyoming(b'{"a": [' + b"[]," * 300_000 + b"0]}") * 8,
}


def probe(port: int, answers: Connection) -> None:
    """Ask for `/health` on new connections, until told; send the durations."""
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    durations = []
    while not answers.poll(EVERY_S):
        began = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.sendall(request)
            is_well = connection.recv(12) == b"HTTP/1.1 200"
        durations.append(time.perf_counter() - began if is_well else 1e9)
    answers.send(durations)


async def client(port: int, data: bytes, end: float) -> int:
    """Send a request again and again, whatever the answers are."""
    count = 0
    while time.monotonic() < end and data:
        try:
            async with asyncio.timeout(end - time.monotonic()):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    reading = asyncio.ensure_future(reader.read(200))
                    if data.startswith(UPGRADE):
                        writer.write(UPGRADE)
                        await asyncio.wait({reading})
                    rest = data.removeprefix(UPGRADE)
                    for at in range(0, len(rest), 2**16):
                        writer.write(rest[at : at + 2**16])
                        await writer.drain()
                    await reading
                    count += 1
                    if rest is not data:
                        await reader.read()
                finally:
                    writer.transport.abort()
                    await asyncio.gather(reading, return_exceptions=True)
        except (TimeoutError, OSError):
            continue
    return count


def measured(kind: str, data: bytes, port: int, wyoming_port: int, n: int, seconds: float) -> float:
    """Return the longest time of an answer of `/health` in seconds, and print it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=probe, args=(port, theirs), daemon=True)
    process.start()
    time.sleep(0.2)

    async def load() -> int:
        to = wyoming_port if kind.startswith("wyoming") else port
        end = time.monotonic() + seconds
        return sum(await asyncio.gather(*(client(to, data, end) for _ in range(n))))

    count = asyncio.run(load())
    time.sleep(0 if data else seconds)
    ours.send(None)
    durations: list[float] = sorted(ours.recv())
    process.join()
    middle = durations[len(durations) // 2]
    print(f"{kind:16} {count:7} {len(durations):7} {middle:9.3f} {durations[-1]:9.3f}", flush=True)
    return durations[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    chosen = parser.parse_args()
    arguments = ("--model", "default", "--threads", "1", "--wyoming", "tcp://127.0.0.1:0")
    slow = {}
    with ServerProcess(*arguments) as server:
        port = urlsplit(server.url).port or 0
        wyoming_port = int(server.log.rsplit("tcp://127.0.0.1:", 1)[1].split()[0])
        print(
            f"{'':16} {'sent':>7} {'probes':>7} {'median s':>9} {'longest s':>9}"
            f"   load of the machine: {os.getloadavg()[0]}"
        )
        for kind in chosen.kinds:
            data = KINDS[kind]()
            longest_s = measured(kind, data, port, wyoming_port, chosen.clients, chosen.seconds)
            if longest_s > LIMIT_S:
                slow[kind] = longest_s
        is_alive = server.process.poll() is None
    print(f"longer than {LIMIT_S} s: {', '.join(slow) or 'none'}")
    sys.exit(bool(slow) or not is_alive)


if __name__ == "__main__":
    main()
