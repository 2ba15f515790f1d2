"""Serve for hours: 16 clients of all protocols, which also leave midway, and restarts by signal.

    python -m benchmarks.serving.day [--minutes 120] [--restart-minutes 30] [--clients 16] [--threads 2]

Each client asks again and again, for a random thing over a new connection: a clip or a file of several
minutes by HTTP, in every format; two clips over a WebSocket; a voice command over Wyoming. A tenth leaves
at a random moment. After each half hour, the server gets SIGTERM under this load, and the next one starts
on the same port: what was accepted before the signal must still be answered.

Every answer is compared with `Transcriber`. Memory, descriptors and temporary files are read every five
seconds; the slope of the memory is that of the second half of each server's life, with Student's interval
of 95 % over its minutes. The figures of each quarter are recorded. Writes `results/serving.json`, and exits
with 1 if an answer was wrong or lost, or if something was left.
"""

import argparse
import asyncio
import base64
import json
import math
import random
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np
from fuzz.server_process import ServerProcess
from websockets.asyncio.client import connect

from whisperport.apps.serving.realtime.ear import Ear
from whisperport.apps.serving.realtime.settings import Settings
from whisperport.build.predicted_times import student_t
from whisperport.speech.audio import SAMPLE_RATE, load_audio
from whisperport.transcription import Transcriber, Transcript
from whisperport.verification import versions

from ..record import record
from .load import CLIPS, FORMATS, answer, compare, spoken, wav, wyoming_port
from .realtime import TRANSCRIPTION

PACKAGES = ("whisperport", "onnxruntime", "starlette", "uvicorn", "wyoming", "websockets")
SHORT_S = 6.0  # a clip up to this length is a short one
LEAVING = 0.1  # of all
LATEST_LEAVE_S = 2.0
EVERY_S = 5.0
QUARTERS = 4
WAV_HEADER = 44  # bytes, of what `wav` returns


@dataclass(frozen=True)
class Speech:
    """Audio that is asked for, and its transcript."""

    data: bytes
    expected: Transcript

    @property
    def pcm(self) -> bytes:
        return self.data[WAV_HEADER:]


@dataclass
class Quarter:
    """What happened in a quarter of the time."""

    kinds: Counter[str] = field(default_factory=Counter)
    # Times of answers for short clips: alone, and while long files were transcribed.
    alone_s: list[float] = field(default_factory=list)
    behind_s: list[float] = field(default_factory=list)


