"""Options of the targets, for compiling and for running."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from whisperport.targets.options import EmulationOptions, Option, check_ranges, clips_option


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Options for compiling.

    Raises:
        UsageError: a number is out of its range.
    """

    emulate: Annotated[
        int,
        clips_option(
            "the vendor's simulator",
            ". The encoder takes a minute per clip for a model of width 128 in fp16, and much longer for "
            "larger ones",
        ),
    ] = 2  # `prefill_64` runs in the second window
    optimization: Annotated[
        Literal[1, 2, 3],
        Option(
            "Effort of the compiler's optimization (htp_graph_finalization_optimization_mode): 1 is the "
            "fastest to compile, 3 gives the fastest program"
        ),
    ] = 3

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(EmulationOptions):
    """Options for running: on the chip, in the simulator, or emulated on the CPU."""

    library: Annotated[
        Path | None,
        Option(
            "Path of the device's HTP library, libQnnHtp.so or QnnHtp.dll; the default is the library of "
            "the package onnxruntime-qnn, which on x86-64 is the simulator"
        ),
    ] = None
    performance: Annotated[
        Literal["default", "burst", "balanced", "high_performance", "power_saver"],
        Option(
            "Clock and power of the NPU (htp_performance_mode); without effect in the simulator"
        ),
    ] = "default"
