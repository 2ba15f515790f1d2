"""Tensors of an HLO module: their shapes and dtypes, alone or in tuples."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from whisperport.inspection.graph import Shape, Value

Tree: TypeAlias = "Value | tuple[Tree, ...]"
"""A tensor, or a tuple of tensors and tuples."""

MAX_RANK = 32  # axes of a tensor
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
    """Return the tensor of a `Shape` message, or a tuple of them; those of a tuple are called `name[0]`.

    Raises:
        ValueError: a dtype is not known, an axis is negative, or there are too many axes.
    """
    if shape.element_type == TUPLE:
        return tuple(
            declared(f"{name}[{place}]", one, constant=constant)
            for place, one in enumerate(shape.tuple_shapes)
        )
    if shape.element_type not in DTYPES:
        raise ValueError(f"`{name}` has the unknown dtype {shape.element_type}")
    return Value(name, _axes(name, shape), DTYPES[shape.element_type], constant)


def leaves(tree: Tree) -> Iterator[Value]:
    """Yield the tensors of a tree in order."""
    if isinstance(tree, Value):
        yield tree
        return
    for inner in tree:
        yield from leaves(inner)


def leaf_at(tree: Tree, index: Sequence[int]) -> Value:
    """Return the tensor at an index, such as (1, 2) for the third element of the second.

    Raises:
        ValueError: there is no tensor at the index.
    """
    for place in index:
        if isinstance(tree, Value) or not 0 <= place < len(tree):
            raise ValueError(f"there is no tensor at the index {list(index)[:8]}")
        tree = tree[place]
    if not isinstance(tree, Value):
        raise ValueError(f"there is a tuple, not a tensor, at the index {list(index)[:8]}")
    return tree


def check_same_form(name: str, tree: Tree, stated: Tree) -> None:
    """Check that a tree has the tuples, shapes and dtypes that are stated.

    Raises:
        ValueError: it has not.
    """
    if isinstance(tree, tuple) and isinstance(stated, tuple) and len(tree) == len(stated):
        for one, other in zip(tree, stated, strict=True):
            check_same_form(name, one, other)
        return
    if isinstance(tree, tuple) or isinstance(stated, tuple):
        raise ValueError(f"`{name}` has another number of tensors than stated")
    if (tree.shape, tree.dtype) != (stated.shape, stated.dtype):
        raise ValueError(f"`{name}` is of another shape or dtype than stated")


def _axes(name: str, shape: Any) -> Shape:
    if len(shape.dimensions) > MAX_RANK:
        raise ValueError(f"`{name}` has {len(shape.dimensions)} axes; the limit is {MAX_RANK}")
    dynamic = list(shape.is_dynamic) or [0] * len(shape.dimensions)
    if len(dynamic) != len(shape.dimensions):
        raise ValueError(f"`{name}` does not state for every axis whether it is dynamic")
    return tuple(
        _axis(name, size, bool(moves))
        for size, moves in zip(shape.dimensions, dynamic, strict=True)
    )


def _axis(name: str, size: int, dynamic: bool) -> int | str:
    if dynamic and size == UNBOUNDED:
        return "?"
    if size < 0:
        raise ValueError(f"`{name}` has an axis of length {size}")
    return f"<={size}" if dynamic else size
