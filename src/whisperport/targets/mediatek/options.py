"""Options of the MediaTek targets, for lowering and for running."""

from dataclasses import dataclass
from typing import Annotated, Literal

from whisperport.targets.mediatek.run_options import DeviceOptions
from whisperport.targets.options import Option


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerOptions:
    """Options for lowering."""

    static: Annotated[
        Literal["linear", "matmul", "all"],
        Option(
            "Operators that w8a8 and w8a16 quantize: linears and convolutions, while all others compute in "
            "float16; these and the matrix multiplications of attention; or all that the quantizer supports"
        ),
    ] = "linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(DeviceOptions):
    """Options for running: on the board, or emulated on the CPU.

    Raises:
        UsageError: a number is out of its range.
    """

    emulate: Annotated[
        Literal["off", "on"],
        Option(
            "on runs the lowered .tflite files in emulation on the CPU, with LiteRT; off runs the "
            "compiled files on the NPU"
        ),
    ] = "off"
