"""Tensors of an HLO module: their shapes and dtypes, alone or in tuples."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from whisperport.model.inspection.graph import Shape, Value

Tree: TypeAlias = "Value | tuple[Tree, ...]"
"""A tensor, or a tuple of tensors and tuples."""

UNBOUNDED = -(2**63)  # the length of a dynamic axis without an upper bound

TUPLE = 13
DTYPES = {
    **dict(enumerate(("bool", "int8", "int16", "int32", "int64"), 1)),
    **dict(enumerate(("uint8", "uint16", "uint32", "uint64"), 6)),
    **dict(enumerate(("float16", "float32", "float64"), 10)),
    **dict(enumerate(("opaque", "complex64", "bfloat16", "token", "complex128"), 14)),
    **dict(enumerate(("float8_e5m2", "float8_e4m3fn", "int4", "uint4"), 19)),
    **dict(enumerate(("float8_e4m3b11fnuz", "float8_e5m2fnuz", "float8_e4m3fnuz"), 23)),
    **dict(enumerate(("int2", "uint2", "float8_e4m3", "float8_e3m4", "int1", "uint1"), 26)),
    **dict(enumerate(("float4_e2m1fn", "float8_e8m0fnu"), 32)),
}


def declared(name: str, shape: Any, *, constant: bool = False) -> Tree:
    """Return the tensor of a `Shape` message, or a tuple of them; those of a tuple are called `name[0]`."""
    if shape.element_type == TUPLE:
        return tuple(
            declared(f"{name}[{place}]", one, constant=constant)
            for place, one in enumerate(shape.tuple_shapes)
        )
    return Value(name, _axes(shape), DTYPES[shape.element_type], constant)


def leaves(tree: Tree) -> Iterator[Value]:
    """Yield the tensors of a tree in order."""
    if isinstance(tree, Value):
        yield tree
        return
    for inner in tree:
        yield from leaves(inner)


def leaf_at(tree: Tree, index: Sequence[int]) -> Value:
    """Return the tensor at an index, such as (1, 2) for the third element of the second."""
    for place in index:
        assert not isinstance(tree, Value)
        tree = tree[place]
    assert isinstance(tree, Value)
    return tree


def _axes(shape: Any) -> Shape:
    dynamic = list(shape.is_dynamic) or [0] * len(shape.dimensions)
    sizes = zip(shape.dimensions, dynamic, strict=True)
    return tuple(_axis(size, bool(moves)) for size, moves in sizes)


def _axis(size: int, dynamic: bool) -> int | str:
    if dynamic and size == UNBOUNDED:
        return "?"
    return f"<={size}" if dynamic else size
