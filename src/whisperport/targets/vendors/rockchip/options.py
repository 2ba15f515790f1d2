"""Options of the targets, for compiling and for running."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from whisperport.errors import UsageError
from whisperport.targets.options import EmulationOptions, Option, check_ranges, clips_option

MISCOMPILING_RULE = "convert_exmatmul_to_mul"
NONE = "none"
CORES = {"auto": 0, "0": 1, "1": 2, "2": 4, "0-1": 3, "0-2": 7}  # value of the option -> core mask


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Options for compiling.

    Raises:
        UsageError: a number is out of its range, or a rule's name has other characters.
    """

    emulate: Annotated[
        int,
        clips_option("the vendor's simulator"),
    ] = 6  # all clips of a default reference: words decide about a quantized encoder
    disable_rules: Annotated[
        str,
        Option(
            "Graph rules of the compiler that are turned off, separated by commas; `none` leaves all of "
            f"them on. {MISCOMPILING_RULE} computes wrong logits and wrong keys in `step`"
        ),
    ] = MISCOMPILING_RULE
    optimization: Annotated[
        Literal[0, 1, 2, 3],
        Option(
            "The compiler's optimization_level: 3 allows all rules, 0 none of the optional ones"
        ),
    ] = 3
    hybrid: Annotated[
        bool,
        Option(
            "Compute in float16 what one 8-bit scale ruins in an encoder in w8a8, as the calibration "
            "samples show (the compiler's hybrid quantization)"
        ),
    ] = True
    samples: Annotated[
        int,
        Option(
            "Number of calibration samples of each quantized program; the vendor recommends 20 to 100",
            low=1,
            high=1000,
        ),
    ] = 32

    def __post_init__(self) -> None:
        check_ranges(self)
        if not re.fullmatch(r"\w+(,\w+)*", self.disable_rules, re.ASCII):
            raise UsageError(
                f"the option `disable-rules` cannot be `{self.disable_rules[:40]}`",
                hint="expected names of rules with commas between them, or `none`",
            )

    @property
    def rules(self) -> tuple[str, ...]:
        """The names of the rules to turn off."""
        return () if self.disable_rules == NONE else tuple(self.disable_rules.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(EmulationOptions):
    """Options for running: on the chip, or emulated on the CPU."""

    cores: Annotated[
        Literal["auto", "0", "1", "2", "0-1", "0-2"],
        Option(
            "Cores of the NPU that run each program; auto lets the driver choose a core for each run. "
            "RK3588 has cores 0 to 2, RK3576 has 0 and 1"
        ),
    ] = "auto"
