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

    device: Annotated[
        Literal["neuron", "cpu"],
        Option(
            "Where programs run: neuron runs compiled programs on a NeuronCore; cpu runs the modules that "
            "would be compiled, with torch"
        ),
    ] = "neuron"
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
