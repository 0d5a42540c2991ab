"""Writes in processes that die, or stop for a while, at any step that the code names."""

import datetime as dt
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from dagster_bq_connector import (
    BigQueryResource,
    BigQueryWriter,
    DailyTable,
    DefaultStreamWriter,
    ExactlyOnceWriter,
    FileLoadsWriter,
    RowSlice,
)
from dagster_bq_connector.write import default_stream, own_stream, parts, staging
from support.forks import Attempt, fork_for, observe, tell_steps

ROWS = 240
SCHEMA = pa.schema([("day", pa.date32()), ("part", pa.int64()), ("n", pa.int64())])


def rows_of(day: str, part: int, first: int = 0, count: int = ROWS) -> pa.Table:
    """Numbered rows of one day and part."""
    columns = [
        pa.array([dt.date.fromisoformat(day)] * count, pa.date32()),
        pa.array([part] * count, pa.int64()),
        pa.array(range(first, first + count), pa.int64()),
    ]
    return pa.table(columns, schema=SCHEMA)


@dataclass(kw_only=True)
class Order(Attempt):
    """One attempt at a write.

    Attributes:
        writer: Its class.
        fields: Of its BigQuery resource.
        options: Of the writer.
        operation: `append`, `replace`, `open` or `load_uris`.
        table: `dataset.table`.
        where: `table`, `partition` (of the day) or `slice` (of the part).
        day: The day of the rows.
        part: The part of the rows.
        key: The write key.
        uris: The files of `load_uris`.
        batch: Rows of a batch.
        max_uris: Files of a load job, if it is to be less than BigQuery takes.
    """

    writer: str
    fields: dict[str, Any]
    options: dict[str, Any]
    operation: str
    table: str
    where: str
    day: str
    part: int
    key: str | None
    uris: list[str] = field(default_factory=list)
    batch: int = 100
    max_uris: int = 0


def attempt(order: Order) -> None:
    """Write, unless killed on the way."""
    default_stream.PREFERRED_BYTES = own_stream.PREFERRED_BYTES = 1_500
    staging.FILE_BYTES = 1_500
    parts.MAX_URIS = order.max_uris or parts.MAX_URIS
    named = observe(order)
    kinds = {
        each.__name__: each for each in (DefaultStreamWriter, ExactlyOnceWriter, FileLoadsWriter)
    }
    writer: BigQueryWriter = kinds[order.writer](
        bigquery=BigQueryResource(**order.fields), **order.options
    )
    rows = rows_of(order.day, order.part)
    pieces = [rows.slice(start, order.batch) for start in range(0, ROWS, order.batch)]
    destination: Any = order.table
    if order.where == "partition":
        destination = DailyTable(order.table, column="day").for_keys([order.day])
    elif order.where == "slice":
        destination = RowSlice.by_keys(order.table, "part", [str(order.part)])
    if order.operation == "open":
        write_on(writer, destination, order)
    elif isinstance(writer, FileLoadsWriter) and order.operation == "load_uris":
        writer.load_uris(order.uris, destination, key=order.key)
    else:
        write = writer.append if order.operation == "append" else writer.replace
        write(pieces, destination, key=order.key)
    tell_steps(order, named)


def write_on(writer: Any, destination: str, order: Order) -> None:
    """A long write, from the last checkpoint to the end."""
    with writer.open(destination, key=order.key) as write:
        for start in range(write.position or 0, ROWS, order.batch):
            count = min(order.batch, ROWS - start)
            write.append(rows_of(order.day, order.part, start, count))
            write.checkpoint(start + count)


if __name__ == "__main__":
    fork_for(Order, attempt)
