"""The door: everything that holds rows becomes a stream of Arrow batches of one schema."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from dagster_bq_connector.errors import SchemaError
from dagster_bq_connector.schema.arrow import is_bytes, is_string
from dagster_bq_connector.schema.frames import (
    CONVERSION_ERRORS,
    frame_package,
    from_pandas,
    from_polars,
)

# An Arrow table, batch or reader; a Polars (lazy) or pandas frame; whatever has the Arrow C stream
# interface; or an iterable of any of them. Written out it would need every one of those packages.
Data: TypeAlias = Any


_compute: Any = pc  # its stubs know a part of what it takes

# Larger batches are cut, so that what is made of one at a time stays small.
PIECE_BYTES = 32 * 1024 * 1024
_END = object()  # of the pieces: a None among them is no piece, and is refused as such


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
        if (package := frame_package(type(data))) == "pandas":
            return _open(from_pandas(data))
        if package == "polars":
            return Batches(*from_polars(data))
        if isinstance(data, pa.RecordBatchReader):
            return Batches(data.schema, map(_own, data))  # it may lead to a generator
        schema = getattr(data, "schema", None)
        if isinstance(schema, pa.Schema) and isinstance(data, Iterable):
            return Batches(schema, iter(data))  # rows of a read, too: their errors keep their type
        if hasattr(data, "__arrow_c_stream__"):
            return _open(pa.RecordBatchReader.from_stream(data))
    except CONVERSION_ERRORS as error:
        raise SchemaError(f"{type(data).__name__} cannot be read as Arrow: {error}") from error
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, dict)):
        return _chain(iter(data))
    raise SchemaError(
        f"{type(data).__name__} holds no rows that can be written: pass an Arrow table, batch or "
        "reader, a Polars or pandas frame, or an iterable of them."
    )


def _cut(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        size = batch.nbytes + sum(map(_decoded_bytes, batch.columns))
        rows = max(1, batch.num_rows * PIECE_BYTES // max(1, size))
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)


def _decoded_bytes(column: Any) -> int:
    """What the texts of a dictionary take where each stands in its row."""
    if not isinstance(column, pa.DictionaryArray):
        return 0
    kind = column.type.value_type
    if is_string(kind) or is_bytes(kind):
        lengths = _compute.binary_length(column.dictionary.cast(pa.large_binary()))
        return int(_compute.sum(lengths.take(column.indices)).as_py() or 0)
    return 0


def _chain(pieces: Iterator[Data]) -> Batches:
    first = next(pieces, _END)
    if first is _END:
        raise SchemaError(
            "The iterable is empty, so its columns are unknown: pass an empty Arrow table instead."
        )
    if isinstance(first, (str, bytes, int, float, dict, list, tuple)):
        raise SchemaError(
            f"The iterable holds {type(first).__name__} objects: pass Arrow batches or frames."
        )
    opened = _open(first)

    def batches() -> Iterator[pa.RecordBatch]:
        rows, following = 0, opened
        for number in itertools.count(2):
            for batch in following.batches:
                rows += batch.num_rows
                yield _own(batch)
            if (piece := next(pieces, _END)) is _END:
                return
            following = _open_next(piece, opened.schema.names, number, rows)

    return Batches(opened.schema, batches())


def _own(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows in memory of their own.

    Rows are held until they are acknowledged or staged, and by then whoever makes the pieces may
    have filled the memory of this one with those of the next, as a pandas frame is filled in place.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def _open_next(piece: Data, names: list[str], number: int, rows: int) -> Batches:
    try:
        opened = _open(piece)
    except SchemaError as error:
        raise SchemaError(f"Piece {number} of the data: {error}{fitting_before(rows)}") from error
    if set(opened.schema.names) != set(names):
        raise SchemaError(
            f"Piece {number} of the data has the columns {opened.schema.names}, the first one has "
            f"{names}.{fitting_before(rows)}"
        )
    return opened


def fitting_before(rows: int) -> str:
    """What to add to an error that comes after `rows` rows of the same data.

    What became of those depends on the writer: only the default stream has written them by then.
    """
    return f" The {rows} row(s) before it fit." if rows else ""
