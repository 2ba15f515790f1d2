"""Options of the targets, for compiling and for running."""

from dataclasses import dataclass
from typing import Annotated, Literal

from whisperport.targets.options import Option, check_ranges, clips_option


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Options for compiling.

    Raises:
        UsageError: a number is out of its range.
    """

    macs: Annotated[
        int | None,
        Option(
            "Number of 8-bit multiply-accumulate units of your chip's NPU; the default is 256, for "
            "Ethos-U65 512",
            low=32,
            high=2048,
        ),
    ] = None
    system_config: Annotated[
        str | None,
        Option(
            "Clock, SRAM and outer memory of your chip, by its name in the compiler's file vela.ini; the "
            "default is on the target's page"
        ),
    ] = None
    memory_mode: Annotated[
        str | None,
        Option(
            "Where weights and tensors are stored, by its name in vela.ini: Dedicated_Sram_384KB is the "
            "outer memory with this much SRAM as a cache; the default is on the target's page"
        ),
    ] = None
    driver: Annotated[
        Literal["bare-metal", "linux"],
        Option(
            "What drives the NPU: bare-metal, a program without operating system on a Cortex-M processor; "
            "linux, Arm's driver on a Cortex-A processor, with Ethos-U85 only"
        ),
    ] = "bare-metal"
    headroom: Annotated[
        int,
        Option(
            "Factor between the range of a 16-bit tensor and its largest value in the calibration set; "
            "above 1, the NPU's tables of functions are coarser",
            low=1,
            high=64,
        ),
    ] = 1
    emulate: Annotated[
        int,
        clips_option("the TOSA reference model"),
    ] = 2

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options for running."""

    emulate: Annotated[
        Literal["off", "on", "quantized"],
        Option(
            "on runs the lowered programs in emulation on the CPU, in float32; quantized runs the "
            "compiler's quantized graphs there in the TOSA reference model, which needs the compiler's "
            "environment; off runs the compiled files, which this machine cannot"
        ),
    ] = "off"
