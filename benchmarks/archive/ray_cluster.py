"""Run an archive on a Ray cluster of three nodes on one machine, while one is lost and another is added.

    python -m benchmarks.archive.ray_cluster CLIPS BUNDLE [--count 600] [--parts nodes overhead]

Needs the extra `ray`; BUNDLE is a folder. Each node has one core, so on a machine of two cores only the
second part, two actors or two processes on files of 30 s, measures time. The CPU time is that of all
processes of Ray too. Writes `results/archive.json`.
"""

import argparse
import os
import statistics
import tempfile
import time
import wave
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default, 15, would measure the priority

import ray
from pyarrow import parquet
from ray.cluster_utils import Cluster

import whisperport
from whisperport import (
    ArchiveOptions,
    DecodeOptions,
    RunOptions,
    TranscribeOptions,
)
from whisperport.apps.archive import ArchiveProgress
from whisperport.verification import versions

from ..record import compact, record, recorded

OPTIONS = TranscribeOptions(decode=DecodeOptions(language="en"), run=RunOptions(threads=1))
NODE = {"num_cpus": 1, "object_store_memory": 150 * 2**20}
LONG_S, LONG_FILES, ROUNDS = 30, 40, 5
PARTS = ("nodes", "overhead")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("clips", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    chosen = parser.parse_args()
    clips = sorted(chosen.clips.rglob("*.wav"))[: chosen.count]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if "nodes" in chosen.parts:
            found["nodes"] = changing_nodes(clips, chosen.bundle, Path(folder))
        if "overhead" in chosen.parts:
            found["overhead"] = overhead(clips, chosen.bundle, Path(folder))
    found["versions"] = versions(["whisperport", "onnxruntime", "ray"])
    record("archive", "ray_cluster", recorded("archive", "ray_cluster") | found)
    print(compact(found))


def changing_nodes(clips: list[Path], bundle: Path, folder: Path) -> dict[str, Any]:
    """Remove a node without grace after a third of the files, and add one after a half."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    lost = cluster.add_node(**NODE)
    cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    events: list[str] = []

    def change(now: ArchiveProgress) -> None:
        if now.done >= now.files // 3 and not events:
            events.append(f"a node was removed after {now.done} files")
            cluster.remove_node(lost, allow_graceful=False)
        if now.done >= now.files // 2 and len(events) == 1:
            events.append(f"a node was added after {now.done} files")
            cluster.add_node(**NODE)

    try:
        started = time.monotonic()
        archive(clips, folder / "ray", bundle, ray=cluster.address, save_every=2, progress=change)
        seconds = time.monotonic() - started
    finally:
        ray.shutdown()
        cluster.shutdown()
    archive(clips, folder / "local", bundle, workers=2)
    mine, other = read(folder / "ray"), read(folder / "local")
    return {
        "events": events,
        "seconds": seconds,
        "files": len(clips),
        "rows": len(mine),
        "missing": len({*map(str, clips)} - {row["id"] for row in mine}),
        "twice": len(mine) - len({row["id"] for row in mine}),
        "failed": sum(row["error"] is not None for row in mine),
        "different_text_or_times": sum(
            shown(row) != shown(same) for row, same in zip(mine, other, strict=True)
        ),
    }


def overhead(clips: list[Path], bundle: Path, folder: Path) -> dict[str, Any]:
    """Files of 30 s with two actors on a node of two cores, and with two processes; alternating.

    A run without its start begins with its first row: then all workers have loaded the bundle.
    """
    files = joined(clips, folder / "long")
    rounds: list[dict[str, dict[str, float]]] = []
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 2})
    ways = {"ray": {"ray": cluster.address}, "processes": {}}
    try:
        for number in range(ROUNDS):
            order = sorted(ways, reverse=bool(number % 2))
            out = folder / str(number)
            rounds.append({way: timed(files, out / way, bundle, ways[way]) for way in order})
            print(rounds[-1], flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()
    ratios = {
        name: [one["ray"][name] / one["processes"][name] for one in rounds]
        for name in rounds[0]["ray"]
    }
    medians = {name: round(statistics.median(some), 3) for name, some in ratios.items()}
    return {"files": len(files), "rounds": rounds, "ray / processes": medians}


def timed(files: list[Path], out: Path, bundle: Path, way: dict[str, Any]) -> dict[str, float]:
    """Wall-clock and CPU seconds until the last row, and from the first to the last."""
    times = [(time.monotonic(), cpu_seconds())]

    def row(now: ArchiveProgress) -> None:
        if now.done in (1, now.files):
            times.append((time.monotonic(), cpu_seconds()))

    archive(files, out, bundle, row, workers=2, **way)
    start, first, last = times
    return {
        "seconds": last[0] - start[0],
        "cpu_s": last[1] - start[1],
        "seconds without start": last[0] - first[0],
        "cpu_s without start": last[1] - first[1],
    }


def cpu_seconds() -> float:
    """CPU seconds of this process and of all processes that it or they have started."""
    found: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            found[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    ours = {os.getpid()}
    while more := {one for one, (parent, _) in found.items() if parent in ours} - ours:
        ours |= more
    return sum(found[one][1] for one in ours) / os.sysconf("SC_CLK_TCK")


def joined(clips: list[Path], folder: Path) -> list[Path]:
    """Write files of about 30 s, each of many clips."""
    folder.mkdir()
    waiting, files = list(clips), []
    while waiting and len(files) < LONG_FILES:
        path = folder / f"{len(files):03}.wav"
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            while waiting and file.getnframes() < LONG_S * 16_000:
                with wave.open(str(waiting.pop()), "rb") as clip:
                    file.writeframes(clip.readframes(clip.getnframes()) + bytes(16_000))
        files.append(path)
    return files


def archive(
    clips: list[Path], out: Path, bundle: Path, progress: Any = lambda _: None, **options: Any
) -> whisperport.ArchiveSummary:
    return whisperport.transcribe_archive(
        clips, out, bundle, ArchiveOptions(**options), OPTIONS, progress=progress
    )


def read(out: Path) -> list[dict[str, Any]]:
    parts = (out / "parts").glob("*.parquet")
    rows = [row for part in parts for row in parquet.read_table(part).to_pylist()]
    return sorted(rows, key=lambda row: row["id"])


def shown(row: dict[str, Any]) -> Any:
    times = [(one["start"], one["end"], one["text"], one["tokens"]) for one in row["segments"]]
    return row["id"], row["text"], row["language"], times, row["audio_sha256"]


if __name__ == "__main__":
    main()
