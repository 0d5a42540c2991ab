"""Which tables and partitions the rows of one write go to, each by a job of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import pyarrow as pa
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.errors import PartitionError, SchemaError
from dagster_bq_connector.schema.types import type_name, wire_field
from dagster_bq_connector.table.admin import EnsuredTable
from dagster_bq_connector.table.options import TableOptions
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.slice import TableSlice

# A batch and the position of its first row, to (id of a target, rows) pairs.
Split: TypeAlias = Callable[[pa.RecordBatch, int], Iterable[tuple[str, pa.RecordBatch]]]
Ensure: TypeAlias = Callable[[TableRef, TableOptions | None], EnsuredTable]


@dataclass(frozen=True)
class Target:
    """A table or partition that one job writes.

    Attributes:
        id: What `Split` calls it.
        ref: The destination of the job.
        key: The partition key that it stands for; empty when the write has no keys.
    """

    id: str
    ref: TableRef
    key: str = ""


@dataclass(frozen=True)
class Targets:
    """The targets of one write.

    Attributes:
        table: The table; of a sharded layout the prefix of its tables.
        columns: The columns that all targets have.
        targets: One or more destinations.
        split: Divides rows among them.
    """

    table: TableRef
    columns: Sequence[SchemaField]
    targets: Sequence[Target]
    split: Split


def of_table(ref: TableRef, ensure: Ensure, options: TableOptions | None) -> Targets:
    """One table, or one partition of it, takes all rows."""
    table = ensure(ref, options)
    return Targets(ref, table.columns, [Target("", ref)], lambda batch, _: [("", batch)])


def of_slice(slice_: TableSlice, ensure: Ensure, options: TableOptions | None) -> Targets:
    """The partitions of a slice, or the tables of a sharded layout. Missing tables are created.

    Raises:
        PartitionError: The windows are no partitions of the table.
    """
    layout = slice_.options.partitioning if slice_.options else None
    options = options or slice_.options or TableOptions()
    if layout and not options.partitioning:
        options = replace(options, partitioning=layout)
    if slice_.sharded:
        ids = slice_.partitions(None)
        columns = _same_columns([ensure(slice_.address(id_), options) for id_ in ids])
    else:
        columns = ensure(slice_.table, options).columns
        ids = slice_.partitions(_column_type(slice_, columns))
    targets = [Target(id_, slice_.address(id_), key) for id_, key in ids.items()]
    return Targets(slice_.table, columns, targets, slice_.split)


def _same_columns(tables: Sequence[EnsuredTable]) -> Sequence[SchemaField]:
    first = tables[0]
    for table in tables[1:]:
        if _shape(table.columns) != _shape(first.columns):
            raise SchemaError(
                f"{table.ref} and {first.ref} have not the same columns, so one write cannot fill "
                "both: write them one by one."
            )
    return first.columns


def _shape(columns: Sequence[SchemaField]) -> dict[str, object]:
    return {c.name.casefold(): (type_name(c), c.mode, _shape(c.fields)) for c in columns}


def _column_type(slice_: TableSlice, columns: Sequence[SchemaField]) -> pa.DataType | None:
    if slice_.column is None:
        return None
    for column in columns:
        if column.name.casefold() == slice_.column.casefold():
            return wire_field(column).type
    raise PartitionError(f"{slice_.table} has no column {slice_.column!r} to be partitioned by.")
