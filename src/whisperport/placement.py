"""Where one program of a bundle is placed: its target, its precision, and that target's options."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of one program."""

    target: str  # name of the target that the program was lowered for
    precision: str = "fp32"  # that the target computes the program in
    options: Mapping[str, str] = field(
        default_factory=dict
    )  # of the target, for lowering: name -> value
