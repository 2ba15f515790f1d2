"""Make calibration sets: samples of a program's inputs, computed from real audio for a vendor's compiler.

audio files ─ windows, at three levels: unchanged, quiet, loud ─► spectrograms
spectrograms ─► the engine, with a recorder on one program ─► samples of the program's inputs
samples ─ the compiler's layout ─► one array per input, in the program's work folder
"""

from whisperport.calibration.calibration_set import (
    CalibrationOptions,
    CalibrationSet,
    calibration_set,
)

__all__ = ["CalibrationOptions", "CalibrationSet", "calibration_set"]
