"""Run a vendor's SDK in another Python interpreter: find the interpreter, and run compile stages in it."""

from whisperport.toolchain.interpreter import find_interpreter, variable
from whisperport.toolchain.process import Failure, probe, run_driver
from whisperport.toolchain.work import Job, Stage, has_unfinished_stages, prepare

__all__ = [
    "Failure",
    "Job",
    "Stage",
    "find_interpreter",
    "has_unfinished_stages",
    "prepare",
    "probe",
    "run_driver",
    "variable",
]
