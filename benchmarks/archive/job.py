"""Measure and stress `whisperport archive` on thousands of short clips.

    python -m benchmarks.archive.job make CLIPS --count 10000 # synthesize clips
    python -m benchmarks.archive.job speed CLIPS # equal to transcribe_files? its speed, and the memory
    python -m benchmarks.archive.job kill CLIPS # kill -9 of the job, then of workers, at random moments
    python -m benchmarks.archive.job damaged CLIPS # 5 % damaged files, each a row with its cause
    python -m benchmarks.archive.job threads CLIPS # worker processes against threads of one process
    python -m benchmarks.archive.job words CLIPS # what the words of a row cost
    python -m benchmarks.archive.job peers CLIPS # and faster-whisper, after `make bench-peers`

Writes `results/archive.json`, a member per command, and prints it. The model is the embedded one. `make`
needs libespeak-ng and libflite, and keeps clips that are there; a clip depends on its number only.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import wave
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

import whisperport
from whisperport import (
    ArchiveOptions,
    DecodeOptions,
    RunOptions,
    TranscribeOptions,
    Transcriber,
    Transcript,
)
from whisperport.apps.archive.identity import Identity
from whisperport.apps.archive.job import Job, with_state
from whisperport.apps.archive.rows import with_identity
from whisperport.apps.archive.store import schema
from whisperport.apps.archive.worker import Worker
from whisperport.build.export.bundle_cache import bundle_of
from whisperport.speech.audio.load import AUDIO_SUFFIXES
from whisperport.verification import text_errors, versions

from ..peers.contenders import Contender
from ..peers.engines import greedy
from ..peers.measuring import Process, in_turn
from ..record import compact, record

ENGLISH = DecodeOptions(language="en")
WORKERS = 2
DAMAGED_ONE_IN = 20
LONGEST_S = 2.2
FLITE_ONE_IN = 4  # clips
NOISE_ONE_IN = 3  # clips
ROUNDS = 7
KILLS = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("make", *COMMANDS))
    parser.add_argument("clips", type=Path)
    parser.add_argument("--count", type=int, help="number of clips; default: all")
    chosen = parser.parse_args()
    if chosen.command == "make":
        make_clips(chosen.clips, chosen.count or 10_000)
        return
    warnings.simplefilter("ignore")
    files = sorted(chosen.clips.absolute().rglob("*"))
    clips = [path for path in files if path.suffix.lower() in AUDIO_SUFFIXES][: chosen.count]
    with tempfile.TemporaryDirectory() as folder:
        found = COMMANDS[chosen.command](clips, Path(folder))
    keep(chosen.command, {"clips": len(clips), **found})


def keep(command: str, found: dict[str, Any]) -> None:
    """Keep the result of a command, and print it."""
    packages = versions(["whisperport", "onnxruntime", "pyarrow"])
    record("archive", command, {"versions": packages, **found})
    print(compact(found))


# The clips: many voices, speeds and noises


def make_clips(folder: Path, count: int) -> None:
    """Synthesize short clips, each with its text in a file beside it."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "training"))
    from synthesizers import FLITE_VOICES, SAMPLE_RATE, Espeak, Flite

    espeak, flite = Espeak(), {voice: Flite(voice) for voice in FLITE_VOICES}
    for number in range(count):
        path = folder / f"{number // 1000:03}" / f"{number:06}.wav"
        if not path.with_suffix(".txt").exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            samples, text = clip(random.Random(number), espeak, flite)
            with wave.open(str(path), "wb") as file:
                file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
                file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
            path.with_suffix(".txt").write_text(f"{text}\n")


def clip(rng: random.Random, espeak: Any, flite: dict[str, Any]) -> tuple[NDArray[np.float32], str]:
    """One short sentence of a random voice and speed, in noise or not; samples at 16 kHz, and its text."""
    from grammar import sentence
    from synthesize import LANGUAGES, VARIANTS
    from synthesizers import FLITE_VOICES, SAMPLE_RATE

    while True:
        text = sentence(rng)
        if len(text) > 40:
            continue
        if rng.randrange(FLITE_ONE_IN) == 0:
            speech = flite[rng.choice(FLITE_VOICES)].speak(text, stretch=rng.uniform(0.8, 1.1))
        else:
            voice = f"{rng.choice(LANGUAGES)}+{rng.choice(VARIANTS)}"
            speech = espeak.speak(text, voice=voice, rate=rng.randint(150, 220))
        if speech.samples.size <= LONGEST_S * SAMPLE_RATE:
            return noisy(speech.samples, rng), text


