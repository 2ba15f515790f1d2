"""Transcribe with one engine, and measure it: one process per engine, kept alive between measurements.

    python worker.py ENGINE FOLDER THREADS [MODE]

It runs in the engine's own environment. It writes one line of JSON when the model is loaded, and answers
each line of JSON on standard input with one line:

    {"audio": "clips.npz", "tokens": 64}    ->  {"wall_s", "cpu_s", "peak_mib", "tokens"}
    {"audio": "clips.npz", "tokens": null}  ->  {"wall_s", "cpu_s", "peak_mib", "texts"}

A list of paths, one per line in a .txt file, is given to the engine as paths.
CPU time is that of all threads of the process. The peak is of resident memory during the request, which
includes the mapped pages of files; null if the system does not tell.
"""

import importlib
import json
import os
import re
import sys
import time
from pathlib import Path

import engines


def main():
    answers = own_standard_output()
    name, folder, threads, *mode = sys.argv[1:]
    clock = Clock()
    engine_class = getattr(engines, name)
    for package in engine_class.PACKAGES:
        importlib.import_module(package)
    imported = clock.lap()
    engine = engine_class(Path(folder).resolve(), int(threads), " ".join(mode))
    loaded = clock.lap()
    answer(answers, {"import": imported, "load": loaded, "peak_mib": peak_mib()})
    for line in sys.stdin:
        answer(answers, measured(engine, json.loads(line)))


def own_standard_output():
    """Keep standard output for answers: what an engine prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


class Clock:
    """Measures laps: seconds of wall-clock time, and of CPU time of all threads."""

    def __init__(self):
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def lap(self):
        wall, cpu = time.perf_counter(), time.process_time()
        lap = {"wall_s": wall - self.wall, "cpu_s": cpu - self.cpu}
        self.wall, self.cpu = wall, cpu
        return lap


def measured(engine, request):
    audios = read(request["audio"])
    reset_peak()
    clock = Clock()
    if request["tokens"] is None:
        result = {"texts": engine.transcribe(audios)}
    else:
        result = {"tokens": engine.window(audios[0], request["tokens"])}
    return clock.lap() | {"peak_mib": peak_mib()} | result


def read(path):
    if path.endswith(".txt"):
        return Path(path).read_text().splitlines()
    import numpy as np  # not with the engine: an engine without numpy would seem to import slowly

    with np.load(path) as clips:
        return [clips[name] for name in clips.files]


def reset_peak():
    """Make Linux measure the peak of resident memory anew."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak is then that of all requests until now


def peak_mib():
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


def answer(stream, data):
    print(json.dumps(data), file=stream, flush=True)


if __name__ == "__main__":
    main()
