"""What the declared columns of a table ask of values that have the right type already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.schema.types import type_name

RowNumbers: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

_compute: Any = pc  # its stubs know a part of what it takes


def problems(array: pa.Array[Any], column: SchemaField) -> Iterator[tuple[RowNumbers, str]]:
    """The rows of a column that BigQuery would refuse or change.

    Args:
        array: Values of the column's wire type.
        column: The column.

    Yields:
        Numbers of rows, and what is wrong with them: null where none may be, too many digits for
        a NUMERIC(p, s), too long for a STRING(n) or BYTES(n). Structs and lists are looked into.
    """
    if column.mode == "REPEATED":
        yield from _elements(array, column)
        return
    if column.mode == "REQUIRED" and array.null_count:
        yield _where(array.is_null()), f"null in {column.name!r}, which is REQUIRED"
    yield from _values(array, column)


def _elements(array: Any, column: SchemaField) -> Iterator[tuple[RowNumbers, str]]:
    """Of a list: the rows whose elements are wrong."""
    elements = array.flatten()
    parents = array.value_parent_indices().to_numpy()
    if elements.null_count:
        yield parents[_where(elements.is_null())], f"null in the array {column.name!r}"
    for rows, reason in _values(elements, column):
        yield parents[rows], reason


def _values(array: Any, column: SchemaField) -> Iterator[tuple[RowNumbers, str]]:
    name = type_name(column)
    if name == "RECORD":
        yield from _fields(array, column)
    elif column.precision is not None and name in ("NUMERIC", "BIGNUMERIC"):
        yield from _digits(array, column, column.precision, column.scale or 0)
    elif column.max_length is not None and name in ("STRING", "BYTES"):
        length = _compute.utf8_length if name == "STRING" else _compute.binary_length
        long = _compute.greater(length(array), column.max_length)
        yield _where(long), f"longer than {name}({column.max_length}) in {column.name!r}"


def _fields(array: Any, column: SchemaField) -> Iterator[tuple[RowNumbers, str]]:
    there = array.is_valid().to_numpy(zero_copy_only=False)
    for index, child in enumerate(column.fields):
        for rows, reason in problems(array.field(index), child):
            yield rows[there[rows]], reason


def _digits(
    array: Any, column: SchemaField, precision: int, scale: int
) -> Iterator[tuple[RowNumbers, str]]:
    text = f"{type_name(column)}({precision}, {scale}) in {column.name!r}"
    # Towards zero, since a carry may need a digit that there is no room for.
    cut = _compute.round(array, ndigits=scale, round_mode="towards_zero")
    fine = _compute.not_equal(cut, array)
    yield _where(fine), f"more digits after the point than {text}"
    bound = pa.scalar(10 ** (precision - scale), pa.int64()) if precision - scale < 19 else None
    if bound is not None:
        yield _where(_compute.greater_equal(_compute.abs(array), bound)), f"larger than {text}"


def _where(mask: Any) -> RowNumbers:
    return np.flatnonzero(_compute.fill_null(mask, False).to_numpy(zero_copy_only=False))
