"""The work folder that the driver reads: the job, the driver itself, and the vendor's stage script."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from whisperport.atomic import write_atomic
from whisperport.toolchain import driver
from whisperport.toolchain.driver import has_unfinished_stages
from whisperport.toolchain.process import SCRIPT

__all__ = ["Job", "Stage", "has_unfinished_stages", "prepare"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of compiling a program; files are named relative to the program's folder.

    It is done again if a file that it reads changes, or one that it wrote is damaged.
    """

    name: str  # also the name of its function in the stage script
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One program to compile; its folder in the work folder holds what the first stages read."""

    name: str
    stages: tuple[Stage, ...]
    # JSON, for the stage script; when it changes, every stage is done again. What concerns one stage
    # only belongs into a file that this stage reads.
    settings: Mapping[str, Any] = field(default_factory=dict)


def prepare(work: Path, script: Path, settings: Mapping[str, Any], jobs: Sequence[Job]) -> None:
    """Write everything that the driver needs besides the files of the programs.

    Args:
        script: the vendor's stage script.
        settings: JSON, for every stage of every program; when they change, all stages are done again.
    """
    described = {"settings": settings, "programs": [asdict(job) for job in jobs]}
    write_atomic(work / driver.JOB, json.dumps(described, indent=1).encode("utf-8"))
    write_atomic(work / driver.SCRIPT, script.read_bytes())
    write_atomic(work / SCRIPT, Path(driver.__file__).read_bytes())
