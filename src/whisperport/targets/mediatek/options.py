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

    api: Annotated[
        Literal["command", "library"],
        Option(
            "command starts neuronrt for every call; library loads each program once through the Neuron "
            "runtime library, which suits programs that run once per token"
        ),
    ] = "command"
    neuronrt: Annotated[str, Option("Name or path of the neuronrt command, for api=command")] = (
        "neuronrt"
    )
    library: Annotated[
        Path | None,
        Option(
            "Path of the Neuron runtime library, for api=library; the default is the system's "
            "libneuronusdk_runtime.mtk.so or libneuron_runtime.so"
        ),
    ] = None
    timeout: Annotated[
        int,
        Option("Time limit in seconds of one neuronrt call, for api=command", low=1, high=3600),
    ] = 60
    files: Annotated[
        Path | None,
        Option(
            "Folder that keeps the raw input and output files of each program's last call, for api=command "
            "and `whisperport verify --device-output`"
        ),
    ] = None
    boost: Annotated[
        int | None,
        Option(
            "Boost value of the NPU's clock (neuronrt's -b), for api=command; the default passes none",
            low=0,
            high=100,
        ),
    ] = None

    def __post_init__(self) -> None:
        check_ranges(self)
