"""The one table of BigQuery types and Arrow types."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.types as at
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.errors import SchemaError

SQL_TYPE = b"ARROW:extension:name"  # of a field's metadata, as Storage Read sends it
MICROSECONDS = "us"
# What Arrow's storage type of an extension says is also what the extension means.
KNOWN_EXTENSIONS = ("arrow.json",)
MAX_NUMERIC = (29, 9)  # digits before and after the point
MAX_BIGNUMERIC = (38, 38)


def _is_string(kind: pa.DataType) -> bool:
    return at.is_string(kind) or at.is_large_string(kind) or at.is_string_view(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    binary = at.is_binary(kind) or at.is_large_binary(kind) or at.is_binary_view(kind)
    return binary or at.is_fixed_size_binary(kind)


def _is_date(kind: pa.DataType) -> bool:
    return at.is_date(kind)


def _is_instant(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.TimestampType) and kind.tz is not None


def is_civil(kind: pa.DataType) -> bool:
    """A timestamp without time zone."""
    return isinstance(kind, pa.TimestampType) and kind.tz is None


def is_list(kind: pa.DataType) -> bool:
    """Any of Arrow's list types."""
    lists = at.is_list(kind) or at.is_large_list(kind) or at.is_fixed_size_list(kind)
    return lists or at.is_list_view(kind) or at.is_large_list_view(kind)


def _is_number(kind: pa.DataType) -> bool:
    return at.is_integer(kind) or at.is_decimal(kind)


def _is_real(kind: pa.DataType) -> bool:
    return at.is_floating(kind) or at.is_integer(kind)


@dataclass(frozen=True, slots=True)
class Scalar:
    """One BigQuery type: what it is on the wire, and which Arrow types become it without loss."""

    wire: pa.DataType
    takes: Callable[[pa.DataType], bool]


SCALARS: dict[str, Scalar] = {
    "BOOLEAN": Scalar(pa.bool_(), at.is_boolean),
    "INTEGER": Scalar(pa.int64(), at.is_integer),
    "FLOAT": Scalar(pa.float64(), _is_real),
    "NUMERIC": Scalar(pa.decimal128(38, 9), _is_number),
    "BIGNUMERIC": Scalar(pa.decimal256(76, 38), _is_number),
    "STRING": Scalar(pa.string(), _is_string),
    "BYTES": Scalar(pa.binary(), _is_bytes),
    "DATE": Scalar(pa.date32(), _is_date),
    "DATETIME": Scalar(pa.timestamp(MICROSECONDS), is_civil),
    "TIMESTAMP": Scalar(pa.timestamp(MICROSECONDS, "UTC"), _is_instant),
    "TIME": Scalar(pa.time64(MICROSECONDS), at.is_time),
    "INTERVAL": Scalar(pa.month_day_nano_interval(), at.is_interval),
    "JSON": Scalar(pa.string(), _is_string),
    "GEOGRAPHY": Scalar(pa.string(), _is_string),
}
# What a new table's column becomes, first match first. Decimals depend on their digits.
_NEW: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (at.is_boolean, "BOOLEAN"),
    (at.is_integer, "INTEGER"),
    (at.is_floating, "FLOAT"),
    (_is_string, "STRING"),
    (_is_bytes, "BYTES"),
    (_is_date, "DATE"),
    (_is_instant, "TIMESTAMP"),
    (is_civil, "DATETIME"),
    (at.is_time, "TIME"),
    (at.is_interval, "INTERVAL"),
)
_ALIASES = {
    "BOOL": "BOOLEAN",
    "INT64": "INTEGER",
    "FLOAT64": "FLOAT",
    "DECIMAL": "NUMERIC",
    "BIGDECIMAL": "BIGNUMERIC",
    "STRUCT": "RECORD",
}


def type_name(field: SchemaField) -> str:
    """The type of a column under one name: `INTEGER` for `INT64`, `RECORD` for `STRUCT`."""
    name = field.field_type.upper()
    return _ALIASES.get(name, name)


def table_fields(schema: pa.Schema) -> list[SchemaField]:
    """The columns that a table made for `schema` has.

    Args:
        schema: Arrow columns. Fields that Arrow says are never null become REQUIRED. A field of
            JSON or GEOGRAPHY is a string with the metadata that Storage Read gives it, or Arrow's
            own JSON extension type.

    Raises:
        SchemaError: A column that BigQuery cannot store, by name; no columns at all; or two that
            differ by case only.
    """
    if not len(schema):
        raise SchemaError("The data has no columns.")
    refuse_twins(schema.names)
    return [table_field(field) for field in schema]


def table_field(field: pa.Field[Any], path: str = "") -> SchemaField:
    """The column that stores `field`; see `table_fields`."""
    path = f"{path}{field.name}"
    kind, mode = plain_type(field.type), "NULLABLE" if field.nullable else "REQUIRED"
    if is_list(kind):
        kind, mode = plain_type(element_type(kind)), "REPEATED"
        if is_list(kind):
            raise SchemaError(
                f"Column {path!r} is a list of lists, which BigQuery does not have: "
                "wrap the inner list in a struct."
            )
    if isinstance(kind, pa.StructType):
        if not kind.num_fields:
            raise SchemaError(f"Column {path!r} is a struct without fields: drop it.")
        children = [kind.field(i) for i in range(kind.num_fields)]
        refuse_twins([child.name for child in children])
        nested = [table_field(child, f"{path}.") for child in children]
        return SchemaField(field.name, "RECORD", mode, fields=nested)
    return SchemaField(field.name, _scalar_name(field, kind, path), mode)


