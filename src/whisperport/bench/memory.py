"""Peak memory of transcribing, in a process of its own: what else ran here does not count.

python -m whisperport.bench.memory BUNDLE RECORDING WORDS THREADS TRUST [OPTION=VALUE]...
"""

import subprocess
import sys
from pathlib import Path

from whisperport.bundle import Bundle
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber

STATUS = Path("/proc/self/status")


def peak_memory_mib(bundle: Path, recording: Path, *, words: bool, run: RunOptions) -> float | None:
    """MiB resident at most while a fresh process loads the bundle and transcribes; None: unknown."""
    options = [f"{name}={value}" for name, value in run.options.items()]
    arguments = [bundle, recording, int(words), run.threads or 0, int(run.trust), *options]
    command = [sys.executable, "-m", "whisperport.bench.memory", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stdout.split()[-1:]
    return float(last[0]) if done.returncode == 0 and last and last[0] != "None" else None


def _peak_of_this_process() -> float | None:
    """Linux's high-water mark. `getrusage` would count the parent's memory before `exec` as ours."""
    try:
        lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return int(kib) / 1024 if kib else None


def _main(bundle: str, recording: str, words: str, threads: str, trust: str, *options: str) -> None:
    pairs = dict(option.split("=", 1) for option in options)
    run = RunOptions(threads=int(threads) or None, options=pairs, trust=trust == "1")
    transcriber = Transcriber(Bundle.open(bundle), run)
    transcriber.transcribe(recording, TranscribeOptions(word_timestamps=words == "1"))
    print(_peak_of_this_process())


if __name__ == "__main__":
    _main(*sys.argv[1:])
