"""Casts of Arrow columns that lose nothing. A row that cannot be cast is noted, not lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from dagster_bq_connector.errors import FailedRow

_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_EXACT_FLOAT = 2**53  # integers beyond have no float64 of their own
_compute: Any = pc  # its stubs know a part of what it takes


def cast_rows(
    array: pa.Array[Any], field: pa.Field[Any], failed: dict[int, FailedRow]
) -> pa.Array[Any]:
    """Cast a column.

    Args:
        array: The values.
        field: What they become.
        failed: Takes the rows that cannot be cast, by their position; they become null.
    """
    lossy = _lossy(array, field.type)
    if lossy is not None and lossy.true_count:
        for index in np.flatnonzero(lossy.to_numpy(zero_copy_only=False)).tolist():
            value = array.slice(index, 1).cast(pa.string())[0].as_py()
            reason = f"{value} does not fit {field.type} without loss"
            failed.setdefault(index, FailedRow(index, reason, field.name))
        array = _compute.if_else(lossy, pa.scalar(None, array.type), array)
    try:
        return _cast(array, field.type)
    except pa.ArrowInvalid:
        return _cast_piecewise(array, field, failed)


def nulls(count: int, kind: pa.DataType) -> pa.Array[Any]:
    """`count` nulls; empty lists where there are no null ones."""
    return _cast(pa.nulls(count), kind)


def _lossy(array: pa.Array[Any], kind: pa.DataType) -> Any:
    """Where the cast would lose something, for the casts that do so often; None for others."""
    given: Any = array.type
    wanted: Any = kind
    if isinstance(kind, pa.TimestampType) and isinstance(given, pa.TimestampType):
        divisor = _PER_SECOND[given.unit] // _PER_SECOND[kind.unit]
        if divisor > 1:
            whole = array.cast(pa.int64())
            coarse = _compute.multiply(_compute.divide(whole, divisor), divisor)
            return _compute.fill_null(_compute.not_equal(coarse, whole), False)
    if at.is_decimal(kind) and at.is_decimal(given) and given.scale > wanted.scale:
        # Towards zero, since a carry may need a digit that there is no room for.
        rounded = _compute.round(array, ndigits=wanted.scale, round_mode="towards_zero")
        return _compute.fill_null(_compute.not_equal(rounded, array), False)
    if at.is_uint64(given) and kind == pa.int64():
        return _compute.fill_null(_compute.greater(array, pa.scalar(2**63 - 1, pa.uint64())), False)
    if kind == pa.float64() and at.is_integer(given) and given.bit_width == 64:
        wide = array.cast(pa.decimal128(20, 0))
        beyond = _compute.greater(_compute.abs(wide), _EXACT_FLOAT)
        return _compute.fill_null(beyond, False)
    return None


def _cast_piecewise(
    array: pa.Array[Any], field: pa.Field[Any], failed: dict[int, FailedRow]
) -> pa.Array[Any]:
    """Halve until only the bad rows are left: for what is rare, and nested."""
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
            reason = f"the value does not fit: {str(error).splitlines()[0]}"
            failed.setdefault(start, FailedRow(start, reason, field.name))
            parts.append(nulls(1, field.type))
    return pa.concat_arrays(parts)


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


def _cast_list(array: Any, kind: pa.ListType[Any]) -> pa.Array[Any]:
    """A list that is null travels as an empty one: BigQuery has no null arrays."""
    if at.is_null(array.type):
        lengths = np.zeros(len(array), dtype=np.int32)
        values: Any = nulls(0, kind.value_type)
    else:
        # The array types' own cast of list views is wrong; their lengths and values are right.
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
        child = nulls(len(array), field.type) if missing else _cast(array.field(index), field.type)
        children.append(child)
    return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
