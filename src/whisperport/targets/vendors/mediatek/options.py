"""Options of the MediaTek targets, for lowering and for running."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from whisperport.targets.options import EmulationOptions, Option, check_ranges


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
class RunOptions(EmulationOptions):
    """Options for running: on the board, or emulated on the CPU with LiteRT.

    Raises:
        UsageError: a number is out of its range.
    """

    neuronrt: Annotated[str, Option("Name or path of the neuronrt command")] = "neuronrt"
    timeout: Annotated[
        int,
        Option("Time limit in seconds of one neuronrt call", low=1, high=3600),
    ] = 60
    files: Annotated[
        Path | None,
        Option(
            "Folder that keeps the raw input and output files of each program's last call, for "
            "`whisperport diagnose`"
        ),
    ] = None
    boost: Annotated[
        int | None,
        Option(
            "Boost value of the NPU's clock (neuronrt's -b); the default passes none",
            low=0,
            high=100,
        ),
    ] = None

    def __post_init__(self) -> None:
        check_ranges(self)
