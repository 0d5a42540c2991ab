"""Rows for the protobuf encoder: any columns and values, and how Google's runtime reads them."""

import datetime as dt
import decimal
import math
import re
import struct
import uuid
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
from google.cloud.bigquery import SchemaField
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, unknown_fields
from hypothesis import strategies as st

COLUMN_NAME = 454943157
UTC = dt.UTC
EPOCH = dt.datetime(1970, 1, 1, tzinfo=UTC)
EXACT = decimal.Context(prec=100)
INTERVAL = re.compile(r"(-?)(\d+)-(\d+) (-?\d+) (-?)(\d+):(\d+):(\d+)(?:\.(\d{6}))?")
WIRE: dict[str, pa.DataType] = {
    "BOOLEAN": pa.bool_(),
    "INTEGER": pa.int64(),
    "FLOAT": pa.float64(),
    "NUMERIC": pa.decimal128(38, 9),
    "BIGNUMERIC": pa.decimal256(76, 38),
    "STRING": pa.string(),
    "BYTES": pa.binary(),
    "DATE": pa.date32(),
    "DATETIME": pa.timestamp("us"),
    "TIMESTAMP": pa.timestamp("us", "UTC"),
    "TIME": pa.time64("us"),
    "JSON": pa.string(),
    "GEOGRAPHY": pa.string(),
    "INTERVAL": pa.month_day_nano_interval(),
}
RANGES = ("DATE", "DATETIME", "TIMESTAMP")
SCALE = {"NUMERIC": 9, "BIGNUMERIC": 38}

# The sizes of varints and of scaled integers change at powers of two.
INTEGERS = st.one_of(
    st.builds(
        lambda bits, offset, sign: sign * (2**bits + offset),
        *(st.integers(0, 62), st.integers(-1, 1), st.sampled_from([-1, 1])),
    ),
    st.sampled_from([-(2**63), 2**63 - 1]),
    st.integers(-(2**63), 2**63 - 1),
)


def decimals(digits: int, scale: int) -> st.SearchStrategy[Decimal]:
    unscaled = st.builds(
        lambda bits, offset, sign: sign * min(2**bits + offset, 10**digits - 1),
        *(st.integers(0, 253), st.integers(-1, 1), st.sampled_from([-1, 1])),
    ) | st.integers(1 - 10**digits, 10**digits - 1)
    return unscaled.map(lambda value: Decimal(value).scaleb(-scale, EXACT))


MICROS = st.integers(-(2**45), 2**45)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "BOOLEAN": st.booleans(),
    "INTEGER": INTEGERS,
    "FLOAT": st.floats().map(lambda number: math.nan if math.isnan(number) else number),
    "NUMERIC": decimals(38, 9),
    "BIGNUMERIC": decimals(76, 38),
    "STRING": st.text(st.characters(exclude_categories=["Cs"])),
    "BYTES": st.binary(),
    "DATE": st.dates(),
    "DATETIME": st.datetimes(),
    "TIMESTAMP": st.datetimes(timezones=st.just(UTC)),
    "TIME": st.times(),
    "JSON": st.sampled_from(["null", "{}", '{"a": [1]}']),
    "GEOGRAPHY": st.just("POINT(1 2)"),
    "INTERVAL": st.builds(
        lambda months, days, micros: pa.MonthDayNano([months, days, micros * 1000]),
        *(st.integers(-120_000, 120_000), st.integers(-3_660_000, 3_660_000), MICROS),
    ),
}


@st.composite
def columns(draw: st.DrawFn, depth: int = 3) -> list[SchemaField]:
    """Columns of any types and modes, their names anything that BigQuery takes."""
    names = draw(
        st.lists(
            st.text(st.characters(categories=["L", "N"], include_characters="_- &%"), min_size=1),
            min_size=1,
            max_size=4,
            unique_by=str.casefold,
        )
    )
    return [draw(column(name, depth)) for name in names]


@st.composite
def column(draw: st.DrawFn, name: str, depth: int) -> SchemaField:
    kinds = [*WIRE, "RANGE", *(["RECORD"] * 4 if depth else [])]
    kind = draw(st.sampled_from(kinds))
    mode = draw(st.sampled_from(["NULLABLE", "NULLABLE", "REQUIRED", "REPEATED"]))
    if kind == "RECORD":
        return SchemaField(name, kind, mode, fields=draw(columns(depth - 1)))
    element = draw(st.sampled_from(RANGES)) if kind == "RANGE" else None
    return SchemaField(name, kind, mode, range_element_type=element)


