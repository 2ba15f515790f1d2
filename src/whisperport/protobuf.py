"""Classes for messages of a vendor's or standard's protobuf schema, from the few fields that are used."""

from collections.abc import Mapping
from typing import Any

Field = tuple[str, int, str]
"""Name, number, type; a type in brackets is repeated."""


def message_class(schema: Mapping[str, tuple[Field, ...]], root: str) -> Any:
    """The class of the message `root`, made in a pool of its own.

    Args:
        schema: message -> its fields. protobuf keeps those that are left out, and writes them again.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    described = descriptor_pb2.FieldDescriptorProto
    types = {
        "int32": described.TYPE_INT32,
        "int64": described.TYPE_INT64,
        "uint32": described.TYPE_UINT32,
        "uint64": described.TYPE_UINT64,
        "string": described.TYPE_STRING,
    }
    file = descriptor_pb2.FileDescriptorProto(name="file", package="file", syntax="proto3")
    for name, fields in schema.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind in fields:
            field = message.field.add(name=field_name, number=number)
            repeated = kind.startswith("[")
            field.label = described.LABEL_REPEATED if repeated else described.LABEL_OPTIONAL
            kind = kind.strip("[]")
            field.type = types.get(kind, described.TYPE_MESSAGE)
            if kind not in types:
                field.type_name = f".file.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"file.{root}"))
