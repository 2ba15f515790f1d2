"""Options of the target for running."""

from dataclasses import dataclass
from typing import Annotated, Literal

from whisperport.targets.options import Option, check_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options for running.

    Raises:
        UsageError: a number is out of its range.
    """

    emulate: Annotated[
        Literal["off", "on"],
        Option(
            "on runs the modules that would be compiled in emulation on the CPU, with torch; off runs "
            "the compiled programs on a NeuronCore"
        ),
    ] = "off"
    core: Annotated[
        int,
        Option(
            "Number of the NeuronCore that runs the programs, among those that this process sees",
            low=0,
            high=1023,
        ),
    ] = 0

    def __post_init__(self) -> None:
        check_ranges(self)
