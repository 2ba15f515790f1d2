"""Load a server, compare every answer with `Transcriber`, and measure.

    python -m benchmarks.serving.load [--model NAME or --model FOLDER] [--parts equal speed ...] [--quick]

    equal     500 requests: alone, 16 at a time, streamed or not, in every format
    speed     overhead of one request for 30 s; 8 clients against `transcribe_files`; start to ready
    short     a command of 3 s by HTTP and by Wyoming, with windows as short as the audio and of 30 s
    queue     a clip behind a long file
    crowd     200 clients, of which a fifth leave midway
    memory    resident memory after many requests
    kills     SIGKILL and SIGTERM at random moments under load

Writes `results/serving.json`, prints what it finds, and exits with 1 if an answer was wrong.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fuzz.server_process import ServerProcess
from wyoming.asr import Transcribe
from wyoming.asr import Transcript as WyomingTranscript
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient

from whisperport.speech.audio import load_audio
from whisperport.speech.audio.pcm import SAMPLE_RATE
from whisperport.speech.text import write_srt, write_vtt
from whisperport.transcription import Transcriber, Transcript, transcribe_files
from whisperport.verification import versions
from whisperport.verification.clips import shipped_audio

from ..record import record, recorded

PACKAGES = ("whisperport", "onnxruntime", "starlette", "uvicorn")
URL = "/v1/audio/transcriptions"
FORMATS = ("json", "text", "srt", "vtt", "verbose_json", "stream")
CLIPS = [clip.path for clip in shipped_audio()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument(
        "--serve", nargs=argparse.REMAINDER, default=[], help="arguments of the server"
    )
    chosen = parser.parse_args()
    transcriber = Transcriber(chosen.model)
    found: dict[str, Any] = {}
    is_bundle = Path(chosen.model).is_dir()
    for part in chosen.parts:
        which = "--bundle" if is_bundle else "--model"
        limits = ["--max-body-mib", "200"]  # an hour
        with ServerProcess(which, chosen.model, *limits, *chosen.serve) as server:
            found[part] = PARTS[part](server, transcriber, 10 if chosen.quick else 1)
        print(f"{part}: {json.dumps(found[part])}", flush=True)
    result = {"model": chosen.model, "serve": chosen.serve, "versions": versions(PACKAGES)} | found
    name = "serving_no_batch" if "--no-batch" in chosen.serve else "serving"
    if is_bundle:  # such as build/embedded-tiny/onnxruntime
        name += f"_{Path(chosen.model).resolve().parent.name}"
    # What is recorded keeps the parts that were not measured.
    record("serving", name, recorded("serving", name) | result)
    sys.exit(any(part.get("different") for part in found.values()))


def equal(server: ServerProcess, transcriber: Transcriber, less: int) -> dict[str, Any]:
    """Every format of every clip, alone and 16 at a time."""
    expected = {clip: transcriber.transcribe(clip) for clip in CLIPS}
    every = list(product(CLIPS, FORMATS))
    random.Random(0).shuffle(every)
    asked = (every * 5)[: 500 // less]
    kinds: Counter[str] = Counter()
    closest = 0.0

    async def one(client: httpx.AsyncClient, clip: Path, form: str) -> None:
        nonlocal closest
        text = await answer(client, clip.read_bytes(), form)
        different, change = compare(text, form, expected[clip])
        closest = max(closest, change)
        kinds["different"] += different
        kinds["bytes of verbose_json differ"] += form == "verbose_json" and change > 0
        kinds["requests"] += 1

    at_once = len(asked) * 4 // 5
    run_clients(server, asked[at_once:], one, 1)
    before = server.cpu_s
    run_clients(server, asked[:at_once], one, 16)
    return {
        **kinds,
        "16 at a time: CPU s per request": round((server.cpu_s - before) / at_once, 4),
        "different": kinds["different"],
        "largest change of a log-probability": closest,
    }


def compare(text: str, form: str, expected: Transcript) -> tuple[bool, float]:
    """Whether an answer is wrong, and the largest change of a log-probability."""
    if form == "stream":
        events = [
            json.loads(block[6:]) for block in text.split("\n\n") if block.startswith("data: ")
        ]
        deltas = "".join(event["delta"] for event in events[:-1])
        return not deltas == events[-1]["text"] == expected.text, 0.0
    if form == "verbose_json":
        found, change = json.loads(text), 0.0
        wrong = len(found["segments"]) != len(expected.segments) or found["text"] != expected.text
        for got, want in zip(found["segments"], expected.segments, strict=False):
            for name in ("start", "end", "text", "seek", "temperature", "compression_ratio"):
                wrong |= got[name] != getattr(want, name)
            wrong |= got["tokens"] != list(want.tokens)
            change = max(change, abs(got["avg_logprob"] - want.avg_logprob))
        return wrong, change
    written = {
        "json": lambda: expected.text,
        "text": lambda: f"{expected.text}\n",
        "srt": lambda: write_srt(expected.segments),
        "vtt": lambda: write_vtt(expected.segments),
    }
    return (json.loads(text)["text"] if form == "json" else text) != written[form](), 0.0


def speed(server: ServerProcess, transcriber: Transcriber, less: int) -> dict[str, Any]:
    """Overhead of one request, and files per minute of 8 clients: wall-clock and CPU time."""
    samples = of_length(30.0)
    clip, files = wav(samples), CLIPS * max(1, 4 // less)
    data = [file.read_bytes() for file in files]
    single, several = [], []
    with ThreadPoolExecutor(8) as pool, connected(server) as client:

        def clients() -> None:
            for found in pool.map(partial(post, client), data):
                found.raise_for_status()

        for _ in range(max(3, 15 // less)):
            alone = took(lambda: transcriber.transcribe(samples), time.process_time)
            served = took(lambda: post(client, clip).raise_for_status(), lambda: server.cpu_s)
            single.append((alone, served))
        for _ in range(5):
            alone = took(lambda: list(transcribe_files(files, transcriber)), time.process_time)
            several.append((alone, took(clients, lambda: server.cpu_s)))
    return {
        "30 s: Transcriber, s and CPU s": medians([alone for alone, _ in single]),
        "30 s: request, s and CPU s": medians([served for _, served in single]),
        "30 s: request / Transcriber": ratios(single),
        "8 clients: files per minute": round(
            60 * len(files) / medians([s for _, s in several])[0], 1
        ),
        "8 clients: time / transcribe_files": ratios(several),
        "start to ready, s": round(server.ready_s, 2),
    }


Times = tuple[float, float]  # wall-clock and CPU seconds


def took(call: Callable[[], Any], cpu: Callable[[], float]) -> Times:
    """Return how long a call takes, and the CPU time meanwhile."""
    before = cpu()
    return seconds(call), cpu() - before


def medians(times: list[Times]) -> list[float]:
    return [round(statistics.median(column), 4) for column in zip(*times, strict=True)]


def ratios(pairs: list[tuple[Times, Times]]) -> list[float]:
    """Medians of the ratios of the second to the first, of each column."""
    return medians([(b[0] / a[0], b[1] / a[1]) for a, b in pairs])


def short(server: ServerProcess, transcriber: Transcriber, less: int) -> dict[str, Any]:
    """A command of 3 s, by HTTP and by Wyoming, of a server with short windows and of one without."""
    samples = of_length(3.0)
    clip, pcm = wav(samples), np.round(samples * 32767).astype("<i2").tobytes()
    arguments = (*server.arguments, "--wyoming", "tcp://127.0.0.1:0")
    with (
        ServerProcess(*arguments, "--no-short-windows") as long_windows,
        ServerProcess(*arguments) as short_windows,
        connected(long_windows) as long_client,
        connected(short_windows) as short_client,
    ):
        clients = {"30 s": long_client, "short": short_client}
        servers = {"30 s": long_windows, "short": short_windows}
        ports = {windows: wyoming_port(server) for windows, server in servers.items()}

        def by_http(windows: str) -> tuple[str, float]:
            began = time.perf_counter()
            text = text_of(post(clients[windows], clip).text)
            return text, time.perf_counter() - began

        ways: dict[str, Callable[[str], tuple[str, float]]] = {
            "HTTP": by_http,
            "Wyoming": lambda windows: asyncio.run(spoken(ports[windows], pcm)),
        }
        result: dict[str, Any] = {"different": 0}
        for way, ask in ways.items():
            texts = {ask(windows)[0] for windows in clients}  # the first answers are not measured
            pairs, count = [], max(5, 30 // less)
            before = {windows: server.cpu_s for windows, server in servers.items()}
            for _ in range(count):
                pairs.append((ask("30 s")[1], ask("short")[1]))
            cpu = {windows: (server.cpu_s - before[windows]) for windows, server in servers.items()}
            result["different"] += len(texts) - 1
            result[f"{way}: CPU s of 30 s, of short"] = [round(s / count, 4) for s in cpu.values()]
            result[f"{way}: s with 30 s, s, ratio"] = [
                *(round(statistics.median(column), 4) for column in zip(*pairs, strict=True)),
                round(statistics.median(b / a for a, b in pairs), 3),
            ]
    return result


async def spoken(port: int, pcm: bytes) -> tuple[str, float]:
    """Speak to a Wyoming server; return the transcript, and the seconds from the speech's end to it."""
    form = {"rate": SAMPLE_RATE, "width": 2, "channels": 1}
    async with AsyncTcpClient("127.0.0.1", port) as client:
        await client.write_event(Transcribe(language="en").event())
        await client.write_event(AudioStart(**form).event())
        for at in range(0, len(pcm), 2048):
            await client.write_event(AudioChunk(audio=pcm[at : at + 2048], **form).event())
        await asyncio.sleep(
            0.2
        )  # speech arrives while it is spoken: the server has read it at its end
        began = time.perf_counter()
        await client.write_event(AudioStop().event())
        while (event := await client.read_event()) is not None:
            if WyomingTranscript.is_type(event.type):
                return WyomingTranscript.from_event(event).text, time.perf_counter() - began
    raise RuntimeError("the Wyoming server closed the connection")


