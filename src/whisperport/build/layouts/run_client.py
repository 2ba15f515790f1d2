"""Run an app on audio files, in the app's own environment: this file does not import whisperport.

    python run_client.py JOB.json

The job, a JSON object, has: `script`, the client's file; `model`, the layout's folder or file; `clips`, WAV
files of 16 bits, 16 kHz, mono; `language`, a code; `result`, the file to write; `app` and `precision`.

The client's file defines

    versions()                    returns package -> version
    load(job)                     loads the model; returns a function: samples (n,) float32 -> an object
                                  with `text`, `segments` ([start, end, text], ...) and, if the app
                                  returns them, `tokens` and `words` ([start, end, text], ...)

The result has `versions`, `clips` (those objects), `load_s`, `seconds` of each clip, and `peak_mib`.
Standard input stays open until the result is read: at its end, the process that asks has ended.
"""

import importlib.util
import json
import os
import resource
import sys
import threading
import time
import wave
from typing import Any

import numpy as np


def main(path: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    client = _module(job["script"])
    start = time.perf_counter()
    transcribe = client.load(job)
    result: dict[str, Any] = {"versions": client.versions(), "load_s": time.perf_counter() - start}
    result["clips"], result["seconds"] = [], []
    for clip in job["clips"]:
        samples = read_wav(clip)
        start = time.perf_counter()
        result["clips"].append(transcribe(samples))
        result["seconds"].append(time.perf_counter() - start)
    result["peak_mib"] = peak_mib()
    with open(job["result"] + ".part", "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.replace(job["result"] + ".part", job["result"])


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _module(path: str) -> Any:
    spec: Any = importlib.util.spec_from_file_location("client", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peak_mib() -> float:
    """Of this process; `ru_maxrss` counts the process that it was forked from as well."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["VmHWM"].split()[0]) / 1024
    except (OSError, KeyError):  # another system than Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def read_wav(path: str) -> Any:
    """Return the samples (n,) float32 of a WAV file."""
    with wave.open(path) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return samples.astype(np.float32) / np.float32(32768)


if __name__ == "__main__":
    main(sys.argv[1])
