"""Send mutated requests to a server.

    python -m fuzz.server [--count 5000] [--seed 0] [--bundle DIR]

Each request is mutated as a whole (head and body), in its fields, or in its audio file; its sender may
state a wrong length, send slowly, stop, or leave before the answer. The server must answer each with a
status below 500, or close the connection; answer others meanwhile; use at most 1 GiB; and leave no file, no
descriptor and no request that it believes to be running. Prints the table, writes it to
build/fuzz/server.json, and exits with 1 if there is a finding.
"""

import argparse
import json
import random
import re
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random

from fuzz.mutators import number, raw
from fuzz.server_process import ServerProcess
from whisperport.verification.clips import shipped_audio

RESULT = Path("build/fuzz/server.json")
TIMEOUT_S = 60
LIMIT_MIB = 1024
CLIPS = [clip.path.read_bytes() for clip in shipped_audio() if clip.seconds < 6]
FIELDS = {
    "model": "whisper-1",
    "response_format": "verbose_json",
    "timestamp_granularities[]": "word",
    "temperature": "0",
    "language": "en",
    "prompt": "nine six",
    "stream": "true",
    "chunking_strategy": '{"type": "server_vad", "threshold": 0.5}',
    "chunking_strategy[type]": "server_vad",
    "include[]": "logprobs",
}
PATHS = ("/v1/audio/transcriptions",) * 20 + (
    "/v1/audio/translations",
    "/v1/models",
    "/v1/models/whisper-1",
    "/ready",
    "/metrics",
)