@dataclass
class Life:
    """A server from its start to its end: its memory and descriptors every few seconds."""

    began: float
    samples: list[tuple[float, float, int, int]] = field(default_factory=list)
    status: int | None = None
    log: str = ""
    left: list[str] = field(default_factory=list)
    cpu_s: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Return its memory at the half and at the end, the slope in MiB per hour, and descriptors."""
        at = [second for second, *_ in self.samples]
        half = at[0] + (at[-1] - at[0]) / 2
        minutes: dict[int, list[float]] = defaultdict(list)
        for second, mib, _, _ in self.samples:
            if second >= half:
                minutes[int((second - half) / 60)].append(mib)
        points = [(minute / 60, statistics.median(mib)) for minute, mib in minutes.items()]
        return {
            "minutes": round((at[-1] - self.began) / 60, 1),
            "MiB at the start, the half, the end": [
                round(self.samples[0][1], 1),
                round(points[0][1], 1),
                round(points[-1][1], 1),
            ],
            "MiB per hour": slope(points),
            "descriptors at the half, the end": [
                max(files for second, _, files, _ in self.samples if lower <= second < upper)
                for lower, upper in ((0.0, half), (half, math.inf))
            ],
            "CPU s": round(self.cpu_s, 1),
            "temporary files, most": max(files for *_, files in self.samples),
            "exit status": self.status,
            "left": self.left,
        }


class Day:
    """The servers, one after the other on the same ports, and what their clients found."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        transcriber = Transcriber(chosen.model)
        clips = [load_audio(clip) for clip in CLIPS]
        self.short = [
            speech(transcriber, one) for one in clips if one.size <= SHORT_S * SAMPLE_RATE
        ]
        self.clips = [speech(transcriber, one) for one in clips]
        choose = random.Random(1)
        self.long = [
            speech(transcriber, np.concatenate(choose.sample(clips * 2, count)))
            for count in (12, 20, 32)
        ]
        self.spoken = [in_session(transcriber, one) for one in self.short]
        self.quarters = [Quarter() for _ in range(QUARTERS)]
        self.wrong: list[str] = []
        self.lives: list[Life] = []
        self.n_long = 0
        self.port = self.wyoming = 0
        self.ending = 0.0  # when the server got its signal; 0: it did not
        self.up = asyncio.Event()

    async def run(self) -> None:
        """Serve and ask until the time is over."""
        self.began = time.monotonic()
        self.end = self.began + 60 * self.chosen.minutes
        clients = [
            asyncio.create_task(self.client(number)) for number in range(self.chosen.clients)
        ]
        while time.monotonic() < self.end:
            await self.serve(min(self.end, time.monotonic() + 60 * self.chosen.restart_minutes))
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def serve(self, until: float) -> None:
        """Run one server until it is time; it ends by a signal, under load."""
        arguments = ["--model", self.chosen.model, "--drain-seconds", "120"]
        arguments += ["--threads", str(self.chosen.threads)]
        arguments += ["--port", str(self.port), "--wyoming", f"tcp://127.0.0.1:{self.wyoming}"]
        life = Life(time.monotonic())
        self.lives.append(life)
        with await asyncio.to_thread(ServerProcess, *arguments) as server:
            self.url = server.url
            self.port, self.wyoming = int(server.url.rpartition(":")[2]), wyoming_port(server)
            self.ending = 0.0
            self.up.set()
            while time.monotonic() < until:
                now = time.monotonic()
                life.samples.append(
                    (now, server.rss_mib, server.n_open_files, len(server.files_left))
                )
                await asyncio.sleep(EVERY_S)
            self.up.clear()
            life.cpu_s = server.cpu_s
            self.ending = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            life.status = await asyncio.to_thread(server.process.wait, 300)
            life.left = server.files_left
            life.log = server.log
        print(f"server {len(self.lives)}: {json.dumps(life.summary())}", flush=True)

    async def client(self, number: int) -> None:
        """Ask until the time is over."""
        choose = random.Random(f"{self.chosen.seed} {number}")
        asks: list[tuple[int, Callable[[random.Random], Awaitable[str]]]] = [
            (200, self.ask_short),
            (50, self.ask_clip),
            (1, self.ask_long),
            (25, self.ask_realtime),
            (75, self.ask_wyoming),
        ]
        weights, ways = zip(*asks, strict=True)
        while True:
            await self.up.wait()
            ask = choose.choices(ways, weights)[0]
            kind = ask.__name__.removeprefix("ask_")
            leaves = choose.uniform(0, LATEST_LEAVE_S) if choose.random() < LEAVING else None
            began = time.monotonic()
            if began > self.end:
                return
            try:
                async with asyncio.timeout(leaves):
                    found = await ask(choose)
            except TimeoutError:
                outcome = "left" if leaves is not None else "lost: no answer"
            except Exception as error:  # of any library: a client must not end by it
                outcome = self.outcome_of(error, began)
            else:
                outcome = "different" if found else "right"
                if found:
                    self.wrong.append(f"{kind}: {found[:500]}")
            if outcome.startswith("lost"):
                self.wrong.append(f"{kind}: {outcome}")
                print(self.wrong[-1], flush=True)
            self.quarter().kinds[f"{kind}: {outcome}"] += 1
            if self.chosen.pause:
                await asyncio.sleep(choose.expovariate(1 / self.chosen.pause))

    def outcome_of(self, error: Exception, began: float) -> str:
        """Return what an error means: a server that ends may turn away what comes after the signal."""
        if self.ending and began > self.ending - 0.5:
            return "asked again after a restart"
        return f"lost: {type(error).__name__}: {error}"[:200]

    def quarter(self) -> Quarter:
        part = (time.monotonic() - self.began) / (self.end - self.began)
        return self.quarters[min(QUARTERS - 1, int(QUARTERS * part))]

    async def ask_short(self, choose: random.Random) -> str:
        """Ask for a short clip as JSON, and note how long it takes."""
        speech, behind = choose.choice(self.short), self.n_long > 0
        began = time.monotonic()
        found = await self.posted(speech, "json")
        took = time.monotonic() - began
        quarter = self.quarter()
        (quarter.behind_s if behind else quarter.alone_s).append(took)
        return found

    async def ask_clip(self, choose: random.Random) -> str:
        """Ask for a clip in some format."""
        return await self.posted(choose.choice(self.clips), choose.choice(FORMATS))

    async def ask_long(self, choose: random.Random) -> str:
        """Ask for a file of minutes in some format."""
        self.n_long += 1
        try:
            return await self.posted(choose.choice(self.long), choose.choice(FORMATS))
        finally:
            self.n_long -= 1

    async def posted(self, speech: Speech, form: str) -> str:
        """Return the answer if it is wrong."""
        how: dict[str, Any] = {"base_url": self.url, "trust_env": False, "timeout": 600}
        async with httpx.AsyncClient(**how, verify=False) as client:  # reads no certificates
            text = await answer(client, speech.data, form)
        wrong, _ = compare(text, form, speech.expected)
        return f"{form}: {text}" if wrong else ""

    async def ask_realtime(self, choose: random.Random) -> str:
        """Ask for two short clips in one session, which are sent as fast as the server reads."""
        asked = choose.choices(self.spoken, k=2)
        url = f"{self.url.replace('http', 'ws')}/v1/realtime?intent=transcription"
        async with connect(url, proxy=None) as socket:
            form = {"type": "audio/pcm", "rate": SAMPLE_RATE}
            given = {"audio": {"input": {"format": form, "turn_detection": None}}}
            await socket.send(json.dumps({"type": "session.update", "session": given}))
            texts = []
            for pcm in (speech.pcm for speech in asked):
                for at in range(0, len(pcm), 2 * SAMPLE_RATE):
                    audio = base64.b64encode(pcm[at : at + 2 * SAMPLE_RATE]).decode()
                    await socket.send(
                        json.dumps({"type": "input_audio_buffer.append", "audio": audio})
                    )
                await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
            while len(texts) < len(asked):
                event = json.loads(await socket.recv())
                if event["type"] in ("error", f"{TRANSCRIPTION}.failed"):
                    return json.dumps(event)
                if event["type"] == f"{TRANSCRIPTION}.completed":
                    texts.append(event["transcript"])
        return "" if texts == [speech.expected.text for speech in asked] else json.dumps(texts)

    async def ask_wyoming(self, choose: random.Random) -> str:
        """Speak a voice command."""
        speech = choose.choice(self.short)
        text, _ = await spoken(self.wyoming, speech.pcm)
        return "" if text.strip() == speech.expected.text.strip() else text

    def result(self) -> dict[str, Any]:
        """Return what is recorded."""
        total: Counter[str] = sum((quarter.kinds for quarter in self.quarters), Counter())
        return {
            "requests": total.total(),
            "different": sum(n for kind, n in total.items() if kind.endswith("different")),
            "lost": sum(n for kind, n in total.items() if ": lost" in kind),
            "quarters": [
                {
                    "requests": quarter.kinds.total(),
                    "short clips, s": quantiles(quarter.alone_s),
                    "short clips behind a long file, s": quantiles(quarter.behind_s),
                    **dict(sorted(quarter.kinds.items())),
                }
                for quarter in self.quarters
            ],
            "servers": [life.summary() for life in self.lives],
            "tracebacks": sum("Traceback" in life.log for life in self.lives),
            "wrong": self.wrong[:20],
        }


