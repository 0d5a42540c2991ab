"""The protobuf message type of a table's rows, for the Storage Write API.

What BigQuery asks of it: proto2, and nothing outside of itself: no package, no import, no oneof,
every nested type inside the root. Which protobuf type carries which BigQuery type is Google's
documentation, "Supported protocol buffer and Arrow data types".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from google.cloud.bigquery import SchemaField
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

from dagster_bq_connector.errors import SchemaError
from dagster_bq_connector.schema.types import child_fields, type_name

_Kind = FieldDescriptorProto.Type
# NUMERIC and BIGNUMERIC are scaled integers as bytes, the date and time types numbers (wire.py).
KINDS: dict[str, _Kind.ValueType] = {
    "BOOLEAN": _Kind.TYPE_BOOL,
    "INTEGER": _Kind.TYPE_INT64,
    "FLOAT": _Kind.TYPE_DOUBLE,
    "NUMERIC": _Kind.TYPE_BYTES,
    "BIGNUMERIC": _Kind.TYPE_BYTES,
    "STRING": _Kind.TYPE_STRING,
    "BYTES": _Kind.TYPE_BYTES,
    "DATE": _Kind.TYPE_INT32,
    "DATETIME": _Kind.TYPE_INT64,
    "TIMESTAMP": _Kind.TYPE_INT64,
    "TIME": _Kind.TYPE_INT64,
    "JSON": _Kind.TYPE_STRING,
    "GEOGRAPHY": _Kind.TYPE_STRING,
    "INTERVAL": _Kind.TYPE_STRING,
}
_UNPACKED = (_Kind.TYPE_STRING, _Kind.TYPE_BYTES)
_LABELS: dict[str, FieldDescriptorProto.Label.ValueType] = {
    "NULLABLE": FieldDescriptorProto.LABEL_OPTIONAL,
    "REQUIRED": FieldDescriptorProto.LABEL_REQUIRED,
    "REPEATED": FieldDescriptorProto.LABEL_REPEATED,
}
_COLUMN_NAME = 454943157  # the extension google.cloud.bigquery.storage.v1.column_name
_DELIMITED = 2  # the wire type of strings, bytes and messages


def varint(number: int) -> bytes:
    """A number that is not negative, as protobuf writes it."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def delimited(number: int, *parts: bytes | memoryview) -> bytes:
    """A string, bytes or message field of a message. The parts are copied once."""
    tag = varint(number << 3 | _DELIMITED)
    return b"".join((tag, varint(sum(len(part) for part in parts)), *parts))


def is_packed(column: SchemaField) -> bool:
    """Whether the values of a row stand together, without a tag each."""
    kind = KINDS.get(type_name(column))
    return column.mode == "REPEATED" and kind is not None and kind not in _UNPACKED


def row_type(columns: Sequence[SchemaField]) -> DescriptorProto:
    """The message type whose messages are rows.

    Args:
        columns: The columns, in the order of the field numbers, from 1. The pseudo-columns of
            change data capture may be among them, as STRING.

    Raises:
        SchemaError: A column has a type that is not supported.
    """
    root = DescriptorProto(name="Row")
    _add_fields(root, columns, root, {name.casefold() for name in _names(columns)})
    return root


def _add_fields(
    message: DescriptorProto, columns: Sequence[SchemaField], root: DescriptorProto, taken: set[str]
) -> None:
    for number, column in enumerate(columns, start=1):
        name = column.name
        if not (name.isascii() and name.isidentifier()):
            name = _free(f"column_{number}", taken)
        # By default foo_bar and fooBar have one name in JSON, which protobuf does not take.
        field = message.field.add(name=name, json_name=name, number=number)
        field.label = _LABELS[column.mode]
        if name != column.name:
            field.options.MergeFromString(delimited(_COLUMN_NAME, column.name.encode()))
        if is_packed(column):
            field.options.packed = True
        if nested := child_fields(column):
            record = root.nested_type.add(name=_free(f"Record_{len(root.nested_type)}", taken))
            field.type, field.type_name = _Kind.TYPE_MESSAGE, record.name
            _add_fields(record, nested, root, taken)
        elif (kind := KINDS.get(type_name(column))) is not None:
            field.type = kind
        else:
            reason = f"has the type {column.field_type}, which is not supported"
            raise SchemaError(f"Column {column.name!r} {reason}.")


def _names(columns: Iterable[SchemaField]) -> Iterator[str]:
    for column in columns:
        yield column.name
        yield from _names(column.fields)


def _free(name: str, taken: set[str]) -> str:
    """The name, or like it, when a column has that one: fields and types share their scope."""
    while name.casefold() in taken:
        name += "_"
    return name
