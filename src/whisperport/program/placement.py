"""The placement of a program: its target, its precision, the target's options, and its mask."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from whisperport.program.json_records import Member
from whisperport.program.masks import MASKED, check_mask
from whisperport.program.strict_json import Field


def _mask(field: Field) -> float:
    try:
        check_mask(field.number())
    except ValueError as error:
        field.reject(str(error))
    return field.number()


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

    target: Annotated[str, Field.non_empty_text]
    precision: Annotated[str, Field.non_empty_text] = "fp32"
    options: Mapping[str, str] = field(default_factory=dict)
    mask: Annotated[float, Member(is_omitted=True), _mask] = MASKED

    def __post_init__(self) -> None:
        check_mask(self.mask)
