"""Compare the time of one transcription between this version of the package and another one.

    python -m benchmarks.speed.single_call --before REPOSITORY/src [--rounds 15] [--bundles DIR ...]

REPOSITORY is a checkout of the other version (`git worktree add --detach REPOSITORY COMMIT`). Each
version runs in one process that stays alive. The two take turns, and alternate which one is first, so
that other load on the machine affects both alike. Wall-clock time is measured, and CPU time of all
threads, which depends less on other load. A ratio is the median of the rounds' ratios. The audio files
are one of about 4 s, ten times per round, and the longest one in the package. Without `--bundles` the
embedded bundle is used.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

NEW = Path(__file__).parents[2] / "src"
REPEATS = (10, 1)  # calls per round for the short and for the long audio file

WORKER = """
import sys, time
from whisperport.targets import RunOptions
from whisperport.transcription import Transcriber
from whisperport.verification.clips import shipped_audio

recordings = sorted(shipped_audio(), key=lambda r: r.seconds)
paths = [min(recordings, key=lambda r: abs(r.seconds - 4)).path, recordings[-1].path]
transcriber = Transcriber(sys.argv[1] or "default", RunOptions(threads=int(sys.argv[2])))
for path in paths:
    transcriber.transcribe(path)
print("ready", flush=True)
for line in sys.stdin:
    which, repeats = map(int, line.split())
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        transcriber.transcribe(paths[which])
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(wall / repeats, cpu / repeats, flush=True)
"""


class Version:
    """A process that transcribes on request with the package in `source`."""

    def __init__(self, source: Path, bundle: str, threads: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, bundle, str(threads)],
            env={"PYTHONPATH": str(source), "PATH": "/usr/bin:/bin", "ORT_DISABLE_TELEMETRY": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        while self._line() != "ready":
            pass

    def seconds(self, which: int) -> tuple[float, float]:
        """Measure wall-clock and CPU time of one transcription of audio file number `which`."""
        assert self.process.stdin
        self.process.stdin.write(f"{which} {REPEATS[which]}\n")
        self.process.stdin.flush()
        wall, cpu = map(float, self._line().split())
        return wall, cpu

    def _line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the process of a version ended")
        return line.strip()

    def close(self) -> None:
        self.process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of one transcription, before and now.")
    parser.add_argument(
        "--before",
        type=Path,
        required=True,
        help="folder that contains the other version's whisperport/",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bundles", nargs="*", default=[""])
    chosen = parser.parse_args()
    for bundle in chosen.bundles:
        before = Version(chosen.before.resolve(), bundle, chosen.threads)
        now = Version(NEW, bundle, chosen.threads)
        for which, name in enumerate(("4 s", "long")):
            rounds = []
            for i in range(chosen.rounds):
                order = (before, now) if i % 2 else (now, before)
                times = {version: version.seconds(which) for version in order}
                rounds.append((times[before], times[now]))
            row = {"bundle": bundle or "embedded", "recording": name, "rounds": len(rounds)}
            for clock, kind in enumerate(("wall", "cpu")):
                row |= summary(kind, [(b[clock], n[clock]) for b, n in rounds])
            print(json.dumps(row), flush=True)
        before.close()
        now.close()


def summary(kind: str, rounds: list[tuple[float, float]]) -> dict[str, float]:
    before, now = (statistics.median(column) for column in zip(*rounds, strict=True))
    return {
        f"{kind}_before_ms": round(1e3 * before, 2),
        f"{kind}_now_ms": round(1e3 * now, 2),
        f"{kind}_ratio": round(statistics.median(n / b for b, n in rounds), 4),
    }


if __name__ == "__main__":
    main()
