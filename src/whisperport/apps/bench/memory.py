"""Measure the peak memory of a transcription in a separate process, so that nothing else is counted.

The process imports this file, and nothing that measures time.
"""

from pathlib import Path
from typing import Any

from whisperport.errors import WhisperportError
from whisperport.program.bundle import Bundle
from whisperport.system.child import Limits, StoppedError, run_limited
from whisperport.system.progress import begin_stage
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber

STATUS = Path("/proc/self/status")
UNLIMITED = Limits(memory_bytes=2**60, seconds=1e8)


def peak_memory_mib(
    bundle: Path, audio: Path, *, word_timestamps: bool, run: RunOptions
) -> float | None:
    """Measure the peak resident memory of a new process that loads a bundle and transcribes a file.

    Returns:
        The peak in MiB; None if the process failed or the system does not report it.
    """
    arguments: dict[str, Any] = {
        "bundle": str(bundle),
        "audio": str(audio),
        "word_timestamps": word_timestamps,
        "run": {"threads": run.threads, "options": dict(run.options), "trust": run.trust},
    }
    try:
        peak: float | None = run_limited(f"{__name__}:transcribe_alone", arguments, UNLIMITED)
    except (StoppedError, WhisperportError):
        return None
    return peak


def transcribe_alone(
    bundle: str, audio: str, word_timestamps: bool, run: dict[str, Any]
) -> float | None:
    """Transcribe a file, and return the peak memory of this process in MiB."""
    begin_stage("transcribing")
    transcriber = Transcriber(Bundle.open(bundle), RunOptions(**run))
    transcriber.transcribe(audio, TranscribeOptions(word_timestamps=word_timestamps))
    return _peak_of_this_process()


def _peak_of_this_process() -> float | None:
    """Read Linux's high-water mark, in MiB. `getrusage` would include the parent's memory before `exec`."""
    try:
        lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return int(kib) / 1024 if kib else None