def noisy(samples: NDArray[np.float32], rng: random.Random) -> NDArray[np.float32]:
    """Add noise 15 to 35 dB below the speech to some of the clips."""
    if rng.randrange(NOISE_ONE_IN):
        return samples
    level = float(np.sqrt(np.square(samples).mean())) * 10 ** (-rng.uniform(15, 35) / 20)
    noise = np.random.default_rng(rng.randrange(2**32)).standard_normal(samples.size, np.float32)
    return samples + np.float32(level) * noise


# Equality, speed and memory


def speed(clips: list[Path], folder: Path) -> dict[str, Any]:
    """Transcribe all clips with `transcribe_files`, then as an archive, and compare every row."""
    expected: dict[str, Transcript] = {}
    with measured() as plain:
        options = TranscribeOptions(decode=ENGLISH, workers=WORKERS, run=RunOptions(threads=1))
        found = whisperport.transcribe_files(clips, bundle_of("default"), options)
        expected.update(zip(map(str, clips), found, strict=True))
    with measured() as archive:
        transcribe_archive(clips, folder / "out", save_every=30)
    rows = read(folder / "out")
    return {
        "transcribe_files": plain,
        "archive": archive,
        "speed_relative": plain["seconds"] / archive["seconds"],
        "cpu_relative": plain["cpu_s"] / archive["cpu_s"],
        **compared(rows, expected),
    }


def compared(rows: list[dict[str, Any]], expected: dict[str, Transcript]) -> dict[str, Any]:
    """How many rows differ from the transcripts, and the largest difference of a log-probability."""
    different, largest = [], 0.0
    for row in rows:
        segments = [asdict(one) for one in expected[row["path"]].segments]
        for mine, other in zip(row["segments"], segments, strict=True):
            for name in ("avg_logprob", "no_speech_prob"):
                largest = max(largest, abs(mine.pop(name) - other.pop(name)))
            other["tokens"] = list(other["tokens"])
        if (row["text"], row["segments"]) != (expected[row["path"]].text, segments):
            different.append(row["id"])
    return {**once(rows, expected), "different": different, "largest_logprob_difference": largest}


def once(rows: list[dict[str, Any]], expected: Any) -> dict[str, int]:
    """How many rows are missing, and how many are there more than once."""
    counts = Counter(row["path"] for row in rows)
    return {
        "rows": len(rows),
        "missing": len(set(map(str, expected)) - set(counts)),
        "twice": sum(count - 1 for count in counts.values()),
    }


