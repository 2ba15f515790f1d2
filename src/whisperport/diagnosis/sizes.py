"""Explain the size of a file: which dtypes and layouts of an output have this number of bytes."""

from collections.abc import Sequence

from whisperport.diagnosis.expected import ExpectedTensor
from whisperport.diagnosis.layouts import layouts_of, squeezed
from whisperport.diagnosis.readings import FORMATS

LONGEST = 6  # explanations that are listed


def size_sentences(size: int, tensor: ExpectedTensor) -> tuple[str, ...]:
    """Return what a file of `size` bytes can hold of an output, the simplest explanation first.

    Args:
        size: bytes of the file.
        tensor: the output.
    """
    return explain_size(size, tensor.name, tensor.array.shape)


def explain_size(size: int, name: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Return what a file of `size` bytes can hold of an output, the simplest explanation first.

    Args:
        size: bytes of the file.
        name: name of the output.
        shape: its shape.
    """
    count = 1
    for axis in shape:
        count *= axis
    product = " x ".join(str(axis) for axis in squeezed(tuple(shape)))
    dtypes: dict[int, list[str]] = {}
    for form in FORMATS:
        if form.code[0] == "<":
            dtypes.setdefault(form.itemsize, []).append(form.name)
    exact, padded = [], []
    for itemsize, names in sorted(dtypes.items()):
        values = size // itemsize
        if size % itemsize or not values:
            continue
        either = " or ".join(names)
        if values == count:
            exact.append(
                f"{size:,} bytes are exactly {product} values of {itemsize} byte(s) each: `{name}` as "
                f"{either}."
            )
        elif values > count and values < 4 * count + 1024:
            for layout in layouts_of(squeezed(tuple(shape)), values)[:2]:
                stored = " x ".join(map(str, layout.padded))
                padded.append(
                    f"{size:,} bytes are {stored} values of {itemsize} byte(s): `{name}` as {either}, "
                    "with padding."
                )
    found = [*exact, *padded][:LONGEST]
    if not found:
        full = 4 * count
        found.append(
            f"{size:,} bytes fit no dtype and layout of `{name}`, which has {product} values: {full:,} "
            f"bytes in float32, {count:,} bytes in int8; the file is {size / full:.3g} times the float32 "
            "size."
        )
    return tuple(found)