def wyoming_port(server: ServerProcess) -> int:
    return int(server.log.rsplit("tcp://127.0.0.1:", 1)[1].split()[0])


def queue(server: ServerProcess, transcriber: Transcriber, less: int) -> dict[str, Any]:
    """A clip of 3 s behind a file of one hour."""
    hour, short = wav(of_length(3600.0 / less)), wav(of_length(3.0))
    with connected(server) as client:
        alone = [seconds(lambda: post(client, short)) for _ in range(5)]
        window = seconds(lambda: post(client, wav(of_length(30.0))))
        with ThreadPoolExecutor(1) as pool:
            began = time.perf_counter()
            long = pool.submit(post, client, hour)
            times = []
            while not long.done():
                time.sleep(1)
                times.append((time.perf_counter() - began, seconds(lambda: post(client, short))))
            text = long.result().json()["text"]
    behind = [took for _, took in times[:-1]]
    same = text == transcriber.transcribe(of_length(3600.0 / less)).text
    return {
        "alone, s": round(statistics.median(alone), 3),
        "a window of 30 s, s": round(window, 3),
        "behind: median, s": round(statistics.median(behind), 3),
        "behind: longest, s": round(max(behind), 3),
        "first of them, s": round(behind[0], 3),
        "clips": len(behind),
        "different": not same,
    }


