"""Check before a long operation that its packages, memory and disk space are available.

Memory and time are estimates:

    peak memory = base + factor · weights            weights: bytes of the model in float32
    time        = base + seconds per GB · weights

Each target's spec has its constants. They are fitted to exports of complete models with random weights, on
one thread of an AMD EPYC with torch 2.13 and executorch 1.5.1 (benchmarks/memory/export_cost.py). Memory is
the peak of the resident memory, and time is CPU time:

    sizes of   weights   onnxruntime      xnnpack
    tiny        151 MB   1.1 GB   32 s    1.3 GB   69 s
    base        290 MB   1.4 GB   56 s    1.7 GB  106 s
    small       967 MB   2.5 GB  137 s    3.6 GB  227 s

The figures for xnnpack were measured on two threads. An export to xnnpack also needs disk space for
temporary files as large as the weights.

Lowering a single program for onnxruntime and xnnpack: an encoder of 33 MB took 0.8 and 0.8 GB, a decoder of
118 MB took 1.0 and 1.6 GB.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from whisperport.errors import WhisperportError, needs
from whisperport.program.dims import Dims
from whisperport.system.child import memory_within
from whisperport.system.machine import control_groups, text_of
from whisperport.targets import TARGETS

ROOT = Path("/")
MB, GB = 1e6, 1e9
LIMIT_BASE_BYTES, LIMIT_FACTOR = 4 * 2**30, 24  # memory limit for a program of unknown origin


_MEASURED = {
    target.spec.name: target.spec.lowering.cost
    for target in TARGETS
    if target.spec.lowering.cost is not None
}
_NOT_MEASURED = max(_MEASURED.values(), key=lambda cost: cost.bundle_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Estimated needs of an operation, fitted to a few measured exports.

    Attributes:
        memory_bytes: peak memory of the process.
        disk_bytes: disk space of the output and of temporary files.
        seconds: time on 2 cores of an AMD EPYC.
    """

    memory_bytes: float
    disk_bytes: float
    seconds: float

    def __str__(self) -> str:
        minutes = max(1, round(self.seconds / 60))
        return (
            f"about {self.memory_bytes / GB:.1f} GB of memory, {self.disk_bytes / MB:.0f} MB of disk "
            f"and {minutes} min"
        )


def estimate_export(dims: Dims, targets: Iterable[str]) -> Estimate:
    """Estimate the export of a bundle. The most expensive of its targets counts."""
    costs = [_MEASURED.get(target, _NOT_MEASURED) for target in targets]
    weights = weight_bytes(dims)
    embedding = 4 * dims.n_vocab * dims.n_text_state
    return Estimate(
        memory_bytes=max(cost.base_bytes + cost.bundle_factor * weights for cost in costs),
        disk_bytes=max(1 + cost.temporary_factor for cost in costs) * weights + embedding + 20 * MB,
        seconds=max(cost.base_s + cost.s_per_gb * weights / GB for cost in costs),
    )


def estimate_lowering(weights: int, target: str) -> Estimate:
    """Estimate the lowering of one program with `weights` bytes of weights."""
    cost = _MEASURED.get(target, _NOT_MEASURED)
    return Estimate(
        memory_bytes=cost.base_bytes + cost.program_factor * weights,
        disk_bytes=(1.1 + cost.temporary_factor) * weights + 20 * MB,
        seconds=cost.base_s + cost.s_per_gb * weights / GB,
    )


@contextmanager
def requires_torch(action: str) -> Iterator[None]:
    """Raise an error that names the pip extra if an import in the block fails.

    Args:
        action: the operation that needs the packages, such as "fix a program"; part of the message.

    Raises:
        MissingPackageError: an import in the block failed.
    """
    with needs(f"cannot {action}: torch and its exporters are not installed", extra="export"):
        yield


def within_memory_of(program: object, *weights: Path, trust: bool) -> AbstractContextManager[None]:
    """Limit the memory of this process while it lowers or rewrites the program of a file.

    The limit is several times what programs of the same size were measured to need.

    Args:
        program: path of the program; any other object has no limit.
        weights: paths of further files of the program.
        trust: use no limit.
    """
    if trust or not isinstance(program, str | os.PathLike):
        return nullcontext()
    try:
        size = sum(map(os.path.getsize, (program, *weights)))
    except (OSError, ValueError):  # the program's reader reports the error
        return nullcontext()
    return memory_within(LIMIT_BASE_BYTES + LIMIT_FACTOR * size)


def weight_bytes(dims: Dims) -> int:
    """Return the bytes of a Whisper model's weights in float32; shared embeddings count once."""
    d, norm = dims.n_text_state, 2 * dims.n_text_state
    attention = 4 * d * d + 3 * d
    feed_forward = 2 * d * dims.n_text_ffn + d + dims.n_text_ffn
    text_layer = 2 * attention + feed_forward + 3 * norm
    encoder = dims.encoder_weights + dims.n_audio_ctx * d
    tables = (dims.n_vocab + dims.n_text_ctx) * d
    return 4 * (encoder + tables + dims.n_text_layer * text_layer + norm)


def check_fits(needed: Estimate, out: Path) -> None:
    """Check that this machine has enough memory and disk space.

    Raises:
        WhisperportError: the free memory, or the free space on the disk of `out`, is below the estimate.
    """
    memory = available_memory()
    if memory is not None and memory < needed.memory_bytes:
        raise _too_small("memory", needed, memory, "use a machine with more")
    free = _free_disk(out)
    if free < needed.disk_bytes:
        another = f"use another disk than that of {out.parent}"
        raise _too_small("space on the disk", needed, free, another)


def available_memory() -> int | None:
    """Return the bytes that this process can still allocate; None if the system does not tell.

    This is the minimum of the machine's available memory and the free memory of every control group of
    this process. In a container, the machine's value alone is too high.
    """
    limits = [*_available_in_machine(), *_available_in_control_groups()]
    return min(limits) if limits else None


def _available_in_machine() -> Iterator[int]:
    for line in text_of(ROOT / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _available_in_control_groups() -> Iterator[int]:
    """Yield the free memory of every control group of version 2 and of version 1 (`memory` hierarchy)."""
    for folder, is_v2 in control_groups("memory", ROOT):
        limit, used = ("max", "current") if is_v2 else ("limit_in_bytes", "usage_in_bytes")
        limit_bytes = _number(folder / f"memory.{limit}")
        used_bytes = _number(folder / f"memory.{used}")
        if limit_bytes is not None and used_bytes is not None:
            yield limit_bytes - used_bytes + _reclaimable(folder)


def _reclaimable(folder: Path) -> int:
    """Return the bytes of cached file pages: they count as used, but the kernel can free them."""
    lines = (line.split() for line in text_of(folder / "memory.stat").splitlines())
    sizes = {words[0]: int(words[1]) for words in lines if len(words) == 2}
    return sizes.get("total_inactive_file", sizes.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    text = text_of(path).strip()
    return int(text) if text.isdigit() else None  # "max" means no limit


def _free_disk(out: Path) -> int:
    folder = Path(os.path.realpath(out)).parent
    while not folder.is_dir():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _too_small(what: str, needed: Estimate, free: float, alternative: str) -> WhisperportError:
    amount = f"{free / GB:.2g} GB" if free >= GB else f"{free / 1e6:.0f} MB"
    return WhisperportError(
        f"there is too little {what}",
        why=f"{amount} are free; estimated need, from measured exports: {needed}",
        hint=f"free some {what}, or {alternative}; "
        "`export` and `lower` skip this check with `--no-preflight`",
    )
