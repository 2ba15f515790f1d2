"""Ask before hours of work whether memory and disk suffice: an estimate, from exports that were measured.

    peak memory = base + factor · weights        weights: bytes of the model in float32
    time        = base + seconds a GB · weights

Fitted to whole exports with random weights, on one thread of an AMD EPYC with torch 2.13 and executorch
1.5.1 (benchmarks/export_cost.py). Memory is the peak of resident memory, and time is CPU time:

    sizes of   weights   onnxruntime      xnnpack
    tiny        151 MB   1.1 GB   32 s    1.7 GB   82 s
    base        290 MB   1.4 GB   56 s    2.5 GB  132 s
    small       967 MB   2.5 GB  137 s    not measured

One program alone, onnxruntime and xnnpack: an encoder of 33 MB took 0.8 and 0.8 GB, a decoder of 118 MB
1.0 and 1.6 GB.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from whisperport.dims import Dims
from whisperport.errors import WhisperportError
from whisperport.limited import memory_within

ROOT = Path("/")
MB, GB = 1e6, 1e9
LIMIT_BASE_BYTES, LIMIT_FACTOR = 4 * 2**30, 24  # of a program of unknown origin


@dataclass(frozen=True, slots=True)
class _Cost:
    base_bytes: float  # of Python, torch and the compiler, before any weight
    factor: float  # peak bytes for each byte of weights, all programs of a bundle together
    one_factor: float  # the same, of one program lowered alone
    base_s: float
    gb_s: float  # seconds for each GB of weights


_COSTS = {
    "onnxruntime": _Cost(0.8 * GB, 1.85, 2.5, 15, 128),
    "xnnpack": _Cost(0.8 * GB, 5.9, 9.5, 28, 360),
}
_UNKNOWN = _COSTS["xnnpack"]  # a target that was not measured: as the costlier of the two


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a job will take; an estimate, fitted to a few measured exports."""

    memory_bytes: float  # peak, of the whole process
    disk_bytes: float
    seconds: float  # on 2 cores of an AMD EPYC

    def __str__(self) -> str:
        minutes = max(1, round(self.seconds / 60))
        return (
            f"about {self.memory_bytes / GB:.1f} GB of memory, {self.disk_bytes / MB:.0f} MB of disk "
            f"and {minutes} min"
        )


def estimate_export(dims: Dims, targets: Iterable[str]) -> Estimate:
    """Of a whole bundle, by the costliest of its targets."""
    costs = [_COSTS.get(target, _UNKNOWN) for target in targets]
    weights = weight_bytes(dims)
    embedding = 4 * dims.n_vocab * dims.n_text_state
    return Estimate(
        memory_bytes=max(cost.base_bytes + cost.factor * weights for cost in costs),
        disk_bytes=weights + embedding + 20 * MB,
        seconds=max(cost.base_s + cost.gb_s * weights / GB for cost in costs),
    )


def estimate_lowering(weights: int, target: str) -> Estimate:
    """Of one program whose weights take so many bytes."""
    cost = _COSTS.get(target, _UNKNOWN)
    return Estimate(
        memory_bytes=cost.base_bytes + cost.one_factor * weights,
        disk_bytes=1.1 * weights + 20 * MB,
        seconds=cost.base_s + cost.gb_s * weights / GB,
    )


def within_memory_of(program: object, *, trust: bool) -> AbstractContextManager[None]:
    """A limit on the memory of this process while it lowers or rewrites the program of a file.

    It is far above what programs of that size were measured to need. A program that was not read from
    a file, or is trusted, has none.
    """
    if trust or not isinstance(program, str | os.PathLike):
        return nullcontext()
    try:
        size = os.path.getsize(program)
    except (OSError, ValueError):  # its reader says what is wrong
        return nullcontext()
    return memory_within(LIMIT_BASE_BYTES + LIMIT_FACTOR * size)


def weight_bytes(dims: Dims) -> int:
    """Of a Whisper model in float32, its tied vocabulary once."""
    d, norm = dims.n_text_state, 2 * dims.n_text_state
    attention = 4 * d * d + 3 * d
    feed_forward = 2 * d * dims.n_text_ffn + d + dims.n_text_ffn
    text_layer = 2 * attention + feed_forward + 3 * norm
    encoder = dims.encoder_weights + dims.n_audio_ctx * d
    tables = (dims.n_vocab + dims.n_text_ctx) * d
    return 4 * (encoder + tables + dims.n_text_layer * text_layer + norm)


def check_fits(needed: Estimate, out: Path) -> None:
    """Refuse a job that this machine has no room for.

    Raises:
        WhisperportError: memory or the disk of `out` has less than the estimate.
    """
    memory = available_memory()
    if memory is not None and memory < needed.memory_bytes:
        raise _too_small("memory", needed, memory, "on a machine with more")
    free = _free_disk(out)
    if free < needed.disk_bytes:
        raise _too_small("space on the disk", needed, free, "to another disk")


def available_memory() -> int | None:
    """Bytes that this process may still take; None where the system does not say.

    The least of what the kernel has and what each control group above this process leaves: in a
    container the machine's own figure is not ours.
    """
    found = [*_of_machine(), *_of_groups()]
    return min(found) if found else None


def _of_machine() -> Iterator[int]:
    for line in _text(ROOT / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _of_groups() -> Iterator[int]:
    """Of version 2 (one hierarchy) and version 1 (`memory` has its own)."""
    for line in _text(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, used = ROOT / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit = ROOT / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            used = "memory.usage_in_bytes"
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            most, now = _number(folder / limit), _number(folder / used)
            if most is not None and now is not None:
                yield most - now + _reclaimable(folder)
            if folder == mount:
                break


def _reclaimable(folder: Path) -> int:
    """Pages of files, which count as used and are given up when memory is short."""
    lines = (line.split() for line in _text(folder / "memory.stat").splitlines())
    sizes = {words[0]: int(words[1]) for words in lines if len(words) == 2}
    return sizes.get("total_inactive_file", sizes.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max": no limit


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _free_disk(out: Path) -> int:
    folder = Path(os.path.realpath(out)).parent
    while not folder.is_dir():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _too_small(what: str, needed: Estimate, free: float, elsewhere: str) -> WhisperportError:
    return WhisperportError(
        f"there is too little {what} for this",
        why=f"{free / GB:.2g} GB are free; an estimate from measured exports is {needed}",
        hint=f"free some, or do it {elsewhere}; `--no-preflight` tries it all the same",
    )
