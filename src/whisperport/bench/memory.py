"""Measure the peak memory of a transcription in a separate process, so that nothing else is counted.

python -m whisperport.bench.memory BUNDLE AUDIO WORD_TIMESTAMPS THREADS TRUST [OPTION=VALUE]...

prints the peak in MiB. WORD_TIMESTAMPS and TRUST are 0 or 1; THREADS is 0 where the runtime chooses.
"""

import subprocess
import sys
from pathlib import Path

from whisperport.bundle import Bundle
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber

STATUS = Path("/proc/self/status")


def peak_memory_mib(
    bundle: Path, audio: Path, *, word_timestamps: bool, run: RunOptions
) -> float | None:
    """Measure the peak resident memory of a new process that loads a bundle and transcribes a file.

    Returns:
        The peak in MiB; None if the process failed or the system does not report it.
    """
    options = [f"{name}={value}" for name, value in run.options.items()]
    arguments = [bundle, audio, int(word_timestamps), run.threads or 0, int(run.trust), *options]
    command = [sys.executable, "-m", "whisperport.bench.memory", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stdout.split()[-1:]
    return float(last[0]) if done.returncode == 0 and last and last[0] != "None" else None


def _peak_of_this_process() -> float | None:
    """Read Linux's high-water mark, in MiB. `getrusage` would include the parent's memory before `exec`."""
    try:
        lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return int(kib) / 1024 if kib else None


def _main(
    bundle: str, audio: str, word_timestamps: str, threads: str, trust: str, *options: str
) -> None:
    pairs = dict(option.split("=", 1) for option in options)
    run = RunOptions(threads=int(threads) or None, options=pairs, trust=trust == "1")
    transcriber = Transcriber(Bundle.open(bundle), run)
    transcriber.transcribe(audio, TranscribeOptions(word_timestamps=word_timestamps == "1"))
    print(_peak_of_this_process())


if __name__ == "__main__":
    _main(*sys.argv[1:])
