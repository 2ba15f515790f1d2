"""HLO modules of a few instructions, written field by field."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .read_hlo import MODULE

FOLDER = Path(__file__).parent / "modules"
F32, S64, TUPLE = 11, 5, 13


def stored(name: str) -> Any:
    """A module of this folder, as a message that can be changed."""
    return MODULE.FromString((FOLDER / f"{name}.hlo.pb").read_bytes())


class Written:
    """A module in the making."""

    def __init__(self) -> None:
        self.module = MODULE(name="written")
        self._ids = 0

    def computation(self, name: str = "main") -> Any:
        """Add a computation; the last one is the entry."""
        self._ids += 1
        made = self.module.computations.add(name=name, id=self._ids)
        self.module.entry_computation_id = made.id
        return made

    def add(
        self,
        computation: Any,
        opcode: str,
        operands: Sequence[Any] = (),
        shape: Sequence[int] = (2, 3),
        **fields: Any,
    ) -> Any:
        """Add an instruction, which becomes the root; `shape` is float32."""
        self._ids += 1
        ids = [one.id for one in operands]
        made = computation.instructions.add(
            name=f"{opcode}.{self._ids}", opcode=opcode, id=self._ids, operand_ids=ids
        )
        made.shape.element_type = F32
        made.shape.dimensions.extend(shape)
        for name, value in fields.items():
            if isinstance(value, list):
                getattr(made, name).extend(value)
            else:
                setattr(made, name, value)
        computation.root_id = made.id
        return made

    def tuple_of(self, computation: Any, operands: Sequence[Any]) -> Any:
        made = self.add(computation, "tuple", operands, ())
        made.shape.element_type = TUPLE
        for one in operands:
            made.shape.tuple_shapes.add().CopyFrom(one.shape)
        return made


def calls(depth: int, per_level: int) -> Any:
    """A module whose every computation calls the one before it several times."""
    written = Written()
    for level in range(depth):
        computation = written.computation(f"level_{level}")
        x = written.add(computation, "parameter")
        if not level:
            written.add(computation, "negate", [x])
        for _ in range(per_level if level else 0):
            callee = written.module.computations[level - 1].id
            x = written.add(computation, "call", [x], called_computation_ids=[callee])
    return written.module