def values(column: SchemaField, kinds: dict[str, Any] = VALUES) -> st.SearchStrategy[Any]:
    """Values of a column, as Arrow gives them to Python."""
    if column.field_type == "RECORD":
        one = st.fixed_dictionaries({c.name: values(c, kinds) for c in column.fields})
    elif column.field_type == "RANGE":
        bound = st.none() | kinds[column.range_element_type.element_type]
        one = st.fixed_dictionaries({"start": bound, "end": bound})
    else:
        one = kinds[column.field_type]
    if column.mode == "REPEATED":
        return st.lists(one, max_size=4)
    return one if column.mode == "REQUIRED" else st.none() | one


def rows(columns: Sequence[SchemaField], kinds: dict[str, Any] = VALUES) -> Any:
    one = st.fixed_dictionaries({c.name: values(c, kinds) for c in columns})
    return st.lists(one, min_size=1, max_size=12)


def wire_type(column: SchemaField) -> pa.DataType:
    """The Arrow type in which values of a column come to the encoder."""
    kind: pa.DataType
    if column.field_type == "RECORD":
        kind = pa.struct([pa.field(c.name, wire_type(c)) for c in column.fields])
    elif column.field_type == "RANGE":
        bound = WIRE[column.range_element_type.element_type]
        kind = pa.struct([pa.field("start", bound), pa.field("end", bound)])
    else:
        kind = WIRE[column.field_type]
    return pa.list_(kind) if column.mode == "REPEATED" else kind


def batch_of(columns: Sequence[SchemaField], rows: list[dict[str, Any]]) -> pa.RecordBatch:
    schema = pa.schema([pa.field(column.name, wire_type(column)) for column in columns])
    return pa.RecordBatch.from_pylist(rows, schema)


def message_class(descriptor: descriptor_pb2.DescriptorProto) -> Any:
    """The message type of a descriptor that stands alone, as the service would make it."""
    package = f"rows_{uuid.uuid4().hex}"
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package)
    file.message_type.add().CopyFrom(descriptor)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName(f"{package}.{descriptor.name}")
    return message_factory.GetMessageClass(found)


def column_name(field: Any) -> str:
    """The column of a field: by its annotation, else by its name."""
    for option in unknown_fields.UnknownFieldSet(field.GetOptions()):
        if option.field_number == COLUMN_NAME:
            return option.data.decode()
    return field.name


def read(message: Any, columns: Sequence[SchemaField]) -> dict[str, Any]:
    """A message as a row."""
    assert not unknown_fields.UnknownFieldSet(message)
    fields = message.DESCRIPTOR.fields
    assert [column_name(field) for field in fields] == [column.name for column in columns]
    row: dict[str, Any] = {}
    for field, column in zip(fields, columns, strict=True):
        value = getattr(message, field.name)
        if column.mode == "REPEATED":
            row[column.name] = [_value(one, column) for one in value]
        else:
            there = message.HasField(field.name)
            row[column.name] = _value(value, column) if there else None
    return row


def _value(value: Any, column: SchemaField) -> Any:
    match column.field_type:
        case "RECORD":
            return read(value, column.fields)
        case "RANGE":
            element = column.range_element_type.element_type
            return read(value, [SchemaField(bound, element) for bound in ("start", "end")])
        case "NUMERIC" | "BIGNUMERIC" as kind:
            unscaled = int.from_bytes(value, "little", signed=True)
            assert len(value) == (unscaled ^ unscaled >> 300).bit_length() // 8 + 1
            return Decimal(unscaled).scaleb(-SCALE[kind], EXACT)
        case "DATE":
            return dt.date(1970, 1, 1) + dt.timedelta(days=value)
        case "TIMESTAMP":
            return EPOCH + dt.timedelta(microseconds=value)
        case "TIME":
            return _time(value)
        case "DATETIME":
            date = dt.date(value >> 46, value >> 42 & 15, value >> 37 & 31)
            return dt.datetime.combine(date, _time(value & (1 << 37) - 1))
        case "INTERVAL":
            return _interval(value)
    return value


def _time(value: int) -> dt.time:
    return dt.time(value >> 32, value >> 26 & 63, value >> 20 & 63, value & (1 << 20) - 1)


def _interval(text: str) -> pa.MonthDayNano:
    found = INTERVAL.fullmatch(text)
    assert found, text
    years, months, days, hours, minutes, seconds = map(int, found.group(2, 3, 4, 6, 7, 8))
    micros = ((hours * 60 + minutes) * 60 + seconds) * 10**6 + int(found[9] or 0)
    months = (years * 12 + months) * (-1 if found[1] else 1)
    return pa.MonthDayNano([months, days, micros * (-1000 if found[5] else 1000)])


def exact(value: Any) -> Any:
    """The same, with floats by their bits: NaN is itself, and 0.0 is not -0.0."""
    if isinstance(value, dict):
        return {name: exact(one) for name, one in value.items()}
    if isinstance(value, list):
        return [exact(one) for one in value]
    return struct.pack("<d", value) if isinstance(value, float) else value
