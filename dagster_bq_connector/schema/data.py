"""The door: everything that holds rows becomes a stream of Arrow batches of one schema."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from dagster_bq_connector.errors import SchemaError

# An Arrow table, batch or reader; a Polars (lazy) or pandas frame; whatever has the Arrow C stream
# interface; or an iterable of any of them. Written out it would need every one of those packages.
Data: TypeAlias = Any


@dataclass(frozen=True)
class Batches:
    """Rows of one schema, read once, a batch at a time."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


def open_data(data: Data) -> Batches:
    """Read `data` as Arrow batches, without holding more than one of its pieces.

    Args:
        data: An Arrow table, batch or reader; a Polars frame, lazy or not; a pandas frame, whose
            index is left out; any object with the Arrow C stream interface; or an iterable of
            any of these, whose pieces must have the columns of the first.

    Raises:
        SchemaError: `data` holds no rows in a form that is known, or its first piece is missing,
            so that there is no schema.
    """
    if isinstance(data, Batches):
        return data
    if isinstance(data, pa.RecordBatch):
        return Batches(data.schema, iter([data]))
    if isinstance(data, pa.Table):
        return Batches(data.schema, iter(data.to_batches()))
    if (name := _frame(data)) == "pandas":
        table = pa.Table.from_pandas(data, preserve_index=False)
        return Batches(table.schema.remove_metadata(), iter(table.to_batches()))
    if name == "polars":
        return open_data(pa.RecordBatchReader.from_stream(data.lazy().collect()))
    if isinstance(schema := getattr(data, "schema", None), pa.Schema) and isinstance(
        data, Iterable
    ):
        return Batches(schema, iter(data))  # the rows of a read, too: their errors keep their type
    if hasattr(data, "__arrow_c_stream__"):
        return open_data(pa.RecordBatchReader.from_stream(data))
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, dict)):
        return _chain(iter(data))
    raise SchemaError(
        f"{type(data).__name__} holds no rows that can be written: pass an Arrow table, batch or "
        "reader, a Polars or pandas frame, or an iterable of them."
    )


def _frame(data: object) -> str | None:
    """`pandas` or `polars` for a frame of theirs, without importing either."""
    for kind in type(data).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in ("pandas", "polars") and kind.__name__ in ("DataFrame", "LazyFrame"):
            return package
    return None


def _chain(pieces: Iterator[Data]) -> Batches:
    first = next(pieces, None)
    if first is None:
        raise SchemaError(
            "The iterable is empty, so its columns are unknown: pass an empty Arrow table instead."
        )
    if isinstance(first, (str, bytes, int, float, dict, list, tuple)):
        raise SchemaError(
            f"The iterable holds {type(first).__name__} objects: pass Arrow batches or frames."
        )
    opened = open_data(first)
    names = opened.schema.names

    def batches() -> Iterator[pa.RecordBatch]:
        yield from opened.batches
        for number, piece in zip(itertools.count(2), pieces, strict=False):
            following = open_data(piece)
            if set(following.schema.names) != set(names):
                raise SchemaError(
                    f"Piece {number} of the data has the columns {following.schema.names}, the "
                    f"first one has {names}."
                )
            yield from (_cast(batch, opened.schema, number) for batch in following.batches)

    return Batches(opened.schema, batches())


def _cast(batch: pa.RecordBatch, schema: pa.Schema, number: int) -> pa.RecordBatch:
    """A later piece as the first one: an all-null column, say, comes with a type of its own."""
    selected = batch.select(schema.names)
    if selected.schema.types == schema.types:
        return selected
    try:
        return selected.cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(f"Piece {number} of the data differs from the first: {error}") from error
