"""Make calibration sets: samples of a program's inputs, computed from real audio for a vendor's compiler.

audio files ─ windows, at three levels: unchanged, quiet, loud ─► spectrograms
spectrograms ─► the session's engine, with a recorder on every program ─► samples of the programs' inputs
samples ─ the compiler's layout ─► one array per input, in the program's work folder
"""

from whisperport.build.calibration.calibration_set import (
    CalibrationOptions,
    CalibrationRequest,
    CalibrationSet,
    calibration_sets,
)

__all__ = [
    "CalibrationOptions",
    "CalibrationRequest",
    "CalibrationSet",
    "calibration_sets",
]
