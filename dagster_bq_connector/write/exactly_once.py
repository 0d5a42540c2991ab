"""Append exactly once: rows go to pending streams, which the ledger knows before they are seen.

The steps of an attempt, and what is left when the process dies between them:

    1. streams are created, and rows appended     nothing is visible; BigQuery drops the streams
    2. the streams are finalized, rows counted    the same
    3. prepare: the ledger entry is created, with the streams
                                                  the next attempt commits these streams
    4. commit: the streams, all at once           the next attempt finds them committed
    5. mark: the entry says so                    the next attempt finds the entry

The first prepare wins. Whoever finds an entry that is prepared commits what it names, and never
replaces it; an attempt that comes second leaves its own streams to BigQuery.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from dagster_bq_connector.clients import Clients
from dagster_bq_connector.errors import (
    FailedRow,
    FailedRowsError,
    PartitionError,
    UnknownOutcomeError,
)
from dagster_bq_connector.ledger import Entry, Key, Ledger
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.schema.conform import Conformer
from dagster_bq_connector.schema.data import Batches
from dagster_bq_connector.table.admin import EnsuredTable
from dagster_bq_connector.write.default_stream import Check
from dagster_bq_connector.write.entries import checked
from dagster_bq_connector.write.key import WriteKey, purpose_of
from dagster_bq_connector.write.own_stream import OwnStreams, RowsRefused
from dagster_bq_connector.write.piece import Piece
from dagster_bq_connector.write.result import NOTHING_WRITTEN, WriteResult
from dagster_bq_connector.write.steps import step
from dagster_bq_connector.write.streams import Streams, Type

PREPARED, COMMITTED = "prepared", "committed"
# Characters that the rows by partition may take of an entry: the names of 64 streams take most of
# the 16,384 that a description holds. A replay of a write to more partitions does not tell them.
LONGEST_COUNTS = 2_000
FIELDS = ("attempt", "streams", "rows", "bytes", "partitions")  # that a replay needs


@dataclass(frozen=True)
class Sending:
    """What an append by streams needs beside its rows.

    Attributes:
        clients: Where to.
        connections: Streams at once.
        progress: Counts acknowledged rows, and is told of waits.
        deadline: Seconds without any success after which a call fails.
    """

    clients: Clients
    connections: int
    progress: Progress
    deadline: float

    @property
    def streams(self) -> Streams:
        """The control calls."""
        return Streams(self.clients.write, self.deadline)

    def open(
        self, table: EnsuredTable, schema: pa.Schema, kind: Type, count: int | None = None
    ) -> OwnStreams:
        """Streams for rows of one schema, `connections` of them unless `count` says otherwise."""
        return OwnStreams(
            self.clients,
            self.streams,
            table,
            schema,
            kind,
            count or self.connections,
            self.progress,
            self.deadline,
        )


def append(
    sending: Sending,
    ledger: Ledger,
    table: EnsuredTable,
    data: Batches,
    key: WriteKey,
    place: str,
    check: Check | None = None,
    counts: Mapping[str, int] | None = None,
) -> WriteResult:
    """Append rows once, however often it is tried under the same key.

    Args:
        sending: How.
        ledger: Where it is kept that the rows are there.
        table: The table, which exists.
        data: The rows; not read when another attempt has done the write.
        key: The write.
        place: The table, or the part of it, for which the key is used.
        check: Raises for rows that do not belong here.
        counts: Rows by partition key, which `check` keeps.

    Returns:
        What was appended, by this attempt or another.

    Raises:
        SchemaError, FailedRowsError, PartitionError: The rows do not fit. Nothing is visible.
        WriteKeyError: The key was used for something else. Nothing is visible.
        UnknownOutcomeError: Whether the rows are there cannot be known.
        LedgerError: The ledger cannot be used. Nothing is visible, or the next try finds it so.
        ConnectorError: The append failed. Nothing is visible, or the next try makes it so.
    """
    purpose = purpose_of(place, "append", data.schema.names)
    ours = Key("write", key.text)
    commit = _Commit(ledger, sending, table, key, purpose)
    if entry := ledger.get(ours):
        return commit.finish(entry, replayed=True)
    rows = _Rows(sending, table, data, check)
    streams = list(rows.send())  # all is counted after that
    partitions = dict(counts or {})
    value = {
        "state": PREPARED,
        "table": str(table.ref),
        "purpose": purpose,
        "attempt": key.attempt,
        "streams": streams,
        "rows": rows.count,
        "bytes": rows.bytes,
        "partitions": partitions if len(json.dumps(partitions)) <= LONGEST_COUNTS else {},
    }
    with step("prepare"):
        written = ledger.create(ours, value)
    if written.entry is None:
        raise UnknownOutcomeError(
            f"The ledger entry of {key.text!r} was deleted while {table.ref} was written: look "
            "whether the rows are there."
        )
    result = commit.finish(written.entry, replayed=not written.won)
    counted = partitions if written.won else result.partitions
    return replace(result, partitions=counted, reconnects=rows.reconnects)


@dataclass(frozen=True)
class _Commit:
    """Brings an entry that is prepared to its end."""

    ledger: Ledger
    sending: Sending
    table: EnsuredTable
    key: WriteKey
    purpose: str

    def finish(self, entry: Entry, replayed: bool) -> WriteResult:
        """Commit what the entry names, unless it was done, and say what was written."""
        value = checked(entry, self.key, self.purpose, (PREPARED, COMMITTED), FIELDS)
        if value["state"] == PREPARED:
            self._commit(entry)
            with step("mark"):
                # Whoever changes it first has committed the same streams.
                self.ledger.compare_and_set(entry, {**value, "state": COMMITTED})
        return WriteResult(
            table=self.table.ref,
            method="exactly_once",
            operation="append",
            rows=value["rows"],
            bytes=value["bytes"],
            columns=self.table.columns,
            partitions=value["partitions"],
            streams=value["streams"],
            replayed=replayed,
        )

    def _commit(self, entry: Entry) -> None:
        try:
            self.sending.streams.commit(self.table.ref, entry.value["streams"])
        except UnknownOutcomeError as error:
            raise UnknownOutcomeError(
                f"{error} Write key {self.key.text!r} was prepared with {entry.value['rows']} "
                f"rows by attempt {entry.value['attempt']}. Look in the table whether they are "
                f"there. If they are, set the state of ledger entry {entry.key.name} to "
                f"{COMMITTED!r}; if not, delete it, and write again "
                "(python -m dagster_bq_connector.ledger)."
            ) from error


class _Rows:
    """Rows on their way into streams that nobody sees yet."""

    def __init__(
        self, sending: Sending, table: EnsuredTable, data: Batches, check: Check | None
    ) -> None:
        self._table, self._data, self._check = table, data, check
        self._conform = Conformer(data.schema, table.columns)
        self._streams = sending.open(table, self._conform.schema, Type.PENDING)
        self._failed: list[FailedRow] = []
        self.count = 0

    def send(self) -> Mapping[str, int]:
        """Send all, and finalize. Gives the rows of each stream."""
        try:
            position = 0
            for batch in self._data.batches:
                self._add(batch, position)
                position += batch.num_rows
            if self._failed:
                raise FailedRowsError(self._table.ref, self._failed, written=0)
            return self._streams.finish()
        except RowsRefused as refused:
            rows = sorted([*self._failed, *refused.rows], key=lambda row: row.index)
            self._streams.abandon()
            raise FailedRowsError(self._table.ref, rows, written=0) from refused
        except BaseException:
            self._streams.abandon()
            raise

    @property
    def bytes(self) -> int:
        """Bytes that were sent."""
        return self._streams.bytes

    @property
    def reconnects(self) -> int:
        """How often a call broke while requests were under way."""
        return self._streams.reconnects

    def _add(self, batch: pa.RecordBatch, position: int) -> None:
        conformed = self._conform(batch)
        if self._check is not None:
            try:
                self._check(conformed.batch, position)
            except PartitionError as error:
                raise PartitionError(f"{error} {NOTHING_WRITTEN}") from None
        self._failed += [row.moved(position) for row in conformed.failed]
        if self._failed:
            return  # nothing will be visible: the rest is only looked at
        self.count += conformed.batch.num_rows
        self._streams.send(Piece(conformed.batch, position))
