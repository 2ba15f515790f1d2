"""The placement of a program: its target, its precision, the target's options, and its mask."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from whisperport.program.masks import MASKED, check_mask


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of one program.

    Attributes:
        target: name of the target that the program is lowered for.
        precision: precision in which the target computes the program. Default: "fp32".
        options: name of a lowering option of the target -> value. Default: none.
        mask: number that the host adds to the attention scores of hidden tokens, in the array that it
            passes as `mask`. Default: -30000.

    Raises:
        ValueError: `mask` is out of range, see `check_mask`.
    """

    target: str
    precision: str = "fp32"
    options: Mapping[str, str] = field(default_factory=dict)
    mask: float = MASKED

    def __post_init__(self) -> None:
        check_mask(self.mask)
