"""Hypothesis strategies: tables of every type that BigQuery has, and rows for them."""

import datetime as dt
import json
import math
from collections.abc import Collection, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pyarrow as pa
from google.cloud.bigquery import SchemaField
from hypothesis import strategies as st

from dagster_bq_connector.schema.types import wire_field

RANGES = ("DATE", "DATETIME", "TIMESTAMP")
EVERY_TYPE = (
    *("BOOLEAN", "INTEGER", "FLOAT", "NUMERIC", "BIGNUMERIC", "STRING", "BYTES", "DATE"),
    *("DATETIME", "TIMESTAMP", "TIME", "INTERVAL", "RANGE", "JSON", "GEOGRAPHY"),
)
GEOGRAPHIES = ("POINT(1 2)", "LINESTRING(0 0, 1 1)", "POLYGON((0 0, 0 1, 1 1, 0 0))")
LOCAL_BIGNUMERIC = 18  # digits after the point that the local BigQuery holds, of 38
LOCAL_INTERVAL_HOURS = 1193
UTC = dt.UTC


def integers(least: int, most: int) -> st.SearchStrategy[int]:
    """Any of them, and often the ends."""
    return st.sampled_from([least, most, 0]) | st.integers(least, most)


def decimals(digits: int, scale: int) -> st.SearchStrategy[Decimal]:
    def exact(unscaled: int) -> Decimal:
        return Decimal((unscaled < 0, tuple(map(int, str(abs(unscaled)))), -scale))

    return integers(1 - 10**digits, 10**digits - 1).map(exact)


def moments(timezone: dt.tzinfo | None) -> st.SearchStrategy[dt.datetime]:
    edges = [dt.datetime.min, dt.datetime.max, dt.datetime(1969, 12, 31, 23, 59, 59, 999999)]
    any_moment = st.sampled_from(edges) | st.datetimes()
    return any_moment.map(lambda moment: moment.replace(tzinfo=timezone))


def dates() -> st.SearchStrategy[dt.date]:
    return st.sampled_from([dt.date.min, dt.date.max]) | st.dates()


def documents() -> st.SearchStrategy[str]:
    plain = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5)
    nested = st.recursive(
        plain,
        lambda inner: (
            st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
        ),
        max_leaves=4,
    )
    return nested.map(lambda value: json.dumps(value, separators=(",", ":")))


def intervals() -> st.SearchStrategy[Any]:
    """What the local BigQuery holds of them: none is negative, and none has microseconds."""
    milliseconds = integers(0, LOCAL_INTERVAL_HOURS * 3_600_000 - 1)
    parts = st.tuples(integers(0, 120_000), integers(0, 3_660_000), milliseconds)
    return parts.map(lambda p: pa.MonthDayNano([p[0], p[1], p[2] * 1_000_000]))


SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "BOOLEAN": st.booleans(),
    "INTEGER": integers(-(2**63), 2**63 - 1),
    "FLOAT": st.floats().map(lambda number: math.nan if math.isnan(number) else number),
    "NUMERIC": decimals(38, 9),
    "BIGNUMERIC": decimals(38, LOCAL_BIGNUMERIC),
    "STRING": st.text(max_size=8),
    "BYTES": st.binary(max_size=8),
    "DATE": dates(),
    "DATETIME": moments(None),
    "TIMESTAMP": moments(UTC),
    "TIME": st.sampled_from([dt.time.min, dt.time.max]) | st.times(),
    "INTERVAL": intervals(),
    "JSON": documents(),
    "GEOGRAPHY": st.sampled_from(GEOGRAPHIES),
}


def ranges(element: str) -> st.SearchStrategy[dict[str, Any]]:
    """Two ends in their order; either may be open."""
    ends = st.lists(SCALARS[element], min_size=2, max_size=2, unique=True).map(sorted)
    keep = st.tuples(st.booleans(), st.booleans())

    def make(drawn: tuple[list[Any], tuple[bool, bool]]) -> dict[str, Any]:
        (start, end), (has_start, has_end) = drawn
        return {"start": start if has_start else None, "end": end if has_end else None}

    return st.tuples(ends, keep).map(make)


@st.composite
def columns(
    draw: st.DrawFn, kinds: Collection[str], depth: int = 2, most: int = 10
) -> list[SchemaField]:
    """The columns of a table.

    Args:
        kinds: The types that they may have, records aside.
        depth: How deep records may nest.
        most: How many columns at most.
    """
    names = [f"c{number}" for number in range(draw(st.integers(1, most)))]
    return [draw(_column(name, kinds, depth)) for name in names]


@st.composite
def _column(draw: st.DrawFn, name: str, kinds: Collection[str], depth: int) -> SchemaField:
    mode = draw(st.sampled_from(["NULLABLE", "REQUIRED", "REPEATED"]))
    kind = draw(st.sampled_from([*kinds, *["RECORD"] * (3 if depth else 0)]))
    if kind == "RECORD":
        fields = draw(columns(kinds, depth - 1, most=3))
        return SchemaField(name, kind, mode, fields=fields)
    if kind == "RANGE":
        return SchemaField(name, kind, mode, range_element_type=draw(st.sampled_from(RANGES)))
    return SchemaField(name, kind, mode)


def values(column: SchemaField) -> st.SearchStrategy[Any]:
    """What a column may hold, as `pa.array` takes it for the column's wire type."""
    if column.field_type == "RECORD":
        children = {child.name: values(child) for child in column.fields}
        value: st.SearchStrategy[Any] = st.fixed_dictionaries(children)
    elif column.range_element_type is not None:
        value = ranges(column.range_element_type.element_type)
    else:
        value = SCALARS[column.field_type]
    if column.mode == "REPEATED":
        return st.lists(value, max_size=3)
    return value if column.mode == "REQUIRED" else st.none() | value


@st.composite
def tables(
    draw: st.DrawFn, kinds: Collection[str], more: Sequence[SchemaField] = ()
) -> tuple[list[SchemaField], pa.Table]:
    """The columns of a table, `more` among them, and rows for it as they travel."""
    fields = [*draw(columns(kinds)), *more]
    row = st.fixed_dictionaries({field.name: values(field) for field in fields})
    rows = draw(st.lists(row, min_size=1, max_size=6))
    schema = pa.schema([wire_field(field) for field in fields])
    return fields, pa.Table.from_pylist(rows, schema=schema)


def plain(value: Any, column: SchemaField) -> Any:
    """A value in a form that is equal and has a hash just when BigQuery's values are equal."""
    if column.mode == "REPEATED":
        single = SchemaField(
            column.name,
            column.field_type,
            fields=column.fields,
            range_element_type=column.range_element_type,
        )
        return tuple(plain(element, single) for element in value)
    if value is None:
        return None
    if column.field_type == "RECORD":
        return tuple(plain(value[child.name], child) for child in column.fields)
    if column.field_type == "RANGE":
        return value["start"], value["end"]
    if column.field_type == "FLOAT":
        return repr(value)  # tells -0.0 from 0.0, and nan is itself
    if column.field_type in ("NUMERIC", "BIGNUMERIC"):
        return Fraction(value)
    if column.field_type == "JSON":
        return json.dumps(json.loads(value), sort_keys=True)
    return value


def multiset(rows: pa.Table, fields: Sequence[SchemaField]) -> list[Any]:
    """The rows, in an order that says nothing."""
    return sorted(
        (tuple(plain(row[field.name], field) for field in fields) for row in rows.to_pylist()),
        key=repr,
    )
