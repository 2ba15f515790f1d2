"""Run a vendor's SDK in another process: find the SDK, and run compile stages with it."""

from whisperport.toolchain.command import find_command
from whisperport.toolchain.interpreter import Installed, find_interpreter, variable
from whisperport.toolchain.process import Failure, probe, run_driver
from whisperport.toolchain.served import ServedPrograms
from whisperport.toolchain.work import Job, Stage, has_unfinished_stages, prepare

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
