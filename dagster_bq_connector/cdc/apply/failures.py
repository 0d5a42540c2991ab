"""Failed events: they stop the stream, are dropped and counted, or are kept as dead letters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.cdc.apply.contract import ensure
from dagster_bq_connector.cdc.apply.target import BigQuery, ChangeAppender
from dagster_bq_connector.cdc.event import FILE, FailedEvent
from dagster_bq_connector.cdc.table import CdcTable, DeadLetters, FailedRowPolicy
from dagster_bq_connector.errors import FailedEventsError
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.schema.types import wire_field
from dagster_bq_connector.table.admin import EnsuredTable
from dagster_bq_connector.table.ref import TableRef

PARKED = "parked"
KEY = ("stream", "source")
# The columns of a table of dead letters.
LETTERS = (
    SchemaField("stream", "STRING", "REQUIRED", description="The change stream"),
    SchemaField("source", "STRING", "REQUIRED", description="The message, as errors name it"),
    SchemaField("topic", "STRING"),
    SchemaField("partition", "INTEGER"),
    SchemaField("offset", "INTEGER", description="In a file, the line"),
    SchemaField("file", "STRING", description="The file, when it came from one"),
    SchemaField("source_table", "STRING", description="The source's table, when it is known"),
    SchemaField("key", "BYTES", description="The message's key, as it came"),
    SchemaField("value", "BYTES", description="The message's value, as it came"),
    SchemaField("column", "STRING", description="The column at fault, when it is known"),
    SchemaField("reason", "STRING", description="Why it could not be applied"),
    SchemaField("run_id", "STRING", description="The run that tried it last"),
    SchemaField("failed_at", "TIMESTAMP", description="When it was tried last"),
)

_compute: Any = pc  # its stubs know a part of what it takes


class Failures:
    """What becomes of failed events while a plan is applied.

    Attributes:
        count: How many there were, parked ones among them.
        named: The first ten, for people.
    """

    def __init__(
        self,
        connection: BigQuery,
        stream: str,
        policy: FailedRowPolicy,
        run_id: str,
        progress: Progress,
    ) -> None:
        """Prepare for failed events of one plan.

        Args:
            connection: Where dead letters go.
            stream: The stream.
            policy: What becomes of them.
            run_id: The run, as dead letters name it.
            progress: Counts dead letters that are acknowledged.
        """
        self.count, self.named = 0, list[str]()
        self._stream, self._policy = stream, policy
        self.letters: Letters | None = None
        if isinstance(policy, DeadLetters):
            self.letters = Letters(connection, policy, stream, run_id, progress)

    def add(
        self,
        messages: pa.RecordBatch,
        events: Sequence[FailedEvent],
        tables: Sequence[str | None],
    ) -> None:
        """Deal with failed events of a batch.

        Args:
            messages: The messages of the batch.
            events: Those that failed.
            tables: Of each its source table, when it is known.

        Raises:
            FailedEventsError: The policy is to fail.
        """
        if not events:
            return
        if self._policy == "fail":
            raise FailedEventsError(self._stream, [event.named(messages) for event in events])
        room = FailedEventsError.SHOWN - len(self.named)
        self.named += [event.named(messages) for event in events[:room]]
        self.count += len(events)
        if self.letters is not None:
            self.letters.keep(
                messages.take(pa.array([event.message for event in events], pa.int64())),
                pa.array(tables, pa.string()),
                pa.array([event.column for event in events], pa.string()),
                pa.array([event.reason for event in events], pa.string()),
            )

    def park(self, messages: pa.RecordBatch, table: str) -> None:
        """Keep changes of a parked table.

        Args:
            messages: Their messages.
            table: The source's table.
        """
        assert self.letters is not None  # a parked table is refused without
        count = messages.num_rows
        self.count += count
        texts = [pa.repeat(table, count), pa.nulls(count, pa.string()), pa.repeat(PARKED, count)]
        self.letters.keep(messages, *texts)

    def settle(self) -> None:
        """Wait until all dead letters are acknowledged.

        Raises:
            FailedEventsError: BigQuery refuses one.
        """
        if self.letters is not None:
            self.letters.settle()

    def close(self) -> None:
        """End what is open, once all is settled."""
        if self.letters is not None:
            self.letters.close()

    def abandon(self) -> None:
        """End what is open now."""
        if self.letters is not None:
            self.letters.abandon()


class Letters:
    """A table of dead letters: a message has one row in it, however often it fails.

    It is a table that changes are applied to, too: the time of a failure is its sequence.

    Attributes:
        ref: Its address.
        kept: What was kept, in batches, if somebody wants to know: None when not. Of each letter
            its `source`, its `source_table` and its reason.
    """

    def __init__(
        self,
        connection: BigQuery,
        letters: DeadLetters,
        stream: str,
        run_id: str,
        progress: Progress,
    ) -> None:
        """Name the table; it is looked up, or created, at the first dead letter."""
        self.ref = TableRef.parse(letters.table, project=connection.project).at(None)
        self._connection, self._stream, self._run_id = connection, stream, run_id
        self._progress = progress
        self._appender: ChangeAppender | None = None
        self.kept: list[tuple[Any, Any, Any]] | None = None

    def keep(self, messages: pa.RecordBatch, tables: Any, columns: Any, reasons: Any) -> None:
        """Write dead letters.

        Args:
            messages: Their messages.
            tables: Of each its source table, or null.
            columns: Of each the column at fault, or null.
            reasons: Of each the reason.
        """
        count = messages.num_rows
        now = pa.scalar(time.time_ns() // 1_000, pa.timestamp("us", "UTC"))
        file = (messages.schema.metadata or {}).get(FILE)
        name = None if file is None else file.decode(errors="replace")
        named = sources(messages)
        if self.kept is not None:
            self.kept.append((named, tables, reasons))
        self._add(
            [
                pa.repeat(self._stream, count),
                named,
                messages.column("topic").cast(pa.string()),
                messages.column("partition").cast(pa.int64()),
                messages.column("offset"),
                pa.repeat(pa.scalar(name, pa.string()), count),
                tables,
                messages.column("key"),
                messages.column("value"),
                columns,
                reasons,
                pa.repeat(self._run_id, count),
                pa.repeat(now, count),
            ],
            deletes=False,
        )

    def remove(self, removed: Any) -> None:
        """Delete dead letters.

        Args:
            removed: Their `source`s.
        """
        count = len(removed)
        empty = [pa.nulls(count, field.type) for field in _SCHEMA][len(KEY) :]
        self._add([pa.repeat(self._stream, count), removed, *empty], deletes=True)

    def settle(self) -> None:
        """Wait until all is acknowledged.

        Raises:
            FailedEventsError: BigQuery refuses a dead letter.
        """
        refused = self._appender.settle() if self._appender else {}
        if refused:
            remedy = f"They cannot be kept in {self.ref} either: mend what is named"
            raise FailedEventsError(self._stream, list(refused.values()), remedy)

    def close(self) -> None:
        """End the append, once all is settled."""
        if self._appender is not None:
            self._appender.close()

    def abandon(self) -> None:
        """End the append now."""
        if self._appender is not None:
            self._appender.abandon()

    def _add(self, arrays: Sequence[Any], deletes: bool) -> None:
        if self._appender is None:
            self._appender = ChangeAppender(
                self._connection, self._table(), self._progress, self._table
            )
        rows = pa.RecordBatch.from_arrays(list(arrays), schema=_SCHEMA)
        count = rows.num_rows
        sequence = f"{time.time_ns() // 1_000:016X}"
        self._appender.add(rows, pa.repeat(deletes, count), pa.repeat(sequence, count))

    def _table(self) -> EnsuredTable:
        cdc = CdcTable(self.ref, KEY, schema=LETTERS, clustering=())
        return ensure(self._connection.admin, self.ref, cdc, KEY, ()).table


def sources(messages: pa.RecordBatch) -> Any:
    """How messages are named, as `name_of` does it."""
    offsets = messages.column("offset").cast(pa.string())
    if file := (messages.schema.metadata or {}).get(FILE):
        name = file.decode(errors="replace")
        return _compute.binary_join_element_wise(f"{name}, line ", offsets, "")
    topics = messages.column("topic").cast(pa.string())
    partitions = messages.column("partition").cast(pa.string())
    return _compute.binary_join_element_wise(topics, "[", partitions, "]@", offsets, "")


_SCHEMA = pa.schema([wire_field(column).with_nullable(True) for column in LETTERS])
