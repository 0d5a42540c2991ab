"""Values of one column: from JSON, as Debezium writes them, to the column's wire type, exactly.

Which forms a column takes:

| column | JSON | meaning |
|---|---|---|
| BOOLEAN | true, false | |
| INTEGER | integer; text | 64 bits; text: base64 of a Decimal without a fraction, or of Bits |
| FLOAT | number; `NaN`, `Infinity`, `-Infinity` | integers up to 2**53 |
| NUMERIC, BIGNUMERIC | text; `{scale, value}`; number | see below |
| STRING | text; what a schema gives a meaning | times as ISO text, decimals as digits |
| BYTES | text | base64 (`binary.handling.mode=bytes`) or hex |
| DATE | integer; text | days since 1970; ISO |
| TIME | integer; text | milli-, micro-, nanoseconds of the day; ISO, with a zone that of UTC |
| DATETIME, TIMESTAMP | integer; text | milli-, micro-, nanoseconds since 1970; ISO |
| INTERVAL | integer; text | microseconds; ISO 8601 |
| JSON | text; anything else | text is a JSON document |
| GEOGRAPHY | text; a point or geometry | WKT or GeoJSON; its WKB |
| REPEATED | array | no element is null; a null array is an empty one |
| RECORD | object | by the names of its fields |

A decimal's text is the base64 of its unscaled number when the message's schema says Decimal, and
its digits when the schema says anything else. Without a schema `DebeziumJson.decimal_handling`
decides, and the scale of bytes is that of the table's column. The unit of an integer is what the
schema says, without one `DebeziumJson.time_precision`: a number may be milli- or microseconds.

Nothing is rounded, cut or wrapped: a value that does not fit fails its event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.cdc.envelope.arrays import strings
from dagster_bq_connector.cdc.envelope.forms import (
    Misfit,
    shown,
    unavailable_texts,
    unavailable_values,
)
from dagster_bq_connector.cdc.envelope.readers import READERS, Column, Reader, said
from dagster_bq_connector.cdc.event import Mask
from dagster_bq_connector.schema.cast import cast_array, nulls
from dagster_bq_connector.schema.limits import check_values
from dagster_bq_connector.schema.place import Place
from dagster_bq_connector.schema.types import child_fields, type_name, wire_field

_compute: Any = pc  # its stubs know a part of what it takes
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_ERRORS = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, Misfit)


@dataclass(frozen=True)
class Read:
    """Values as they travel.

    Attributes:
        array: Of the column's wire type; null where there is no value.
        unavailable: Where the source had a value that it did not send; None for nowhere.
        missing: Where the row has no such column; None for nowhere.
    """

    array: pa.Array[Any]
    unavailable: Mask | None = None
    missing: Mask | None = None


def read(column: Column, values: Sequence[Any], place: Place) -> Read:
    """Read the values of a column.

    Args:
        column: The column.
        values: As JSON gives them; UNSET where the row has no such column.
        place: Takes the rows that fail. What their values become means nothing.
    """
    wire: Any = wire_field(column.field).type
    text = strings(values)
    kinds: set[Any] = {str} if text is not None else set(map(type, values)) - {type(None)}
    missing = unavailable = None
    if msgspec.UnsetType in kinds:
        kinds.remove(msgspec.UnsetType)
        missing = np.fromiter((v is msgspec.UNSET for v in values), np.bool_, len(values))
        values = [None if v is msgspec.UNSET else v for v in values]
    parts: list[Any] = []
    for kind in kinds:
        chosen = values if len(kinds) == 1 else [v if type(v) is kind else None for v in values]
        if kind is str:
            chosen = pa.array(chosen, pa.string()) if text is None else text
        array, found = _read_kind(column, kind, chosen, place)
        if array is not None:
            parts.append(array if array.type == wire else cast_array(array, wire, place))
        unavailable = _either(unavailable, found)
    if not parts:
        parts = [nulls(len(values), wire)]
    array = parts[0] if len(parts) == 1 else _compute.coalesce(*parts)
    _check(column.field, array, _either(missing, unavailable), place)
    return Read(array, unavailable, missing)


def _either(mask: Mask | None, other: Mask | None) -> Mask | None:
    return other if mask is None else mask if other is None else mask | other


def _check(field: SchemaField, array: Any, absent: Mask | None, place: Place) -> None:
    """Fail what BigQuery would refuse. What was not sent is no null."""
    if field.mode != "REQUIRED" or absent is None:
        check_values(array, field, place)
        return
    check_values(array, _nullable(field), place)
    empty = array.is_null().to_numpy(zero_copy_only=False) & ~absent
    place.fail(np.flatnonzero(empty), f"null in {field.name!r}, which is REQUIRED: give it a value")


def _read_kind(
    column: Column, kind: type, values: Any, place: Place
) -> tuple[Any | None, Mask | None]:
    """Values of one kind, and nulls; text as an array. None when the column takes no such kind."""
    given: Any = values
    if kind is str:
        found = None if column.nested else unavailable_texts(given)
        if found is not None:
            given = _compute.if_else(pa.array(found), None, given)
    else:
        looked = kind in (list, dict) and not column.nested
        found = unavailable_values(values) if looked else None
        if found is not None:
            given = [None if gone else v for v, gone in zip(values, found.tolist(), strict=True)]
    if column.field.mode == "REPEATED":
        if kind is list:
            return _read_lists(column, given, place), found
        _fail_kind(column, given, place)
        return None, found
    if type_name(column.field) == "RECORD" and kind is dict:
        return _read_objects(column, given, place), found
    reader = READERS.get((type_name(column.field), kind))
    if reader is None or not reader.takes(column):
        _fail_kind(column, given, place)
        return None, found
    return _exactly(reader.read, column, given, place), found


def _read_lists(column: Column, values: Sequence[Any], place: Place) -> Any:
    wire: Any = wire_field(column.field).type
    lists: list[list[Any]] = [value or [] for value in values]
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(value) for value in lists], out=offsets[1:])
    starts: Any = pa.array(offsets)
    elements = list(chain.from_iterable(lists))
    shape = pa.ListArray.from_arrays(starts, pa.nulls(len(elements)))
    if None in elements:
        empty = np.flatnonzero([element is None for element in elements])
        reason = "null in an array, which BigQuery does not have: use a JSON column for the array"
        place.elements(shape).fail(empty, reason)
    meaning = column.meaning.items if column.meaning is not None else None
    element = Column(_nullable(column.field), meaning, column.forms, nested=True)
    found = read(element, elements, place.elements(shape))
    return pa.ListArray.from_arrays(starts, found.array, type=wire)


def _read_objects(column: Column, values: Sequence[Any], place: Place) -> Any:
    wire: Any = wire_field(column.field).type
    fields = column.meaning.fields if column.meaning is not None else {}
    children: list[Any] = []
    for child in child_fields(column.field):
        below = Column(child, fields.get(child.name), column.forms, nested=True)
        found = [None if value is None else value.get(child.name) for value in values]
        children.append(read(below, found, place.field(child.name)).array)
    mask = pa.array([value is None for value in values])
    members = [wire.field(index) for index in range(wire.num_fields)]
    return pa.StructArray.from_arrays(children, fields=members, mask=mask)


def _exactly(reader: Reader, column: Column, values: Any, place: Place) -> Any:
    """Read all; where that fails, halve until only the bad values are left."""
    parts: list[Any] = []
    todo = [(0, len(values))]
    while todo:
        start, stop = todo.pop()
        try:
            whole = stop - start == len(values)
            parts.append(reader(column, values if whole else values[start:stop]))
        except _ERRORS as error:
            if stop - start > 1:
                middle = (start + stop) // 2
                todo += [(middle, stop), (start, middle)]
                continue
            value = values[start]
            value = value.as_py() if isinstance(value, pa.Scalar) else value
            if value is not None:
                place.fail(np.array([start]), _reason(column, value, error))
            parts.append(None)
    kinds = {part.type for part in parts if part is not None}
    if len(parts) == 1 and kinds:
        return parts[0]
    wire = wire_field(column.field).type
    kind = kinds.pop() if len(kinds) == 1 else wire
    if kinds:  # decimals of several widths
        parts = [part if part is None else cast_array(part, wire, place) for part in parts]
    return pa.concat_arrays([pa.nulls(1, kind) if part is None else part for part in parts])


def _reason(column: Column, value: Any, error: Exception) -> str:
    if isinstance(error, Misfit):
        return str(error)
    why = str(error).splitlines()[0]
    return f"{shown(value)} does not fit {_named(column)}: {why}: mend it, or use another column"


def _fail_kind(column: Column, values: Sequence[Any], place: Place) -> None:
    """Fail all values that are not null: the column takes no such kind."""
    items = cast("Any", values).to_pylist() if isinstance(values, pa.Array) else values
    rows = [index for index, value in enumerate(items) if value is not None]
    called = f", which the message calls {said(column.meaning)}" if column.meaning else ""
    reasons = [
        f"{shown(items[row])} is {_kind(items[row])}{called}, which {_named(column)} does not "
        "take: give the table's column the type of the source's"
        for row in rows
    ]
    place.fail(np.array(rows, np.int64), reasons)


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "an array" if isinstance(value, list) else "an object")


def _named(column: Column) -> str:
    repeated = "a REPEATED " if column.field.mode == "REPEATED" else "a "
    return f"{repeated}{type_name(column.field)} column"


def _nullable(field: SchemaField) -> SchemaField:
    """The same column, of single values that may be null."""
    return SchemaField.from_api_repr({**field.to_api_repr(), "mode": "NULLABLE"})