def main() -> int:
    """Run the campaign; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bundle", default="", help="a folder; without it, the embedded model")
    chosen = parser.parse_args()
    limits = ["--max-body-mib", "8", "--idle-seconds", "2", "--max-audio-seconds", "60"]
    model = ["--bundle", chosen.bundle] if chosen.bundle else ["--model", "default"]
    with ServerProcess(*model, *limits) as server:
        findings: list[str] = []
        kinds: Counter[str] = Counter()
        before, peak = server.n_open_files, 0.0
        with ThreadPoolExecutor(8) as pool:
            jobs = pool.map(
                partial(attempt, server.url), range(chosen.seed, chosen.seed + chosen.count)
            )
            for number_, kind in enumerate(jobs):
                kinds[kind] += 1
                peak = max(peak, server.rss_mib)
                if kind.startswith("finding"):
                    findings.append(f"{chosen.seed + number_}: {kind}")
                if number_ % 500 == 499:
                    print(f"{number_ + 1}: {dict(kinds)}, {peak:.0f} MiB", flush=True)
        time.sleep(5)
        findings += left(server, before, peak)
        status = server.end()
        if status:
            findings.append(f"exit status {status}")
        if "Traceback" in server.log:
            findings.append(server.log[server.log.index("Traceback") :][:3000])
    result = {"count": chosen.count, "seed": chosen.seed, "answers": dict(kinds.most_common())}
    result |= {"peak MiB": round(peak), "findings": findings}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return bool(findings)


def left(server: ServerProcess, files_before: int, peak_mib: float) -> list[str]:
    """What the server has left over."""
    found = [f"file left: {name}" for name in server.files_left]
    if server.metric("requests_running") > 0:
        found.append("a request runs that has no client")
    if server.n_open_files > files_before + 2:
        found.append(f"{server.n_open_files} open files, {files_before} before")
    if peak_mib > LIMIT_MIB:
        found.append(f"{peak_mib:.0f} MiB")
    return found


def attempt(url: str, seed: int) -> str:
    """Send one request; return the kind of its outcome."""
    choose = Random(seed)
    data = request(choose)
    host, port = re.findall(r"//(.*):(\d+)", url)[0]
    try:
        with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
            connection.settimeout(TIMEOUT_S)
            if not send(connection, data, choose):
                return "left"
            return answered(connection)
    except TimeoutError:
        return "finding: no answer"
    except OSError:  # closed while the request was sent
        return "closed"


def send(connection: socket.socket, data: bytes, choose: Random) -> bool:
    """Send a request in the way of a chosen client; return whether it waits for the answer."""
    way = choose.random()
    if way < 0.05:  # leaves in the middle
        connection.sendall(data[: choose.randrange(len(data))])
        return False
    if way < 0.10:  # leaves after the request
        connection.sendall(data)
        time.sleep(choose.uniform(0, 0.2))
        return False
    if way < 0.13:  # stops, and waits
        connection.sendall(data[: choose.randrange(len(data))])
        return True
    if way < 0.16:  # sends slowly
        for start in range(0, len(data), len(data) // 5 + 1):
            connection.sendall(data[start : start + len(data) // 5 + 1])
            time.sleep(0.1)
        return True
    connection.sendall(data)
    return True


def answered(connection: socket.socket) -> str:
    """Read the answer, and return its status."""
    found = b""
    while b"\r\n" not in found and (piece := connection.recv(65536)):
        found += piece
    if not (status := re.match(rb"HTTP/1\.1 (\d{3}) ", found)):
        return "finding: no HTTP" if found else "closed"
    number_ = int(status[1])
    allowed = number_ < 500 or number_ == 503
    return str(number_) if allowed else f"finding: {number_}"


def request(choose: Random) -> bytes:
    """Return the bytes of one request."""
    fields = [(name, FIELDS[name]) for name in FIELDS if name == "model" or choose.random() < 0.15]
    audio, kind = choose.choice(CLIPS), choose.random()
    if kind < 0.35:
        audio = raw.mutated(audio, choose, CLIPS)
    elif kind < 0.5:
        fields = [mutated_field(one, choose) for one in fields]
    elif kind < 0.55:
        fields += [(f"f{i}", "x") for i in range(choose.choice((1, 63, 64, 65, 5000)))]
    elif kind < 0.6:
        fields.append(("prompt", "x" * choose.choice((100, 65_535, 65_536, 9_000_000))))
    elif kind < 0.63:
        audio = forged_wav(choose)
    body = multipart(fields, audio)
    head = {"Host": "localhost", "Content-Type": "multipart/form-data; boundary=b"}
    head["Content-Length"] = str(len(body))
    if 0.63 < kind < 0.7:
        head = {
            name: raw.mutated(value.encode(), choose).decode("latin-1")
            for name, value in head.items()
        }
    elif 0.7 < kind < 0.73:
        head["Content-Length"] = choose.choice(
            ("-1", "0", "1", "99999999999", "abc", str(len(body) + 5))
        )
    elif 0.73 < kind < 0.76:
        del head["Content-Length"]
        head["Transfer-Encoding"] = "chunked"
        body = chunked(body, choose)
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    path = choose.choice(PATHS)
    method = "POST" if "audio" in path or choose.random() < 0.2 else "GET"
    data = f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body
    return (raw.mutated(data, choose, CLIPS) or b"\0") if kind > 0.85 else data


def mutated_field(field: tuple[str, str], choose: Random) -> tuple[str, str]:
    name, value = field
    changed = choose.choice(
        (
            raw.mutated(value.encode(), choose).decode("latin-1"),
            str(number(choose)),
            "",
            "[" * 10_000,
            '{"type": "server_vad", "threshold": 1e999}',
            "\0",
            "nan",
        )
    )
    return (name, changed) if choose.random() < 0.8 else (changed[:50].replace('"', ""), value)


def multipart(fields: list[tuple[str, str]], audio: bytes) -> bytes:
    form = b"--b\r\nContent-Disposition: form-data; name="
    parts = [
        form + f'"{name}"\r\n\r\n{value}\r\n'.encode("latin-1", "replace") for name, value in fields
    ]
    file = form + b'"file"; filename="../../x"\r\nContent-Type: audio/wav\r\n\r\n' + audio + b"\r\n"
    return b"".join([*parts, file, b"--b--\r\n"])


def chunked(body: bytes, choose: Random) -> bytes:
    """Return the body in chunks, of which one may state a wrong size."""
    size = choose.choice((1000, 65_536))
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    wrong = choose.randrange(2 * len(pieces))
    written = [
        f"{len(piece) + (i == wrong) * choose.choice((-1, 1, 10**9)):x}\r\n".encode()
        + piece
        + b"\r\n"
        for i, piece in enumerate(pieces)
    ]
    return b"".join(written) + b"0\r\n\r\n"


def forged_wav(choose: Random) -> bytes:
    """Return a wav file whose header lies: rate, channels, bits and sizes."""
    rate = choose.choice((0, 1, 7, 8000, 192_000, 2**31 - 1, 2**32 - 1))
    channels, bits = (
        choose.choice((0, 1, 2, 255, 65_535)),
        choose.choice((0, 1, 8, 16, 24, 64, 65_535)),
    )
    size = choose.choice((0, 1, 36, 2**31, 2**32 - 1))
    numbers = [(16, 4), (1, 2), (channels, 2), (rate, 4), (rate, 4), (2, 2), (bits, 2)]
    head = b"".join(value.to_bytes(width, "little") for value, width in numbers)
    data = size.to_bytes(4, "little") + random.Random(0).randbytes(50_000)
    return b"RIFF" + size.to_bytes(4, "little") + b"WAVEfmt " + head + b"data" + data


if __name__ == "__main__":
    sys.exit(main())
