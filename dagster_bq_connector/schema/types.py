"""The one table of BigQuery types and Arrow types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.types as at
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.errors import SchemaError
from dagster_bq_connector.schema.arrow import (
    INTERVAL,
    MICROSECONDS,
    element_type,
    extension,
    is_bool,
    is_bytes,
    is_civil,
    is_exact,
    is_instant,
    is_interval,
    is_list,
    is_string,
    is_uuid,
    plain_type,
)
from dagster_bq_connector.schema.names import check_name, refuse_twins

# Of a field's metadata, as Storage Read sends them: `google:sqlType:json` under the first, `range`
# under the second. A list's field carries what its elements are.
SQL_TYPE = (b"ARROW:extension:name", b"google:sqlType")
MAX_NUMERIC = (29, 9)  # digits before and after the point
MAX_BIGNUMERIC = (38, 38)


def _is_real(kind: pa.DataType) -> bool:
    return at.is_floating(kind) or at.is_integer(kind)


def _is_number(kind: pa.DataType) -> bool:
    return is_exact(kind) or at.is_floating(kind)


def _is_text(kind: pa.DataType) -> bool:
    return is_string(kind) or is_uuid(kind)


def _is_binary(kind: pa.DataType) -> bool:
    return is_bytes(kind) or is_uuid(kind)


@dataclass(frozen=True, slots=True)
class Scalar:
    """One BigQuery type: what it is on the wire, and which Arrow types become it.

    A value that would lose something by it fails its row (exact.py).
    """

    wire: pa.DataType
    takes: Callable[[pa.DataType], bool]


SCALARS: dict[str, Scalar] = {
    "BOOLEAN": Scalar(pa.bool_(), is_bool),
    "INTEGER": Scalar(pa.int64(), is_exact),
    "FLOAT": Scalar(pa.float64(), _is_real),
    "NUMERIC": Scalar(pa.decimal128(38, 9), _is_number),
    "BIGNUMERIC": Scalar(pa.decimal256(76, 38), _is_number),
    "STRING": Scalar(pa.string(), _is_text),
    "BYTES": Scalar(pa.binary(), _is_binary),
    "DATE": Scalar(pa.date32(), at.is_date),
    "DATETIME": Scalar(pa.timestamp(MICROSECONDS), is_civil),
    "TIMESTAMP": Scalar(pa.timestamp(MICROSECONDS, "UTC"), is_instant),
    "TIME": Scalar(pa.time64(MICROSECONDS), at.is_time),
    "INTERVAL": Scalar(INTERVAL, is_interval),
    "JSON": Scalar(pa.string(), is_string),
    "GEOGRAPHY": Scalar(pa.string(), is_string),
}
# What a new table's column becomes, first match first. Decimals depend on their digits.
_NEW: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (is_bool, "BOOLEAN"),
    (at.is_integer, "INTEGER"),
    (at.is_floating, "FLOAT"),
    (_is_text, "STRING"),
    (is_bytes, "BYTES"),
    (at.is_date, "DATE"),
    (is_instant, "TIMESTAMP"),
    (is_civil, "DATETIME"),
    (at.is_time, "TIME"),
    (is_interval, "INTERVAL"),
)
_RANGES = ("DATE", "DATETIME", "TIMESTAMP")
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


def child_fields(column: SchemaField) -> Sequence[SchemaField]:
    """The fields of a RECORD, or `start` and `end` of a RANGE, which travels as one.

    Raises:
        SchemaError: A RANGE does not say of what.
    """
    if type_name(column) != "RANGE":
        return column.fields
    element = column.range_element_type
    if element is None or not element.element_type:
        raise SchemaError(f"Column {column.name!r} is a RANGE, but not said of what.")
    return [SchemaField(end, element.element_type) for end in ("start", "end")]


def wire_field(column: SchemaField) -> pa.Field[Any]:
    """How a column's values travel as Arrow.

    Raises:
        SchemaError: The column has a type that this library does not carry.
    """
    name = type_name(column)
    if name in ("RECORD", "RANGE"):
        # Fields are nullable in Arrow even where they are REQUIRED: below a struct that is null
        # there is nothing else. What is REQUIRED is checked row by row (limits.py).
        children = [wire_field(child).with_nullable(True) for child in child_fields(column)]
        kind: pa.DataType = pa.struct(children)
    elif name in SCALARS:
        kind = SCALARS[name].wire
    else:
        raise SchemaError(f"Column {column.name!r} has the type {name}, which is not supported.")
    if column.mode == "REPEATED":
        return pa.field(column.name, pa.list_(pa.field("item", kind)), nullable=False)
    return pa.field(column.name, kind, nullable=column.mode != "REQUIRED")


def table_fields(schema: pa.Schema) -> list[SchemaField]:
    """The columns that a table made for `schema` has.

    Args:
        schema: Arrow columns. Fields that Arrow says are never null become REQUIRED. A field of
            JSON or GEOGRAPHY is a string, and one of RANGE a struct of `start` and `end`, with
            the metadata that Storage Read gives it; Arrow's own JSON type is JSON, too.

    Raises:
        SchemaError: A column that BigQuery cannot store, by name; a name that it does not take;
            no columns at all; or two that differ by case only.
    """
    if not len(schema):
        raise SchemaError("The data has no columns.")
    refuse_twins(schema.names)
    return [table_field(field) for field in schema]


def table_field(field: pa.Field[Any], path: str = "") -> SchemaField:
    """The column that stores `field`; see `table_fields`."""
    path = f"{path}{field.name}"
    check_name(field.name, path)
    kind: Any = plain_type(field.type)
    mode = "NULLABLE" if field.nullable else "REQUIRED"
    marks = _marks(field)
    if is_list(kind):
        marks |= _marks(kind.value_field) if not at.is_map(kind) else set()
        kind, mode = plain_type(element_type(kind)), "REPEATED"
        if is_list(kind):
            raise SchemaError(
                f"Column {path!r} is a list of lists, which BigQuery does not have: "
                "wrap the inner list in a struct."
            )
    if isinstance(kind, pa.StructType):
        if "RANGE" in marks:
            element = _range_element(kind, path)
            return SchemaField(field.name, "RANGE", mode, range_element_type=element)
        return SchemaField(field.name, "RECORD", mode, fields=_struct_fields(kind, path))
    return SchemaField(field.name, _scalar_name(kind, marks, path), mode)


def _struct_fields(kind: pa.StructType, path: str) -> list[SchemaField]:
    if not kind.num_fields:
        raise SchemaError(f"Column {path!r} is a struct without fields: drop it, or give it one.")
    children = [kind.field(index) for index in range(kind.num_fields)]
    refuse_twins([child.name for child in children], f"{path}.")
    return [table_field(child, f"{path}.") for child in children]


def _range_element(kind: pa.StructType, path: str) -> str:
    children = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    if sorted(children) == ["end", "start"]:
        elements = {_new_name(plain_type(child)) for child in children.values()}
        if len(elements) == 1 and (element := elements.pop()) in _RANGES:
            return element
    raise SchemaError(
        f"Column {path!r} is marked as a RANGE but is no struct of a start and an end, both dates, "
        "both datetimes or both instants: mend it, or drop the mark."
    )


def _scalar_name(kind: pa.DataType, marks: set[str], path: str) -> str:
    if is_string(kind) and (marked := marks & {"JSON", "GEOGRAPHY"}):
        return marked.pop()
    if at.is_decimal(kind):
        return _decimal_name(kind, path)
    if name := _new_name(kind):
        return name
    raise SchemaError(
        f"Column {path!r} has the Arrow type {kind}, which cannot be stored: {cure(kind)}."
    )


def _new_name(kind: pa.DataType) -> str | None:
    return next((name for matches, name in _NEW if matches(kind)), None)


def cure(kind: pa.DataType) -> str:
    """What to do with a column whose Arrow type no column of BigQuery takes."""
    if at.is_null(kind):
        return "it holds nulls only, so its type is unknown: cast it, or drop it"
    if at.is_union(kind):
        return "its values have several types: cast them to one, or give each a column"
    if extension(kind):
        return "pass its storage (Array.storage), or cast it to a type that BigQuery has"
    return "cast it to a type that BigQuery has, or drop it"


def _decimal_name(kind: Any, path: str) -> str:
    whole, fraction = kind.precision - kind.scale, max(kind.scale, 0)
    for name, (most_whole, most_fraction) in (
        ("NUMERIC", MAX_NUMERIC),
        ("BIGNUMERIC", MAX_BIGNUMERIC),
    ):
        if whole <= most_whole and fraction <= most_fraction:
            return name
    raise SchemaError(
        f"Column {path!r} has {whole} digits before and {fraction} after the point; BIGNUMERIC "
        "takes 38 of each: cast it to a smaller decimal."
    )


def _marks(field: pa.Field[Any]) -> set[str]:
    """What a field says that its values are, beyond their Arrow type."""
    metadata = field.metadata or {}
    names = [metadata[key].decode(errors="replace") for key in SQL_TYPE if key in metadata]
    return {name.rpartition(":")[2].upper() for name in names} | (
        {"JSON"} if extension(field.type) == "arrow.json" else set()
    )