def crowd(server: ServerProcess, transcriber: Transcriber, less: int) -> dict[str, Any]:
    """200 clients for 5 minutes; a fifth of the requests are left midway."""
    expected = {clip: transcriber.transcribe(clip).text for clip in CLIPS}
    until, kinds = time.monotonic() + 300 / less, Counter[str]()

    async def client_of(number: int) -> None:
        choose = random.Random(number)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=600) as client:
            while time.monotonic() < until:
                clip, leaves = choose.choice(CLIPS), choose.random() < 0.2
                try:
                    async with asyncio.timeout(choose.uniform(0, 3) if leaves else None):
                        found = await apost(
                            client, clip.read_bytes(), choose.choice(("json", "stream"))
                        )
                except TimeoutError:
                    kinds["left"] += 1
                    continue
                except httpx.HTTPError as error:
                    kinds[f"lost: {type(error).__name__}"] += 1
                    continue
                if found.status_code == 429:
                    kinds["429"] += 1
                    await asyncio.sleep(float(found.headers["retry-after"]))
                else:
                    kinds["right" if expected[clip] in text_of(found.text) else "different"] += 1

    async def all_clients() -> None:
        await asyncio.gather(*(client_of(number) for number in range(200)))

    asyncio.run(all_clients())
    time.sleep(2)
    return {
        **kinds,
        "different": kinds["different"],
        "files left": server.files_left,
        "open files": server.n_open_files,
        "requests running": server.metric("requests_running"),
        "audio waiting": server.metric("audio_seconds_waiting"),
        "MiB": round(server.rss_mib, 1),
    }


