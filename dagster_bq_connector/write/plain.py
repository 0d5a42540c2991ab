"""What Parquet has no form for travels as plain columns, which SQL turns into the real ones.

JSON and INTERVAL travel as text, RANGE as a struct of its start and end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.schema.types import type_name
from dagster_bq_connector.table.literals import quoted

# Position of a row in the data: errors of SQL name it.
ROW = "_dagster_bq_row"
# A number that JSON of BigQuery would round is refused, like every other value that would change.
_PARSE = "PARSE_JSON({}, wide_number_mode=>'exact')"
_NOT_IN_PARQUET = ("JSON", "INTERVAL", "RANGE")
_INTERVAL = np.dtype([("months", "<i4"), ("days", "<i4"), ("nanoseconds", "<i8")])
_MONTHS, _HOUR, _MINUTE, _SECOND = 12, 3600, 60, 10**9  # a year in months; seconds; nanoseconds

_compute: Any = pc  # its stubs know a part of what it takes


def is_loadable(columns: Sequence[SchemaField]) -> bool:
    """Whether a load job takes all the columns from Parquet.

    JSON it takes from CSV, Avro and JSON files only. GEOGRAPHY and TIME it takes from Parquet when
    the job names the columns.
    """
    return all(
        type_name(column) not in _NOT_IN_PARQUET and is_loadable(column.fields)
        for column in columns
    )


def plain_columns(columns: Sequence[SchemaField]) -> list[SchemaField]:
    """The columns of a staging table, with one more for the position of the row."""
    return [*map(_plain_column, columns), SchemaField(ROW, "INTEGER", "REQUIRED")]


def plain_schema(schema: pa.Schema, columns: Sequence[SchemaField]) -> pa.Schema:
    """The schema of what `plain_batch` gives."""
    return plain_batch(pa.RecordBatch.from_pylist([], schema=schema), columns, 0).schema


def plain_batch(
    batch: pa.RecordBatch, columns: Sequence[SchemaField], first: int
) -> pa.RecordBatch:
    """Rows as a staging table takes them.

    Args:
        batch: The rows, of the columns' wire types.
        columns: The columns of the destination, in any order.
        first: Position of the first row in the data.
    """
    known = {column.name.casefold(): column for column in columns}
    arrays: list[pa.Array[Any]] = []
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        column = known[name.casefold()]
        arrays.append(array if is_loadable([column]) else _plain_array(array, column))
    arrays.append(pa.array(np.arange(first, first + batch.num_rows), pa.int64()))
    return pa.RecordBatch.from_arrays(arrays, names=[*batch.schema.names, ROW])


def selected(columns: Sequence[SchemaField]) -> str:
    """SQL that gives every column of a staging table its type again, in order."""
    return ", ".join(
        f"{_value(quoted(column.name), column)} AS {quoted(column.name)}" for column in columns
    )


def misfit(column: SchemaField) -> str:
    """SQL that is true for rows of a staging table whose plain column is no value of its type.

    Empty for a column that is plain itself.
    """
    return _misfit(quoted(column.name), column)


def _plain_column(column: SchemaField) -> SchemaField:
    """Never REQUIRED and of any length: that is checked by now, and again by the destination."""
    kind, mode = type_name(column), "REPEATED" if column.mode == "REPEATED" else "NULLABLE"
    fields = [_plain_column(field) for field in column.fields]
    if kind == "RANGE":
        element: Any = column.range_element_type
        fields = [SchemaField(name, element.element_type) for name in ("start", "end")]
        kind = "RECORD"
    elif kind in _NOT_IN_PARQUET:
        kind = "STRING"
    return SchemaField(column.name, kind, mode, fields=fields)


def _plain_array(array: Any, column: SchemaField) -> pa.Array[Any]:
    if column.mode == "REPEATED":
        return pa.ListArray.from_arrays(array.offsets, _plain_values(array.values, column))
    return _plain_values(array, column)


def _plain_values(array: Any, column: SchemaField) -> pa.Array[Any]:
    kind = type_name(column)
    if kind == "INTERVAL":
        return _interval_text(array)
    if kind != "RECORD":
        return array
    children = [
        _plain_array(array.field(index), child) for index, child in enumerate(column.fields)
    ]
    names = [child.name for child in column.fields]
    return pa.StructArray.from_arrays(children, names=names, mask=array.is_null())


def _interval_text(array: Any) -> pa.Array[Any]:
    """Each interval as `Y-M D H:M:S.F`, each of the three parts with its own sign."""
    buffer = array.buffers()[1]
    width = _INTERVAL.itemsize
    stored = np.frombuffer(buffer, _INTERVAL, len(array), array.offset * width) if buffer else []
    parts: Any = np.asarray(stored, dtype=_INTERVAL)
    months, nanoseconds = parts["months"].astype(np.int64), parts["nanoseconds"]
    seconds, fraction = np.divmod(np.abs(nanoseconds), _SECOND)
    digits = _compute.utf8_lpad(pa.array(fraction).cast(pa.string()), 9, "0")
    micros = _compute.utf8_slice_codeunits(digits, 0, 6)
    # Digits beyond microseconds are left for BigQuery to refuse.
    exact = _compute.equal(_compute.utf8_slice_codeunits(digits, 6, 9), "000")
    clock = [
        _number(seconds // _HOUR, nanoseconds < 0),
        _number(seconds % _HOUR // _MINUTE),
        _number(seconds % _MINUTE),
    ]
    year_month = _joined(
        [_number(np.abs(months) // _MONTHS, months < 0), _number(np.abs(months) % _MONTHS)], "-"
    )
    days = pa.array(parts["days"].astype(np.int64)).cast(pa.string())
    time = _joined([_joined(clock, ":"), _compute.if_else(exact, micros, digits)], ".")
    text = _joined([year_month, days, time], " ")
    return _compute.if_else(array.is_valid(), text, pa.scalar(None, pa.string()))


def _number(values: Any, negative: Any = None) -> Any:
    text = pa.array(values).cast(pa.string())
    if negative is None:
        return text
    sign = _compute.if_else(pa.array(negative), "-", "")
    return _joined([sign, text], "")


def _joined(parts: Sequence[Any], separator: str) -> Any:
    return _compute.binary_join_element_wise(*parts, separator)


def _value(sql: str, column: SchemaField, depth: int = 0) -> str:
    if is_loadable([column]):
        return sql
    if column.mode != "REPEATED":
        return _scalar(sql, column, depth)
    element, position = f"e{depth}", f"o{depth}"
    return (
        f"ARRAY(SELECT {_scalar(element, column, depth + 1)} FROM UNNEST({sql}) AS {element} "
        f"WITH OFFSET AS {position} ORDER BY {position})"
    )


def _scalar(sql: str, column: SchemaField, depth: int) -> str:
    kind = type_name(column)
    if kind == "JSON":
        return _PARSE.format(sql)
    if kind == "INTERVAL":
        return f"CAST({sql} AS INTERVAL)"
    if kind == "RANGE":
        return f"IF({sql} IS NULL, NULL, RANGE({sql}.`start`, {sql}.`end`))"
    fields = [
        f"{_value(f'{sql}.{quoted(field.name)}', field, depth)} AS {quoted(field.name)}"
        for field in column.fields
    ]
    return f"IF({sql} IS NULL, NULL, STRUCT({', '.join(fields)}))"


def _misfit(sql: str, column: SchemaField, depth: int = 0) -> str:
    if is_loadable([column]):
        return ""
    if column.mode != "REPEATED":
        return _scalar_misfit(sql, column, depth)
    element = f"e{depth}"
    test = _scalar_misfit(element, column, depth + 1)
    return f"EXISTS(SELECT 1 FROM UNNEST({sql}) AS {element} WHERE {test})"


def _scalar_misfit(sql: str, column: SchemaField, depth: int) -> str:
    kind = type_name(column)
    if kind == "JSON":
        return f"({sql} IS NOT NULL AND SAFE.{_PARSE.format(sql)} IS NULL)"
    if kind == "INTERVAL":
        return f"({sql} IS NOT NULL AND SAFE_CAST({sql} AS INTERVAL) IS NULL)"
    if kind == "RANGE":
        return f"COALESCE({sql}.`start` >= {sql}.`end`, FALSE)"
    tests = [_misfit(f"{sql}.{quoted(field.name)}", field, depth) for field in column.fields]
    return f"({' OR '.join(filter(None, tests))})"
