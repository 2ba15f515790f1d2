"""Run an archive on a Ray cluster of three nodes on one machine, while one is lost and another is added.

    python benchmarks/archive_ray.py CLIPS BUNDLE [--count 600]

Needs the extra `ray`; BUNDLE is a folder. Each node has one core, so on a machine of two cores only the
second part, two actors or two processes on files of 30 s, measures time. Writes
`results/archive_ray_DATE.json`.
"""

import argparse
import datetime
import json
import os
import tempfile
import time
import wave
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default, 15, would measure the priority

import ray
from pyarrow import parquet
from ray.cluster_utils import Cluster

import whisperport
from whisperport import (
    ArchiveOptions,
    ArchiveProgress,
    DecodeOptions,
    RunOptions,
    TranscribeOptions,
)
from whisperport.verification import machine, versions

RESULTS = Path(__file__).parent / "results"
OPTIONS = TranscribeOptions(decode=DecodeOptions(language="en"), run=RunOptions(threads=1))
NODE = {"num_cpus": 1, "object_store_memory": 150 * 2**20}
LONG_S, LONG_FILES = 30, 80


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("clips", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--count", type=int, default=600)
    chosen = parser.parse_args()
    clips = sorted(chosen.clips.rglob("*.wav"))[: chosen.count]
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "nodes": changing_nodes(clips, chosen.bundle, Path(folder)),
            "overhead": overhead(clips, chosen.bundle, Path(folder)),
            "machine": machine(),
            "versions": versions(["whisperport", "onnxruntime", "ray"]),
        }
    path = RESULTS / f"archive_ray_{datetime.date.today()}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


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
    """Files of 30 s with two actors on a node of two cores, and with two processes; alternating."""
    files = joined(clips, folder / "long")
    found: dict[str, Any] = {"files": len(files), "ray": [], "processes": []}
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 2})
    try:
        for number in range(3):
            for name, own in (("ray", {"ray": cluster.address}), ("processes", {})):
                summary = archive(files, folder / f"{name}{number}", bundle, workers=2, **own)
                found[name].append(round(summary.run_seconds, 1))
    finally:
        ray.shutdown()
        cluster.shutdown()
    return found


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
