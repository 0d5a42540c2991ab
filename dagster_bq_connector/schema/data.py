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


# Larger batches are cut, so that what is made of one at a time stays small.
PIECE_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Batches:
    """Rows, read once, a batch at a time.

    Attributes:
        schema: The columns of the first batch. Later ones have the same names, in any order; their
            types may be others.
        batches: At most 32 MiB each, unless one row is larger.
    """

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


def open_data(data: Data) -> Batches:
    """Read `data` as Arrow batches, without holding more than one of its pieces.

    Args:
        data: An Arrow table, batch or reader; a Polars frame, lazy or not; a pandas frame, whose
            index is a column when it has a name; any object with the Arrow C stream interface; or
            an iterable of any of these, whose pieces must have the columns of the first.

    Raises:
        SchemaError: `data` holds no rows in a form that is known, or its first piece is missing,
            so that there is no schema.
    """
    if isinstance(data, Batches):
        return data
    opened = _open(data)
    return Batches(opened.schema, _cut(opened.batches))


def _open(data: Data) -> Batches:
    if isinstance(data, pa.RecordBatch):
        return Batches(data.schema, iter([data]))
    if isinstance(data, pa.Table):
        return Batches(data.schema, iter(data.to_batches()))
    try:
        if (name := _frame(data)) == "pandas":
            return _open(_from_pandas(data))
        if name == "polars":
            return _open(_from_polars(data))
        schema = getattr(data, "schema", None)
        if isinstance(schema, pa.Schema) and isinstance(data, Iterable):
            return Batches(schema, iter(data))  # rows of a read, too: their errors keep their type
        if hasattr(data, "__arrow_c_stream__"):
            return _open(pa.RecordBatchReader.from_stream(data))
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise SchemaError(f"{type(data).__name__} cannot be read as Arrow: {error}") from error
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


def _from_pandas(frame: Any) -> pa.Table:
    if all(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    table = pa.Table.from_pandas(frame, preserve_index=False)
    return table.replace_schema_metadata(None)


def _from_polars(frame: Any) -> pa.RecordBatchReader:
    frame = frame.lazy().collect()
    for name, kind in frame.schema.items():
        if str(kind).startswith("Object"):
            raise SchemaError(
                f"Column {name!r} holds Python objects: cast it to a type that Arrow has."
            )
    return pa.RecordBatchReader.from_stream(frame)


def _cut(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rows = max(1, batch.num_rows * PIECE_BYTES // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)


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
    opened = _open(first)
    names = opened.schema.names

    def batches() -> Iterator[pa.RecordBatch]:
        yield from opened.batches
        for number, piece in zip(itertools.count(2), pieces, strict=False):
            following = _open(piece)
            if set(following.schema.names) != set(names):
                raise SchemaError(
                    f"Piece {number} of the data has the columns {following.schema.names}, the "
                    f"first one has {names}."
                )
            yield from following.batches

    return Batches(opened.schema, batches())
