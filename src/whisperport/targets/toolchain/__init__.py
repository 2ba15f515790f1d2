"""Run a vendor's SDK in another process: find the SDK, and run compile stages with it."""

from whisperport.targets.toolchain.interpreter import (
    Installed,
    find_command,
    find_interpreter,
    variable,
)
from whisperport.targets.toolchain.process import (
    Failure,
    Job,
    Stage,
    has_unfinished_stages,
    prepare,
    probe,
    run_driver,
)
from whisperport.targets.toolchain.served import ServedPrograms

__all__ = [
    "Failure",
    "Installed",
    "Job",
    "ServedPrograms",
    "Stage",
    "find_command",
    "find_interpreter",
    "has_unfinished_stages",
    "prepare",
    "probe",
    "run_driver",
    "variable",
]