def speech(transcriber: Transcriber, samples: np.ndarray) -> Speech:
    """Return audio as a client sends it, with its transcript."""
    data = wav(samples)
    pcm = np.frombuffer(data[WAV_HEADER:], "<i2").astype(np.float32) / 32768
    return Speech(data, transcriber.transcribe(pcm))


def in_session(transcriber: Transcriber, speech: Speech) -> Speech:
    """Return audio with the transcript of what a session keeps of it, from shortly before the speech."""
    ear = Ear(Settings("whisper-1", kind="audio/pcm", rate=SAMPLE_RATE, vad=None))
    parts = [part for part in ear.push(speech.pcm) if isinstance(part, np.ndarray)]
    if not parts:  # nobody speaks
        return replace(speech, expected=replace(speech.expected, text=""))
    kept = np.concatenate(parts).astype(np.float32) / 32768
    return replace(speech, expected=transcriber.transcribe(kept))


def quantiles(times: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile, and how many there are."""
    if len(times) < 2:
        return {"count": len(times)}
    hundredths = statistics.quantiles(times, n=100, method="inclusive")
    return {"count": len(times), "median": hundredths[49], "p99": hundredths[98]}


def slope(points: Sequence[tuple[float, float]]) -> list[float]:
    """Return the slope of a line through points, and both ends of its interval of 95 %."""
    if len(points) < 4:
        return []
    x, y = np.array(points).T
    (rise, _), covariance = np.polyfit(x, y, 1, cov=True)
    margin = student_t(0.975, len(points) - 2) * math.sqrt(covariance[0, 0])
    return [float(rise), float(rise - margin), float(rise + margin)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="default")
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--restart-minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0, help="mean seconds between two requests")
    parser.add_argument("--seed", type=int, default=0)
    day = Day(parser.parse_args())
    asyncio.run(day.run())
    found = day.result()
    print(json.dumps(found, indent=1))
    record("serving", "day", {"versions": versions(PACKAGES)} | found)
    is_wrong = found["different"] or found["lost"] or found["tracebacks"]
    sys.exit(bool(is_wrong or any(life.status or life.left for life in day.lives)))


if __name__ == "__main__":
    main()
