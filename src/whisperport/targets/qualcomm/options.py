"""Options of the targets, for compiling and for running."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from whisperport.targets.options import Option, check_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Options for compiling.

    Raises:
        UsageError: a number is out of its range.
    """

    emulate: Annotated[
        int,
        Option(
            "Number of the reference's audio clips that every program is verified on in the vendor's "
            "simulator; 0 verifies none. The encoder takes a minute per clip for a model of width 128 "
            "in fp16, and much longer for larger ones",
            low=0,
            high=1000,
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
class RunOptions:
    """Options for running: on the chip, in the simulator, or emulated on the CPU."""

    emulate: Annotated[
        Literal["off", "on"],
        Option(
            "on runs the lowered ONNX files in emulation on the CPU, in float32; off runs the compiled "
            "files, on an Arm machine on its NPU, on an x86-64 machine in the vendor's simulator"
        ),
    ] = "off"
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
