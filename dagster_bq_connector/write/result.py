"""What a write did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from google.cloud.bigquery import SchemaField

from dagster_bq_connector.table.ref import TableRef

WriteMethod = Literal["default_stream", "exactly_once", "file_loads"]
Operation = Literal["append", "replace"]
# What an error says that comes while rows are read. The table may have been created for them by
# then, or have been given columns.
NOTHING_WRITTEN = "No row was written."


@dataclass(frozen=True)
class WriteResult:
    """The outcome of one append or replace.

    Attributes:
        table: The table; of a sharded layout the prefix of its tables.
        method: How the rows went.
        operation: What was asked.
        rows: Rows that are in the table because of this write.
        bytes: Bytes of them as they were sent or staged.
        columns: The columns of the table.
        partitions: Rows by partition key, when the write replaced partitions.
        jobs: Ids of the jobs.
        streams: Names of the write streams that were committed.
        replayed: Whether another attempt at the same write had done it already.
        reconnects: How often a connection of a streamed write broke and was opened again.
    """

    table: TableRef
    method: WriteMethod
    operation: Operation
    rows: int
    bytes: int
    columns: Sequence[SchemaField]
    partitions: Mapping[str, int] = field(default_factory=dict[str, int])
    jobs: Sequence[str] = ()
    streams: Sequence[str] = ()
    replayed: bool = False
    reconnects: int = 0
