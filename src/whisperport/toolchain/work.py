"""Prepare the work folder for the driver: the job, the driver with its kit, and the stage script."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from whisperport.system.atomic import write_atomic
from whisperport.toolchain import driver
from whisperport.toolchain.driver import has_unfinished_stages
from whisperport.toolchain.process import SCRIPT

__all__ = ["Job", "Stage", "has_unfinished_stages", "prepare"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of compiling a program. Paths are relative to the program's folder.

    A stage runs again if a file that it reads has changed, or if a file that it wrote is damaged.
    """

    name: str  # also the key of its function in `STAGES` of the stage script
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One program to compile. Its folder in the work folder contains the input of the first stage."""

    name: str
    stages: tuple[Stage, ...]
    # JSON for the stage script. If it changes, every stage runs again. Put the settings of a single stage
    # into a file that this stage reads.
    settings: Mapping[str, Any] = field(default_factory=dict)


def prepare(work: Path, script: Path, settings: Mapping[str, Any], jobs: Sequence[Job]) -> None:
    """Write the job description, the driver with its kit, and the stage script into a work folder.

    Args:
        work: the work folder; each job's own folder in it already contains the files of its program.
        script: path of the vendor's stage script.
        settings: JSON for every stage of every program. If it changes, all stages run again.
        jobs: the programs to compile.
    """
    described = {"settings": settings, "programs": [asdict(job) for job in jobs]}
    write_atomic(work / driver.JOB, json.dumps(described, indent=1).encode("utf-8"))
    write_atomic(work / driver.SCRIPT, script.read_bytes())
    own = Path(driver.__file__)
    write_atomic(work / driver.KIT, own.with_name(driver.KIT).read_bytes())
    write_atomic(work / SCRIPT, own.read_bytes())
