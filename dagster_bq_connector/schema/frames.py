"""Polars and pandas frames as Arrow, without importing either."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.types as at

from dagster_bq_connector.errors import SchemaError

# What Arrow's conversions raise for values and types that it does not know.
CONVERSION_ERRORS = (pa.ArrowException, ValueError, TypeError, OverflowError)


def frame_package(kind: type) -> str | None:
    """`pandas` or `polars` for the type of a frame of theirs."""
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        if package in ("pandas", "polars") and base.__name__ in ("DataFrame", "LazyFrame"):
            return package
    return None


def from_pandas(frame: Any) -> pa.Table:
    """A pandas frame, whose index is a column when it has a name.

    Raises:
        SchemaError: A column has values that are of no one type of Arrow.
    """
    if all(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    try:
        table = pa.Table.from_pandas(frame, preserve_index=False)
    except CONVERSION_ERRORS as error:
        raise _blame(frame, error) from error
    for position, name in enumerate(table.schema.names):
        _refuse_unlike(frame.iloc[:, position], table.column(position).type, name)
    return table.replace_schema_metadata(None)


def _blame(frame: Any, error: Exception) -> SchemaError:
    """Name the column, and the row, that Arrow could not read."""
    for position, name in enumerate(frame.columns):
        series = frame.iloc[:, position]
        if (problem := _problem(series)) is None:
            continue
        if (unknown := _problem(series.iloc[:0])) is not None:
            return SchemaError(
                f"Column {str(name)!r} has the pandas type {series.dtype}, which cannot be read as "
                f"Arrow: {unknown}. Convert it first, as with astype."
            )
        good, bad = 0, len(series)
        while bad - good > 1:  # the first `good` values convert, the first `bad` ones do not
            middle = (good + bad) // 2
            if (shorter := _problem(series.iloc[:middle])) is None:
                good = middle
            else:
                bad, problem = middle, shorter
        return _mixed(name, bad - 1, series.iloc[bad - 1], str(problem))
    return SchemaError(f"The pandas frame cannot be read as Arrow: {error}.")


def _problem(series: Any) -> Exception | None:
    try:
        pa.array(series, from_pandas=True)
    except CONVERSION_ERRORS as error:
        return error
    return None


def _mixed(name: object, row: int, value: object, problem: str) -> SchemaError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:60] + "…"
    return SchemaError(
        f"Column {str(name)!r} cannot be read as Arrow at row {row}, where it holds {shown}: "
        f"{problem.splitlines()[0]}. Give the column values of one type that Arrow has, or make "
        "this one null."
    )


def _refuse_unlike(series: Any, kind: pa.DataType, name: str) -> None:
    """Python values of two kinds in one column, of which Arrow would make one without a word."""
    if series.dtype != object or not (
        at.is_date(kind) or at.is_timestamp(kind) or at.is_binary(kind)
    ):
        return
    first: tuple[bool, ...] | None = None
    for row, (value, missing) in enumerate(zip(series, series.isna(), strict=True)):
        if missing:
            continue
        is_moment = isinstance(value, dt.datetime)
        found = (isinstance(value, str), is_moment, is_moment and value.tzinfo is not None)
        first = first or found
        if found != first:
            raise _mixed(name, row, value, "the values before it are of another kind")


def from_polars(frame: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """A Polars frame. A lazy one is collected batch by batch, where its Polars can.

    Raises:
        SchemaError: A column has a type that Arrow has not.
    """
    if not hasattr(frame, "collect_schema") or hasattr(frame, "height"):
        return _polars_schema(frame), iter(pa.RecordBatchReader.from_stream(frame))
    schema = _polars_schema(frame.collect_schema().to_frame())
    if hasattr(frame, "collect_batches"):  # since Polars 1.35
        pieces = frame.collect_batches(maintain_order=True, lazy=True)
    else:
        pieces = iter([frame.collect()])
    return schema, (batch for piece in pieces for batch in pa.RecordBatchReader.from_stream(piece))


def _polars_schema(frame: Any) -> pa.Schema:
    for name, kind in frame.schema.items():
        if str(kind).startswith("Object"):  # they would travel as addresses
            raise SchemaError(
                f"Column {name!r} holds Python objects: cast it to a type that Arrow has."
            )
        try:
            _ = pa.RecordBatchReader.from_stream(frame.head(0).select(name)).schema
        except pa.ArrowException as error:
            raise SchemaError(
                f"Column {name!r} has the Polars type {kind}, which Arrow has not: cast it, as to "
                "Int64 or to Decimal(38, 0)."
            ) from error
    return pa.RecordBatchReader.from_stream(frame.head(0)).schema
