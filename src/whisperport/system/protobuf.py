"""Protobuf message classes, built from the fields of a schema that whisperport uses."""

from collections.abc import Mapping
from typing import Any

Field = tuple[str, int, str]
"""(name, number, type) of a field. A type in brackets marks a repeated field."""


def message_class(schema: Mapping[str, tuple[Field, ...]], root: str) -> Any:
    """Create the class of the message `root` in a separate descriptor pool.

    Args:
        schema: name of a message -> the fields that are used. protobuf preserves all other fields when a
            message is read and written again.
        root: name of the message whose class is returned.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    described = descriptor_pb2.FieldDescriptorProto
    types = {
        "float": described.TYPE_FLOAT,
        "int32": described.TYPE_INT32,
        "int64": described.TYPE_INT64,
        "uint32": described.TYPE_UINT32,
        "uint64": described.TYPE_UINT64,
        "string": described.TYPE_STRING,
        "bytes": described.TYPE_BYTES,
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
