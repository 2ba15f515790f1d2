"""Frozen dataclasses to JSON and back, by the annotations of their fields.

    record ── to_json ──► JSON object ── from_json ──► record

Each field is a member of the object, in the order of the class. A tuple is an array, a mapping an object, a
path its text, a member of an enumeration its value, and a NaN or an infinity, which JSON does not have, the
string "nan", "inf" or "-inf". An integer must be 0 or more when it is read.

What a type cannot say stands beside it, in `Annotated`: a function that reads the field's value from a
`Field`, such as `Field.sha256`, or a `Member`. A class whose JSON has more than its fields has a method
`to_json` of its own, which begins with `members`.

ARCHITECTURE.md says why no library does this.
"""

import math
import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache, partial
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from whisperport.program.strict_json import Field

T = TypeVar("T")
Reader = Callable[[Field], Any]


@dataclass(frozen=True, slots=True)
class Member:
    """The member of a JSON object that holds a field.

    Attributes:
        name: of the member; empty: that of the field.
        is_omitted: whether the member is absent if the field has its default.
    """

    name: str = ""
    is_omitted: bool = False


def to_json(value: Any) -> Any:
    """Return a record, or a value that a record may hold, as JSON data."""
    if is_dataclass(value):
        own = getattr(value, "to_json", None)
        return members(value) if own is None else own()
    if isinstance(value, Mapping):
        return {name: to_json(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(element) for element in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def members(record: Any) -> dict[str, Any]:
    """Return the fields of a record as a JSON object."""
    written = {}
    for field in _known_fields(cast("Hashable", type(record))):
        value = getattr(record, field.name)
        if not (field.member.is_omitted and value == field.default):
            written[field.member.name] = to_json(value)
    return written


def from_json(kind: type[T], data: Field) -> T:
    """Read a record from the JSON object that `to_json` wrote.

    Args:
        kind: its class.
        data: the object, of any content.

    Raises:
        BundleError: a member is missing, unknown or of another type, or the class rejects the values with a
            ValueError; the message names the member.
    """
    there = data.mapping()
    known = [
        field
        for field in _known_fields(cast("Hashable", kind))
        if field.member.name in there or not field.member.is_omitted
    ]
    data.members([field.member.name for field in known])
    values = {field.name: field.read(there[field.member.name]) for field in known}
    try:
        return kind(**values)
    except ValueError as error:
        data.reject(f"is not valid: {error}")


class _Known(NamedTuple):
    """What is known about one field of a class."""

    name: str
    read: Reader
    member: Member
    default: Any


@cache
def _known_fields(kind: Any) -> tuple[_Known, ...]:
    annotations = get_type_hints(kind, include_extras=True)
    return tuple(
        _Known(f.name, _reader(annotations[f.name]), _member(f.name, annotations), f.default)
        for f in fields(kind)
    )


def _member(name: str, annotations: Mapping[str, Any]) -> Member:
    marks = getattr(annotations[name], "__metadata__", ())
    member = next((mark for mark in marks if isinstance(mark, Member)), Member())
    return member if member.name else replace(member, name=name)


def _reader(annotation: Any) -> Reader:
    """Return what reads a value of the annotated type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        own: Reader | None = next((mark for mark in arguments[1:] if callable(mark)), None)
        return own or _reader(arguments[0])
    if origin in (Union, UnionType):
        (present,) = (_reader(kind) for kind in arguments if kind is not NoneType)
        return lambda field: None if field.value is None else present(field)
    if origin is Literal:
        return lambda field: field.one_of(arguments)
    if origin is tuple:
        return _array_reader(arguments)
    if origin in (dict, Mapping):
        name_of, value_of = map(_reader, arguments)
        return lambda field: {
            name_of(Field(name, field.path, field.document)): value_of(member)
            for name, member in field.mapping().items()
        }
    return _SCALARS.get(annotation) or partial(from_json, annotation)


def _array_reader(kinds: tuple[Any, ...]) -> Reader:
    readers = [_reader(kind) for kind in kinds if kind is not Ellipsis]
    if len(readers) < len(kinds):
        return lambda field: tuple(map(readers[0], field.elements()))

    def read(field: Field) -> Any:
        elements = field.elements()
        if len(elements) != len(readers):
            field.reject(f"has {len(elements)} elements; expected {len(readers)}")
        return tuple(read(element) for read, element in zip(readers, elements, strict=True))

    return read


_SCALARS: Mapping[Any, Reader] = {
    str: Field.text,
    int: Field.integer,
    float: Field.number,
    bool: Field.boolean,
    Any: lambda field: field.value,
}