def _scalar_name(field: pa.Field[Any], kind: pa.DataType, path: str) -> str:
    if (marked := _marked(field)) and _is_string(kind):
        return marked
    if at.is_decimal(kind):
        return _decimal_name(kind, path)
    for matches, name in _NEW:
        if matches(kind):
            return name
    remedy = "cast it to a type that BigQuery has, or drop it"
    if at.is_null(kind):
        remedy = "it holds nulls only, so its type is unknown: cast it, or drop it"
    raise SchemaError(
        f"Column {path!r} has the Arrow type {kind}, which cannot be stored: {remedy}."
    )


def _decimal_name(kind: Any, path: str) -> str:
    whole, fraction = kind.precision - kind.scale, kind.scale
    for name, (most_whole, most_fraction) in (
        ("NUMERIC", MAX_NUMERIC),
        ("BIGNUMERIC", MAX_BIGNUMERIC),
    ):
        if whole <= most_whole and 0 <= fraction <= most_fraction:
            return name
    raise SchemaError(
        f"Column {path!r} has {whole} digits before and {fraction} after the point; BIGNUMERIC "
        "takes 38 of each: cast it to a smaller decimal."
    )


def _marked(field: pa.Field[Any]) -> str | None:
    """JSON or GEOGRAPHY, when the field says that its strings are that."""
    if isinstance(field.type, pa.BaseExtensionType):
        return "JSON" if field.type.extension_name == "arrow.json" else None
    name = (field.metadata or {}).get(SQL_TYPE, b"").decode().rpartition(":")[2].upper()
    return name if name in ("JSON", "GEOGRAPHY") else None


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values, below dictionaries and extensions."""
    if isinstance(kind, pa.DictionaryType):
        return plain_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name in KNOWN_EXTENSIONS:
        return plain_type(kind.storage_type)
    return kind


def element_type(kind: Any) -> pa.DataType:
    """The type of a list's values."""
    return kind.value_type  # every list type has one, but they share no base class


def refuse_twins(names: Iterable[str]) -> None:
    """Raise SchemaError for names that differ by case only."""
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.get(name.casefold())) is not None:
            raise SchemaError(
                f"Columns {other!r} and {name!r} are one column to BigQuery, which ignores case: "
                "rename one."
            )
        seen[name.casefold()] = name


def mismatches(kind: pa.DataType, column: SchemaField, path: str) -> list[str]:
    """Why values of an Arrow type cannot go into a column; empty when they can.

    Args:
        kind: The Arrow type.
        column: The column.
        path: What to call the column, with dots for fields of structs.
    """
    kind = plain_type(kind)
    if at.is_null(kind):
        return []
    if is_list(kind) != (column.mode == "REPEATED"):
        wanted = "a list" if column.mode == "REPEATED" else "single values"
        return [f"column {path!r} takes {wanted}, not {kind}"]
    if is_list(kind):
        kind = plain_type(element_type(kind))
    name = type_name(column)
    if name == "RECORD" and not at.is_null(kind):
        return _struct_mismatches(kind, column, path)
    if name == "RANGE" and kind == wire_field(column).type:
        return []
    if at.is_null(kind) or (name in SCALARS and SCALARS[name].takes(kind)):
        return []
    hint = ""
    if name == "TIMESTAMP" and is_civil(kind):
        hint = " (it has no time zone: say which one, or use a DATETIME column)"
    return [f"column {path!r} is {name} and takes no Arrow {kind}{hint}"]


def _struct_mismatches(kind: pa.DataType, column: SchemaField, path: str) -> list[str]:
    if not isinstance(kind, pa.StructType):
        return [f"column {path!r} is RECORD and takes no Arrow {kind}"]
    children = [kind.field(index) for index in range(kind.num_fields)]
    refuse_twins([child.name for child in children])
    known = {child.name.casefold(): child for child in column.fields}
    given = {child.name.casefold() for child in children}
    problems = [
        f"column {path!r} lacks the required field {child.name!r}"
        for child in column.fields
        if child.mode == "REQUIRED" and child.name.casefold() not in given
    ]
    for field in children:
        child = known.get(field.name.casefold())
        if child is None:
            problems.append(f"column {path!r} has no field {field.name!r}")
        else:
            problems += mismatches(field.type, child, f"{path}.{child.name}")
    return problems


def wire_field(column: SchemaField) -> pa.Field[Any]:
    """How a column's values travel as Arrow.

    Raises:
        SchemaError: The column has a type that this library does not carry.
    """
    name = type_name(column)
    if name == "RANGE" and column.range_element_type is not None:
        bound = SchemaField("bound", str(column.range_element_type.element_type))
        bounds = wire_field(bound).type
        kind: pa.DataType = pa.struct([("start", bounds), ("end", bounds)])
    elif name == "RECORD":
        # Fields are nullable in Arrow even where they are REQUIRED: below a struct that is null
        # there is nothing else. What is REQUIRED is checked row by row (limits.py).
        children = [wire_field(child).with_nullable(True) for child in column.fields]
        kind = pa.struct(children)
    elif name in SCALARS:
        kind = SCALARS[name].wire
    else:
        raise SchemaError(f"Column {column.name!r} has the type {name}, which is not supported.")
    if column.mode == "REPEATED":
        return pa.field(column.name, pa.list_(pa.field("item", kind)), nullable=False)
    return pa.field(column.name, kind, nullable=column.mode != "REQUIRED")
