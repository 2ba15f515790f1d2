"""Calibration sets: inputs of a bundle's programs, recorded from real audio for a vendor's compiler.

recordings ─ windows, each as recorded, quiet and loud ─► spectrograms
spectrograms ─► the engine, with a recorder before one program ─► samples of its inputs
samples ─ the compiler's layout ─► one array per input, in the program's work folder
"""

from whisperport.calibration.calibration_set import (
    CalibrationOptions,
    CalibrationSet,
    calibration_set,
)

__all__ = ["CalibrationOptions", "CalibrationSet", "calibration_set"]
