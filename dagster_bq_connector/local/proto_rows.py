"""Protobuf rows as the service reads them.

Upstream takes a field for the column of its name, and only the forms that JSON has. Here columns
are named by their annotation, too, dates and times may be packed numbers, decimals scaled integers
as bytes, intervals text, ranges messages; and bytes and JSON may stand in structs and lists.

Seams: `write._decoder`, which reads the writer schema, and `tabledata._spec_type` and `_select`,
which put JSON values into columns.
"""

import base64
import datetime as dt
import itertools
import math
import re
from collections.abc import Callable, Iterator
from decimal import Context, Decimal
from typing import Any

import grpc
from google.cloud.bigquery_storage_v1 import types as api
from google.protobuf.unknown_fields import UnknownFieldSet

from dagster_bq_connector.local.faults import INVALID, StorageFault
from dagster_bq_connector.local.upstream import database, tabledata, types, write

COLUMN_NAME = 454943157  # the extension google.cloud.bigquery.storage.v1.column_name
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
SCALE = {"NUMERIC": 9, "BIGNUMERIC": 38}
EXACT = Context(prec=100)
INTERVAL = re.compile(r"(-?)(\d+)-(\d+) (-?\d+) (-?)(\d+):(\d+):(\d+)(?:\.(\d{1,6}))?")
ENCODED = ("BLOB", "JSON")  # what is text in the JSON of a row
Row = dict[str, Any]
Decode = Callable[[Any, Any], Any]
_decoder: Callable[[Any], Decode | None] = write._decoder


def decoder(request: api.AppendRowsRequest) -> Decode | None:
    """What reads the rows of a connection, when the request has a writer schema."""
    descriptor = request.proto_rows.writer_schema.proto_descriptor
    if not descriptor.name:
        return _decoder(request)
    try:
        message = write._message_class(descriptor)
    except TypeError as error:
        raise StorageFault(INVALID, f"Invalid proto schema: {error}.") from error

    def decode(request: api.AppendRowsRequest, fields: Any) -> list[Row]:
        rows = request.proto_rows.rows.serialized_rows
        return [_row(message.FromString(row), fields) for row in rows]

    return decode


def column_name(field: Any) -> str:
    """The column of a field, of a message type or of its descriptor: by annotation, or by name."""
    options = field.options if hasattr(field, "options") else field.GetOptions()
    for option in UnknownFieldSet(options):
        if option.field_number == COLUMN_NAME:
            return option.data.decode()
    return field.name


def _row(message: Any, fields: list[Any]) -> Row:
    """A message as the JSON of a row. What it lacks is not in it."""
    known = {field.name.casefold(): field for field in fields}
    row: Row = {}
    for field in message.DESCRIPTOR.fields:
        name = column_name(field)
        column = known.get(name.casefold())
        value = getattr(message, field.name)
        if field.is_repeated:
            row[name] = [_value(one, column) for one in value]
        elif message.HasField(field.name):
            row[name] = _value(value, column)
    return row


def _value(value: Any, column: Any) -> Any:
    known: tuple[str, Any] = (column.type if column else "STRING", value)
    match known:
        case "RECORD", _:
            return _row(value, column.fields)
        case "RANGE", _:
            ends = column.replace(type=column.rangeElementType.type)
            return {
                name: _value(getattr(value, end), ends) if value.HasField(end) else None
                for name, end in zip(types.RANGE_FIELDS, ("start", "end"), strict=True)
            }
        case ("NUMERIC" | "BIGNUMERIC") as kind, bytes():
            number = Decimal(int.from_bytes(value, "little", signed=True))
            return f"{number.scaleb(-SCALE[kind], EXACT):f}"
        case _, bytes():
            return base64.b64encode(value).decode()
        case "DATE", int():
            return (EPOCH + dt.timedelta(days=value)).date().isoformat()
        case "TIMESTAMP", int():
            return (EPOCH + dt.timedelta(microseconds=value)).isoformat()
        case "TIME", int():
            return _time(value).isoformat()
        case "DATETIME", int():
            date = dt.date(value >> 46, value >> 42 & 15, value >> 37 & 31)
            return dt.datetime.combine(date, _time(value & (1 << 37) - 1)).isoformat()
        case "INTERVAL", str():
            return _interval(value)
        case _, float() if not math.isfinite(value):
            return str(value)
        case _:
            return value


def _time(packed: int) -> dt.time:
    return dt.time(packed >> 32, packed >> 26 & 63, packed >> 20 & 63, packed & (1 << 20) - 1)


def _interval(text: str) -> str:
    """Y-M D H:M:S.F as DuckDB reads it; other text as it is.

    Raises:
        StorageFault: It does not fit the Parquet files of the lake, which would round it.
    """
    found = INTERVAL.fullmatch(text)
    if not found:
        return text
    years, months, days, hours, minutes, seconds = map(int, found.group(2, 3, 4, 6, 7, 8))
    micros = ((hours * 60 + minutes) * 60 + seconds) * 10**6 + int((found[9] or "0").ljust(6, "0"))
    millis, rest = divmod(micros, 1000)
    if rest or millis >> 32 or "-" in (found[1], found[4][0], found[5]):
        text = f"Intervals are whole milliseconds here, less than 2^32, not negative: not {text}."
        raise StorageFault(grpc.StatusCode.UNIMPLEMENTED, text)
    return f"{found[1]}{years * 12 + months} months {days} days {found[5]}{micros} microseconds"


def spec_type(kind: Any) -> str:
    """The type in which the JSON of a row is read."""
    if element := types._element(kind):
        return f"{spec_type(element)}[]"
    if kind.id == "struct":
        members = [f"{database.quote(name)} {spec_type(child)}" for name, child in kind.children]
        return f"STRUCT({', '.join(members)})"
    return "VARCHAR" if str(kind) in ENCODED else str(kind)


def select(column: str, kind: Any) -> str:
    """SQL that makes a value so read the column's."""
    return _select(f"r.{column}", kind, itertools.count())


def _select(x: str, kind: Any, names: Iterator[int]) -> str:
    if str(kind) == "JSON":
        return f"CAST({x} AS JSON)"
    if str(kind) == "BLOB":
        return f"from_base64({x})"
    if element := types._element(kind):
        name = f"e{next(names)}"
        value = _select(name, element, names)
        return x if value == name else f"list_transform({x}, lambda {name}: {value})"
    if kind.id == "struct":
        members = {n: (f"{x}.{database.quote(n)}", child) for n, child in kind.children}
        values = {n: _select(member, child, names) for n, (member, child) in members.items()}
        if any(values[n] != member for n, (member, _) in members.items()):
            packed = ", ".join(f"{database.quote(n)} := {value}" for n, value in values.items())
            return f"CASE WHEN {x} IS NOT NULL THEN struct_pack({packed}) END"
    return x


def install() -> None:
    write._decoder = decoder
    tabledata._spec_type, tabledata._select = spec_type, select
