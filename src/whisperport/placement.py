"""The placement of a program: its target, its precision, and the target's options."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of one program.

    Attributes:
        target: name of the target that the program is lowered for.
        precision: precision in which the target computes the program. Default: "fp32".
        options: name of a lowering option of the target -> value. Default: none.
    """

    target: str
    precision: str = "fp32"
    options: Mapping[str, str] = field(default_factory=dict)