def memory(server: ServerProcess, _: Transcriber, less: int) -> dict[str, Any]:
    """Resident memory during 10,000 requests of different formats with 2 s of speech, 4 at a time."""
    clips = [wav(load_audio(clip)[: 2 * SAMPLE_RATE]) for clip in CLIPS]
    count, points = 10_000 // less, dict[int, float]()

    async def one(client: httpx.AsyncClient, number: int, form: str) -> None:
        await answer(client, clips[number % len(clips)], form)
        if number % (count // 10) == 0:
            points[number] = round(server.rss_mib, 1)
            print(f"{number}: {points[number]} MiB", flush=True)

    run_clients(server, [(n, FORMATS[n % 6]) for n in range(1, count + 1)], one, 4)
    return {"MiB after requests": points, "open files": server.n_open_files}


def kills(_: ServerProcess, transcriber: Transcriber, less: int) -> dict[str, Any]:
    """Kill a loaded server at random moments; it starts again and leaves nothing."""
    choose, kinds = random.Random(0), Counter[str]()
    expected = {clip: transcriber.transcribe(clip).text for clip in CLIPS}
    for number in range(50 // less):
        with ServerProcess("--model", "default", "--drain-seconds", "20") as server:
            with ThreadPoolExecutor(12) as pool, connected(server) as client:
                futures = [(c, pool.submit(post, client, c.read_bytes())) for c in CLIPS[:12]]
                time.sleep(choose.uniform(0, 1.5))
                number_of = signal.SIGKILL if number % 2 else signal.SIGTERM
                status = server.end(number_of)
                kinds[f"{number_of.name}: exit {status}"] += 1
                for clip, future in futures:
                    kinds[outcome(number_of, future, expected[clip])] += 1
            kinds["files left"] += len(server.files_left)
    return {**kinds, "different": kinds["different"]}


def outcome(number: signal.Signals, future: Any, text: str) -> str:
    try:
        found = future.result(60)
    except httpx.HTTPError as error:
        return f"{number.name}: {type(error).__name__}"
    if found.status_code != 200:
        return f"{number.name}: status {found.status_code}"
    return f"{number.name}: right" if found.json()["text"] == text else "different"


PARTS: dict[str, Callable[[ServerProcess, Transcriber, int], dict[str, Any]]] = {
    "equal": equal,
    "speed": speed,
    "short": short,
    "queue": queue,
    "crowd": crowd,
    "memory": memory,
    "kills": kills,
}


def connected(server: ServerProcess) -> httpx.Client:
    return httpx.Client(base_url=server.url, trust_env=False, timeout=3600)


def run_clients(
    server: ServerProcess,
    asked: list[Any],
    one: Callable[..., Awaitable[None]],
    count: int,
) -> None:
    """Call `one(client, *arguments)` for all arguments, `count` at a time."""

    async def all_of_them() -> None:
        room = asyncio.Semaphore(count)
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(
            base_url=server.url, trust_env=False, timeout=600, limits=limits
        ) as client:

            async def in_turn(arguments: Any) -> None:
                async with room:
                    await one(client, *arguments)

            await asyncio.gather(*map(in_turn, asked))

    asyncio.run(all_of_them())


async def answer(client: httpx.AsyncClient, data: bytes, form: str) -> str:
    found = await apost(client, data, form)
    found.raise_for_status()
    return found.text


async def apost(client: httpx.AsyncClient, data: bytes, form: str) -> httpx.Response:
    fields = {"stream": "true"} if form == "stream" else {"response_format": form}
    return await client.post(URL, data={"model": "whisper-1"} | fields, files={"file": ("x", data)})


def post(client: httpx.Client, data: bytes) -> httpx.Response:
    return client.post(URL, data={"model": "whisper-1"}, files={"file": ("x", data)})


def text_of(body: str) -> str:
    if "data: " in body:  # perhaps after comments
        return str(json.loads(body.strip().split("\n\n")[-1][6:])["text"])
    return str(json.loads(body)["text"])


def of_length(duration_s: float) -> np.ndarray:
    """Speech of a duration: shipped clips one after the other."""
    clips = [load_audio(clip) for clip in CLIPS[:12]]
    wanted = round(duration_s * SAMPLE_RATE)
    repeated = clips * (1 + wanted // sum(clip.size for clip in clips))
    return np.concatenate(repeated)[:wanted]


def wav(samples: np.ndarray) -> bytes:
    data = np.round(samples * 32767).astype("<i2").tobytes()
    header = b"RIFF" + (36 + len(data)).to_bytes(4, "little") + b"WAVEfmt "
    form = (16, 1, 1, SAMPLE_RATE, 2 * SAMPLE_RATE, 2, 16)
    sizes = (4, 2, 2, 4, 4, 2, 2)
    fmt = b"".join(value.to_bytes(size, "little") for value, size in zip(form, sizes, strict=True))
    return header + fmt + b"data" + len(data).to_bytes(4, "little") + data


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