@contextmanager
def measured() -> Iterator[dict[str, Any]]:
    """Wall-clock and CPU seconds of the block with its children, and the memory in tenths of the time."""
    found: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    samples: list[int] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(1.0):
            samples.append(resident_bytes(os.getpid()))

    thread = threading.Thread(target=sample)
    thread.start()
    started, cpu = time.monotonic(), cpu_seconds()
    try:
        yield found
    finally:
        found["seconds"], found["cpu_s"] = time.monotonic() - started, cpu_seconds() - cpu
        stop.set()
        thread.join()
        tenths = [samples[len(samples) * part // 10 :] for part in range(10)] if samples else []
        found["memory_mb"] = [round(part[0] / 1e6) for part in tenths if part]
        found["load_after"] = os.getloadavg()[0]


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(one) for one in path.read_text().split()] if path.exists() else []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with_threads = [int(one) for one in task.read_text().split()]
        found += [one for one in with_threads if one not in found]
    return found


def resident_bytes(pid: int) -> int:
    """Proportional memory of a process and its children: shared pages count once."""
    total = 0
    for one in (pid, *children(pid)):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        except OSError:
            continue
    return total


def transcribe_archive(
    source: Any, out: Path, decoding: TranscribeOptions | None = None, **options: Any
) -> Any:
    return whisperport.transcribe_archive(
        source,
        out,
        bundle_of("default"),
        ArchiveOptions(workers=WORKERS, **options),
        decoding or TranscribeOptions(decode=ENGLISH),
    )


def read(out: Path) -> list[dict[str, Any]]:
    return [
        row
        for part in (out / "parts").glob("*.parquet")
        for row in parquet.read_table(part).to_pylist()
    ]


# Killed jobs and workers


def kill(clips: list[Path], folder: Path) -> dict[str, Any]:
    """Kill the job after random numbers of saved rows and run it again; then its workers."""
    rng = random.Random(0)
    jobs = killed_jobs(clips, folder / "jobs", rng)
    return {"jobs": jobs, "workers": killed_workers(clips, folder / "workers", rng)}


def command(clips: list[Path], out: Path) -> list[str]:
    listed = out.with_suffix(".txt")
    listed.write_text("".join(f"{clip}\n" for clip in clips))
    return [
        *(sys.executable, "-m", "whisperport", "archive", str(listed), "--model", "default"),
        *("--out", str(out), "--language", "en", "--workers", str(WORKERS), "--save-every", "1"),
    ]


def killed_jobs(clips: list[Path], out: Path, rng: random.Random) -> dict[str, Any]:
    """Kill the job KILLS times, spread over the whole work, then let it end."""
    rows_after = []
    for wanted in moments(clips, rng):
        with subprocess.Popen(command(clips, out), stderr=subprocess.DEVNULL) as job:
            wait_for_rows(out, wanted, job, rng)
            workers = children(job.pid)
            assert job.poll() is None, "the job ended before it was killed"
            job.kill()
        while any(is_running(one) for one in workers):
            time.sleep(0.01)
        assert once(read(out), clips)["twice"] == 0
        rows_after.append(saved_rows(out))
    done = subprocess.run(command(clips, out), stderr=subprocess.DEVNULL)
    rows = read(out)
    return {"rows_after_each": rows_after, "status": done.returncode, **once(rows, clips)}


def killed_workers(clips: list[Path], out: Path, rng: random.Random) -> dict[str, Any]:
    """Kill a random worker KILLS times during one run; files that are blamed are tried again."""
    rows_at = []
    with subprocess.Popen(command(clips, out), stderr=subprocess.DEVNULL) as job:
        for wanted in moments(clips, rng):
            wait_for_rows(out, wanted, job, rng)
            os.kill(rng.choice(children(job.pid)), signal.SIGKILL)
            rows_at.append(saved_rows(out))
    rows = read(out)
    failed = sum(row["error"] is not None for row in rows)
    found = {
        "rows_at_each": rows_at,
        "status": job.returncode,
        "failed": failed,
        **once(rows, clips),
    }
    retried = subprocess.run([*command(clips, out), "--retry-failed"], stderr=subprocess.DEVNULL)
    return (
        found
        | {"failed_after_retry": sum(row["error"] is not None for row in read(out))}
        | {"status_after_retry": retried.returncode}
    )


def moments(clips: list[Path], rng: random.Random) -> list[int]:
    """Numbers of saved rows, one in each of KILLS equal parts of the work."""
    part = len(clips) * 0.95 / KILLS  # a run must not end before its kill
    return [int((number + rng.random()) * part) for number in range(KILLS)]


def wait_for_rows(out: Path, wanted: int, job: subprocess.Popen[bytes], rng: random.Random) -> None:
    """Wait until so many rows are saved and a worker runs, and then for a part of a second."""
    while job.poll() is None and not (saved_rows(out) >= wanted and children(job.pid)):
        time.sleep(0.05)
    time.sleep(rng.uniform(0, 1))  # rows are saved every second: at any moment between two times


def saved_rows(out: Path) -> int:
    return sum(parquet.read_metadata(part).num_rows for part in (out / "parts").glob("*.parquet"))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Damaged files


def damaged(clips: list[Path], folder: Path) -> dict[str, Any]:
    """Replace one file in twenty by a damaged one, and count the rows of each kind by their cause."""
    source, kinds = folder / "clips", dict[str, str]()
    source.mkdir()
    for number, clip in enumerate(clips):
        path = source / clip.name
        if number % DAMAGED_ONE_IN:
            path.symlink_to(clip)
        else:
            name = list(DAMAGES)[number // DAMAGED_ONE_IN % len(DAMAGES)]
            DAMAGES[name](clip, path)
            kinds[str(path)] = name
    with measured() as took:
        transcribe_archive(source, folder / "out", save_every=5)
    rows = read(folder / "out")
    causes = Counter(f"{kinds.get(row['path'], 'good')}: {cause(row)}" for row in rows)
    return {**took, **once(rows, source.iterdir()), "causes": dict(causes)}


def cause(row: dict[str, Any]) -> str:
    if row["error"]:
        text = f"{row['error']['what']}: {row['error']['why']}"
        return f"error: {text.replace(row['path'], 'PATH')}"
    return ", ".join(row["marks"]) or "transcribed"


def _cut(clip: Path, path: Path) -> None:
    path.write_bytes(clip.read_bytes()[: clip.stat().st_size // 2])


def _silence(_clip: Path, path: Path) -> None:
    path.write_bytes(_riff(bytes(32_000 * 2 * 3600)))


def _riff(data: bytes) -> bytes:
    size = len(data)
    head = b"RIFF" + (size + 36).to_bytes(4, "little") + b"WAVEfmt \x10\0\0\0\x01\0\x01\0"
    rates = (16_000).to_bytes(4, "little") + (32_000).to_bytes(4, "little")
    return head + rates + b"\x02\0\x10\0data" + size.to_bytes(4, "little") + data


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "cut": _cut,
    "header only": lambda clip, path: path.write_bytes(clip.read_bytes()[:30]),
    "empty": lambda _, path: path.touch(),
    "not audio": lambda _, path: path.write_bytes(random.Random(0).randbytes(20_000)),
    "two hours of silence": _silence,
    "pipe": lambda _, path: os.mkfifo(path),
    "link loop": lambda _, path: path.symlink_to(path),
    "link to nothing": lambda _, path: path.symlink_to(path.with_suffix(".gone")),
    "not readable": lambda _, path: path.symlink_to("/proc/1/mem"),
}


# Processes and threads


def threads(clips: list[Path], folder: Path) -> dict[str, Any]:
    """The same clips with worker processes, and with threads of one process, alternating three times."""
    transcriber = Transcriber(bundle_of("default"), RunOptions(threads=1))
    found: dict[str, list[dict[str, Any]]] = {"processes": [], "threads": []}
    for number in range(3):
        with measured() as took:
            transcribe_archive(clips, folder / str(number), save_every=30)
        found["processes"].append(took)
        options = TranscribeOptions(decode=ENGLISH, workers=WORKERS, run=RunOptions(threads=1))
        with measured() as took:
            list(whisperport.transcribe_files(clips, transcriber, options))
        found["threads"].append(took)
        shutil.rmtree(folder / str(number))
    return found


# Words


def words(clips: list[Path], folder: Path) -> dict[str, Any]:
    """The same clips with and without words, in turn in one process; and the bytes of their rows."""
    bundle = bundle_of("default").folder
    workers = {
        name: Worker(bundle, TranscribeOptions(run=RunOptions(threads=1), word_timestamps=is_on))
        for name, is_on in (("words", True), ("no words", False))
    }
    jobs = [with_state(Job(clip.name, str(clip))) for clip in clips]
    cpu_s: dict[str, list[float]] = {name: [] for name in workers}
    for number in range(ROUNDS + 1):  # the first is not counted
        for name in in_turn(list(workers), number):
            started = time.process_time()
            rows = [one.result() for one in [workers[name].submit(job) for job in jobs]]
            cpu_s[name].append(time.process_time() - started)
            part = folder / f"{name}.parquet"
            identity = Identity("", "", {})
            table = [with_identity(row, identity, "") for row in rows]
            parquet.write_table(pa.Table.from_pylist(table, schema()), part, compression="zstd")
    ratios = np.divide(cpu_s["words"][1:], cpu_s["no words"][1:])
    sizes = {name: (folder / f"{name}.parquet").stat().st_size for name in workers}
    return {
        "cpu_s": cpu_s,
        "cpu_relative": np.quantile(ratios, (0.25, 0.5, 0.75)).round(3).tolist(),
        "audio_s": sum(row["duration"] for row in rows),
        "words": sum(len(one["text"].split()) for one in rows),
        "bytes": sizes,
        "bytes_per_word": (sizes["words"] - sizes["no words"])
        / sum(len(one["text"].split()) for one in rows),
    }


# Another implementation

CHUNK = 500  # files that one contender transcribes before the next one has its turn
PEERS = Path("build/peers")
MODES = ("float32 batched", "float32 batched single", "int8 batched", "int8 batched single")
Chunk = dict[str, Any]


def peers(clips: list[Path], folder: Path) -> dict[str, Any]:
    """The archive and faster-whisper's batched pipeline on the same files, in turn.

    Each is two processes of one thread. All decode greedily, in English, at one temperature. The first
    chunk shows which of `MODES` takes least CPU time; that one transcribes the others. The archive's times
    include its start and its end for each chunk; faster-whisper's processes stay loaded.
    """
    contenders: dict[str, Callable[[list[Path]], Chunk]] = {"archive": partial(_archived, folder)}
    for mode in MODES:
        contenders[mode] = partial(_peer, folder, [_started(folder, mode) for _ in range(WORKERS)])
    found: dict[str, list[Chunk]] = {name: [] for name in contenders}
    for number, start in enumerate(range(0, len(clips), CHUNK)):
        for name in in_turn(list(contenders), number):
            found[name].append(contenders[name](clips[start : start + CHUNK]))
            print(name, found[name][-1], flush=True)
        if number == 0:
            best = min(MODES, key=lambda mode: found[mode][0]["cpu_s"])
            contenders = {name: contenders[name] for name in ("archive", best)}
        done = {"clips": min(len(clips), start + CHUNK)}
        result = {name: _sums(chunks, found["archive"]) for name, chunks in found.items()}
        keep("peers", done | result)  # an interrupted run keeps its results
    return result


def _started(folder: Path, mode: str) -> Process:
    contender = Contender(mode, "FasterWhisper", mode)
    python = Path(".venv-peers/bin/python")
    return Process(contender, python, PEERS / "embedded", 1, folder / f"{mode}.log")


def _archived(folder: Path, clips: list[Path]) -> Chunk:
    out = folder / "out"
    with measured() as took:
        transcribe_archive(clips, out, greedy(), save_every=30)
    texts = {row["path"]: row["text"] for row in read(out)}
    shutil.rmtree(out)
    return _chunk(took["seconds"], took["cpu_s"], clips, [texts[str(clip)] for clip in clips])


def _peer(folder: Path, processes: list[Process], clips: list[Path]) -> Chunk:
    """Give each process its share of the files."""
    shares = [clips[number :: len(processes)] for number in range(len(processes))]
    lists = [folder / f"{number}.txt" for number in range(len(processes))]
    for path, share in zip(lists, shares, strict=True):
        path.write_text("".join(f"{clip}\n" for clip in share))
    started = time.monotonic()
    with ThreadPoolExecutor(len(processes)) as pool:
        found = list(pool.map(lambda one, path: one.ask(path), processes, lists))
    seconds, cpu_s = time.monotonic() - started, sum(one["cpu_s"] for one in found)
    texts = [text for one in found for text in one["texts"]]
    return _chunk(seconds, cpu_s, [clip for share in shares for clip in share], texts)


def _chunk(seconds: float, cpu_s: float, clips: list[Path], texts: list[str]) -> Chunk:
    references = [clip.with_suffix(".txt").read_text() for clip in clips]
    errors = reduce(add, map(text_errors, texts, references))
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "word_errors": errors.errors,
        "words": errors.length,
    }


def _sums(chunks: list[Chunk], base: list[Chunk]) -> dict[str, Any]:
    """Sums over the chunks, and quartiles of the chunks' ratios to those of the archive."""
    sums: dict[str, Any] = {name: sum(one[name] for one in chunks) for name in chunks[0]}
    for name in ("seconds", "cpu_s"):
        ratios = [mine[name] / other[name] for mine, other in zip(chunks, base, strict=False)]
        sums[f"{name}_relative"] = np.quantile(ratios, (0.25, 0.5, 0.75)).round(3).tolist()
    return sums | {"chunks": chunks}


COMMANDS: dict[str, Callable[[list[Path], Path], dict[str, Any]]] = {
    "speed": speed,
    "kill": kill,
    "damaged": damaged,
    "threads": threads,
    "words": words,
    "peers": peers,
}

if __name__ == "__main__":
    main()
