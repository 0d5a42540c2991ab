"""The cast of batches to the columns of one table, without loss and row by row where it fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.errors import FailedRow, SchemaError
from dagster_bq_connector.schema.types import (
    SCALARS,
    element_type,
    is_civil,
    is_list,
    plain_type,
    refuse_twins,
    type_name,
    wire_field,
)


@dataclass(frozen=True)
class Conformed:
    """Rows as they travel, and the rows that could not be made so.

    Attributes:
        batch: The good rows, in their order.
        positions: For each good row its position in the batch that came in; None when all are
            good.
        failed: The other rows; their `index` is the position in the batch that came in.
    """

    batch: pa.RecordBatch
    positions: np.ndarray[tuple[int], np.dtype[np.int64]] | None
    failed: list[FailedRow]


class Conformer:
    """Casts batches of one schema to the columns of one table, without loss."""

    def __init__(
        self, schema: pa.Schema, columns: Sequence[SchemaField], complete: bool = False
    ) -> None:
        """Match the columns by name, ignoring case as BigQuery does.

        Args:
            schema: The columns of the data.
            columns: The columns of the table.
            complete: Add the columns that the data lacks, as nulls.

        Raises:
            SchemaError: A column that the table lacks, a required one that the data lacks, or
                types that cannot be cast without loss. Every offender is named.
        """
        refuse_twins(schema.names)
        known = {column.name.casefold(): column for column in columns}
        if unknown := [name for name in schema.names if name.casefold() not in known]:
            raise SchemaError(
                f"The table has no column {', '.join(map(repr, unknown))}: add it to the table "
                f"or drop it from the data. The table has {', '.join(c.name for c in columns)}."
            )
        given = {name.casefold() for name in schema.names}
        missing = [
            c.name for c in columns if c.mode == "REQUIRED" and c.name.casefold() not in given
        ]
        if missing:
            raise SchemaError(
                f"The data lacks the required column {', '.join(map(repr, missing))}."
            )
        self.columns = [known[name.casefold()] for name in schema.names]
        problems = [
            problem
            for field, column in zip(schema, self.columns, strict=True)
            for problem in _mismatches(field.type, column, column.name)
        ]
        if problems:
            raise SchemaError("The data does not fit the table: " + "; ".join(problems) + ".")
        self._added = [c for c in columns if c.name.casefold() not in given] if complete else []
        self._taken = [wire_field(column) for column in self.columns]
        self.schema = pa.schema([*self._taken, *map(wire_field, self._added)])

    def __call__(self, batch: pa.RecordBatch) -> Conformed:
        """Cast one batch.

        A value that does not fit its column (too large, too precise, null where none may be)
        fails its row and no other.
        """
        failed: dict[int, FailedRow] = {}
        arrays = [
            _cast_rows(array, field, failed)
            for array, field in zip(batch.columns, self._taken, strict=True)
        ]
        arrays += [_nulls(batch.num_rows, wire_field(column).type) for column in self._added]
        if not failed:
            return Conformed(pa.RecordBatch.from_arrays(arrays, schema=self.schema), None, [])
        good = np.ones(batch.num_rows, dtype=bool)
        good[list(failed)] = False
        positions = np.flatnonzero(good)
        kept = pa.array(positions, pa.int64())
        arrays = [array.take(kept) for array in arrays]
        rows = [failed[index] for index in sorted(failed)]
        return Conformed(pa.RecordBatch.from_arrays(arrays, schema=self.schema), positions, rows)


def _mismatches(kind: pa.DataType, column: SchemaField, path: str) -> list[str]:
    """Why values of `kind` cannot go into `column`; empty when they can."""
    kind = plain_type(kind)
    if at.is_null(kind):
        return []
    if is_list(kind) != (column.mode == "REPEATED"):
        wanted = "a list" if column.mode == "REPEATED" else "single values"
        return [f"column {path!r} takes {wanted}, not {kind}"]
    if is_list(kind):
        kind = plain_type(element_type(kind))
    name = type_name(column)
    if name == "RECORD":
        return _struct_mismatches(kind, column, path)
    if name in SCALARS and (at.is_null(kind) or SCALARS[name].takes(kind)):
        return []
    hint = ""
    if name == "TIMESTAMP" and is_civil(kind):
        hint = " (it has no time zone: say which one, or use a DATETIME column)"
    return [f"column {path!r} is {name} and takes no Arrow {kind}{hint}"]


def _struct_mismatches(kind: pa.DataType, column: SchemaField, path: str) -> list[str]:
    if not isinstance(kind, pa.StructType):
        return [f"column {path!r} is RECORD and takes no Arrow {kind}"]
    known = {child.name.casefold(): child for child in column.fields}
    problems: list[str] = []
    for index in range(kind.num_fields):
        field = kind.field(index)
        child = known.get(field.name.casefold())
        if child is None:
            problems.append(f"column {path!r} has no field {field.name!r}")
        else:
            problems += _mismatches(field.type, child, f"{path}.{child.name}")
    return problems


def _cast_rows(
    array: pa.Array[Any], field: pa.Field[Any], failed: dict[int, FailedRow]
) -> pa.Array[Any]:
    """Cast a column. Rows that cannot be cast become null and are noted in `failed`."""
    try:
        cast = _cast(array, field.type)
    except pa.ArrowInvalid:
        cast = _cast_piecewise(array, field, failed)
    if not field.nullable and cast.null_count:
        for index in np.flatnonzero(pc.is_null(cast).to_numpy(zero_copy_only=False)):
            reason = "null in a column that is REQUIRED"
            failed.setdefault(int(index), FailedRow(int(index), reason, field.name))
    return cast


def _cast_piecewise(
    array: pa.Array[Any], field: pa.Field[Any], failed: dict[int, FailedRow]
) -> pa.Array[Any]:
    """Halve until only the bad rows are left. Slow for many bad rows, fast for few."""
    parts: list[pa.Array[Any]] = []
    todo = [(0, len(array))]
    while todo:
        start, stop = todo.pop()
        try:
            parts.append(_cast(array.slice(start, stop - start), field.type))
        except pa.ArrowInvalid as error:
            if stop - start > 1:
                middle = (start + stop) // 2
                todo += [(middle, stop), (start, middle)]
                continue
            failed.setdefault(start, FailedRow(start, _reason(error), field.name))
            parts.append(_nulls(1, field.type))
    return pa.concat_arrays(parts)


def _reason(error: pa.ArrowInvalid) -> str:
    return f"the value does not fit: {str(error).splitlines()[0]}"


def _cast(array: pa.Array[Any], kind: pa.DataType) -> pa.Array[Any]:
    """Cast without loss.

    Raises:
        pa.ArrowInvalid: A value does not fit.
    """
    if isinstance(array, pa.ExtensionArray):
        return _cast(array.storage, kind)
    if isinstance(array, pa.DictionaryArray):
        return _cast(array.dictionary, kind).take(array.indices)
    if isinstance(kind, pa.ListType):
        return _cast_list(array, kind)
    if isinstance(kind, pa.StructType) and isinstance(array, pa.StructArray):
        return _cast_struct(array, kind)
    if at.is_decimal(kind) and at.is_integer(array.type):
        array = array.cast(pa.decimal128(20, 0))  # pyarrow asks for room for any 64-bit integer
    return array if array.type == kind else array.cast(kind)


def _nulls(count: int, kind: pa.DataType) -> pa.Array[Any]:
    return _cast(pa.nulls(count), kind)


def _cast_list(array: Any, kind: pa.ListType[Any]) -> pa.Array[Any]:
    """A list that is null travels as an empty one: BigQuery has no null arrays."""
    if at.is_null(array.type):
        lengths = np.zeros(len(array), dtype=np.int32)
        values = pa.nulls(0, kind.value_type)
    else:
        if at.is_list_view(array.type) or at.is_large_list_view(array.type):
            array = array.cast(pa.large_list(element_type(array.type)))
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        values = _cast(array.flatten(), kind.value_type)
    offsets = np.zeros(len(array) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind)


def _cast_struct(array: pa.StructArray, kind: pa.StructType) -> pa.Array[Any]:
    given = {array.type.field(i).name.casefold(): i for i in range(array.type.num_fields)}
    children: list[pa.Array[Any]] = []
    fields = [kind.field(i) for i in range(kind.num_fields)]
    for field in fields:
        index = given.get(field.name.casefold())
        missing = index is None
        children.append(
            _nulls(len(array), field.type) if missing else _cast(array.field(index), field.type)
        )
    return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
